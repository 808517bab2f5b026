#include "merging/vocabulary_plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <map>
#include <unordered_map>

#include "core/error.h"
#include "core/one_line.h"
#include "core/suggest.h"
#include "io/json_object.h"
#include "merging/written_tokenizer.h"
#include "text/vocabulary.h"

namespace mergex::merging {
namespace fs = std::filesystem;
using io::Json;
using text::Token;
using text::Vocabulary;

namespace {

// What fast kernels and a split over devices ask of a row count; a larger power of two in it is chance.
constexpr std::int64_t kLargestAlignment = 128;

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// `"a", "b", "c" and 7 more`
std::string some_of(const std::vector<std::string>& tokens) {
  constexpr std::size_t kShown = 3;
  std::string text;
  for (std::size_t i = 0; i < std::min(kShown, tokens.size()); ++i) {
    text += fmt::format("{}\"{}\"", i == 0 ? "" : ", ", one_line(tokens[i]));
  }
  return tokens.size() > kShown ? fmt::format("{} and {} more", text, tokens.size() - kShown) : text;
}

class Planner {
 public:
  Planner(std::span<const VocabularyModel> models, std::optional<std::size_t> base, const VocabularyOptions& options)
      : models_(models), base_(base), options_(options) {}

  VocabularyPlan plan(std::size_t config_donor) {
    check_hidden_sizes();
    read_vocabularies();
    choose_source();
    resolve_rules();
    extend_source();
    list_tokens();
    choose_rows();
    map_rows();
    describe_tokenizer();
    edit_config(models_[config_donor], *vocabularies_[config_donor]);
    warn_of_conflicts();
    return std::move(plan_);
  }

 private:
  struct Rule {
    const TokenRule* given;
    std::size_t model = 0;  ///< kModel, kModelToken
    std::int64_t row = 0;
  };

  const std::string& where() const { return options_.where; }
  void warn(std::string message) { plan_.warnings.push_back(std::move(message)); }

  void check_hidden_sizes() const {
    const VocabularyModel* first = nullptr;
    for (const auto& model : models_) {
      if (model.rows == 0) continue;
      if (first == nullptr) first = &model;
      if (model.hidden_size != first->hidden_size) {
        fail("{}: \"{}\" has hidden size {}, but \"{}\" has {}; only models of one width can be merged", where(),
             one_line(model.name), model.hidden_size, one_line(first->name), first->hidden_size);
      }
    }
  }

  void read_vocabularies() {
    std::map<fs::path, std::shared_ptr<const Vocabulary>> by_folder;
    for (const auto& model : models_) {
      auto& vocabulary = by_folder[model.folder];
      if (vocabulary == nullptr) {
        vocabulary = std::make_shared<const Vocabulary>(Vocabulary::read(model.folder));
        for (const auto& warning : vocabulary->warnings()) warn(warning);
      }
      vocabularies_.push_back(vocabulary);
    }
  }

  std::size_t model_named(const std::string& name) const {
    std::vector<std::string> names;
    for (std::size_t m = 0; m < models_.size(); ++m) {
      if (models_[m].name == name) return m;
      names.push_back(models_[m].name);
    }
    fail("{}: got \"{}\", no model of this merge{}", where(), one_line(name), did_you_mean(name, names));
  }

  void choose_source() {
    source_ = base_.value_or(0);
    if (options_.source == VocabularyOptions::Origin::kModel) source_ = model_named(options_.model);
    if (options_.source == VocabularyOptions::Origin::kBase && !base_) {
      fail("{}: got \"base\", but the recipe has no base_model; name one, or the model whose tokenizer is meant",
           where());
    }
    check_kinds();
  }

