#include "merging/written_tokenizer.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "core/error.h"
#include "core/one_line.h"
#include "io/atomic_file.h"
#include "io/json.h"

namespace mergex::merging {
namespace fs = std::filesystem;
using io::Json;
using text::Token;
using text::Vocabulary;
using Kind = Vocabulary::Kind;

namespace {

std::string file_text(const Json& value) { return value.dump(2, ' ', false, Json::error_handler_t::replace) + "\n"; }

Json checked_object(Json value, const std::string& where) {
  if (!value.is_object()) fail("{}: got {}, expected an object; copy the tokenizer again", where, io::shown(value));
  return value;
}

// Looking keys up one by one in an ordered object of 100,000 would take minutes.
std::unordered_set<std::string_view> keys(const Json& object) {
  std::unordered_set<std::string_view> all;
  for (const auto& entry : object.get_ref<const Json::object_t&>()) all.insert(entry.first);
  return all;
}

// Every token, added ones too: readers take the id of an added token from here, and else count on from the size of
// the model's vocabulary, whatever the file says.
void extend_vocab_object(Json& vocab, const Vocabulary& vocabulary, std::span<const Token> added) {
  std::vector<const Token*> missing;
  const auto known = keys(vocab);
  for (const auto& token : vocabulary.tokens()) {
    if (!known.contains(token.text)) missing.push_back(&token);
  }
  for (const auto& token : added) missing.push_back(&token);
  auto& members = vocab.get_ref<Json::object_t&>();
  for (const auto* token : missing) members.push_back({token->text, token->id});
}

[[noreturn]] void fail_for_hole(const Vocabulary& vocabulary, const Token& token, std::size_t expected) {
  fail("{}: token \"{}\" has id {}, expected {}: this kind of tokenizer cannot be extended where ids are left out; "
       "use tokenizer_source: base",
       vocabulary.file().string(), one_line(token.text), token.id, expected);
}

// The place of a piece is its id. Added tokens are cut out of a text before its pieces are sought, so that their
// scores play no part.
void extend_piece_list(Json& pieces, const Vocabulary& vocabulary, std::span<const Token> added) {
  const auto append = [&](const Token& token) {
    if (token.id < static_cast<std::int64_t>(pieces.size())) return;
    if (token.id > static_cast<std::int64_t>(pieces.size())) fail_for_hole(vocabulary, token, pieces.size());
    pieces.push_back(Json::array({token.text, token.score}));
  };
  for (const auto& token : vocabulary.tokens()) append(token);
  for (const auto& token : added) append(token);
}

Json added_token_entry(const Token& token) {
  const auto& flags = *token.added;
  return {{"content", token.text},       {"single_word", flags.single_word}, {"lstrip", flags.lstrip},
          {"rstrip", flags.rstrip},      {"normalized", flags.normalized},   {"special", flags.special}};
}

bool holds_space(const text::BpeMerge& merge) {
  return merge.first.find(' ') != std::string::npos || merge.second.find(' ') != std::string::npos;
}

// Keeps the spelling of the file: pairs, or one text per merge. A token that holds a space asks for pairs.
void extend_merges(Json& model, const Vocabulary& vocabulary, std::span<const text::BpeMerge> added) {
  if (added.empty()) return;
  auto& merges = model["merges"];
  const bool are_texts = !merges.empty() && merges[0].is_string();
  const bool stay_texts = are_texts && std::ranges::none_of(added, holds_space);
  if (are_texts && !stay_texts) {
    merges = Json::array();
    for (const auto& [left, right] : vocabulary.merges()) merges.push_back(Json::array({left, right}));
  }
  for (const auto& [left, right] : added) {
    merges.push_back(stay_texts ? Json(left + " " + right) : Json::array({left, right}));
  }
}

std::string extended_tokenizer_json(const Vocabulary& vocabulary, const AddedVocabulary& added) {
  auto root = io::read_json(vocabulary.file());
  auto& model = root["model"];
  if (vocabulary.kind() == Kind::kUnigram) {
    extend_piece_list(model["vocab"], vocabulary, added.tokens);
  } else {
    extend_vocab_object(model["vocab"], vocabulary, added.tokens);
  }
  if (vocabulary.kind() == Kind::kBpe) extend_merges(model, vocabulary, added.merges);
  auto& added_tokens = root["added_tokens"];
  if (added_tokens.is_null()) added_tokens = Json::array();
  for (const auto& token : added.tokens) {
    if (!token.added) continue;
    Json entry{{"id", token.id}};
    entry.update(added_token_entry(token));
    added_tokens.push_back(std::move(entry));
  }
  return file_text(root);
}

// Byte pair encoding of one word (Sennrich et al. 2016, arXiv:1508.07909).
class Merger {
 public:
  Merger(const Vocabulary& base, std::span<const Token> added) {
    for (const auto tokens : {base.tokens(), added}) {
      for (const auto& token : tokens) ids_.emplace(token.text, token.id);
    }
  }

  /// Appends a merge. @return false where it is there already or names a token that is not
  bool add(const std::string& left, const std::string& right) {
    const auto joined = id_of(left + right);
    if (joined == kNone || id_of(left) == kNone || id_of(right) == kNone) return false;
    return rank_of_.emplace(pair_of(id_of(left), id_of(right)), rank_of_.size()).second;
  }

