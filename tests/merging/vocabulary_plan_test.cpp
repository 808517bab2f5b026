#include "merging/vocabulary_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "merging/vocabulary_support.h"
#include "support/catch.h"
#include "support/paths.h"

using namespace mergex;
using namespace mergex::merging;
using test::SmallTokenizer;
using Origin = VocabularyOptions::Origin;
namespace fs = std::filesystem;

namespace {

constexpr std::int64_t kWidth = 4;

VocabularyOptions options(Origin source, bool keep_padding_rows = true) {
  return {.source = source, .keep_padding_rows = keep_padding_rows, .where = "recipe.yaml"};
}

std::vector<std::string> letters(const std::string& text) {
  std::vector<std::string> tokens{"<unk>", "<s>"};
  for (const char c : text) tokens.emplace_back(1, c);
  return tokens;
}

// Models whose embeddings hold random numbers, no two of them equal.
class Models {
 public:
  std::size_t add(const SmallTokenizer& tokenizer, std::int64_t rows) {
    const auto name = std::string(1, static_cast<char>('p' + models_.size()));
    models_.push_back({name, tokenizer.write(folder_ / name), rows, kWidth});
    std::vector<float> values(static_cast<std::size_t>(rows * kWidth));
    for (auto& value : values) value = std::normal_distribution<float>()(random_);
    embeddings_.push_back(std::make_unique<test::MemorySource>(std::move(values)));
    tokenizers_.push_back(tokenizer);
    return models_.size() - 1;
  }
  // A model with the values of another one in other rows.
  std::size_t add_permuted(std::size_t original) {
    auto tokenizer = tokenizers_[original];
    const auto rows = models_[original].rows;
    std::vector<std::int64_t> new_row(static_cast<std::size_t>(rows));
    std::iota(new_row.begin(), new_row.end(), 0);
    std::ranges::shuffle(new_row, random_);
    for (auto& [token, id] : tokenizer.vocab) id = new_row[static_cast<std::size_t>(id)];
    const auto m = add(tokenizer, rows);
    std::vector<float> values(static_cast<std::size_t>(rows * kWidth));
    for (std::int64_t r = 0; r < rows; ++r) {
      embeddings_[original]->read(r * kWidth, kWidth, &values[static_cast<std::size_t>(new_row[static_cast<std::size_t>(r)] * kWidth)]);
    }
    embeddings_[m] = std::make_unique<test::MemorySource>(std::move(values));
    return m;
  }

  VocabularyPlan plan(const VocabularyOptions& given, std::optional<std::size_t> base = 0) const {
    return plan_vocabulary(models_, base, 0, given);
  }
  std::unique_ptr<RowSource> aligned(const VocabularyPlan& plan, std::size_t m) const {
    std::vector<RowSource::Part> parts;
    for (std::size_t i = 0; i < models_.size(); ++i) parts.push_back({embeddings_[i].get(), models_[i].rows});
    return std::make_unique<RowSource>(plan.maps[m], parts, kWidth);
  }
  std::vector<double> row(const VocabularyPlan& plan, std::size_t m, std::int64_t r) const {
    std::vector<double> values(kWidth);
    aligned(plan, m)->read(r * kWidth, kWidth, values.data());
    return values;
  }
  std::vector<double> stored_row(std::size_t m, std::int64_t r) const {
    std::vector<double> values(kWidth);
    embeddings_[m]->read(r * kWidth, kWidth, values.data());
    return values;
  }
  std::vector<double> row_of(std::size_t m, const std::string& token) const {
    return stored_row(m, tokenizers_[m].vocab.at(token));
  }
  const SmallTokenizer& tokenizer(std::size_t m) const { return tokenizers_[m]; }
  std::vector<VocabularyModel>& all() { return models_; }

 private:
  test::TemporaryFolder folder_;
  std::mt19937 random_{11};
  std::vector<VocabularyModel> models_;
  std::vector<std::unique_ptr<test::MemorySource>> embeddings_;
  std::vector<SmallTokenizer> tokenizers_;
};

std::vector<double> mean(const std::vector<double>& x, const std::vector<double>& y) {
  std::vector<double> result(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) result[i] = (x[i] + y[i]) / 2.0;
  return result;
}

bool warns_of(const VocabularyPlan& plan, const std::string& text) {
  return std::ranges::any_of(plan.warnings, [&](const auto& warning) { return warning.find(text) != std::string::npos; });
}

}  // namespace