  // A sentencepiece model's ids depend on the program that reads it, so all that can be told is that two are equal.
  void check_kinds() const {
    const auto& source = *vocabularies_[source_];
    for (std::size_t m = 0; m < models_.size(); ++m) {
      const auto& other = *vocabularies_[m];
      if (source.kind() == Vocabulary::Kind::kOpaque || other.kind() == Vocabulary::Kind::kOpaque) {
        if (source.kind() == other.kind() && source.digest() == other.digest()) continue;
        const auto& opaque = other.kind() == Vocabulary::Kind::kOpaque ? other : source;
        fail("{}: only vocabularies with a tokenizer.json can be compared; save one beside it with transformers "
             "(AutoTokenizer, save_pretrained)",
             opaque.file().string());
      }
      if (options_.source == VocabularyOptions::Origin::kUnion && source.kind() != other.kind()) {
        fail("{}: \"{}\" has a {} tokenizer, \"{}\" a {} one, and their union would be neither; use tokenizer_source: "
             "base",
             where(), one_line(models_[m].name), kind_name(other.kind()), one_line(models_[source_].name),
             kind_name(source.kind()));
      }
    }
    if (source.kind() == Vocabulary::Kind::kOpaque && !options_.tokens.empty()) {
      fail("{}: tokens: the tokens of {} are not known; save a tokenizer.json beside it with transformers "
           "(AutoTokenizer, save_pretrained)",
           where(), source.file().string());
    }
  }

  // The row that a model has for a token.
  std::optional<std::int64_t> row_of(std::size_t m, std::string_view token) const {
    const auto* found = vocabularies_[m]->find(token);
    if (found == nullptr || found->id >= models_[m].rows) return std::nullopt;
    return found->id;
  }

  [[noreturn]] void fail_for_token(const TokenRule& rule, const std::string& token, std::size_t m) const {
    std::vector<std::string> texts;
    for (const auto& known : vocabularies_[m]->tokens()) texts.push_back(known.text);
    fail("{}: tokens: \"{}\": \"{}\" has no token \"{}\"{}", where(), one_line(rule.token), one_line(models_[m].name),
         one_line(token), did_you_mean(token, texts));
  }

  void resolve_rules() {
    for (const auto& given : options_.tokens) {
      Rule rule{.given = &given};
      if (given.kind == TokenRule::Kind::kModel || given.kind == TokenRule::Kind::kModelToken) {
        rule.model = model_named(given.model);
        if (given.kind == TokenRule::Kind::kModelToken && given.source_id) {
          rule.row = *given.source_id;
          if (rule.row < 0 || rule.row >= models_[rule.model].rows) {
            fail("{}: tokens: \"{}\": got token_id {}, expected 0 to {}, the rows of \"{}\"", where(),
                 one_line(given.token), rule.row, models_[rule.model].rows - 1, one_line(given.model));
          }
        } else {
          const auto& token = given.kind == TokenRule::Kind::kModel ? given.token : given.source_token;
          const auto row = row_of(rule.model, token);
          if (!row) fail_for_token(given, token, rule.model);
          rule.row = *row;
        }
      }
      rules_.emplace(given.token, rule);
    }
  }

