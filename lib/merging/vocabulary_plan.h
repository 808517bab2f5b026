#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/json.h"
#include "merging/row_source.h"

namespace mergex::merging {

/// What a model that lacks a token of the result uses for it.
struct TokenRule {
  enum class Kind {
    kDefault,     ///< the base's row, else the only model's that has it, else the mean over those that have it
    kModel,       ///< the same token of `model`
    kModelToken,  ///< another token of `model`: `source_token` or `source_id`
    kZero,
  };
  std::string token;
  Kind kind = Kind::kDefault;
  std::string model = {};
  std::string source_token = {};
  std::optional<std::int64_t> source_id = {};
  bool force = false;  ///< for every model, also for those that have the token
};

/// mergekit's `tokenizer_source`, or its `tokenizer` block.
struct VocabularyOptions {
  enum class Origin { kUnion, kBase, kModel };
  Origin source = Origin::kUnion;
  std::string model = {};  ///< kModel: whose tokenizer
  std::optional<std::int64_t> pad_to_multiple_of = {};
  /// Rows beyond the tokens stay, and a union is padded like the tokenizer's own model. mergekit cuts them: false.
  bool keep_padding_rows = true;
  std::vector<TokenRule> tokens = {};
  std::string where = {};  ///< begins messages: "recipe.yaml#/tokenizer"
};

struct VocabularyModel {
  std::string name;              ///< as the recipe gives it
  std::filesystem::path folder;
  std::int64_t rows = 0;         ///< of its input embedding; 0: only its tokenizer is used
  std::int64_t hidden_size = 0;  ///< of its input embedding
};

/// A vocabulary for the result, and what that means for the tensors and files of the models.
struct VocabularyPlan {
  std::int64_t rows = 0;        ///< of the result's vocabulary tensors
  std::int64_t num_tokens = 0;
  std::vector<std::shared_ptr<const RowMap>> maps;  ///< per model, where it has rows
  /// Changes to the donor's config.json: JSON pointer -> value.
  std::vector<std::pair<std::string, io::Json>> config_edits;
  /// Tokenizer files, and generation_config.json where ids in it change: name -> content.
  std::vector<std::pair<std::string, std::string>> written_files;
  std::filesystem::path tokenizer_folder;           ///< that `copied_files` come from
  std::vector<std::filesystem::path> copied_files;  ///< names in `tokenizer_folder`, copied as they are
  std::vector<std::string> warnings;
};

/// Settles vocabulary, rows and tokenizer of a merge from tokenizer files alone.
///
/// Tokens of a union: the base's with their ids, then model by model those that only others have, by their ids there;
/// added tokens last. A token whose id lies beyond its model's rows counts as absent there. A model that lacks a token
/// follows TokenRule. Rows without a token stay the model's own where no token of it lies there, else the base's; what
/// is beyond that, and with `keep_padding_rows` = false all rows beyond the last token, is the mean of the model's
/// other rows.
///
/// @param base          in `models`; without one a union begins with the first model
/// @param config_donor  in `models`: whose config.json and generation_config.json the result gets
/// @throws UserError in one line: unknown model or token, no tokenizer, unlike kinds, hidden sizes that differ
VocabularyPlan plan_vocabulary(std::span<const VocabularyModel> models, std::optional<std::size_t> base,
                               std::size_t config_donor, const VocabularyOptions& options);

/// Files that belong to the tokenizer, so that with a VocabularyPlan they come from it alone and never from the donor
/// of the config: tokenizer.json, vocab.json, chat_template.jinja, ...
bool is_tokenizer_file(std::string_view name);

}  // namespace mergex::merging
