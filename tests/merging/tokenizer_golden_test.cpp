#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>

#include "io/json.h"
#include "io/safetensors.h"
#include "merging/vocabulary_plan.h"
#include "merging/vocabulary_support.h"
#include "support/catch.h"
#include "support/paths.h"

// Merged embeddings of another program, compared by token: it numbers the tokens of a union anew in every run.

using namespace mergex;
using namespace mergex::merging;
namespace fs = std::filesystem;

namespace {

constexpr double kTolerance = 6e-7;  // of the tensor's largest value: tests/golden/merge/NOTES.md

using Values = std::vector<double>;

Values linear(const Values& base, const Values& a) {
  Values merged(base.size());
  for (std::size_t i = 0; i < base.size(); ++i) merged[i] = 0.4 * base[i] + 0.6 * a[i];
  return merged;
}

// One task vector: its larger half, by magnitude over the whole tensor; the weight cancels.
Values ties(const Values& base, const Values& a) {
  Values magnitudes;
  for (std::size_t i = 0; i < base.size(); ++i) magnitudes.push_back(std::abs(a[i] - base[i]));
  std::ranges::sort(magnitudes, std::greater());
  const auto smallest_kept = magnitudes[magnitudes.size() / 2 - 1];
  auto merged = base;
  for (std::size_t i = 0; i < base.size(); ++i) {
    if (std::abs(a[i] - base[i]) >= smallest_kept) merged[i] = a[i];
  }
  return merged;
}

struct Case {
  std::string name;
  VocabularyOptions options;
  Values (*merge)(const Values&, const Values&) = linear;
};

// The options of recipes/<name>.yaml.
std::vector<Case> cases() {
  const auto given = [](VocabularyOptions::Origin source) {
    return VocabularyOptions{.source = source, .keep_padding_rows = false, .where = "recipe.yaml"};
  };
  auto padded = given(VocabularyOptions::Origin::kUnion);
  padded.pad_to_multiple_of = 32;
  auto of_a = given(VocabularyOptions::Origin::kModel);
  of_a.model = "a";
  auto with_tokens = given(VocabularyOptions::Origin::kUnion);
  with_tokens.tokens = {
      {.token = "<|tool|>", .kind = TokenRule::Kind::kModelToken, .model = "a", .source_token = "ab", .force = true},
      {.token = "z", .kind = TokenRule::Kind::kModel, .model = "base", .force = true},
      {.token = "7", .kind = TokenRule::Kind::kZero}};
  return {{"tokenizer_union_f32", given(VocabularyOptions::Origin::kUnion)},
          {"tokenizer_base_f32", given(VocabularyOptions::Origin::kBase)},
          {"tokenizer_model_f32", of_a},
          {"tokenizer_union_pad_f32", padded},
          {"tokenizer_tokens_f32", with_tokens},
          {"tokenizer_union_ties_f32", given(VocabularyOptions::Origin::kUnion), ties}};
}

}  // namespace

TEST_CASE("rows of merges over unlike vocabularies", "[merging][golden]") {
  const auto folder = test::golden_folder("merge");
  if (!folder) return;
  const auto base = *folder / "inputs/llama_tok_base_f32", a = *folder / "inputs/llama_tok_a_f32";
  const auto base_file = io::SafetensorsFile::open(base / "model.safetensors");
  const auto a_file = io::SafetensorsFile::open(a / "model.safetensors");

  for (const auto& [name, options, merge] : cases()) {
    INFO(name);
    const auto plan = plan_vocabulary(std::array{VocabularyModel{"base", base, 36, 36}, VocabularyModel{"a", a, 42, 36}},
                                      0, 0, options);
    const auto expected_file = io::SafetensorsFile::open(*folder / "outputs" / (name + ".safetensors"));
    const auto expected_row = io::read_json(*folder / "outputs" / (name + ".vocab.json"));
    const auto ids = test::written_ids(plan);
    REQUIRE(ids.size() == expected_row.size());

    double largest_error = 0.0;
    for (const auto* tensor : {"model.embed_tokens.weight", "lm_head.weight"}) {
      const test::MemorySource stored_base(*base_file.find(tensor)), stored_a(*a_file.find(tensor));
      const std::vector<RowSource::Part> parts{{&stored_base, 36}, {&stored_a, 42}};
      const RowSource aligned_base(plan.maps[0], parts, 36), aligned_a(plan.maps[1], parts, 36);
      const test::MemorySource expected(*expected_file.find(tensor));
      REQUIRE(expected.size() == plan.rows * 36);
      const auto merged = merge(test::all_values(aligned_base, plan.rows * 36), test::all_values(aligned_a, plan.rows * 36));
      const auto z = test::all_values(expected, plan.rows * 36);
      double largest = 0.0;
      for (const auto value : z) largest = std::max(largest, std::abs(value));

      std::map<std::int64_t, std::int64_t> rows;  // of the result -> of the golden
      for (const auto& [token, id] : ids) rows[id] = expected_row.at(token).get<std::int64_t>();
      for (std::int64_t r = plan.num_tokens; r < plan.rows; ++r) rows[r] = r;  // padding
      REQUIRE(static_cast<std::int64_t>(rows.size()) == plan.rows);
      for (const auto& [mine, theirs] : rows) {
        for (std::int64_t j = 0; j < 36; ++j) {
          const auto x = merged[static_cast<std::size_t>(mine * 36 + j)];
          const auto error = std::abs(x - z[static_cast<std::size_t>(theirs * 36 + j)]) / largest;
          INFO(tensor << " row " << mine);
          REQUIRE(error <= kTolerance);
          largest_error = std::max(largest_error, error);
        }
      }
    }
    test::log_golden("merge/" + name + " (vocabulary tensors)", fmt::format("ok, largest error {:.1e}", largest_error));
  }
}