  // Tokens that the result has beyond its source's.
  void extend_source() {
    const auto& source = *vocabularies_[source_];
    std::vector<const Token*> ordinary, added;
    std::unordered_map<std::string_view, bool> seen;
    const auto collect = [&](const Token& token) {
      if (source.find(token.text) != nullptr || !seen.emplace(token.text, true).second) return;
      (token.added ? added : ordinary).push_back(&token);
    };
    if (options_.source == VocabularyOptions::Origin::kUnion) {
      for (std::size_t m = 0; m < models_.size(); ++m) {
        for (const auto& token : vocabularies_[m]->tokens()) {
          if (token.id < models_[m].rows) collect(token);
        }
      }
    }
    auto next_id = source.num_ids();
    const auto append = [&](Token token) {
      token.id = next_id++;
      extension_.tokens.push_back(std::move(token));
    };
    for (const auto* token : ordinary) append(*token);
    for (const auto* token : added) append(*token);

    for (const auto& given : options_.tokens) {
      if (source.find(given.token) != nullptr || seen.contains(given.token)) continue;
      Token token{.text = given.token, .added = text::AddedTokenFlags{}};
      bool is_known = false;
      for (const auto& vocabulary : vocabularies_) {
        const auto* found = vocabulary->find(given.token);
        if (found == nullptr || is_known) continue;
        is_known = true;
        if (found->added) token.added = found->added;
      }
      if (!is_known && given.kind == TokenRule::Kind::kDefault) fail_for_token(given, given.token, source_);
      if (!is_known) warn(fmt::format("{}: tokens: no model has \"{}\": it is new in the result", where(),
                                      one_line(given.token)));
      append(std::move(token));
    }

    if (source.kind() != Vocabulary::Kind::kBpe) return;
    std::vector<const Vocabulary*> others;
    for (std::size_t m = 0; m < models_.size(); ++m) {
      if (m != source_) others.push_back(vocabularies_[m].get());
    }
    extension_ = with_merges(source, others, std::move(extension_));
    if (extension_.unreached.empty()) return;
    warn(fmt::format("{}: the merges of \"{}\" never lead to token {} of the {} new ones: no text is encoded to them",
                     where(), one_line(models_[source_].name), some_of(extension_.unreached),
                     extension_.tokens.size()));
  }

  void list_tokens() {
    const auto& source = *vocabularies_[source_];
    const auto& last = extension_.tokens.empty() ? source.tokens() : std::span<const Token>(extension_.tokens);
    token_at_.resize(last.empty() ? 0 : static_cast<std::size_t>(last.back().id + 1));
    for (const auto tokens : {source.tokens(), std::span<const Token>(extension_.tokens)}) {
      for (const auto& token : tokens) {
        token_at_[static_cast<std::size_t>(token.id)] = &token;
        id_of_.emplace(token.text, token.id);
        ++plan_.num_tokens;
      }
    }
  }

  void choose_rows() {
    const auto num_ids = static_cast<std::int64_t>(token_at_.size());
    const auto source_rows = models_[source_].rows;
    const bool is_padded = source_rows > vocabularies_[source_]->num_ids();
    const bool keep = options_.keep_padding_rows || vocabularies_[source_]->kind() == Vocabulary::Kind::kOpaque;
    num_kept_rows_ = keep ? std::max(num_ids, source_rows) : num_ids;
    std::int64_t multiple = options_.pad_to_multiple_of.value_or(1);
    if (!options_.pad_to_multiple_of && keep && is_padded && num_ids > source_rows) {
      const auto power_of_two = std::int64_t{1} << std::countr_zero(static_cast<std::uint64_t>(source_rows));
      multiple = std::min(power_of_two, kLargestAlignment);
    }
    if (multiple < 1 || multiple > Vocabulary::kMaxId) {
      fail("{}: pad_to_multiple_of: got {}, expected 1 to {}", where(), multiple, Vocabulary::kMaxId);
    }
    plan_.rows = round_up(num_kept_rows_, multiple);
  }

  void append_row(RowMap& map, std::size_t m, std::int64_t r) {
    if (r < static_cast<std::int64_t>(token_at_.size()) && token_at_[static_cast<std::size_t>(r)] != nullptr) {
      const auto& token = token_at_[static_cast<std::size_t>(r)]->text;
      const auto rule = rules_.find(token);
      const bool is_forced = rule != rules_.end() && rule->second.given->force;
      if (const auto own = row_of(m, token); own && !is_forced) {
        map.append(RowRun::Kind::kStored, m, *own);
      } else {
        append_substitute(map, token, rule == rules_.end() ? nullptr : &rule->second);
      }
      return;
    }
    const auto is_spare = [&](std::size_t model) {
      return r < models_[model].rows && vocabularies_[model]->at(r) == nullptr;
    };
    if (r < num_kept_rows_ && is_spare(m)) {
      map.append(RowRun::Kind::kStored, m, r);
    } else if (r < num_kept_rows_ && is_spare(source_)) {
      map.append(RowRun::Kind::kStored, source_, r);
    } else {
      map.append(RowRun::Kind::kMeanOfAll);
    }
  }

