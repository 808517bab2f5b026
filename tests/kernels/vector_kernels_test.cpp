#include "kernels/vector_kernels.h"

#include <catch2/catch.hpp>

#include <cmath>
#include <vector>

#include "core/random.h"
#include "kernels/kronecker.h"
#include "kernels/merged_product.h"

// Every instruction set that this processor has, against sums written out in double precision.
namespace mergex::kernels {
namespace {

using Index = std::int64_t;

template <class T>
std::vector<T> random_values(Index count, std::uint64_t seed) {
  SplitMix64 generator(seed);
  std::vector<T> values(static_cast<std::size_t>(count));
  for (auto& v : values) v = static_cast<T>(2.0 * generator.uniform() - 1.0);
  return values;
}

template <class T>
void check_close(const std::vector<T>& got, const std::vector<double>& expected, double scale) {
  REQUIRE(got.size() == expected.size());
  const double tolerance = sizeof(T) == sizeof(float) ? 4e-6 : 1e-14;
  double worst = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i) worst = std::max(worst, std::abs(static_cast<double>(got[i]) - expected[i]));
  CHECK(worst <= tolerance * scale);
}

void serial(Index count, const std::function<void(Index, Index)>& body) { body(0, count); }
/// As several threads would, in another order.
void in_pieces(Index count, const std::function<void(Index, Index)>& body) {
  for (Index i = count; i-- > 0;) body(i, i + 1);
}

template <class T, class Test>
void for_each_set(Test&& test) {
  for (const auto set : {InstructionSet::kPlain, InstructionSet::kAvx2, InstructionSet::kAvx512}) {
    const auto* vectors = vector_kernels<T>(set);
    if (vectors == nullptr) continue;
    INFO(vectors->name << ", " << sizeof(T) << " bytes");
    test(*vectors);
  }
}

template <class T>
void check_multiply(const VectorKernels<T>& k, Index m, Index n, Index depth, bool transposed, bool accumulate) {
  INFO(m << " x " << n << " x " << depth << (transposed ? " transposed" : "") << (accumulate ? " added" : ""));
  const auto a = random_values<T>(m * depth, 1), b = random_values<T>(depth * n, 2);
  auto c = random_values<T>(m * n, 3);
  const Index a_row = transposed ? 1 : depth, a_column = transposed ? m : 1;
  std::vector<double> expected(c.size());
  for (Index i = 0; i < m; ++i) {
    for (Index j = 0; j < n; ++j) {
      double total = accumulate ? static_cast<double>(c[static_cast<std::size_t>(i * n + j)]) : 0.0;
      for (Index l = 0; l < depth; ++l) {
        total += static_cast<double>(a[static_cast<std::size_t>(i * a_row + l * a_column)]) *
                 static_cast<double>(b[static_cast<std::size_t>(l * n + j)]);
      }
      expected[static_cast<std::size_t>(i * n + j)] = total;
    }
  }
  k.multiply(m, n, depth, a.data(), a_row, a_column, b.data(), n, c.data(), n, accumulate);
  check_close(c, expected, std::sqrt(static_cast<double>(depth)));
}

/// A Kronecker problem with everything drawn, and its answer by contraction over all four axes at once.
template <class T>
struct KroneckerCase {
  Index rank, n, a1, a2, b1, b2;
  bool has_base, before, after;

  Index out() const { return a1 * a2; }
  Index in() const { return b1 * b2; }
  std::size_t size() const { return static_cast<std::size_t>(n * out() * in()); }

  std::vector<T> experts = random_values<T>(n * out() * in(), 1), base = random_values<T>(out() * in(), 2);
  std::vector<T> c1_out = random_values<T>(rank * n * a1 * a1, 3), c2_out = random_values<T>(rank * n * a2 * a2, 4);
  std::vector<T> c1_in = random_values<T>(rank * n * b1 * b1, 5), c2_in = random_values<T>(rank * n * b2 * b2, 6);
  std::vector<std::uint8_t> keep_before = bits(7), keep_after = bits(8);
  std::vector<T> upstream = random_values<T>(n * out() * in(), 9);
  T scale = T{0.75};

  std::vector<std::uint8_t> bits(std::uint64_t seed) const {
    SplitMix64 generator(seed);
    std::vector<std::uint8_t> values(size());
    for (auto& v : values) v = generator.uniform() < 0.7 ? 1 : 0;
    return values;
  }

