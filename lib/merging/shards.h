#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "io/file_descriptor.h"
#include "merging/plan.h"

namespace mergex::merging {

/// Which file of the result holds which tensor, and where.
struct ShardLayout {
  struct Shard {
    std::string file = {};
    std::string header = {};
    std::vector<std::size_t> tensors = {};  ///< in the order of their bytes
    std::uint64_t num_bytes = 0;            ///< of the file
  };
  struct Place {
    std::size_t shard = 0;
    std::uint64_t offset = 0;  ///< in the file
  };

  std::vector<Shard> shards;
  std::vector<Place> places;     ///< of MergePlan::tensors
  std::uint64_t data_bytes = 0;  ///< headers excluded

  /// model.safetensors.index.json; empty where there is one shard.
  std::string index(const std::vector<PlannedTensor>& tensors) const;
};

/// Fills shards in the plan's order: a new one begins where a tensor would exceed `shard_bytes`, and one that is larger
/// than that has a shard for itself. Inside of a shard wide types come first, so that all data is aligned.
ShardLayout plan_shards(const std::vector<PlannedTensor>& tensors, std::uint64_t shard_bytes);

/// The files of a layout, with headers and room for all data from the beginning. Writing is safe from several threads.
/// All members throw std::system_error.
class ShardFiles {
 public:
  /// @param keeps  the data of files that are there already, from a run that was interrupted
  ShardFiles(const std::filesystem::path& folder, const ShardLayout& layout, bool keeps);

  void write(std::size_t tensor, std::uint64_t offset, std::span<const std::byte> bytes) const;
  void read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> bytes) const;
  /// Copies bytes of a file by the kernel, or `mapped`, the same bytes, where it cannot.
  void copy(std::size_t tensor, std::uint64_t offset, const io::FileDescriptor& from, std::uint64_t from_offset,
            std::span<const std::byte> mapped) const;
  /// Makes durable what was written to the shards of these tensors.
  void sync(std::span<const std::size_t> tensors) const;

 private:
  const ShardLayout* layout_;
  std::vector<io::FileDescriptor> files_;
};

}  // namespace mergex::merging
