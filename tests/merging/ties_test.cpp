#include <cmath>
#include <numeric>

#include "core/random.h"
#include "merging/methods.h"
#include "support/catch.h"
#include "support/merging.h"
#include "support/paths.h"

namespace mergex::merging {
namespace {

using test::InMemory;
using test::Named;

std::vector<float> random_values(std::size_t count, std::uint64_t seed, bool coarse) {
  SplitMix64 generator(seed);
  std::vector<float> values(count);
  for (auto& v : values) {
    const double x = generator.uniform() - 0.5;
    v = static_cast<float>(coarse ? std::round(16.0 * x) / 16.0 : x);
  }
  return values;
}

}  // namespace

// Three task vectors, six elements, everything kept. The weights 3, 1, 1 make the first model's sign win where the
// other two are against it.
TEST_CASE("weights flip the vote: four dialects, four results", "[merging]") {
  const std::vector<std::vector<float>> deltas{{1, -2, 4, 0, 3, 1}, {-2, 1, 2, 0, -3, -0.5f}, {-1, 3, 0, 5, 0, -0.5f}};
  const auto merged = [&](Dialect dialect, const std::vector<Named>& weights) {
    InMemory<float> tensor{.context = test::context_for(kTies, {6}, 3, weights, {}, dialect),
                           .base = std::vector<float>(6),
                           .inputs = deltas};
    return test::merge_tensor(kTies, tensor);
  };
  const std::vector<Named> weights{{{"weight", 3}}, {{"weight", 1}}, {{"weight", 1}}}, ones{{{"weight", 1}}};
  // Weighted sums 0, -2, 14, 5, 6, 2 elect + - + + + +; agreeing weighted entries over their weights.
  CHECK(merged(Dialect::kMergekit, weights) == std::vector<float>{1, -2, 3.5f, 5, 3, 1});
  // Plain sums -2, 2, 6, 5, 0, 0 elect - + + + + +; weighted entries over their number.
  CHECK(merged(Dialect::kPeft, weights) == std::vector<float>{-1.5f, 2, 7, 5, 9, 3});
  // The same vote, but the majority decides where sums are 0: + in three columns, - in one. Mean, and sum.
  CHECK(merged(Dialect::kPaper, ones) == std::vector<float>{-1.5f, 2, 3, 5, 3, 1});
  CHECK(merged(Dialect::kFusionBench, ones) == std::vector<float>{-3, 4, 6, 5, 3, 1});
}

TEST_CASE("votes that cancel go to the model's majority", "[merging]") {
  // Two tensors; sums -1 -1 and 0: the majority is -.
  std::vector<InMemory<float>> model(2);
  model[0] = {.context = test::context_for(kTies, {2}, 2, {{{"weight", 1}}}, {}, Dialect::kPaper),
              .base = {0, 0},
              .inputs = {{-1, -1}, {0, 0}}};
  model[1] = {.context = test::context_for(kTies, {1}, 2, {{{"weight", 1}}}, {}, Dialect::kPaper),
              .base = {0},
              .inputs = {{3}, {-3}}};
  CHECK(test::merge_model(kTies, model)[1] == std::vector<float>{-3});
  for (auto& tensor : model) tensor.context.dialect = Dialect::kMergekit;
  CHECK(test::merge_model(kTies, model)[1] == std::vector<float>{3});
}

TEST_CASE("a published vote has no weights", "[merging]") {
  const auto context = test::context_for(kTies, {2}, 2, {{{"weight", 0.3}}}, {}, Dialect::kPaper);
  CHECK(kTies.problem(context) ==
        "ties has no weights in this dialect (got 0.3); set weight to 1, or dialect to mergekit or peft");
  CHECK(kTies.problem(test::context_for(kTies, {2}, 2, {{{"weight", 0.3}}})).empty());
}

TEST_CASE("a global trim keeps what a sort of the whole model keeps", "[merging][law]") {
  const bool coarse = GENERATE(false, true);  // coarse: ties across tensors and units
  const auto dialect = GENERATE(Dialect::kPaper, Dialect::kFusionBench);
  const std::vector<std::vector<std::int64_t>> shapes{{40, 9}, {7}, {1}, {300}, {3, 5}};
  for (const double density : {0.0, 0.001, 0.2, 0.5, 0.999, 1.0}) {
    std::vector<InMemory<float>> model;
    std::vector<float> all;
    for (const auto& shape : shapes) {
      auto& tensor = model.emplace_back(InMemory<float>{
          .context = test::context_for(kTies, shape, 1, {{{"weight", 1}, {"density", density}}}, {}, dialect)});
      const auto n = static_cast<std::size_t>(tensor.context.num_elements());
      tensor.base.assign(n, 0.0f);
      tensor.inputs = {random_values(n, n, coarse)};
      all.insert(all.end(), tensor.inputs[0].begin(), tensor.inputs[0].end());
    }
    std::vector<std::size_t> order(all.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, [&](auto i, auto j) { return std::abs(all[i]) > std::abs(all[j]); });
    const auto n = static_cast<double>(all.size());
    std::size_t kept = density <= 0.0 ? 0 : std::max<std::size_t>(1, static_cast<std::size_t>(density * n));
    if (dialect == Dialect::kFusionBench && density > 0.0 && density < 1.0) {
      // Its threshold is the value below, and every entry that equals it stays.
      const float threshold = std::abs(all[order[kept]]);
      while (kept < all.size() && std::abs(all[order[kept]]) >= threshold) ++kept;
    }
    std::vector<float> expected(all.size());
    for (std::size_t i = 0; i < kept; ++i) expected[order[i]] = all[order[i]];
    for (const test::Tiling tiling : {test::Tiling{}, test::Tiling{.tile = 11, .unit = 50}}) {
      INFO("density " << density << (coarse ? ", coarse" : ""));
      std::vector<float> merged;
      for (const auto& part : test::merge_model(kTies, model, tiling))
        merged.insert(merged.end(), part.begin(), part.end());
      CHECK((merged == expected));
    }
  }
}

TEST_CASE("a global trim needs one density per model", "[merging]") {
  std::vector<InMemory<float>> model(2);
  for (std::size_t i = 0; i < 2; ++i) {
    model[i] = {.context = test::context_for(kTies, {2}, 1, {{{"weight", 1}, {"density", i == 0 ? 0.5 : 0.4}}}, {},
                                             Dialect::kPaper),
                .base = {0, 0},
                .inputs = {{1, 2}}};
  }
  CHECK(test::user_error([&] { test::merge_model(kTies, model); }) ==
        "tensor: density is 0.4, elsewhere 0.5; a trim over the whole model needs one density per model");
}

TEST_CASE("TIES-4, TIES-5: opposite models, number of kept entries", "[merging][law]") {
  for (const std::size_t n : {1u, 7u, 1000u}) {
    InMemory<float> tensor{.context = test::context_for(kTies, {static_cast<std::int64_t>(n)}, 2, {{{"weight", 0.4}}}),
                           .base = std::vector<float>(n)};
    tensor.inputs = {random_values(n, 1, false), random_values(n, 1, false)};
    for (auto& x : tensor.inputs[1]) x = -x;
    const auto merged = test::merge_tensor(kTies, tensor);
    for (std::size_t e = 0; e < n; ++e) CHECK(merged[e] == Approx(std::abs(tensor.inputs[0][e])));

    for (const double density : {0.1, 0.29, 0.5, 0.9}) {
      InMemory<float> one{.context = test::context_for(kTies, {static_cast<std::int64_t>(n)}, 1,
                                                       {{{"weight", 1.0}, {"density", density}}}),
                          .base = std::vector<float>(n),
                          .inputs = {random_values(n, 2, false)}};
      const auto kept = std::max<std::int64_t>(1, static_cast<std::int64_t>(density * static_cast<double>(n)));
      CHECK(std::ranges::count_if(test::merge_tensor(kTies, one), [](float x) { return x != 0.0f; }) == kept);
    }
  }
}

}  // namespace mergex::merging
