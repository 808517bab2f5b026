#include <cmath>
#include <numeric>

#include "core/random.h"
#include "io/safetensors.h"
#include "merging/methods.h"
#include "support/catch.h"
#include "support/merging.h"

// What holds for any tensors (the names are those of the specification's laws).

namespace mergex::merging {
namespace {

using test::InMemory;
using test::merge_tensor;
using test::Named;
using Shape = std::vector<std::int64_t>;

const std::vector<Shape> kShapes{{}, {1}, {7}, {3, 5}, {64, 33}, {1000}, {4, 3, 5}};

template <class T>
constexpr double kTolerance = sizeof(T) == 4 ? 4e-7 : 4e-15;

template <class T>
std::vector<T> normal(std::int64_t count, std::uint64_t seed, double size = 1.0) {
  SplitMix64 generator(seed);
  std::vector<T> values;
  for (std::int64_t i = 0; i < count; ++i) {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - generator.uniform()));
    values.push_back(static_cast<T>(size * radius * std::cos(6.283185307179586 * generator.uniform())));
  }
  return values;
}

std::int64_t size_of(const Shape& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

/// A base and models near it, for a method with these parameters.
template <class T>
InMemory<T> siblings(const Method& method, const Shape& shape, std::size_t num_inputs,
                     const std::vector<Named>& per_input = {}, const Named& shared = {},
                     Dialect dialect = Dialect::kMergekit, std::uint64_t seed = 1) {
  InMemory<T> tensor{.context = test::context_for(method, shape, num_inputs, per_input, shared, dialect)};
  const auto base = normal<T>(size_of(shape), seed);
  if (tensor.context.has_base) tensor.base = base;
  for (std::size_t i = 0; i < num_inputs; ++i) {
    auto& input = tensor.inputs.emplace_back(normal<T>(size_of(shape), seed + 10 + i, 0.3));
    for (std::size_t e = 0; e < input.size(); ++e) input[e] += base[e];
  }
  return tensor;
}

template <class T>
double norm(const std::vector<T>& v) {
  double sum = 0.0;
  for (const T x : v) sum += static_cast<double>(x) * static_cast<double>(x);
  return std::sqrt(sum);
}

template <class T>
void require_close(const std::vector<T>& got, const std::vector<T>& expected, double tolerance = kTolerance<T>) {
  REQUIRE(got.size() == expected.size());
  double largest = 0.0, worst = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(expected[i])));
    const double error = std::abs(static_cast<double>(got[i]) - static_cast<double>(expected[i]));
    worst = std::isnan(error) ? INFINITY : std::max(worst, error);
  }
  CHECK(worst <= tolerance * largest);
}

/// Equal as numbers.
template <class T>
void require_equal(const std::vector<T>& got, const std::vector<T>& expected) {
  require_close(got, expected, 0.0);
}

template <class T>
std::vector<T> difference(const std::vector<T>& a, const std::vector<T>& b) {
  std::vector<T> out(a);
  for (std::size_t i = 0; i < a.size(); ++i) out[i] -= b[i];
  return out;
}

/// A setting of a method that is good for any tensor.
struct Setting {
  const Method* method;
  std::size_t num_inputs;
  std::vector<Named> per_input = {};
  Named shared = {};
  Dialect dialect = Dialect::kMergekit;
};

template <class T>
std::vector<Setting> settings() {
  const std::vector<Named> weights{{{"weight", 0.2}}, {{"weight", 0.5}}, {{"weight", 0.9}}};
  const std::vector<Named> densities{
      {{"weight", 0.2}, {"density", 0.5}}, {{"weight", 0.5}, {"density", 0.3}}, {{"weight", 0.9}, {"density", 0.7}}};
  const std::vector<Named> ones{{{"weight", 1.0}, {"density", 0.4}}};
  std::vector<Setting> all{
      {&kLinear, 3, weights},
      {&kUniformSoup, 3},
      {&kSlerp, 1, {}, {{"t", 0.3}}},
      {&kNuslerp, 2, {{{"weight", 0.3}}, {{"weight", 0.6}}}},
      {&kNuslerp, 2, {{{"weight", 0.3}}, {{"weight", 0.6}}}, {{"nuslerp_flatten", 0}}},
      {&kNuslerp, 2, {{{"weight", 0.3}}, {{"weight", 0.6}}}, {{"nuslerp_flatten", 0}, {"nuslerp_row_wise", 1}}},
      {&kMultislerp, 3, weights},
      {&kKarcher, 3},
      {&kTaskArithmetic, 3, weights, {{"lambda", 0.7}}},
      {&kTies, 3, densities},
      {&kTies, 3, densities, {}, Dialect::kPeft},
      {&kTies, 3, ones, {{"trim_scope", 1}}, Dialect::kPaper},
      {&kTies, 3, densities, {{"rescale", 1}}},
      {&kDareLinear, 3, densities},
      {&kDareTies, 3, densities, {}, Dialect::kPeft},
      {&kDella, 3, densities},
      {&kDellaLinear, 3, densities, {}, Dialect::kPaper},
      {&kBreadcrumbs, 3, densities},
      {&kBreadcrumbsTies, 3, densities},
      {&kSce, 3},
      {&kSce, 3, {}, {{"select_topk", 0.4}}},
      {&kSce, 3, {}, {{"select_topk", 0.4}}, Dialect::kPaper},
      {&kModelStock, 3},
      {&kModelStock, 3, {}, {{"filter_wise", 1}}, Dialect::kPaper},
      {&kNearswap, 1, {}, {{"t", 0.1}}},
      {&kArceeFusion, 1},
      {&kRam, 3},
      {&kRamplusTl, 3},
      {&kPassthrough, 1, {{{"scale", 0.5}}}},
      {&kFisher, 3},
      {&kRegmean, 3},
  };
  if constexpr (sizeof(T) == sizeof(float)) {  // a trim over the whole model is one of float32
    all.push_back({&kTies, 3, ones, {}, Dialect::kPaper});
    all.push_back({&kTies, 3, ones, {}, Dialect::kFusionBench});
  }
  return all;
}