  Kronecker<T> kernel(const VectorKernels<T>& vectors, decltype(&serial) parallel) const {
    return {.rank = rank,
            .num_experts = n,
            .a1 = a1,
            .a2 = a2,
            .b1 = b1,
            .b2 = b2,
            .c1_out = c1_out.data(),
            .c2_out = c2_out.data(),
            .c1_in = c1_in.data(),
            .c2_in = c2_in.data(),
            .experts = experts.data(),
            .base = has_base ? base.data() : nullptr,
            .keep_before = before ? keep_before.data() : nullptr,
            .keep_after = after ? keep_after.data() : nullptr,
            .scale = scale,
            .vectors = &vectors,
            .parallel = parallel};
  }

  /// Element (row, column) of the operator's matrix M [O I, O I] of one expert.
  double operator_entry(Index expert, Index p, Index q, Index u, Index v, Index j, Index k, Index l, Index m) const {
    double total = 0.0;
    for (Index r = 0; r < rank; ++r) {
      const auto at = r * n + expert;
      const auto entry = [at](const std::vector<T>& c, Index w, Index row, Index column) {
        return static_cast<double>(c[static_cast<std::size_t>((at * w + row) * w + column)]);
      };
      total += entry(c1_out, a1, p, j) * entry(c2_out, a2, q, k) * entry(c1_in, b1, u, l) * entry(c2_in, b2, v, m);
    }
    return total;
  }

  /// M applied to x, or its transpose.
  std::vector<double> apply(const std::vector<double>& x, bool transposed) const {
    std::vector<double> y(size(), 0.0);
    for (Index e = 0; e < n; ++e) {
      for (Index row = 0; row < out() * in(); ++row) {
        for (Index column = 0; column < out() * in(); ++column) {
          const auto o1 = row / in(), i1 = row % in(), o2 = column / in(), i2 = column % in();
          const auto m = operator_entry(e, o1 / a2, o1 % a2, i1 / b2, i1 % b2, o2 / a2, o2 % a2, i2 / b2, i2 % b2);
          const auto to = transposed ? column : row, from = transposed ? row : column;
          y[static_cast<std::size_t>(e * out() * in() + to)] += m * x[static_cast<std::size_t>(e * out() * in() + from)];
        }
      }
    }
    return y;
  }

