#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "io/json.h"

namespace mergex::text {

/// How a token outside the model's own segmentation is found in a text.
struct AddedTokenFlags {
  bool special = false, single_word = false, lstrip = false, rstrip = false, normalized = false;
  bool operator==(const AddedTokenFlags&) const = default;
};

struct Token {
  std::string text;
  std::int64_t id = 0;
  double score = 0.0;                           ///< log probability of a Unigram piece, else 0
  std::optional<AddedTokenFlags> added = {};    ///< of an added token; empty for one that only the model has
};

/// Two neighbours that byte pair encoding joins.
using BpeMerge = std::pair<std::string, std::string>;

/// What a Hugging Face folder says of its tokens: tokenizer.json, else vocab.json (and merges.txt), else vocab.txt
/// (the latter two with added_tokens.json). It does not segment texts. Ids may have holes and may lie beyond the rows
/// of the embedding.
class Vocabulary {
 public:
  enum class Kind {
    kBpe,
    kWordPiece,
    kUnigram,
    kWordLevel,
    kOpaque,  ///< only a sentencepiece model, whose ids depend on the program that reads it: no tokens here
  };
  static constexpr std::int64_t kMaxId = (std::int64_t{1} << 24) - 1;  ///< the largest published ones end at 300,000

  /// @throws UserError when the folder holds no tokenizer, or one that is damaged
  static Vocabulary read(const std::filesystem::path& folder);

  Vocabulary(Vocabulary&&) = default;
  Vocabulary& operator=(Vocabulary&&) = default;
  Vocabulary(const Vocabulary&) = delete;
  Vocabulary& operator=(const Vocabulary&) = delete;

  Kind kind() const { return kind_; }
  const std::filesystem::path& file() const { return file_; }  ///< that the tokens were read from
  std::span<const Token> tokens() const { return tokens_; }    ///< by ascending id
  const Token* find(std::string_view text) const;
  const Token* at(std::int64_t id) const;
  std::int64_t num_ids() const { return tokens_.empty() ? 0 : tokens_.back().id + 1; }  ///< highest id + 1

  std::span<const BpeMerge> merges() const { return merges_; }  ///< by falling priority; empty for other kinds
  /// "bos_token" -> "<s>", for bos, eos, unk, sep, pad, cls and mask.
  const std::map<std::string, std::string>& roles() const { return roles_; }
  /// Normaliser, pre-tokeniser, decoder and prefixes of tokenizer.json as one text, "" for other files: tokens of
  /// vocabularies that differ here may never meet.
  const std::string& conventions() const { return conventions_; }
  /// Contents of the files of an opaque one, to tell whether two are the same.
  const std::string& digest() const { return digest_; }
  const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  friend class VocabularyReader;
  Vocabulary() = default;

  Kind kind_ = Kind::kOpaque;
  std::filesystem::path file_;
  std::vector<Token> tokens_;
  std::unordered_map<std::string_view, std::size_t> index_;  // keys lie in tokens_
  std::vector<BpeMerge> merges_;
  std::map<std::string, std::string> roles_;
  std::string conventions_, digest_;
  std::vector<std::string> warnings_;
};

/// "BPE", "WordPiece", ... as tokenizer.json spells it.
std::string_view kind_name(Vocabulary::Kind kind);

}  // namespace mergex::text