  void append_substitute(RowMap& map, const std::string& token, const Rule* rule) {
    if (rule != nullptr && rule->given->kind == TokenRule::Kind::kZero) return map.append(RowRun::Kind::kZero);
    if (rule != nullptr && rule->given->kind != TokenRule::Kind::kDefault) {
      return map.append(RowRun::Kind::kStored, rule->model, rule->row);
    }
    if (base_) {
      if (const auto row = row_of(*base_, token)) return map.append(RowRun::Kind::kStored, *base_, *row);
    }
    std::vector<RowMap::ModelRow> rows;
    for (std::size_t m = 0; m < models_.size(); ++m) {
      if (const auto row = row_of(m, token)) rows.push_back({m, *row});
    }
    if (rows.empty()) return map.append(RowRun::Kind::kZero);
    if (rows.size() == 1) return map.append(RowRun::Kind::kStored, rows[0].model, rows[0].row);
    map.append_mean(std::move(rows));
  }

  void map_rows() {
    for (std::size_t m = 0; m < models_.size(); ++m) {
      auto map = std::make_shared<RowMap>();
      if (models_[m].rows > 0) {
        for (std::int64_t r = 0; r < plan_.rows; ++r) append_row(*map, m, r);
      }
      plan_.maps.push_back(std::move(map));
    }
  }

  void describe_tokenizer() {
    const auto& source = *vocabularies_[source_];
    plan_.tokenizer_folder = models_[source_].folder;
    if (!extension_.tokens.empty()) plan_.written_files = extended_tokenizer(source, extension_);
    std::vector<std::string> left_out;
    for (const auto& entry : fs::directory_iterator(plan_.tokenizer_folder)) {
      const auto name = entry.path().filename().string();
      if (!entry.is_regular_file() || !is_tokenizer_file(name)) continue;
      const auto has_name = [&](const auto& file) { return file.first == name; };
      if (std::ranges::any_of(plan_.written_files, has_name)) continue;
      if (!extension_.tokens.empty() && lists_tokens(name)) {
        left_out.push_back(name);
      } else {
        plan_.copied_files.emplace_back(name);
      }
    }
    std::ranges::sort(plan_.copied_files);
    std::ranges::sort(left_out);
    if (!left_out.empty()) {
      warn(fmt::format("the result has more tokens than {}, which therefore is not copied from {}", some_of(left_out),
                       plan_.tokenizer_folder.string()));
    }
  }

  // Whether a tokenizer file holds the vocabulary itself, so that it would contradict an extended one.
  static bool lists_tokens(const std::string& name) {
    return !name.starts_with("chat_template") && !name.ends_with(".py") && name != "special_tokens_map.json" &&
           name != "tokenizer_config.json";
  }

  void edit_config(const VocabularyModel& donor, const Vocabulary& donor_vocabulary) {
    const auto config_file = donor.folder / "config.json";
    const auto config = io::read_json(config_file);
    bool has_vocab_size = false;
    const auto flat = config.flatten();
    for (const auto& [pointer, value] : flat.items()) {
      // Parts of a model that see no text (audio, images) count other things by this name.
      if (pointer != "/vocab_size" && !(pointer.ends_with("/vocab_size") && value == donor.rows)) continue;
      has_vocab_size = true;
      if (value != plan_.rows) plan_.config_edits.emplace_back(pointer, plan_.rows);
    }
    if (!has_vocab_size) plan_.config_edits.emplace_back("/vocab_size", plan_.rows);

    if (donor_vocabulary.kind() == Vocabulary::Kind::kOpaque) return;  // all vocabularies are equal
    edit_ids(config, "", donor_vocabulary, config_file, plan_.config_edits);
    const auto generation_file = donor.folder / "generation_config.json";
    std::error_code ignored;
    if (!fs::exists(generation_file, ignored)) return;
    auto generation = io::read_json(generation_file);
    std::vector<std::pair<std::string, Json>> edits;
    edit_ids(generation, "", donor_vocabulary, generation_file, edits);
    if (edits.empty()) return;
    for (auto& [pointer, value] : edits) generation[Json::json_pointer(pointer)] = std::move(value);
    plan_.written_files.emplace_back("generation_config.json", generation.dump(2) + "\n");
  }

