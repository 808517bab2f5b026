#include "text/vocabulary.h"

#include <algorithm>
#include <array>

#include "core/error.h"
#include "core/one_line.h"
#include "core/utf8.h"
#include "io/json_object.h"
#include "io/sha256.h"
#include "io/text_lines.h"

namespace mergex::text {
namespace fs = std::filesystem;
using io::Json;
using io::shown;

namespace {

constexpr const char* kTokenizerJson = "tokenizer.json";
constexpr const char* kVocabJson = "vocab.json";
constexpr const char* kVocabTxt = "vocab.txt";
constexpr const char* kMergesTxt = "merges.txt";
constexpr const char* kAddedTokens = "added_tokens.json";
constexpr std::array kSentencePieceFiles{"tokenizer.model", "spiece.model", "sentencepiece.bpe.model"};
constexpr std::array kRoles{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"};

bool has_file(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(path, ignored);
}

const Json* member(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ? nullptr : &*found;
}

bool flag(const Json& object, const char* key) {
  const auto* value = member(object, key);
  return value != nullptr && value->is_boolean() && value->get<bool>();
}

}  // namespace

std::string_view kind_name(Vocabulary::Kind kind) {
  switch (kind) {
    case Vocabulary::Kind::kBpe: return "BPE";
    case Vocabulary::Kind::kWordPiece: return "WordPiece";
    case Vocabulary::Kind::kUnigram: return "Unigram";
    case Vocabulary::Kind::kWordLevel: return "WordLevel";
    case Vocabulary::Kind::kOpaque: break;
  }
  return "sentencepiece";
}

class VocabularyReader {
 public:
  Vocabulary read(const fs::path& folder) {
    if (has_file(folder / kTokenizerJson)) {
      read_tokenizer_json(folder / kTokenizerJson);
    } else if (has_file(folder / kVocabJson)) {
      read_vocab_json(folder);
    } else if (has_file(folder / kVocabTxt)) {
      read_vocab_txt(folder);
    } else {
      read_sentencepiece(folder);
    }
    read_roles(folder);
    finish();
    return std::move(result_);
  }

 private:
  using Kind = Vocabulary::Kind;

  std::string where(const std::string& pointer) const { return result_.file_.string() + "#" + pointer; }

  // In tokenizer.json the last of two equal pieces of a list counts.
  void add_model_token(std::string text, std::int64_t id, double score = 0.0) {
    const auto [entry, is_new] = index_.emplace(text, result_.tokens_.size());
    if (is_new) {
      result_.tokens_.push_back({.text = std::move(text), .id = id, .score = score});
      return;
    }
    result_.warnings_.push_back(fmt::format("{}: token \"{}\" is there twice; the last one counts",
                                            result_.file_.string(), one_line(text)));
    auto& token = result_.tokens_[entry->second];
    token.id = id;
    token.score = score;
  }

  void add_added_token(const std::string& text, std::int64_t id, const AddedTokenFlags& flags) {
    const auto [entry, is_new] = index_.emplace(text, result_.tokens_.size());
    if (is_new) {
      result_.tokens_.push_back({.text = text, .id = id, .added = flags});
      return;
    }
    auto& token = result_.tokens_[entry->second];
    token.added = flags;
    if (token.id != id) {
      result_.warnings_.push_back(fmt::format("{}: added token \"{}\" has id {}, but {} in the model's vocabulary, "
                                              "which counts",
                                              result_.file_.string(), one_line(text), id, token.id));
    }
  }

  std::int64_t checked_id(const Json& value, std::string_view token) const {
    if (!value.is_number_integer() || value < 0 || value > Vocabulary::kMaxId) {
      fail("{}: id of token \"{}\": got {}, expected a whole number of 0 to {}; copy the tokenizer again",
           result_.file_.string(), one_line(token), shown(value), Vocabulary::kMaxId);
    }
    return value.get<std::int64_t>();
  }

  void read_tokenizer_json(const fs::path& file) {
    result_.file_ = file;
    const auto root = io::read_json(file);
    const auto* model = root.is_object() ? member(root, "model") : nullptr;
    if (model == nullptr || !model->is_object()) {
      fail("{}: holds no \"model\" object; copy the tokenizer again", file.string());
    }
    read_model(*model);
    if (const auto* added = member(root, "added_tokens")) read_added_tokens(*added);

    Json conventions = Json::object();
    for (const auto* key : {"normalizer", "pre_tokenizer", "decoder"}) {
      conventions[key] = member(root, key) != nullptr ? root[key] : Json(nullptr);
    }
    for (const auto* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      const auto* value = member(*model, key);
      conventions[key] = value != nullptr ? *value : Json("");
    }
    conventions["byte_fallback"] = flag(*model, "byte_fallback");
    result_.conventions_ = conventions.dump(-1, ' ', false, Json::error_handler_t::replace);
  }

