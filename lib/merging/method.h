#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/json.h"
#include "io/json_object.h"
#include "merging/source.h"

namespace mergex::merging {

/// Whose definition is followed where publications and programs differ (docs/merge.md lists every difference).
enum class Dialect { kMergekit, kPaper, kPeft, kFusionBench };

/// An option of a method. Numbers may vary with layer and tensor name; see docs/merge.md, "Parameters".
struct Parameter {
  enum class Scope { kInput, kShared };  ///< one value per model, or one per tensor
  enum class Kind { kNumber, kFlag, kChoice };

  std::string_view name;
  Scope scope;
  Kind kind;
  std::optional<double> fallback;  ///< empty: must be given. Flags are 0 and 1, choices the index of their name
  io::Range range = {};            ///< of a number
  std::span<const std::string_view> choices = {};
  std::string_view summary;
};

/// Values of a method's parameters for one tensor (and one input).
class Values {
 public:
  void set(std::string_view name, double value);  ///< `name` must outlive this: it is a Parameter's
  /// @throws std::logic_error for a name that the method does not declare
  double operator[](std::string_view name) const;
  std::span<const std::pair<std::string_view, double>> all() const { return values_; }

 private:
  std::vector<std::pair<std::string_view, double>> values_;
};

/// Everything that is known of one output tensor before its values are read.
struct TensorContext {
  struct Input {
    std::string identity = {};             ///< of the model and tensor, the same on every machine: keys random masks
    Values parameters = {};
    const Source* statistics = nullptr;    ///< Fisher information (as the tensor) or Gram matrix; only where the method asks
  };
  std::string name = {};
  std::vector<std::int64_t> shape = {};
  bool has_base = false;
  std::vector<Input> inputs = {};          ///< without the base
  Values shared = {};
  Dialect dialect = Dialect::kMergekit;
  /// The 16-bit type of all inputs and of the arithmetic that mergekit would do on them (its `dtype` is not wider):
  /// its dialect ranks task vectors by magnitudes that are rounded to this type.
  std::optional<io::DType> native = {};
  std::uint64_t seed = 0;

  std::int64_t num_elements() const;
  std::int64_t row_length() const;  ///< the last dimension; 1 for a scalar. A vector is one row
  std::int64_t num_rows() const;
};

/// A run of elements of one tensor, widened to T. Tiles of a unit come in order and from one thread; units in any order.
template <class T>
struct Tile {
  std::int64_t begin = 0;            ///< flat index of the first element
  std::int64_t count = 0;
  std::int64_t unit = 0;             ///< number of the unit that it belongs to
  bool opens_unit = false;           ///< first tile of its unit
  const T* base = nullptr;           ///< nullptr where the merge has none
  std::span<const T* const> inputs;  ///< in the order of TensorContext::inputs
};

/// Memory that the driver lends to a tensor's merge.
template <class T>
struct Workspace {
  std::span<double> sums;           ///< of this unit in this pass; zero when the unit opens
  std::span<std::uint32_t> counts;  ///< of this thread in this pass; zero at first
  std::span<std::int64_t> state;    ///< of this unit; zero when the unit opens, kept from tile to tile
  std::span<T> scratch;             ///< Needs::scratch * Tile::count values, undefined at first
  std::span<std::vector<std::uint64_t>> lists = {};  ///< of this unit in this pass; empty when the unit opens
};

/// What a pass gathered over the whole tensor. The same for any number of threads: sums are added in the order of
/// units, counts are integers.
struct Totals {
  std::span<const double> sums;              ///< added over units, in order
  std::span<const double> unit_sums;         ///< [units, sums]
  std::span<const std::uint64_t> counts;
  std::span<const std::vector<std::uint64_t>> unit_lists = {};  ///< [units, lists]
};

/// The merge of one tensor. Methods that need norms or thresholds gather them in passes over the inputs before the
/// result is computed; every pass sees every tile (except Needs::samples_first). All arithmetic is in T.
template <class T>
class TensorMerge {
 public:
  struct Needs {
    int passes = 0;           ///< before the result
    bool whole_rows = false;  ///< tiles hold whole rows (TensorContext::row_length)
    std::size_t sums = 0, counts = 0, state = 0;  ///< lengths of the workspace's parts
    std::size_t scratch = 0;                      ///< values per element of a tile
    std::size_t lists = 0, listed = 0;  ///< number of the unit's lists, how much the method puts into one at most
    /// Pass 0 may see only some short tiles (driver.h, sample_of), and has no counts; nor has pass 1.
    bool samples_first = false;
  };

  virtual ~TensorMerge() = default;
  virtual Needs needs() const { return {}; }
  /// Asked before a pass: false leaves it out.
  virtual bool wants(int pass) const { return pass < needs().passes; }
  virtual void gather(int /*pass*/, const Tile<T>&, const Workspace<T>&) const {}
  /// Once after each pass, from one thread.
  virtual void finish(int /*pass*/, const Totals&) {}
  virtual void merge(const Tile<T>&, const Workspace<T>&, T* out) const = 0;
  /// Findings for merge_report.json ("kept", "cosine", "interpolation"), after the last pass.
  virtual void report(io::Json& /*entry*/) const {}
};

/// What the tensors of one merge share, for methods whose thresholds or norms are the whole model's. With one, every
/// tensor finishes a pass before any begins the next; `finish` is then called once.
class ModelState {
 public:
  virtual ~ModelState() = default;
  virtual void finish(int /*pass*/) {}
};

/// A published way to merge. The array in registry.cpp is what exists.
struct Method {
  enum class Base {
    kOrdinary,  ///< a model like any other where it is listed; otherwise only the donor of config and tokenizer
    kOptional,  ///< task vectors are merged where one is given
    kRequired,
  };
  enum class Statistics { kNone, kFisher, kGram };

  std::string_view name, summary, paper;
  Base base = Base::kOrdinary;
  std::size_t min_inputs = 1, max_inputs = SIZE_MAX;  ///< without the base where it is optional or required
  std::span<const Parameter> parameters = {};
  bool is_random = false;
  Statistics statistics = Statistics::kNone;
  /// Why these parameters cannot be merged with, or "". Called for every tensor before any is read.
  std::string (*problem)(const TensorContext&) = nullptr;
  /// The input whose values the result has exactly (-1: the base), where this follows from the parameters alone.
  std::optional<int> (*copies)(const TensorContext&) = nullptr;
  std::shared_ptr<ModelState> (*model_state)(const TensorContext& any_tensor) = nullptr;
  std::unique_ptr<TensorMerge<float>> (*make_float)(const TensorContext&, ModelState*) = nullptr;
  std::unique_ptr<TensorMerge<double>> (*make_double)(const TensorContext&, ModelState*) = nullptr;
};

/// In the order of help.
std::span<const Method* const> methods();
/// @throws UserError "<where>: got <name>, no such method; did you mean ...?"
const Method& find_method(std::string_view name, std::string_view where);

}  // namespace mergex::merging