  std::vector<std::string> segment(std::string_view word) const {
    std::vector<std::string> pieces;
    for (const char byte : word) {
      const bool continues = (static_cast<unsigned char>(byte) & 0xC0) == 0x80;
      if (!continues || pieces.empty()) pieces.emplace_back();
      pieces.back() += byte;
    }
    std::vector<std::int64_t> ids;
    for (const auto& piece : pieces) ids.push_back(id_of(piece));
    while (pieces.size() > 1) {
      auto best_rank = rank_of_.size();
      std::size_t best = 0;
      for (std::size_t i = 0; i + 1 < ids.size(); ++i) {
        const auto found = rank_of_.find(pair_of(ids[i], ids[i + 1]));
        if (found == rank_of_.end() || found->second >= best_rank) continue;
        best_rank = found->second;
        best = i;
      }
      if (best_rank == rank_of_.size()) break;
      pieces[best] += pieces[best + 1];
      ids[best] = id_of(pieces[best]);
      pieces.erase(pieces.begin() + static_cast<std::ptrdiff_t>(best) + 1);
      ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    }
    return pieces;
  }

 private:
  static constexpr std::int64_t kNone = 0xFFFFFFFF;  // above every id
  static std::uint64_t pair_of(std::int64_t left, std::int64_t right) {
    return static_cast<std::uint64_t>(left) << 32 | static_cast<std::uint64_t>(right);
  }
  std::int64_t id_of(const std::string& token) const {
    const auto found = ids_.find(token);
    return found == ids_.end() ? kNone : found->second;
  }

  std::unordered_map<std::string, std::int64_t> ids_;
  std::unordered_map<std::uint64_t, std::size_t> rank_of_;
};

std::string extended_merges_txt(const fs::path& file, std::span<const text::BpeMerge> added) {
  auto lines = io::read_file(file);
  if (!lines.empty() && lines.back() != '\n') lines += '\n';
  for (const auto& [left, right] : added) lines += left + " " + right + "\n";
  return lines;
}

std::string extended_vocab_txt(const Vocabulary& vocabulary, std::span<const Token> added) {
  std::string lines;
  std::int64_t num_lines = 0;
  const auto append = [&](const Token& token) {
    if (token.id != num_lines) fail_for_hole(vocabulary, token, static_cast<std::size_t>(num_lines));
    lines += token.text + "\n";
    ++num_lines;
  };
  for (const auto& token : vocabulary.tokens()) append(token);
  for (const auto& token : added) append(token);
  return lines;
}

}  // namespace

AddedVocabulary with_merges(const Vocabulary& base, std::span<const Vocabulary* const> others, AddedVocabulary added) {
  constexpr std::size_t kLongest = 256;  // characters; joining takes their square

  Merger merger(base, added.tokens);
  for (const auto& [left, right] : base.merges()) merger.add(left, right);
  const auto add = [&](const std::string& left, const std::string& right) {
    if (merger.add(left, right)) added.merges.emplace_back(left, right);
  };
  std::unordered_set<std::string_view> new_tokens;
  for (const auto& token : added.tokens) new_tokens.insert(token.text);
  for (const auto* other : others) {
    for (const auto& [left, right] : other->merges()) {
      const auto joined = left + right;
      if (!new_tokens.contains(joined)) continue;
      add(left, right);
      if (joined.size() > kLongest) continue;
      auto pieces = merger.segment(joined);
      while (pieces.size() > 1) {
        std::size_t i = 0;
        while (i + 1 < pieces.size() && !new_tokens.contains(pieces[i] + pieces[i + 1])) ++i;
        if (i + 1 == pieces.size()) break;
        add(pieces[i], pieces[i + 1]);
        pieces[i] += pieces[i + 1];
        pieces.erase(pieces.begin() + static_cast<std::ptrdiff_t>(i) + 1);
      }
    }
  }
  for (const auto& token : added.tokens) {
    if (!token.added && token.text.size() <= kLongest && merger.segment(token.text).size() > 1) {
      added.unreached.push_back(token.text);
    }
  }
  return added;
}

std::vector<std::pair<std::string, std::string>> extended_tokenizer(const Vocabulary& vocabulary,
                                                                    const AddedVocabulary& added) {
  std::vector<std::pair<std::string, std::string>> files;
  const auto folder = vocabulary.file().parent_path();
  const auto name = vocabulary.file().filename().string();
  if (name == "tokenizer.json") {
    files.emplace_back(name, extended_tokenizer_json(vocabulary, added));
  } else if (name == "vocab.txt") {
    files.emplace_back(name, extended_vocab_txt(vocabulary, added.tokens));
  } else {
    auto vocab = io::read_json(vocabulary.file());
    extend_vocab_object(vocab, vocabulary, added.tokens);
    files.emplace_back(name, file_text(vocab));
    if (vocabulary.kind() == Kind::kBpe) {
      files.emplace_back("merges.txt", extended_merges_txt(folder / "merges.txt", added.merges));
    }
  }

  std::error_code ignored;
  const bool adds_flagged = std::ranges::any_of(added.tokens, [](const Token& t) { return t.added.has_value(); });
  const bool needs_list = name != "tokenizer.json" && adds_flagged;
  if (const auto file = folder / "added_tokens.json"; fs::exists(file, ignored) || needs_list) {
    auto list = fs::exists(file, ignored) ? checked_object(io::read_json(file), file.string()) : Json::object();
    for (const auto& token : added.tokens) {
      if (token.added) list[token.text] = token.id;
    }
    files.emplace_back("added_tokens.json", file_text(list));
  }
  if (const auto file = folder / "tokenizer_config.json"; fs::exists(file, ignored)) {
    auto config = checked_object(io::read_json(file), file.string());
    if (needs_list || config.contains("added_tokens_decoder")) {
      auto& decoder = config["added_tokens_decoder"];
      if (!decoder.is_null()) decoder = checked_object(decoder, file.string() + "#/added_tokens_decoder");
      for (const auto& token : added.tokens) {
        if (token.added) decoder[std::to_string(token.id)] = added_token_entry(token);
      }
    }
    files.emplace_back("tokenizer_config.json", file_text(config));
  }
  return files;
}

}  // namespace mergex::merging