  void edit_ids(const Json& object, const std::string& pointer, const Vocabulary& donor, const fs::path& file,
                std::vector<std::pair<std::string, Json>>& edits) {
    if (!object.is_object()) return;
    for (const auto& [key, value] : object.items()) {
      const auto here = pointer + "/" + io::escape_pointer(key);
      if (value.is_object()) edit_ids(value, here, donor, file, edits);
      const bool holds_ids = key.ends_with("_token_id") || key.ends_with("_token_ids") || key == "suppress_tokens" ||
                             key == "begin_suppress_tokens" || key == "bad_words_ids";
      if (!holds_ids) continue;
      auto mapped = mapped_ids(value, key, donor, file);
      if (mapped != value) edits.emplace_back(here, std::move(mapped));
    }
  }

  // Ids that the donor has no token for (-1, padding rows) stay.
  Json mapped_ids(const Json& value, const std::string& key, const Vocabulary& donor, const fs::path& file) {
    if (value.is_array()) {
      Json all = Json::array();
      for (const auto& entry : value) {
        auto mapped = mapped_ids(entry, key, donor, file);
        if (!mapped.is_null()) all.push_back(std::move(mapped));
      }
      return all;
    }
    if (!value.is_number_integer()) return value;
    const auto* token = donor.at(value.get<std::int64_t>());
    if (token == nullptr) return value;
    if (const auto id = id_of_.find(token->text); id != id_of_.end()) return id->second;
    if (key.ends_with("_id")) {
      const auto& roles = vocabularies_[source_]->roles();
      if (const auto role = roles.find(key.substr(0, key.size() - 3)); role != roles.end()) {
        if (const auto id = id_of_.find(role->second); id != id_of_.end()) return id->second;
      }
    }
    warn(fmt::format("{}: {}: the result has no token \"{}\": left out", file.string(), key, one_line(token->text)));
    return nullptr;
  }

  void warn_of_conflicts() {
    const auto& source = *vocabularies_[source_];
    for (std::size_t m = 0; m < models_.size(); ++m) {
      const auto& model = models_[m];
      const auto& vocabulary = *vocabularies_[m];
      if (model.rows > 0) warn_of_tokens_without_row(model, vocabulary);
      if (m == source_) continue;
      for (const auto& [role, token] : vocabulary.roles()) {
        const auto here = source.roles().find(role);
        if (here == source.roles().end() || here->second == token) continue;
        warn(fmt::format("{}: \"{}\" is \"{}\" in \"{}\" and \"{}\" in the written tokenizer", where(), role,
                         one_line(token), one_line(model.name), one_line(here->second)));
      }
      if (options_.source == VocabularyOptions::Origin::kUnion) warn_of_unlike_tokens(model, vocabulary);
    }
    warn_of_rules_and_zeros();
  }

  void warn_of_tokens_without_row(const VocabularyModel& model, const Vocabulary& vocabulary) {
    std::vector<std::string> beyond;
    for (const auto& token : vocabulary.tokens()) {
      if (token.id >= model.rows) beyond.push_back(token.text);
    }
    if (beyond.empty()) return;
    warn(fmt::format("\"{}\": its embedding has {} rows, none for token {}; treated as absent there",
                     one_line(model.name), model.rows, some_of(beyond)));
  }

