#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "io/json_object.h"
#include "merging/parameters.h"
#include "merging/vocabulary_plan.h"

namespace mergex::merging {

/// The models that a merge names, each once.
struct ModelReference {
  std::string text;  ///< as the recipe writes it
  std::filesystem::path path;
  std::optional<std::filesystem::path> adapter = {};
};

/// A model in a slice.
struct SliceSource {
  std::size_t model = 0;
  std::optional<std::pair<std::int64_t, std::int64_t>> layers = {};  ///< [first, end); absent: all
  std::optional<std::filesystem::path> statistics = {};              ///< Fisher information or Gram matrices
  ParameterLevel parameters = {};
  std::string where = {};
};

struct Slice {
  std::vector<SliceSource> sources = {};
  ParameterLevel parameters = {};
  std::string where = {};
};

/// The whole model, or its encoder, decoder or what both share.
struct Module {
  std::string name = {};  ///< empty: the whole model
  bool has_slices = false;  ///< `slices` with layer ranges; otherwise one slice of whole models
  std::vector<Slice> slices = {};
  ParameterLevel parameters = {};
};

/// What an unmatched name means.
enum class MissingRule { kError, kAvailable, kBase };

/// The `merge` section of a recipe, read and checked by itself; nothing of the models is known yet.
struct MergeSection {
  const Method* method = nullptr;
  Dialect dialect = Dialect::kMergekit;
  FilterMatch filters = FilterMatch::kParts;
  MissingRule missing = MissingRule::kError;
  bool buffers_from_base = false;
  bool untie = false;
  std::optional<io::DType> dtype = {}, out_dtype = {};
  std::vector<ModelReference> models = {};
  std::optional<std::size_t> base = {};
  std::vector<Module> modules = {};
  ParameterLevel parameters = {};
  std::optional<VocabularyOptions> tokenizer = {};
  std::string chat_template = {};  ///< empty: the donor's
  std::string where = {};
  io::Json resolved = {};  ///< the section with absolute paths

  bool has_base_role() const { return base && method->base != Method::Base::kOrdinary; }
};

/// How a relative path of a model is meant.
enum class RelativeTo {
  kRecipe,      ///< to the file that names it
  kWorkingDir,  ///< mergekit's: to the working directory; where nothing is there, to the recipe's folder
};

/// @param root   the recipe; `merge` is claimed
/// @param named  results of earlier merges of the same file, which models may be called by
/// @throws UserError for everything that is wrong with it and missing folders
MergeSection read_merge_section(io::JsonObject& root, RelativeTo relative_to,
                                const std::map<std::string, std::filesystem::path>& named = {});

/// "float32", "torch.bfloat16" -> the type; nullopt for what is no type to merge in.
std::optional<io::DType> parse_torch_dtype(std::string_view name);
std::string_view torch_dtype_name(io::DType dtype);

}  // namespace mergex::merging