  Kind kind_of(const Json& model) const {
    if (const auto* type = member(model, "type")) {
      for (const auto kind : {Kind::kBpe, Kind::kWordPiece, Kind::kUnigram, Kind::kWordLevel}) {
        if (*type == kind_name(kind)) return kind;
      }
      fail("{}: got {}, expected \"BPE\", \"WordPiece\", \"Unigram\" or \"WordLevel\"", where("/model/type"),
           shown(*type));
    }
    // Files of 2020 do not say it.
    if (model.contains("merges")) return Kind::kBpe;
    if (model.contains("max_input_chars_per_word")) return Kind::kWordPiece;
    return model.contains("unk_id") ? Kind::kUnigram : Kind::kWordLevel;
  }

  void read_model(const Json& model) {
    result_.kind_ = kind_of(model);
    const auto* vocab = member(model, "vocab");
    const bool is_list = result_.kind_ == Kind::kUnigram;
    if (vocab == nullptr || (is_list ? !vocab->is_array() : !vocab->is_object())) {
      fail("{}: got {}, expected {}; copy the tokenizer again", where("/model/vocab"),
           vocab == nullptr ? "nothing" : shown(*vocab), is_list ? "a list of pieces and scores" : "tokens and ids");
    }
    result_.tokens_.reserve(vocab->size());
    if (is_list) {
      for (std::size_t i = 0; i < vocab->size(); ++i) {
        const auto& piece = (*vocab)[i];
        if (!piece.is_array() || piece.size() != 2 || !piece[0].is_string() || !piece[1].is_number()) {
          fail("{}: got {}, expected [piece, score]; copy the tokenizer again",
               where(fmt::format("/model/vocab/{}", i)), shown(piece));
        }
        add_model_token(piece[0].get<std::string>(), checked_id(Json(i), piece[0].get_ref<const std::string&>()),
                        piece[1].get<double>());
      }
      return;
    }
    for (const auto& [text, id] : vocab->get_ref<const Json::object_t&>()) add_model_token(text, checked_id(id, text));
    if (const auto* merges = member(model, "merges")) read_merges(*merges);
  }

  // A merge is a pair, or in files before 2024 one text with a space between the two.
  void read_merges(const Json& merges) {
    if (!merges.is_array()) fail("{}: got {}, expected a list", where("/model/merges"), shown(merges));
    result_.merges_.reserve(merges.size());
    for (std::size_t i = 0; i < merges.size(); ++i) {
      const auto& merge = merges[i];
      if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        result_.merges_.emplace_back(merge[0].get<std::string>(), merge[1].get<std::string>());
      } else if (!merge.is_string() || !add_merge_line(merge.get_ref<const std::string&>())) {
        fail("{}: got {}, expected two tokens; copy the tokenizer again", where(fmt::format("/model/merges/{}", i)),
             shown(merge));
      }
    }
  }

  bool add_merge_line(std::string_view line) {
    const auto space = line.find(' ');
    if (space == std::string_view::npos || line.find(' ', space + 1) != std::string_view::npos) return false;
    result_.merges_.emplace_back(line.substr(0, space), line.substr(space + 1));
    return true;
  }

  void read_added_tokens(const Json& added) {
    if (!added.is_array()) fail("{}: got {}, expected a list", where("/added_tokens"), shown(added));
    for (std::size_t i = 0; i < added.size(); ++i) {
      const auto& token = added[i];
      const auto* content = token.is_object() ? member(token, "content") : nullptr;
      if (content == nullptr || !content->is_string() || !token.contains("id")) {
        fail("{}: got {}, expected an object with \"content\" and \"id\"; copy the tokenizer again",
             where(fmt::format("/added_tokens/{}", i)), shown(token));
      }
      const auto& text = content->get_ref<const std::string&>();
      add_added_token(text, checked_id(token["id"], text), flags_of(token));
    }
  }

  static AddedTokenFlags flags_of(const Json& token) {
    return {.special = flag(token, "special"),
            .single_word = flag(token, "single_word"),
            .lstrip = flag(token, "lstrip"),
            .rstrip = flag(token, "rstrip"),
            .normalized = flag(token, "normalized")};
  }

  void read_vocab_json(const fs::path& folder) {
    result_.file_ = folder / kVocabJson;
    const auto vocab = io::read_json(result_.file_);
    if (!vocab.is_object()) {
      fail("{}: got {}, expected an object of tokens and ids", result_.file_.string(), shown(vocab));
    }
    for (const auto& [text, id] : vocab.get_ref<const Json::object_t&>()) add_model_token(text, checked_id(id, text));
    result_.kind_ = Kind::kWordLevel;
    if (has_file(folder / kMergesTxt)) {
      result_.kind_ = Kind::kBpe;
      read_merges_txt(folder / kMergesTxt);
    }
    read_added_tokens_json(folder);
  }