  std::vector<double> task_vectors() const {
    std::vector<double> tau(size());
    for (std::size_t i = 0; i < size(); ++i) {
      const auto b = has_base ? static_cast<double>(base[i % base.size()]) : 0.0;
      tau[i] = before && keep_before[i] == 0 ? 0.0 : static_cast<double>(scale) * (static_cast<double>(experts[i]) - b);
    }
    return tau;
  }
};

template <class T>
void check_kronecker(KroneckerCase<T> c, const VectorKernels<T>& vectors) {
  INFO("rank " << c.rank << ", " << c.a1 << " x " << c.a2 << ", " << c.b1 << " x " << c.b2);
  auto expected = c.apply(c.task_vectors(), false);
  for (std::size_t i = 0; i < c.size(); ++i) {
    if (c.after && c.keep_after[i] == 0) expected[i] = 0.0;
  }
  std::vector<T> gamma(c.size());
  c.kernel(vectors, serial).forward(gamma.data());
  check_close(gamma, expected, 10.0);
  auto again = gamma;
  c.kernel(vectors, in_pieces).forward(again.data());
  CHECK(gamma == again);

  std::vector<double> g(c.size());
  for (std::size_t i = 0; i < g.size(); ++i) g[i] = c.after && c.keep_after[i] == 0 ? 0.0 : static_cast<double>(c.upstream[i]);
  auto expected_experts = c.apply(g, true);
  std::vector<double> expected_base(c.base.size(), 0.0);
  for (std::size_t i = 0; i < g.size(); ++i) {
    expected_experts[i] = c.before && c.keep_before[i] == 0 ? 0.0 : static_cast<double>(c.scale) * expected_experts[i];
    expected_base[i % expected_base.size()] -= expected_experts[i];
  }
  std::vector<T> experts(c.size()), base(c.base.size());
  std::vector<T> d[4] = {c.c1_out, c.c2_out, c.c1_in, c.c2_in};
  const auto run = [&](decltype(&serial) parallel) {
    c.kernel(vectors, parallel)
        .backward(c.upstream.data(), {experts.data(), base.data(), d[0].data(), d[1].data(), d[2].data(), d[3].data()});
  };
  run(serial);
  check_close(experts, expected_experts, 10.0);
  check_close(base, expected_base, 20.0);

  // The operator is linear in each factor: its derivative along a direction is the change itself.
  for (int f = 0; f < 4; ++f) {
    auto moved = c;
    std::vector<T>* factors[4] = {&moved.c1_out, &moved.c2_out, &moved.c1_in, &moved.c2_in};
    const auto direction = random_values<T>(static_cast<Index>(factors[f]->size()), 20 + static_cast<std::uint64_t>(f));
    *factors[f] = direction;
    const auto along = moved.apply(c.task_vectors(), false);
    double expected_derivative = 0.0, derivative = 0.0;
    for (std::size_t i = 0; i < g.size(); ++i) expected_derivative += g[i] * along[i];
    for (std::size_t i = 0; i < direction.size(); ++i) {
      derivative += static_cast<double>(direction[i]) * static_cast<double>(d[f][i]);
    }
    INFO("factor " << f);
    CHECK(derivative == Approx(expected_derivative).epsilon(0).margin(sizeof(T) == sizeof(float) ? 2e-3 : 1e-11));
  }

  const auto first = std::vector<std::vector<T>>{experts, base, d[0], d[1], d[2], d[3]};
  run(in_pieces);
  CHECK(first == std::vector<std::vector<T>>{experts, base, d[0], d[1], d[2], d[3]});
}

template <class T>
void check_merged_product(const VectorKernels<T>& vectors, Index b, Index t, Index n, Index o, Index i, bool has_base) {
  INFO(b << " sentences of " << t << ", " << n << " terms [" << o << ", " << i << "]" << (has_base ? " and a base" : ""));
  const auto x = random_values<T>(b * t * i, 1), terms = random_values<T>(n * o * i, 2), base = random_values<T>(o * i, 3);
  const auto scores = random_values<T>(b * n, 4), dy = random_values<T>(b * t * o, 5);
  const MergedProduct<T> p{.num_sentences = b,
                           .num_tokens = t,
                           .num_terms = n,
                           .out_features = o,
                           .in_features = i,
                           .x = x.data(),
                           .terms = terms.data(),
                           .base = has_base ? base.data() : nullptr,
                           .scores = scores.data(),
                           .vectors = &vectors,
                           .parallel = serial};
  const auto value = [](const std::vector<T>& v, Index at) { return static_cast<double>(v[static_cast<std::size_t>(at)]); };
  std::vector<double> y(dy.size()), dx(x.size(), 0.0), dterms(terms.size(), 0.0), dbase(base.size(), 0.0);
  std::vector<double> dscores(scores.size(), 0.0), g(base.size());
  for (Index s = 0; s < b; ++s) {
    std::fill(g.begin(), g.end(), 0.0);
    for (Index row = 0; row < o; ++row) {
      for (Index column = 0; column < i; ++column) {
        const auto at = row * i + column;
        double w = has_base ? value(base, at) : 0.0;
        for (Index e = 0; e < n; ++e) w += value(scores, s * n + e) * value(terms, e * o * i + at);
        for (Index k = 0; k < t; ++k) {
          const auto in_x = static_cast<std::size_t>((s * t + k) * i + column);
          const auto in_y = static_cast<std::size_t>((s * t + k) * o + row);
          y[in_y] += w * static_cast<double>(x[in_x]);
          dx[in_x] += w * static_cast<double>(dy[in_y]);
          g[static_cast<std::size_t>(at)] += static_cast<double>(x[in_x]) * static_cast<double>(dy[in_y]);
        }
      }
    }
    for (Index at = 0; at < o * i; ++at) {
      dbase[static_cast<std::size_t>(at)] += g[static_cast<std::size_t>(at)];
      for (Index e = 0; e < n; ++e) {
        dterms[static_cast<std::size_t>(e * o * i + at)] += value(scores, s * n + e) * g[static_cast<std::size_t>(at)];
        dscores[static_cast<std::size_t>(s * n + e)] += value(terms, e * o * i + at) * g[static_cast<std::size_t>(at)];
      }
    }
  }
  std::vector<T> got_y(y.size()), got_dx(x.size()), got_terms(terms.size()), got_base(base.size()), got_scores(scores.size());
  std::vector<T> work_space(static_cast<std::size_t>(b * i * p.padded_tokens()));
  p.forward(got_y.data(), work_space.data());
  p.backward_input(dy.data(), got_dx.data());
  p.backward_weights(dy.data(), got_terms.data(), false, has_base ? got_base.data() : nullptr, got_scores.data());
  const auto width = std::sqrt(static_cast<double>(i * n)), depth = std::sqrt(static_cast<double>(b * t * n));
  check_close(got_y, y, 2.0 * width);
  check_close(got_dx, dx, 2.0 * std::sqrt(static_cast<double>(o * n)));
  check_close(got_terms, dterms, 2.0 * depth);
  if (has_base) check_close(got_base, dbase, 2.0 * depth);
  check_close(got_scores, dscores, 4.0 * std::sqrt(static_cast<double>(o * i * t)));

  auto pieces = p;
  pieces.parallel = in_pieces;
  const auto first_y = got_y;
  pieces.forward(got_y.data(), work_space.data());
  CHECK(first_y == got_y);
  pieces.backward_weights(dy.data(), got_terms.data(), true, nullptr, got_scores.data());  // added: twice as much
  for (auto& v : dterms) v *= 2.0;
  check_close(got_terms, dterms, 4.0 * depth);
}

}  // namespace

