#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "merging/comparison.h"
#include "merging/plan.h"
#include "merging/shards.h"

namespace mergex::merging {

/// How the elements of a tensor are divided: by the tensor and the method's needs alone, never by the number of threads
/// or the memory, since sums are added unit by unit.
struct Division {
  std::int64_t tile = 0;  ///< elements that are merged at once
  std::int64_t unit = 0;  ///< elements that one thread works on, tile by tile
  std::int64_t num_units = 0;
};
/// @param whole_rows,num_sums  TensorMerge::Needs
Division divide(const TensorContext& context, bool whole_rows, std::size_t num_sums);

/// The short runs of elements within [begin, end) that a sample of a tensor has: one at a random place in each of equal
/// parts of the tensor, so that neither rows nor columns that differ mislead it. Always the same ones.
struct Piece {
  std::int64_t begin = 0, count = 0;
};
std::vector<Piece> sample_of(std::int64_t num_elements, std::int64_t begin, std::int64_t end);

/// What is known of a tensor once it is written.
struct MergedTensor {
  std::optional<Comparison> comparison = {};  ///< absent for copies
  io::Json findings = io::Json::object();     ///< the method's
};

/// Carries out the tensors of a plan, a group at a time: every pass of a method is one loop of the threads over the
/// units of all tensors of the group, so that neither many small tensors nor one large one leave threads waiting.
class Driver {
 public:
  /// @param memory_bytes  a quarter for what methods keep of a group's tensors, a quarter for the threads' buffers, of
  ///                      which fewer threads are used where it is not enough
  /// @param progress      told of bytes of the result, those of earlier passes counting in parts; from any thread
  Driver(const MergePlan& plan, ThreadPool& pool, const ShardFiles& files, std::uint64_t memory_bytes,
         std::function<void(std::uint64_t bytes, const PlannedTensor&)> progress);
  ~Driver();

  /// The passes of methods whose thresholds are the whole model's, over all its tensors. Comes first.
  void gather_model();
  /// How many tensors from the front of `pending` on belong to one group; at least one.
  std::size_t group_size(std::span<const std::size_t> pending);
  /// Merges and writes these tensors. @return what was found, by tensor
  std::vector<MergedTensor> merge(std::span<const std::size_t> group);

 private:
  class Run;
  class CopyRun;
  template <class T>
  class MergeRun;
  class Buffers;

  Run& run_of(std::size_t tensor);
  ModelState* model_state_of(const PlannedTensor& tensor);  // nullptr: its passes are its own
  void run_pass(std::span<Run* const> runs, std::optional<int> pass);

  const MergePlan& plan_;
  ThreadPool& pool_;
  const ShardFiles& files_;
  std::uint64_t memory_bytes_;
  std::function<void(std::uint64_t, const PlannedTensor&)> progress_;
  std::vector<std::pair<const Method*, std::shared_ptr<ModelState>>> states_;
  std::vector<std::unique_ptr<Run>> runs_;  // by tensor; between the passes of a model all, otherwise a group's
  std::vector<Buffers> buffers_;            // by thread
};

}  // namespace mergex::merging