template <class T>
InMemory<T> siblings(const Setting& s, const Shape& shape) {
  return siblings<T>(*s.method, shape, s.num_inputs, s.per_input, s.shared, s.dialect);
}

/// The kind of method whose result at an element follows from that element alone.
bool is_local(const Method& method) {
  return &method == &kLinear || &method == &kUniformSoup || &method == &kTaskArithmetic || &method == &kNearswap ||
         &method == &kRam || &method == &kPassthrough || &method == &kFisher;
}

/// Values of a Fisher information or Gram matrix.
template <class T>
class ArraySource final : public Source {
 public:
  explicit ArraySource(std::vector<T> values) : values_(std::move(values)) {}
  void read(std::int64_t begin, std::int64_t count, float* out) const override { copy(begin, count, out); }
  void read(std::int64_t begin, std::int64_t count, double* out) const override { copy(begin, count, out); }

 private:
  template <class To>
  void copy(std::int64_t begin, std::int64_t count, To* out) const {
    for (std::int64_t i = 0; i < count; ++i) out[i] = static_cast<To>(values_[static_cast<std::size_t>(begin + i)]);
  }
  std::vector<T> values_;
};

}  // namespace

TEST_CASE("every method is in the settings of the laws", "[merging][law]") {
  for (const auto* method : methods()) {
    INFO(method->name);
    CHECK(std::ranges::any_of(settings<float>(), [&](const auto& s) { return s.method == method; }));
  }
}