TEST_CASE("products of every instruction set equal sums in double precision", "[kernels][law]") {
  const auto test = [](const auto& k) {
    for (const Index m : {1, 3, 8, 37}) {
      for (const Index n : {1, 16, 23, 64, 300}) {
        for (const Index depth : {1, 7, 130}) {
          for (const bool transposed : {false, true}) check_multiply(k, m, n, depth, transposed, depth == 7);
        }
      }
    }
  };
  for_each_set<float>(test);
  for_each_set<double>(test);
}

TEST_CASE("the elected sign is that of the sum, and zero agrees with zero", "[kernels][law]") {
  for_each_set<float>([](const VectorKernels<float>& k) {
    constexpr Index kCount = 600, kTerms = 3;
    auto terms = random_values<float>(kCount * kTerms, 1);
    const std::vector<float> base(kCount, 0.25F);
    for (std::size_t e = 0; e < kCount; e += 5) {
      for (std::size_t i = 0; i < kTerms; ++i) terms[i * kCount + e] = 0.25F;
    }
    std::vector<std::uint8_t> keep(kCount * kTerms, 9);
    k.elect_signs(kCount, kTerms, terms.data(), kCount, base.data(), keep.data(), kCount);
    const auto sign = [](float v) { return (v > 0) - (v < 0); };
    for (std::size_t e = 0; e < kCount; ++e) {
      float total = 0;
      for (std::size_t i = 0; i < kTerms; ++i) total += terms[i * kCount + e] - base[e];
      for (std::size_t i = 0; i < kTerms; ++i) {
        REQUIRE(keep[i * kCount + e] == (sign(terms[i * kCount + e] - base[e]) == sign(total) ? 1 : 0));
      }
    }
  });
}

TEST_CASE("the Kronecker kernel equals the full operator, and so do its gradients, for any split", "[kernels][law]") {
  for_each_set<float>([](const VectorKernels<float>& v) {
    check_kronecker(KroneckerCase<float>{1, 2, 2, 3, 2, 5, true, false, false}, v);
    check_kronecker(KroneckerCase<float>{3, 2, 1, 7, 3, 4, true, true, false}, v);
  });
  for_each_set<double>([](const VectorKernels<double>& v) {
    check_kronecker(KroneckerCase<double>{1, 1, 4, 4, 2, 2, false, false, true}, v);   // the in side first
    check_kronecker(KroneckerCase<double>{2, 3, 2, 3, 3, 5, true, true, true}, v);     // the out side first
    check_kronecker(KroneckerCase<double>{2, 2, 1, 5, 1, 19, true, true, false}, v);   // prime widths, padded
    check_kronecker(KroneckerCase<double>{8, 1, 3, 3, 1, 3, true, false, false}, v);
  });
}

TEST_CASE("merged products in tiles equal merging first, at odd sizes", "[kernels][law]") {
  const auto test = [](const auto& vectors) {
    for (const bool has_base : {false, true}) {
      check_merged_product(vectors, 3, 5, 2, 7, 11, has_base);
      check_merged_product(vectors, 9, 1, 3, 16, 16, has_base);
      check_merged_product(vectors, 0, 4, 2, 3, 5, has_base);
      check_merged_product(vectors, 2, 0, 2, 3, 5, has_base);
      check_merged_product(vectors, 1, 1, 1, 1, 1, has_base);
      check_merged_product(vectors, 2, 17, 1, 70, 600, has_base);   // several tiles across
      check_merged_product(vectors, 5, 3, 7, 300, 129, has_base);  // several tiles down, a group that is not full
    }
  };
  for_each_set<float>(test);
  for_each_set<double>(test);
}

}  // namespace mergex::kernels