TEST_CASE("TOK-1: one vocabulary, nothing moves", "[merging][law]") {
  const std::int64_t rows = GENERATE(8, 12);  // without and with padding
  const auto source = GENERATE(Origin::kUnion, Origin::kBase, Origin::kModel);
  Models models;
  models.add(SmallTokenizer::of(letters("abcdef")), rows);
  models.add(SmallTokenizer::of(letters("abcdef")), rows);
  auto given = options(source);
  given.model = "q";
  const auto plan = models.plan(given);
  CHECK(plan.rows == rows);
  for (const std::size_t m : {0u, 1u}) {
    REQUIRE(plan.maps[m]->runs.size() == 1);
    CHECK(plan.maps[m]->runs[0].model == m);
    CHECK(plan.maps[m]->runs[0].row == 0);
    CHECK(models.aligned(plan, m)->stored() != nullptr);
  }
  CHECK(plan.written_files.empty());
  CHECK(plan.copied_files == std::vector<fs::path>{"tokenizer.json", "tokenizer_config.json"});
  CHECK(plan.warnings.empty());
}

TEST_CASE("TOK-2: other ids for the same tokens change nothing", "[merging][law]") {
  Models models;
  models.add(SmallTokenizer::of(letters("abcdef")), 8);
  const auto donor = models.add(SmallTokenizer::of(letters("bdfhij")), 8);
  const auto permuted = models.add_permuted(donor);
  const auto source = GENERATE(Origin::kUnion, Origin::kBase);
  const auto plan = models.plan(options(source));
  CHECK(test::all_values(*models.aligned(plan, donor), plan.rows * kWidth) ==
        test::all_values(*models.aligned(plan, permuted), plan.rows * kWidth));
}

TEST_CASE("TOK-3 and TOK-5: a token keeps its row, whatever the ids", "[merging][law]") {
  const auto seed = GENERATE(range(1u, 21u));
  std::mt19937 random(seed);
  Models models;
  const std::string pool = "abcdefghijklmnopqrstuvwxyz0123456789";
  for (int m = 0; m < 3; ++m) {
    SmallTokenizer tokenizer;
    std::int64_t id = 0;
    auto shuffled = pool;
    std::ranges::shuffle(shuffled, random);
    for (const char c : shuffled.substr(0, 5 + random() % 25)) {
      id += random() % 5 == 0 ? 2 : 1;  // a hole now and then
      tokenizer.vocab[std::string(1, c)] = id;
    }
    models.add(tokenizer, id + 1 + static_cast<std::int64_t>(random() % 9));
  }
  auto given = options(random() % 2 == 0 ? Origin::kUnion : Origin::kBase, random() % 2 == 0);
  if (random() % 2 == 0) given.pad_to_multiple_of = 16;
  const auto plan = models.plan(given);

  const auto ids = test::written_ids(plan);
  CHECK(static_cast<std::int64_t>(ids.size()) == plan.num_tokens);
  if (given.pad_to_multiple_of) CHECK(plan.rows % 16 == 0);
  const std::pair<std::string, io::Json> vocab_size("/vocab_size", plan.rows);
  CHECK(std::ranges::count(plan.config_edits, vocab_size) == 1);
  for (const auto& [token, id] : ids) {
    REQUIRE(id < plan.rows);
    for (std::size_t m = 0; m < 3; ++m) {
      if (models.tokenizer(m).vocab.contains(token)) CHECK(models.row(plan, m, id) == models.row_of(m, token));
    }
  }
  for (const auto& [token, id] : models.tokenizer(0).vocab) CHECK(ids.at(token) == id);  // the base's ids stay
}

TEST_CASE("TOK-4: a forced token is the same row in every model", "[merging][law]") {
  Models models;
  models.add(SmallTokenizer::of(letters("abc")), 5);
  models.add(SmallTokenizer::of(letters("bcd")), 5);
  models.add(SmallTokenizer::of(letters("ace")), 5);
  auto given = options(Origin::kUnion);
  given.tokens = {{.token = "a", .kind = TokenRule::Kind::kModel, .model = "r", .force = true},
                  {.token = "c", .kind = TokenRule::Kind::kModelToken, .model = "q", .source_token = "d", .force = true},
                  {.token = "b", .kind = TokenRule::Kind::kModelToken, .model = "q", .source_id = 1, .force = true},
                  {.token = "d", .force = true},
                  {.token = "e", .kind = TokenRule::Kind::kZero, .force = true}};
  const auto plan = models.plan(given);
  const auto ids = test::written_ids(plan);
  for (std::size_t m = 0; m < 3; ++m) {
    CHECK(models.row(plan, m, ids.at("a")) == models.row_of(2, "a"));
    CHECK(models.row(plan, m, ids.at("c")) == models.row_of(1, "d"));
    CHECK(models.row(plan, m, ids.at("b")) == models.row_of(1, "<s>"));
    CHECK(models.row(plan, m, ids.at("d")) == models.row_of(1, "d"));
    CHECK(models.row(plan, m, ids.at("e")) == std::vector<double>(kWidth, 0.0));
  }
}

