#include <fmt/format.h>

#include <cmath>
#include <numeric>

#include "core/random.h"
#include "io/checkpoint_folder.h"
#include "io/json.h"
#include "merging/methods.h"
#include "merging/source.h"
#include "support/catch.h"
#include "support/merging.h"
#include "support/paths.h"

namespace mergex::merging {
namespace {

using test::InMemory;
using test::Named;

InMemory<float> one_model(const Method& method, std::vector<std::int64_t> shape, const Named& parameters,
                          const Named& shared = {}, Dialect dialect = Dialect::kMergekit) {
  InMemory<float> tensor{.context = test::context_for(method, std::move(shape), 1, {parameters}, shared, dialect)};
  const auto n = static_cast<std::size_t>(tensor.context.num_elements());
  SplitMix64 generator(n);
  tensor.base.assign(n, 0.0f);
  auto& input = tensor.inputs.emplace_back();
  for (std::size_t e = 0; e < n; ++e) input.push_back(static_cast<float>(generator.uniform() - 0.5));
  return tensor;
}

std::size_t num_kept(const std::vector<float>& merged) {
  return static_cast<std::size_t>(std::ranges::count_if(merged, [](float x) { return x != 0.0f; }));
}

}  // namespace

TEST_CASE("DARE-2, DARE-4: as many as the density says, sums kept", "[merging][law]") {
  for (const double density : {0.02, 0.3, 0.9}) {
    const auto tensor = one_model(kDareLinear, {400, 250}, {{"weight", 1.0}, {"density", density}});
    io::Json report;
    const auto merged = test::merge_tensor(kDareLinear, tensor, {}, &report);
    const double n = 100'000;
    CHECK(std::abs(static_cast<double>(num_kept(merged)) / n - density) <=
          5.0 * std::sqrt(density * (1.0 - density) / n));
    CHECK(report["kept"][0].get<double>() == static_cast<double>(num_kept(merged)) / n);
    const auto magnitude = [](double sum, float x) { return sum + std::abs(static_cast<double>(x)); };
    CHECK(std::accumulate(merged.begin(), merged.end(), 0.0, magnitude) ==
          Approx(std::accumulate(tensor.inputs[0].begin(), tensor.inputs[0].end(), 0.0, magnitude)).epsilon(1e-5));
  }
}

TEST_CASE("DARE-2: with the published rescale, the mean over masks is the task vector", "[merging][law]") {
  auto tensor = one_model(kDareLinear, {50}, {{"weight", 1.0}, {"density", 0.4}}, {}, Dialect::kPaper);
  std::vector<double> sum(50);
  constexpr int kSeeds = 2000;
  for (int seed = 0; seed < kSeeds; ++seed) {
    tensor.context.seed = static_cast<std::uint64_t>(seed);
    const auto merged = test::merge_tensor(kDareLinear, tensor);
    for (std::size_t e = 0; e < sum.size(); ++e) sum[e] += static_cast<double>(merged[e]);
  }
  for (std::size_t e = 0; e < sum.size(); ++e) {
    const double x = static_cast<double>(tensor.inputs[0][e]);
    CHECK(std::abs(sum[e] / kSeeds - x) <= 5.0 * std::abs(x) * std::sqrt(0.6 / 0.4 / kSeeds));
  }
}

TEST_CASE("masks follow seed, model and tensor, and nothing else", "[merging][law]") {
  for (const auto* method : {&kDareLinear, &kDareTies, &kDella, &kDellaLinear}) {
    INFO(method->name);
    const auto tensor = one_model(*method, {37, 41}, {{"weight", 1.0}, {"density", 0.5}});
    const auto merged = test::merge_tensor(*method, tensor);
    const auto cut = test::merge_tensor(*method, tensor, {.tile = 5, .unit = 100});
    for (std::size_t e = 0; e < cut.size(); ++e) {
      if ((cut[e] == 0.0f) != (merged[e] == 0.0f)) FAIL("another mask in other tiles");
    }
    for (const int change : {0, 1, 2}) {
      auto other = tensor;
      if (change == 0) other.context.seed = 8;
      if (change == 1) other.context.name = "another";
      if (change == 2) other.context.inputs[0].identity = "another";
      CHECK((test::merge_tensor(*method, other) != merged));
    }
  }
}

TEST_CASE("DELLA-3: the larger in its row, the likelier to stay", "[merging][law]") {
  constexpr std::size_t kRow = 20, kSeeds = 4000;
  const auto dialect = GENERATE(Dialect::kMergekit, Dialect::kPaper);
  auto tensor = one_model(kDellaLinear, {3, kRow}, {{"weight", 1.0}, {"density", 0.6}, {"epsilon", 0.2}}, {}, dialect);
  std::vector<double> kept(3 * kRow);
  for (std::size_t seed = 0; seed < kSeeds; ++seed) {
    tensor.context.seed = seed;
    const auto merged = test::merge_tensor(kDellaLinear, tensor);
    for (std::size_t e = 0; e < kept.size(); ++e) kept[e] += merged[e] != 0.0f ? 1.0 / kSeeds : 0.0;
  }
  const double half = dialect == Dialect::kPaper ? 0.1 : 0.2;
  for (std::size_t row = 0; row < 3; ++row) {
    const auto* values = tensor.inputs[0].data() + row * kRow;
    for (std::size_t e = 0; e < kRow; ++e) {
      const auto rank =
          std::count_if(values, values + kRow, [&](float x) { return std::abs(x) < std::abs(values[e]); });
      const double chance = 0.6 - half + 2.0 * half * static_cast<double>(rank) / (kRow - 1);
      CHECK(std::abs(kept[row * kRow + e] - chance) <= 5.0 * std::sqrt(chance * (1.0 - chance) / kSeeds));
    }
  }
}

TEST_CASE("DELLA-4: chances outside of (0, 1) are refused", "[merging]") {
  const auto problem = [](double density, double epsilon, Dialect dialect = Dialect::kMergekit) {
    return kDella.problem(test::context_for(
        kDella, {4}, 1, {{{"weight", 1.0}, {"density", density}, {"epsilon", epsilon}}}, {}, dialect));
  };
  CHECK(problem(0.5, 0.3).empty());
  CHECK(problem(1.0, 0.3).empty());
  CHECK(problem(0.9, 0.1) ==
        "density 0.9 and epsilon 0.1 give chances from 0.8 to 1, expected all between 0 and 1; lower epsilon");
  CHECK_FALSE(problem(0.1, 0.15).empty());
  CHECK(problem(0.1, 0.15, Dialect::kPaper).empty());
}

// The same statistics as 40 runs of the reference, which draws from another generator.
TEST_CASE("random methods have the reference's statistics", "[merging][golden]") {
  const auto folder = test::golden_folder("merge");
  if (!folder) return;
  struct Case {
    std::string name;
    const Method* method;
    Named parameters, shared = {};
    std::string type = "_f32";
  };
  const std::vector<Case> cases{
      {"dare_linear_d0.3_f32", &kDareLinear, {{"weight", 1.0}, {"density", 0.3}}},
      {"dare_linear_d0.5_f32", &kDareLinear, {{"weight", 1.0}, {"density", 0.5}}},
      {"dare_linear_d0.9_f32", &kDareLinear, {{"weight", 1.0}, {"density", 0.9}}},
      {"dare_linear_norescale_f32", &kDareLinear, {{"weight", 1.0}, {"density", 0.5}}, {{"rescale", 0}}},
      {"dare_ties_f32", &kDareTies, {{"weight", 1.0}, {"density", 0.4}}},
      {"della_f32", &kDella, {{"weight", 1.0}, {"density", 0.5}, {"epsilon", 0.3}}},
      {"della_linear_f32", &kDellaLinear, {{"weight", 1.0}, {"density", 0.7}, {"epsilon", 0.1}}}};
  constexpr std::size_t kSeeds = 40;
  const io::CheckpointFolder base(*folder / "inputs" / "llama_base_f32"), expert(*folder / "inputs" / "llama_c_f32");
  const auto read = [](const io::TensorView& view) {
    std::vector<float> values(static_cast<std::size_t>(view.num_elements()));
    StoredTensor(view).read(0, view.num_elements(), values.data());
    return values;
  };
  for (const auto& c : cases) {
    const auto stats = io::read_json(*folder / "stats" / (c.name + ".json"));
    double worst = 0.0;  // in standard deviations of the difference of two means
    for (const auto& [name, expected] : stats.items()) {
      if (base.find(name) == nullptr) continue;  // all tensors together
      const auto nonzero = expected["nonzero"].get<double>();
      if (nonzero == 0.0) continue;
      INFO(c.name << ", " << name);
      InMemory<float> tensor{.context =
                                 test::context_for(*c.method, base.find(name)->shape, 1, {c.parameters}, c.shared)};
      tensor.context.name = name;
      tensor.base = read(*base.find(name));
      tensor.inputs = {read(*expert.find(name))};
      double kept = 0.0, survivor_factor = 0.0;
      for (std::size_t seed = 0; seed < kSeeds; ++seed) {
        tensor.context.seed = seed;
        const auto merged = test::merge_tensor(*c.method, tensor);
        double count = 0.0, factor = 0.0, before = 0.0, after = 0.0;
        for (std::size_t e = 0; e < merged.size(); ++e) {
          const double delta = static_cast<double>(tensor.inputs[0][e]) - static_cast<double>(tensor.base[e]);
          const double got = static_cast<double>(merged[e]) - static_cast<double>(tensor.base[e]);
          before += std::abs(delta);
          after += std::abs(got);
          // Far below a unit of the base in the last place, a delta is not there any more.
          if (delta == 0.0 || merged[e] == tensor.base[e]) continue;
          count += 1.0;
          factor += got / delta;
        }
        kept += count / nonzero / kSeeds;
        survivor_factor += (count == 0.0 ? 0.0 : factor / count) / kSeeds;
        if (c.shared.empty() && count > 0.0) CHECK(after == Approx(before).epsilon(1e-3));
      }
      const double deviation = std::max(expected["kept_fraction_sd"].get<double>(), 0.5 / nonzero);
      const double distance =
          std::abs(kept - expected["kept_fraction_mean"].get<double>()) / (deviation * std::sqrt(2.0 / kSeeds));
      worst = std::max(worst, distance);
      CHECK(distance <= 5.0);
      if (!expected["survivor_factor_mean"].is_null() && nonzero > 200.0) {
        CHECK(survivor_factor == Approx(expected["survivor_factor_mean"].get<double>()).epsilon(0.05));
      }
    }
    test::log_golden("merge statistics of " + c.name,
                     fmt::format("{}, {:.1f} standard deviations at most", worst <= 5.0 ? "ok" : "FAILED", worst));
  }
}

}  // namespace mergex::merging