TEMPLATE_TEST_CASE("a merge does not depend on where tensors are cut", "[merging][law]", float, double) {
  using T = TestType;
  for (const auto& s : settings<T>()) {
    for (const Shape& shape : {Shape{7}, {64, 33}, {5003}, {4, 3, 5}, {0}, {0, 3}}) {
      INFO(s.method->name << ", " << io::shape_text(shape));
      const auto tensor = siblings<T>(s, shape);
      const auto whole = merge_tensor(*s.method, tensor);
      for (const std::int64_t tile : {1, 17, 1024, 1500}) {
        CHECK((merge_tensor(*s.method, tensor, {.tile = tile}) == whole));
      }
      // Sums are added unit by unit, so there units count; nothing else knows of them.
      if (is_local(*s.method) || s.method == &kTies) {
        for (const std::int64_t unit : {40, 1000}) {
          if (s.shared.contains("rescale")) continue;
          CHECK((merge_tensor(*s.method, tensor, {.tile = 13, .unit = unit}) == whole));
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("X-1: models that equal the base give the base", "[merging][law]", float, double) {
  using T = TestType;
  for (const auto& s : settings<T>()) {
    if (s.method == &kPassthrough) continue;
    for (const Shape& shape : kShapes) {
      INFO(s.method->name << ", " << io::shape_text(shape));
      auto tensor = siblings<T>(s, shape);
      const auto base = tensor.inputs[0];
      if (!tensor.base.empty()) tensor.base = base;
      for (auto& input : tensor.inputs) input = base;
      const auto merged = merge_tensor(*s.method, tensor);
      tensor.base.empty() || s.method == &kSlerp ? require_close(merged, base) : require_equal(merged, base);
    }
  }
}

TEMPLATE_TEST_CASE("X-8: finite tensors never give infinities or NaN", "[merging][law]", float, double) {
  using T = TestType;
  for (const auto& s : settings<T>()) {
    for (const Shape& shape : kShapes) {
      for (const std::string kind :
           {"zeros", "zero base", "one zero model", "opposite", "opposite task vectors", "constant", "tiny"}) {
        INFO(s.method->name << ", " << io::shape_text(shape) << ", " << kind);
        auto tensor = siblings<T>(s, shape);
        auto& base = tensor.base.empty() ? tensor.inputs[0] : tensor.base;
        auto& other = tensor.inputs.back();
        for (std::size_t e = 0; e < base.size(); ++e) {
          if (kind == "zeros") {
            base[e] = T{0};
            for (auto& input : tensor.inputs) input[e] = T{0};
          } else if (kind == "zero base") {
            base[e] = T{0};
          } else if (kind == "one zero model") {
            other[e] = T{0};
          } else if (kind == "opposite") {
            other[e] = -base[e];
          } else if (kind == "opposite task vectors") {
            base[e] = T{0};
            other[e] = -tensor.inputs[0][e];
          } else if (kind == "constant") {
            base[e] = T(0.5);
            for (auto& input : tensor.inputs) input[e] = T(0.25);
          } else {
            base[e] *= T(1e-30);
            for (auto& input : tensor.inputs) input[e] *= T(1e-30);
          }
        }
        const auto merged = merge_tensor(*s.method, tensor);
        CHECK(std::ranges::all_of(merged, [](T x) { return std::isfinite(x); }));
      }
    }
  }
}

TEMPLATE_TEST_CASE("NaN stays where it is in methods that see elements alone", "[merging][law]", float, double) {
  using T = TestType;
  for (const auto& s : settings<T>()) {
    if (!is_local(*s.method)) continue;
    INFO(s.method->name);
    auto tensor = siblings<T>(s, {64, 33});
    const auto clean = merge_tensor(*s.method, tensor);
    tensor.inputs[0][70] = std::numeric_limits<T>::quiet_NaN();
    auto merged = merge_tensor(*s.method, tensor);
    CHECK(std::isnan(merged[70]));
    merged[70] = clean[70];
    CHECK((merged == clean));
  }
}

TEMPLATE_TEST_CASE("X-2: the order of models does not matter", "[merging][law]", float, double) {
  using T = TestType;
  for (const auto& s : settings<T>()) {
    if (s.num_inputs < 3 || s.method->is_random) continue;
    INFO(s.method->name);
    auto tensor = siblings<T>(s, {64, 33});
    const auto merged = merge_tensor(*s.method, tensor);
    std::swap(tensor.inputs[0], tensor.inputs[2]);
    std::swap(tensor.context.inputs[0], tensor.context.inputs[2]);
    require_close(merge_tensor(*s.method, tensor), merged, 4 * kTolerance<T>);
  }
}

TEMPLATE_TEST_CASE("X-3: a model of weight 0 changes nothing", "[merging][law]", float, double) {
  using T = TestType;
  for (const auto& s : settings<T>()) {
    const bool has_weight = std::ranges::any_of(s.method->parameters, [](const auto& p) { return p.name == "weight"; });
    if (!has_weight || s.num_inputs < 3 || s.dialect != Dialect::kMergekit) continue;
    INFO(s.method->name);
    auto tensor = siblings<T>(s, {64, 33});
    const auto merged = merge_tensor(*s.method, tensor);
    tensor.inputs.push_back(normal<T>(64 * 33, 99));
    tensor.context.inputs.push_back(tensor.context.inputs[0]);
    tensor.context.inputs.back().identity = "another";
    tensor.context.inputs.back().parameters.set(kLinear.parameters[0].name, 0.0);
    require_equal(merge_tensor(*s.method, tensor), merged);
  }
}

TEMPLATE_TEST_CASE("X-4: shifting all models shifts the result", "[merging][law]", float, double) {
  using T = TestType;
  // On a coarse grid, so that task vectors stay exactly what they are.
  const auto to_grid = [](std::vector<T>& values, T shift) {
    for (auto& x : values) x = std::round(x * T{256}) / T{256} + shift;
  };
  for (const auto& s : settings<T>()) {
    if (s.method->base != Method::Base::kRequired && s.method != &kLinear) continue;
    if (s.method == &kSlerp || s.method == &kArceeFusion) continue;
    INFO(s.method->name);
    auto tensor = siblings<T>(s, {64, 33}), shifted = tensor;
    to_grid(tensor.base, T{0});
    to_grid(shifted.base, T{3});
    for (auto& input : tensor.inputs) to_grid(input, T{0});
    for (auto& input : shifted.inputs) to_grid(input, T{3});
    auto expected = merge_tensor(*s.method, tensor);
    for (auto& x : expected) x += T{3};
    require_close(merge_tensor(*s.method, shifted), expected, 2 * kTolerance<T>);
  }
}

TEMPLATE_TEST_CASE("X-5: scaling all models scales the result", "[merging][law]", float, double) {
  using T = TestType;
  for (const auto& s : settings<T>()) {
    if (s.method == &kRam || s.method == &kRamplusTl || s.method == &kNearswap || s.method == &kArceeFusion) continue;
    INFO(s.method->name);
    auto tensor = siblings<T>(s, {64, 33});
    auto expected = merge_tensor(*s.method, tensor);
    for (auto& x : expected) x *= T{4};
    for (auto& x : tensor.base) x *= T{4};
    for (auto& input : tensor.inputs) {
      for (auto& x : input) x *= T{4};
    }
    // Multislerp adds its eps of 1e-8 to norms.
    require_close(merge_tensor(*s.method, tensor), expected, s.method == &kMultislerp ? 1e-7 : kTolerance<T>);
  }
}

TEMPLATE_TEST_CASE("what is said to be a copy is one", "[merging][law]", float, double) {
  using T = TestType;
  const std::vector<Named> second{{{"weight", 0.0}}, {{"weight", 0.7}}, {{"weight", 0.0}}};
  const std::vector<Named> none{{{"weight", 0.0}}};
  const std::vector<Setting> all{
      {&kLinear, 3, second},
      {&kLinear, 3, {{{"weight", 0.0}}, {{"weight", 0.0}}, {{"weight", 1.0}}}, {{"normalize", 0}}},
      {&kUniformSoup, 1},
      {&kSlerp, 1, {}, {{"t", 0.0}}},
      {&kSlerp, 1, {}, {{"t", 1.0}}},
      {&kNuslerp, 2, {{{"weight", 1.0}}, {{"weight", 0.0}}}},
      {&kNuslerp, 2, {{{"weight", 0.0}}, {{"weight", 2.0}}}},
      {&kMultislerp, 3, second},
      {&kTaskArithmetic, 3, none},
      {&kTaskArithmetic, 3, {{{"weight", 0.5}}}, {{"lambda", 0.0}}},
      {&kTies, 3, none},
      {&kDareLinear, 3, none},
      {&kNearswap, 1, {}, {{"t", 0.0}}},
      {&kPassthrough, 1}};
  for (const auto& s : all) {
    INFO(s.method->name);
    const auto tensor = siblings<T>(s, {64, 33});
    REQUIRE(s.method->copies != nullptr);
    const auto copied = s.method->copies(tensor.context);
    REQUIRE(copied.has_value());
    const auto& expected = *copied < 0 ? tensor.base : tensor.inputs[static_cast<std::size_t>(*copied)];
    require_close(merge_tensor(*s.method, tensor), expected);
  }
  for (const auto& s : settings<T>()) {
    if (s.method->copies == nullptr) continue;
    INFO(s.method->name);
    CHECK_FALSE(s.method->copies(siblings<T>(s, {7}).context).has_value());
  }
}

TEMPLATE_TEST_CASE("X-7: a density of 1 is no sparsification", "[merging][law]", float, double) {
  using T = TestType;
  const std::vector<Named> weights{{{"weight", 0.2}}, {{"weight", 0.5}}, {{"weight", -0.4}}};
  for (const Shape& shape : kShapes) {
    const auto dense = merge_tensor(kTaskArithmetic, siblings<T>(kTaskArithmetic, shape, 3, weights));
    const auto voted = merge_tensor(kTies, siblings<T>(kTies, shape, 3, weights, {{"normalize", 0}}));
    for (const auto* method : {&kDareLinear, &kDellaLinear, &kBreadcrumbs}) {
      INFO(method->name << io::shape_text(shape));
      require_equal(merge_tensor(*method, siblings<T>(*method, shape, 3, weights)), dense);
    }
    for (const auto* method : {&kDareTies, &kDella, &kBreadcrumbsTies}) {
      INFO(method->name << io::shape_text(shape));
      require_equal(merge_tensor(*method, siblings<T>(*method, shape, 3, weights, {{"normalize", 0}})), voted);
    }
  }
}

TEMPLATE_TEST_CASE("LIN: scale of weights, range, the same model twice", "[merging][law]", float, double) {
  using T = TestType;
  const auto tensor = siblings<T>(kLinear, {64, 33}, 2, {{{"weight", 0.3}}, {{"weight", 0.7}}});
  const auto merged = merge_tensor(kLinear, tensor);
  for (std::size_t e = 0; e < merged.size(); ++e) {
    const auto [low, high] = std::minmax(tensor.inputs[0][e], tensor.inputs[1][e]);
    const T slack = std::abs(high - low) * T(kTolerance<T>) + std::abs(high) * T(kTolerance<T>);
    if (merged[e] < low - slack || merged[e] > high + slack) FAIL("outside of the inputs' range");
  }
  require_equal(merge_tensor(kLinear, siblings<T>(kLinear, {64, 33}, 2, {{{"weight", 1.2}}, {{"weight", 2.8}}})),
                merged);
  auto twice = siblings<T>(kLinear, {64, 33}, 2, {{{"weight", 0.5}}, {{"weight", 2.0}}}, {{"normalize", 0}});
  twice.inputs[1] = twice.inputs[0];
  auto expected = twice.inputs[0];
  for (auto& x : expected) x *= T(2.5);
  require_close(merge_tensor(kLinear, twice), expected);
}

TEMPLATE_TEST_CASE("SLERP: ends, symmetry, length", "[merging][law]", float, double) {
  using T = TestType;
  for (const Shape& shape : kShapes) {
    INFO(io::shape_text(shape));
    const auto a = normal<T>(size_of(shape), 3);
    auto b = normal<T>(size_of(shape), 4);
    const auto merged = [&](double t, const auto& from, const auto& to) {
      return merge_tensor(
          kSlerp,
          InMemory<T>{.context = test::context_for(kSlerp, shape, 1, {}, {{"t", t}}), .base = from, .inputs = {to}});
    };
    require_equal(merged(0.0, a, b), a);
    require_equal(merged(1.0, a, b), b);
    require_close(merged(0.3, a, b), merged(0.7, b, a));
    if (size_of(shape) < 7) continue;  // otherwise perhaps parallel
    const double ratio = norm(a) / norm(b);
    for (auto& x : b) x = static_cast<T>(static_cast<double>(x) * ratio);
    CHECK(norm(merged(0.3, a, b)) == Approx(norm(a)).epsilon(1e-6));
    // NUS-2, KAR-2, MSL-2: the same point of the same arc.
    const auto nuslerp = test::context_for(kNuslerp, shape, 2, {{{"weight", 0.7}}, {{"weight", 0.3}}});
    require_close(merge_tensor(kNuslerp, InMemory<T>{.context = nuslerp, .inputs = {a, b}}), merged(0.3, a, b));
    const auto multislerp = test::context_for(kMultislerp, shape, 2, {{{"weight", 0.4}}});
    require_close(merge_tensor(kMultislerp, InMemory<T>{.context = multislerp, .inputs = {a, b}}), merged(0.5, a, b),
                  2e-7);
    const auto karcher = test::context_for(kKarcher, shape, 2);
    const auto mean = merge_tensor(kKarcher, InMemory<T>{.context = karcher, .inputs = {a, b}});
    require_close(mean, merged(0.5, a, b), 2e-6);
    CHECK(norm(mean) == Approx(norm(a)).epsilon(1e-6));
  }
}

TEMPLATE_TEST_CASE("NUS-3, NUS-4: equal models, whatever the weights", "[merging][law]", float, double) {
  using T = TestType;
  for (const bool flat : {true, false}) {
    for (const bool with_base : {true, false}) {
      auto tensor =
          siblings<T>(kNuslerp, {64, 33}, 2, {{{"weight", 0.35}}, {{"weight", 0.9}}}, {{"nuslerp_flatten", flat}});
      tensor.inputs[1] = tensor.inputs[0];
      tensor.context.has_base = with_base;
      if (with_base) tensor.base = normal<T>(64 * 33, 50);
      require_close(merge_tensor(kNuslerp, tensor), tensor.inputs[0]);
    }
  }
}

TEMPLATE_TEST_CASE("MSL-3, KAR-3: lengths", "[merging][law]", float, double) {
  using T = TestType;
  auto tensor = siblings<T>(kMultislerp, {64, 33}, 3, {{{"weight", 1.0}}, {{"weight", 2.0}}, {{"weight", 1.0}}});
  tensor.context.has_base = true;
  tensor.base = normal<T>(64 * 33, 60);
  const auto merged = difference(merge_tensor(kMultislerp, tensor), tensor.base);
  const double expected = 0.25 * norm(difference(tensor.inputs[0], tensor.base)) +
                          0.5 * norm(difference(tensor.inputs[1], tensor.base)) +
                          0.25 * norm(difference(tensor.inputs[2], tensor.base));
  CHECK(norm(merged) == Approx(expected).epsilon(1e-6));

  const auto means = siblings<T>(kKarcher, {64, 33}, 3);
  CHECK(norm(merge_tensor(kKarcher, means)) ==
        Approx((norm(means.inputs[0]) + norm(means.inputs[1]) + norm(means.inputs[2])) / 3.0).epsilon(1e-6));
  // KAR-1
  const auto one = siblings<T>(kKarcher, {64, 33}, 1);
  require_close(merge_tensor(kKarcher, one), one.inputs[0]);
}

TEMPLATE_TEST_CASE("TA: one model, linearity, weights that add up to 1", "[merging][law]", float, double) {
  using T = TestType;
  const auto merged = [](double a, double b) {
    const auto tensor = siblings<T>(kTaskArithmetic, {64, 33}, 2, {{{"weight", a}}, {{"weight", b}}});
    return merge_tensor(kTaskArithmetic, tensor);
  };
  const auto tensor = siblings<T>(kTaskArithmetic, {64, 33}, 2, {{{"weight", 1.0}}});
  require_close(merged(1.0, 0.0), tensor.inputs[0]);
  const auto sum = difference(merged(0.5, 0.25), tensor.base);
  auto parts = difference(merged(0.5, 0.0), tensor.base);
  const auto other = difference(merged(0.0, 0.25), tensor.base);
  for (std::size_t e = 0; e < parts.size(); ++e) parts[e] += other[e];
  require_close(sum, parts, 10 * kTolerance<T>);
  const auto average = siblings<T>(kLinear, {64, 33}, 2, {{{"weight", 0.75}}, {{"weight", 0.25}}}, {{"normalize", 0}});
  require_close(merged(0.75, 0.25), merge_tensor(kLinear, average));
}

TEMPLATE_TEST_CASE("BC: counts, the largest are gone, gamma 0 trims like ties", "[merging][law]", float, double) {
  using T = TestType;
  for (const std::int64_t n : {1, 7, 15, 99, 1000}) {
    for (const double density : {0.0, 0.1, 0.5, 0.97}) {
      for (const double gamma : {0.0, 0.01, 0.3}) {
        INFO(n << " " << density << " " << gamma);
        const Named parameters{{"weight", 1.0}, {"density", density}, {"gamma", gamma}};
        auto tensor = siblings<T>(kBreadcrumbs, {n}, 1, {parameters});
        std::ranges::fill(tensor.base, T{0});
        const auto merged = merge_tensor(kBreadcrumbs, tensor);
        const auto kept = static_cast<std::int64_t>(density * static_cast<double>(n));
        CHECK(std::ranges::count_if(merged, [](T x) { return x != T{0}; }) == kept);
        const auto top = std::min(static_cast<std::int64_t>(gamma * static_cast<double>(n)), n - kept);
        auto sorted = tensor.inputs[0];
        std::ranges::sort(sorted, {}, [](T x) { return -std::abs(x); });
        for (std::int64_t i = 0; i < top; ++i) {
          const T largest = sorted[static_cast<std::size_t>(i)];
          CHECK(std::ranges::find(merged, largest) == merged.end());
        }
        if (gamma == 0.0 && kept > 0) {
          auto trimmed = siblings<T>(kTies, {n}, 1, {{{"weight", 1.0}, {"density", density}}});
          std::ranges::fill(trimmed.base, T{0});
          require_equal(merged, merge_tensor(kTies, trimmed));
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("SCE: one model, equal models, scale of task vectors, what is not selected", "[merging][law]", float,
                   double) {
  using T = TestType;
  const auto one = siblings<T>(kSce, {64, 33}, 1);
  require_close(merge_tensor(kSce, one), one.inputs[0]);
  auto equal = siblings<T>(kSce, {64, 33}, 3);
  equal.inputs[1] = equal.inputs[2] = equal.inputs[0];
  require_close(merge_tensor(kSce, equal), equal.inputs[0]);

  // The published test for "no change at all" does not depend on size; mergekit's does.
  const auto tiny = [&](Dialect dialect) {
    auto tensor = siblings<T>(kSce, {64, 33}, 2, {}, {}, dialect);
    std::ranges::fill(tensor.base, T{0});
    for (std::size_t e = 0; e < tensor.inputs[0].size(); ++e) {
      tensor.inputs[0][e] *= T(1.0 / 8192);
      tensor.inputs[1][e] *= T(3.0 / 8192);
    }
    io::Json report;
    merge_tensor(kSce, tensor, {}, &report);
    return report["coefficients"][0].template get<double>();
  };
  CHECK(tiny(Dialect::kMergekit) == 0.5);
  CHECK(tiny(Dialect::kPaper) == Approx(0.1).epsilon(0.1));

  const auto selected = siblings<T>(kSce, {64, 33}, 3, {}, {{"select_topk", 0.25}});
  const auto merged = merge_tensor(kSce, selected);
  std::size_t moved = 0;
  for (std::size_t e = 0; e < merged.size(); ++e) moved += merged[e] != selected.base[e] ? 1 : 0;
  CHECK(moved <= merged.size() / 4);
  CHECK(moved > merged.size() / 5);
}

TEMPLATE_TEST_CASE("RAM: disjoint, everywhere active, no amplification, inactive", "[merging][law]", float, double) {
  using T = TestType;
  auto tensor = siblings<T>(kRam, {64, 33}, 2);
  auto everywhere = tensor.base;
  for (std::size_t e = 0; e < everywhere.size(); ++e) {
    everywhere[e] += ((tensor.inputs[0][e] - tensor.base[e]) + (tensor.inputs[1][e] - tensor.base[e])) / T{2};
  }
  require_close(merge_tensor(kRam, tensor), everywhere);
  const auto plus = siblings<T>(kRamplusTl, {64, 33}, 2, {}, {{"r", 0.0}});
  require_equal(merge_tensor(kRamplusTl, plus), merge_tensor(kRam, tensor));

  for (std::size_t e = 0; e < tensor.base.size(); ++e) {
    if (e % 3 == 2) {
      tensor.inputs[0][e] = tensor.inputs[1][e] = tensor.base[e];
    } else {
      tensor.inputs[e % 3][e] = tensor.base[e];
    }
  }
  const auto disjoint = merge_tensor(kRam, tensor);
  auto sum = siblings<T>(kTaskArithmetic, {64, 33}, 2, {{{"weight", 1.0}}});
  sum.inputs = tensor.inputs;
  require_close(disjoint, merge_tensor(kTaskArithmetic, sum), 2e-5);  // epsilon: changes that small are dropped
}

TEMPLATE_TEST_CASE("STOCK: equal, orthogonal and unchanged models", "[merging][law]", float, double) {
  using T = TestType;
  const auto dialect = GENERATE(Dialect::kMergekit, Dialect::kPaper);
  for (const bool filter_wise : {false, true}) {
    auto tensor = siblings<T>(kModelStock, {64, 33}, 3, {}, {{"filter_wise", filter_wise}}, dialect);
    tensor.inputs[1] = tensor.inputs[2] = tensor.inputs[0];
    require_close(merge_tensor(kModelStock, tensor), tensor.inputs[0]);
    for (std::size_t i = 0; i < 3; ++i) {
      tensor.inputs[i] = tensor.base;
      for (std::size_t e = i; e < tensor.base.size(); e += 3) tensor.inputs[i][e] += T(0.5);
    }
    require_equal(merge_tensor(kModelStock, tensor), tensor.base);
  }
  // STOCK-4: the more models agree, the farther from the base.
  double last = -1.0;
  for (const double shared : {0.0, 0.5, 1.0, 2.0}) {
    auto tensor = siblings<T>(kModelStock, {1000}, 3, {}, {}, dialect);
    const auto common = normal<T>(1000, 77);
    for (auto& input : tensor.inputs) {
      for (std::size_t e = 0; e < input.size(); ++e) input[e] += static_cast<T>(shared) * common[e];
    }
    io::Json report;
    merge_tensor(kModelStock, tensor, {}, &report);
    const double t = report["interpolation"].template get<double>();
    CHECK(t > last);
    CHECK(t <= 1.0);
    last = t;
  }
}

TEMPLATE_TEST_CASE("NEAR: at most t, never beyond the other model", "[merging][law]", float, double) {
  using T = TestType;
  const auto tensor = siblings<T>(kNearswap, {64, 33}, 1, {}, {{"t", 0.1}});
  const auto merged = merge_tensor(kNearswap, tensor);
  for (std::size_t e = 0; e < merged.size(); ++e) {
    const double a = static_cast<double>(tensor.base[e]), b = static_cast<double>(tensor.inputs[0][e]);
    const double expected = a + std::clamp(b - a, -0.1, 0.1);
    if (std::abs(static_cast<double>(merged[e]) - expected) > kTolerance<T> * std::max(1.0, std::abs(a)))
      FAIL("not the closed form");
  }
  const auto far = siblings<T>(kNearswap, {64, 33}, 1, {}, {{"t", 100.0}});
  require_equal(merge_tensor(kNearswap, far), far.inputs[0]);
}

TEMPLATE_TEST_CASE("FUS: every element is one of two, the largest changes are taken", "[merging][law]", float, double) {
  using T = TestType;
  const auto tensor = siblings<T>(kArceeFusion, {1, 2000}, 1);
  const auto merged = merge_tensor(kArceeFusion, tensor);
  double smallest_taken = INFINITY, largest_left = 0.0;
  for (std::size_t e = 0; e < merged.size(); ++e) {
    const T a = tensor.base[e], moved = a + (tensor.inputs[0][e] - a);
    const double change = std::abs(static_cast<double>(tensor.inputs[0][e]) - static_cast<double>(a));
    if (merged[e] == a) {
      largest_left = std::max(largest_left, change);
    } else {
      if (merged[e] != moved) FAIL("neither");
      smallest_taken = std::min(smallest_taken, change);
    }
  }
  // In one row importance is the change times one number.
  CHECK(largest_left <= smallest_taken);
  std::vector<double> changes;
  for (std::size_t e = 0; e < merged.size(); ++e) {
    changes.push_back(std::abs(static_cast<double>(tensor.inputs[0][e]) - static_cast<double>(tensor.base[e])));
  }
  std::ranges::sort(changes);
  const double threshold = changes[999] + 1.5 * (changes[1499] - changes[499]);
  CHECK(smallest_taken >= threshold * (1 - 1e-6));
  CHECK(largest_left <= threshold * (1 + 1e-6));
}

TEMPLATE_TEST_CASE("FISH: equal, dominating and scaled information", "[merging][law]", float, double) {
  using T = TestType;
  const Shape shape{64, 33};
  const auto n = size_of(shape);
  const auto merged = [&](const std::vector<std::vector<T>>& information, const Named& shared) {
    auto tensor = siblings<T>(kFisher, shape, information.size(), {}, shared);
    std::vector<std::unique_ptr<ArraySource<T>>> sources;
    for (std::size_t i = 0; i < information.size(); ++i) {
      tensor.context.inputs[i].statistics =
          sources.emplace_back(std::make_unique<ArraySource<T>>(information[i])).get();
    }
    return std::pair{merge_tensor(kFisher, tensor), tensor.inputs};
  };
  const std::vector<T> ones(static_cast<std::size_t>(n), T{1});
  auto random = normal<T>(n, 5);
  for (auto& x : random) x = x * x + T(0.01);
  const auto [equal, inputs] = merged({ones, ones}, {});
  for (std::size_t e = 0; e < equal.size(); ++e) {
    if (std::abs(equal[e] - (inputs[0][e] + inputs[1][e]) / T{2}) > T(1e-6)) FAIL("not the average");
  }
  const auto [dominated, other_inputs] = merged({std::vector<T>(ones.size()), ones}, {{"normalize_fisher_weight", 0}});
  require_close(dominated, other_inputs[1], 1e-5);
  auto scaled = random;
  for (auto& x : scaled) x *= T{16};
  require_close(merged({random, ones}, {{"minimal_fisher_weight", 1e-300}}).first,
                merged({scaled, ones}, {{"minimal_fisher_weight", 1e-300}}).first, 1e-5);
  const auto [weighted, all] = merged({random, ones}, {});
  for (std::size_t e = 0; e < weighted.size(); ++e) {
    const auto [low, high] = std::minmax(all[0][e], all[1][e]);
    if (weighted[e] < low - T(1e-6) || weighted[e] > high + T(1e-6)) FAIL("outside of the inputs' range");
  }
}

TEMPLATE_TEST_CASE("RM: equal models, equal Gram matrices, a diagonal one, the least squares", "[merging][law]", float,
                   double) {
  using T = TestType;
  constexpr std::int64_t kOut = 12, kIn = 9, kTokens = 40;
  const auto inputs_of = [](std::uint64_t seed) { return normal<double>(kTokens * kIn, seed); };
  const auto gram_of = [](const std::vector<double>& x) {
    std::vector<double> gram(kIn * kIn);
    for (std::size_t t = 0; t < kTokens; ++t) {
      for (std::size_t i = 0; i < kIn; ++i) {
        for (std::size_t j = 0; j < kIn; ++j) gram[i * kIn + j] += x[t * kIn + i] * x[t * kIn + j] / kTokens;
      }
    }
    return gram;
  };
  const auto merged = [&](const InMemory<T>& given, const std::vector<std::vector<double>>& grams,
                          double off_diagonal) {
    auto tensor = given;
    tensor.context =
        test::context_for(kRegmean, {kOut, kIn}, 2, {}, {{"reduce_non_diagonal_ratio", off_diagonal}, {"ridge", 1e-9}});
    std::vector<std::unique_ptr<ArraySource<double>>> sources;
    for (std::size_t i = 0; i < 2; ++i) {
      tensor.context.inputs[i].statistics = sources.emplace_back(std::make_unique<ArraySource<double>>(grams[i])).get();
    }
    const auto whole = merge_tensor(kRegmean, tensor);
    require_close(merge_tensor(kRegmean, tensor, {.tile = 20, .unit = 40}), whole);
    return whole;
  };
  const auto x = std::vector{inputs_of(1), inputs_of(2)};
  const auto grams = std::vector{gram_of(x[0]), gram_of(x[1])};
  auto tensor = siblings<T>(kRegmean, {kOut, kIn}, 2);
  std::vector<T> average = tensor.inputs[0];
  for (std::size_t e = 0; e < average.size(); ++e) average[e] = (average[e] + tensor.inputs[1][e]) / T{2};
  require_close(merged(tensor, {grams[0], grams[0]}, 0.7), average, 1e-6);

  const auto by_diagonal = merged(tensor, grams, 0.0);
  for (std::size_t e = 0; e < by_diagonal.size(); ++e) {
    const auto column = e % kIn;
    const double g0 = grams[0][column * (kIn + 1)], g1 = grams[1][column * (kIn + 1)];
    const double expected =
        (g0 * static_cast<double>(tensor.inputs[0][e]) + g1 * static_cast<double>(tensor.inputs[1][e])) / (g0 + g1);
    if (std::abs(static_cast<double>(by_diagonal[e]) - expected) > 1e-6) FAIL("not the column's average");
  }

  const auto loss = [&](const std::vector<T>& w) {
    double sum = 0.0;
    for (std::size_t model = 0; model < 2; ++model) {
      for (std::size_t t = 0; t < kTokens; ++t) {
        for (std::size_t o = 0; o < kOut; ++o) {
          double error = 0.0;
          for (std::size_t i = 0; i < kIn; ++i) {
            error += x[model][t * kIn + i] *
                     (static_cast<double>(w[o * kIn + i]) - static_cast<double>(tensor.inputs[model][o * kIn + i]));
          }
          sum += error * error;
        }
      }
    }
    return sum;
  };
  const auto best = merged(tensor, grams, 1.0);
  CHECK(loss(best) < loss(average));
  auto nearby = best;
  for (auto& w : nearby) w += T(0.01);
  CHECK(loss(best) < loss(nearby));

  tensor.inputs[1] = tensor.inputs[0];
  require_close(merged(tensor, grams, 0.9), tensor.inputs[0], 1e-6);
}

}  // namespace mergex::merging