  void warn_of_unlike_tokens(const VocabularyModel& model, const Vocabulary& vocabulary) {
    const auto& source = *vocabularies_[source_];
    const bool are_known = !vocabulary.conventions().empty() && !source.conventions().empty();
    if (are_known && vocabulary.conventions() != source.conventions()) {
      warn(fmt::format("{}: \"{}\" normalises or splits texts by other rules than the written tokenizer (those of "
                       "\"{}\"): some of its tokens may never be met",
                       where(), one_line(model.name), one_line(models_[source_].name)));
    }
    std::vector<std::string> unlike;
    for (const auto& token : vocabulary.tokens()) {
      if (!token.added) continue;
      const auto* here = source.find(token.text);
      if (here != nullptr && here->added && here->added != token.added) unlike.push_back(token.text);
    }
    if (unlike.empty()) return;
    warn(fmt::format("{}: \"{}\" sets other flags (special, single_word, lstrip, rstrip, normalized) for token {}; "
                     "those of \"{}\" count",
                     where(), one_line(model.name), some_of(unlike), one_line(models_[source_].name)));
  }

  void warn_of_rules_and_zeros() {
    const auto num_holders = [&](const std::string& token) {
      std::size_t count = 0;
      for (std::size_t m = 0; m < models_.size(); ++m) count += row_of(m, token) ? 1 : 0;
      return count;
    };
    const auto num_with_rows =
        static_cast<std::size_t>(std::ranges::count_if(models_, [](const auto& model) { return model.rows > 0; }));
    for (const auto& given : options_.tokens) {
      if (!given.force && num_holders(given.token) == num_with_rows) {
        warn(fmt::format("{}: tokens: \"{}\" has no effect, as every model has this token; set force: true to replace "
                         "their rows",
                         where(), one_line(given.token)));
      }
    }
    std::vector<std::string> nowhere;
    for (const auto* token : token_at_) {
      if (token == nullptr || num_holders(token->text) > 0) continue;
      const auto rule = rules_.find(token->text);
      if (rule == rules_.end() || rule->second.given->kind == TokenRule::Kind::kDefault) nowhere.push_back(token->text);
    }
    if (!nowhere.empty()) {
      warn(fmt::format("{}: no model has a row for token {}: zeros are written", where(), some_of(nowhere)));
    }
  }

  std::span<const VocabularyModel> models_;
  std::optional<std::size_t> base_;
  const VocabularyOptions& options_;
  std::vector<std::shared_ptr<const Vocabulary>> vocabularies_;  // per model
  std::size_t source_ = 0;                                       // whose tokenizer is written
  std::map<std::string, Rule, std::less<>> rules_;
  AddedVocabulary extension_;
  std::vector<const Token*> token_at_;  // by id of the result; nullptr where there is none
  std::unordered_map<std::string_view, std::int64_t> id_of_;
  std::int64_t num_kept_rows_ = 0;      // rows below this that have no token are kept rather than averaged
  VocabularyPlan plan_;
};

}  // namespace

VocabularyPlan plan_vocabulary(std::span<const VocabularyModel> models, std::optional<std::size_t> base,
                               std::size_t config_donor, const VocabularyOptions& options) {
  return Planner(models, base, options).plan(config_donor);
}

bool is_tokenizer_file(std::string_view name) {
  constexpr std::array<std::string_view, 16> kNames{
      "tokenizer.json",        "tokenizer_config.json", "special_tokens_map.json",   "added_tokens.json",
      "vocab.json",            "vocab.txt",             "merges.txt",                "tokenizer.model",
      "spiece.model",          "sentencepiece.bpe.model", "chat_template.jinja",     "chat_template.json",
      "source.spm",            "target.spm",            "tekken.json",               "bpe.codes"};
  return std::ranges::find(kNames, name) != kNames.end() || name.ends_with(".tiktoken") ||
         (name.starts_with("tokenization_") && name.ends_with(".py"));
}

}  // namespace mergex::merging