// The same three vocabularies went through mergekit 0.1.5, with and without a base: rows by the same rules.
TEST_CASE("what a model uses for a token that it lacks", "[merging]") {
  Models models;
  models.add(SmallTokenizer::of(letters("abcdef")), 8);
  models.add(SmallTokenizer::of(letters("afebcg0")), 9);
  models.add(SmallTokenizer::of(letters("ahg0f")), 7);

  const auto with_base = models.plan(options(Origin::kUnion, false), 0);
  auto ids = test::written_ids(with_base);
  CHECK(with_base.rows == 11);
  CHECK(models.row(with_base, 2, ids.at("b")) == models.row_of(0, "b"));  // the base has it
  CHECK(models.row(with_base, 1, ids.at("d")) == models.row_of(0, "d"));
  CHECK(models.row(with_base, 0, ids.at("h")) == models.row_of(2, "h"));  // one model has it
  CHECK(models.row(with_base, 0, ids.at("g")) == mean(models.row_of(1, "g"), models.row_of(2, "g")));

  const auto without = models.plan(options(Origin::kUnion, false), std::nullopt);
  ids = test::written_ids(without);
  CHECK(models.row(without, 2, ids.at("b")) == mean(models.row_of(0, "b"), models.row_of(1, "b")));
  CHECK(models.row(without, 2, ids.at("d")) == models.row_of(0, "d"));

  auto given = options(Origin::kUnion, false);
  given.tokens = {{.token = "h", .kind = TokenRule::Kind::kModel, .model = "r"},
                  {.token = "b", .kind = TokenRule::Kind::kModelToken, .model = "q", .source_token = "c"},
                  {.token = "d", .kind = TokenRule::Kind::kZero}};
  const auto ruled = models.plan(given, 0);
  ids = test::written_ids(ruled);
  CHECK(models.row(ruled, 2, ids.at("b")) == models.row_of(1, "c"));
  CHECK(models.row(ruled, 1, ids.at("b")) == models.row_of(1, "b"));  // has it: not forced
  CHECK(models.row(ruled, 1, ids.at("d")) == std::vector<double>(kWidth, 0.0));
}

TEST_CASE("T4: more rows than tokens, more tokens than rows", "[merging]") {
  SmallTokenizer base, donor;
  for (int i = 0; i < 150; ++i) base.vocab[fmt::format("t{}", i)] = i;
  for (int i = 0; i < 152; ++i) donor.vocab[fmt::format("t{}", i)] = 151 - i;  // t0, the last one, has no row
  Models models;
  models.add(base, 160);
  models.add(donor, 151);

  SECTION("the base's tokenizer") {
    const auto plan = models.plan(options(Origin::kBase));
    CHECK(plan.rows == 160);
    CHECK(models.row(plan, 1, 7) == models.stored_row(1, 144));
    CHECK(models.row(plan, 1, 0) == models.stored_row(0, 0));      // treated as absent
    CHECK(models.row(plan, 0, 155) == models.stored_row(0, 155));  // padding stays the base's
    CHECK(models.row(plan, 1, 155) == models.stored_row(0, 155));
    CHECK(warns_of(plan, "\"q\": its embedding has 151 rows, none for token \"t0\"; treated as absent there"));
    CHECK(plan.config_edits == std::vector<std::pair<std::string, io::Json>>{{"/vocab_size", 160}});
    CHECK(models.plan(options(Origin::kBase, false)).rows == 150);
  }
  SECTION("a union, into the padding") {
    const auto plan = models.plan(options(Origin::kUnion));
    const auto ids = test::written_ids(plan);
    CHECK(plan.rows == 160);
    CHECK(ids.size() == 152);
    CHECK(ids.at("t151") == 150);
    CHECK(ids.at("t150") == 151);
    CHECK(models.row(plan, 0, 150) == models.row_of(1, "t151"));
    CHECK(models.row(plan, 0, 159) == models.stored_row(0, 159));
    CHECK(models.plan(options(Origin::kUnion, false)).rows == 152);
  }
  SECTION("the tokenizer that has more tokens than rows") {
    auto given = options(Origin::kModel);
    given.model = "q";
    const auto plan = models.plan(given);
    CHECK(plan.rows == 152);
    for (const std::size_t m : {0u, 1u}) CHECK(models.row(plan, m, 151) == models.row_of(0, "t0"));
  }
}