  void read_merges_txt(const fs::path& file) {
    io::TextLines lines(file);
    while (const auto line = lines.next()) {
      const bool is_heading = lines.number() == 1 && line->starts_with("#version");
      if (is_heading || line->empty()) continue;
      check_utf8(*line, lines);
      if (!add_merge_line(*line)) {
        fail("{}:{}: got \"{}\", expected two tokens and a space between them", file.string(), lines.number(),
             one_line(*line));
      }
    }
  }

  static void check_utf8(std::string_view line, const io::TextLines& lines) {
    if (is_valid_utf8(line)) return;
    fail("{}:{}: not valid UTF-8; copy the tokenizer again", lines.name(), lines.number());
  }

  void read_vocab_txt(const fs::path& folder) {
    result_.file_ = folder / kVocabTxt;
    result_.kind_ = Kind::kWordPiece;
    io::TextLines lines(result_.file_);
    while (const auto line = lines.next()) {
      check_utf8(*line, lines);
      add_model_token(std::string(*line), checked_id(Json(lines.number() - 1), *line));
    }
    read_added_tokens_json(folder);
  }

  // The ids are in added_tokens.json; how the tokens are found is in tokenizer_config.json, where it is said at all.
  void read_added_tokens_json(const fs::path& folder) {
    if (!has_file(folder / kAddedTokens)) return;
    const auto added = io::read_json(folder / kAddedTokens);
    if (!added.is_object()) {
      fail("{}: got {}, expected an object of tokens and ids", (folder / kAddedTokens).string(), shown(added));
    }
    std::map<std::string, AddedTokenFlags> flags;
    if (has_file(folder / "tokenizer_config.json")) {
      const auto config = io::read_json(folder / "tokenizer_config.json");
      if (const auto* decoder = config.is_object() ? member(config, "added_tokens_decoder") : nullptr;
          decoder != nullptr && decoder->is_object()) {
        for (const auto& entry : decoder->get_ref<const Json::object_t&>()) {
          const auto* content = entry.second.is_object() ? member(entry.second, "content") : nullptr;
          if (content != nullptr && content->is_string()) flags[content->get<std::string>()] = flags_of(entry.second);
        }
      }
    }
    for (const auto& [text, id] : added.get_ref<const Json::object_t&>()) {
      add_added_token(text, checked_id(id, text), flags[text]);
    }
  }

  void read_sentencepiece(const fs::path& folder) {
    for (const auto* name : kSentencePieceFiles) {
      if (!has_file(folder / name)) continue;
      result_.file_ = folder / name;
      result_.digest_ = io::sha256_file(folder / name);
      if (has_file(folder / kAddedTokens)) result_.digest_ += io::sha256_file(folder / kAddedTokens);
      return;
    }
    fail("{}: holds no tokenizer (tokenizer.json, vocab.json, vocab.txt or a sentencepiece model); copy it from where "
         "the weights come from",
         folder.string());
  }

  void read_roles(const fs::path& folder) {
    for (const auto* name : {"tokenizer_config.json", "special_tokens_map.json"}) {
      if (!has_file(folder / name)) continue;
      const auto config = io::read_json(folder / name);
      if (!config.is_object()) fail("{}: got {}, expected an object", (folder / name).string(), shown(config));
      for (const auto* role : kRoles) {
        const auto* value = member(config, role);
        if (value != nullptr && value->is_object()) value = member(*value, "content");
        if (value != nullptr && value->is_string()) result_.roles_.emplace(role, value->get<std::string>());
      }
    }
  }

  void finish() {
    auto& tokens = result_.tokens_;
    std::ranges::stable_sort(tokens, {}, &Token::id);
    for (std::size_t i = 1; i < tokens.size(); ++i) {
      if (tokens[i].id == tokens[i - 1].id) {
        fail("{}: tokens \"{}\" and \"{}\" have the same id {}; copy the tokenizer again", result_.file_.string(),
             one_line(tokens[i - 1].text), one_line(tokens[i].text), tokens[i].id);
      }
    }
    result_.index_.reserve(tokens.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) result_.index_.emplace(tokens[i].text, i);
  }

  Vocabulary result_;
  std::unordered_map<std::string, std::size_t> index_;
};

Vocabulary Vocabulary::read(const fs::path& folder) { return VocabularyReader().read(folder); }

const Token* Vocabulary::find(std::string_view text) const {
  const auto found = index_.find(text);
  return found == index_.end() ? nullptr : &tokens_[found->second];
}

const Token* Vocabulary::at(std::int64_t id) const {
  const auto found = std::ranges::lower_bound(tokens_, id, {}, &Token::id);
  return found == tokens_.end() || found->id != id ? nullptr : &*found;
}

}  // namespace mergex::text