TEST_CASE("rows that are padding in one model and tokens in another", "[merging]") {
  Models models;
  models.add(SmallTokenizer::of(letters("abc")), 8);       // rows 5 to 7 are padding
  models.add(SmallTokenizer::of(letters("abcdefg")), 8);   // tokens of other meaning there; "g" has no row
  const auto plan = models.plan(options(Origin::kBase));
  CHECK(plan.rows == 8);
  for (const std::int64_t r : {5, 6, 7}) CHECK(models.row(plan, 1, r) == models.stored_row(0, r));

  const auto united = models.plan(options(Origin::kUnion, false));
  const auto ids = test::written_ids(united);
  CHECK(ids.size() == 8);
  CHECK_FALSE(ids.contains("g"));  // a token that no embedding has
}

TEST_CASE("a union keeps the alignment of a padded base", "[merging]") {
  Models models;
  models.add(SmallTokenizer::of(letters("abcd")), 8);                  // 6 tokens
  models.add(SmallTokenizer::of(letters("efghijklm")), 11);
  const auto plan = models.plan(options(Origin::kUnion));              // 15 tokens
  CHECK(plan.num_tokens == 15);
  CHECK(plan.rows == 16);
  auto padded = options(Origin::kUnion);
  padded.pad_to_multiple_of = 10;
  CHECK(models.plan(padded).rows == 20);
  padded.pad_to_multiple_of = 0;
  CHECK(test::user_error([&] { models.plan(padded); }) == 
        "recipe.yaml: pad_to_multiple_of: got 0, expected 1 to 16777215");
}

TEST_CASE("ids in config.json and generation_config.json follow their tokens", "[merging]") {
  auto base = SmallTokenizer::of({"<s>", "</s>", "<pad>", "a", "b"});
  base.config = {{"vocab_size", 5},      {"bos_token_id", 0}, {"eos_token_id", 1},
                 {"pad_token_id", -1},   {"sep_token_id", 2}, {"text_config", {{"vocab_size", 5}, {"bos_token_id", 0}}},
                 {"audio_config", {{"vocab_size", 99}}}};
  auto donor = SmallTokenizer::of({"a", "b", "c", "<s>", "</s>", "[EOS]"});
  donor.tokenizer_config = {{"sep_token", {{"content", "[EOS]"}}}};
  Models models;
  models.add(base, 5);
  models.add(donor, 6);
  test::write_text(models.all()[0].folder / "generation_config.json",
                   R"({"eos_token_id": [1, 2], "bos_token_id": 0, "suppress_tokens": [3, 4], "max_length": 20})");
  auto given = options(Origin::kModel);
  given.model = "q";
  const auto plan = models.plan(given);
  const std::vector<std::pair<std::string, io::Json>> expected{
      {"/vocab_size", 6},   {"/text_config/vocab_size", 6},   {"/bos_token_id", 3},
      {"/eos_token_id", 4}, {"/sep_token_id", 5}, {"/text_config/bos_token_id", 3}};
  CHECK(plan.config_edits == expected);
  REQUIRE(plan.written_files.size() == 1);
  CHECK(plan.written_files[0].first == "generation_config.json");
  CHECK(io::parse_json(plan.written_files[0].second, "") ==
        io::Json{{"eos_token_id", {4}}, {"bos_token_id", 3}, {"suppress_tokens", {0, 1}}, {"max_length", 20}});
  CHECK(warns_of(plan, "generation_config.json: eos_token_id: the result has no token \"<pad>\": left out"));
}

TEST_CASE("conflicts between vocabularies are said", "[merging]") {
  auto base = SmallTokenizer::of(letters("abc")), donor = base;
  base.tokenizer_config = {{"bos_token", "<s>"}, {"eos_token", "a"}};
  donor.tokenizer_config = {{"bos_token", "b"}, {"eos_token", "a"}};
  base.added = {{.text = "a", .id = base.vocab.at("a"), .added = text::AddedTokenFlags{.special = true}}};
  donor.added = {{.text = "a", .id = donor.vocab.at("a"), .added = text::AddedTokenFlags{.special = false}}};
  Models models;
  models.add(base, 5);
  models.add(donor, 5);
  const auto plan = models.plan(options(Origin::kUnion));
  CHECK(plan.warnings ==
        std::vector<std::string>{
            "recipe.yaml: \"bos_token\" is \"b\" in \"q\" and \"<s>\" in the written tokenizer",
            "recipe.yaml: \"q\" sets other flags (special, single_word, lstrip, rstrip, normalized) for token \"a\"; "
            "those of \"p\" count"});

  auto given = options(Origin::kUnion);
  given.tokens = {{.token = "b", .kind = TokenRule::Kind::kZero},
                  {.token = "new", .kind = TokenRule::Kind::kModelToken, .model = "p", .source_token = "b"}};
  const auto ruled = models.plan(given);
  CHECK(warns_of(ruled, "tokens: \"b\" has no effect, as every model has this token; set force: true"));
  CHECK(warns_of(ruled, "tokens: no model has \"new\": it is new in the result"));
  CHECK(models.row(ruled, 1, 5) == models.row_of(0, "b"));
}

TEST_CASE("vocabularies that cannot be merged are refused in one line", "[merging]") {
  Models models;
  models.add(SmallTokenizer::of(letters("abc")), 5);
  models.add(SmallTokenizer::of(letters("abcd")), 6);
  const auto fault = [&](const VocabularyOptions& given, std::optional<std::size_t> base = 0) {
    return test::user_error([&] { models.plan(given, base); });
  };
  auto given = options(Origin::kModel);
  given.model = "pp";
  CHECK(fault(given) == "recipe.yaml: got \"pp\", no model of this merge");
  CHECK(fault(options(Origin::kBase), std::nullopt) ==
        "recipe.yaml: got \"base\", but the recipe has no base_model; name one, or the model whose tokenizer is meant");

  const auto with_rule = [&](TokenRule rule) {
    auto ruled = options(Origin::kUnion);
    ruled.tokens = {std::move(rule)};
    return fault(ruled);
  };
  CHECK(with_rule({.token = "a", .kind = TokenRule::Kind::kModel, .model = "x"}) ==
        "recipe.yaml: got \"x\", no model of this merge");
  CHECK(with_rule({.token = "d", .kind = TokenRule::Kind::kModel, .model = "p"}) ==
        "recipe.yaml: tokens: \"d\": \"p\" has no token \"d\"");
  CHECK(with_rule({.token = "a", .kind = TokenRule::Kind::kModelToken, .model = "q", .source_token = "<unk"}) ==
        "recipe.yaml: tokens: \"a\": \"q\" has no token \"<unk\"; did you mean \"<unk>\"?");
  CHECK(with_rule({.token = "a", .kind = TokenRule::Kind::kModelToken, .model = "q", .source_id = 6}) ==
        "recipe.yaml: tokens: \"a\": got token_id 6, expected 0 to 5, the rows of \"q\"");
  CHECK(with_rule({.token = "<unk", .force = true}) ==
        "recipe.yaml: tokens: \"<unk\": \"p\" has no token \"<unk\"; did you mean \"<unk>\"?");

  SECTION("another width") {
    models.all()[1].hidden_size = 8;
    CHECK(fault(options(Origin::kUnion)) ==
          "recipe.yaml: \"q\" has hidden size 8, but \"p\" has 4; only models of one width can be merged");
  }
  SECTION("another kind of tokenizer") {
    test::write_text(models.all()[1].folder / "tokenizer.json",
                     R"({"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}}})");
    CHECK(fault(options(Origin::kUnion)) ==
          "recipe.yaml: \"q\" has a WordLevel tokenizer, \"p\" a BPE one, and their union would be neither; use "
          "tokenizer_source: base");
    CHECK(models.plan(options(Origin::kBase)).rows == 5);
  }
  SECTION("only a sentencepiece model") {
    for (const auto& model : models.all()) {
      fs::remove(model.folder / "tokenizer.json");
      test::write_text(model.folder / "tokenizer.model", "the same bytes");
    }
    const auto plan = models.plan(options(Origin::kBase));  // equal, whatever they mean
    CHECK(plan.rows == 5);
    CHECK(plan.copied_files == std::vector<fs::path>{"tokenizer.model", "tokenizer_config.json"});
    CHECK(plan.maps[1]->runs.size() == 1);
    test::write_text(models.all()[1].folder / "tokenizer.model", "other bytes");
    CHECK(fault(options(Origin::kUnion)).ends_with(
        "tokenizer.model: only vocabularies with a tokenizer.json can be compared; save one beside it with "
        "transformers (AutoTokenizer, save_pretrained)"));
  }
}
