#include "merging/span_kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "core/philox.h"
#include "core/random.h"
#include "support/catch.h"

namespace mergex::merging {
namespace {

using Index = std::int64_t;

/// Any bit pattern: normal numbers of every size, subnormals, zeros, infinities, NaN; some of a weight's size.
template <class T>
std::vector<T> any_values(Index count, std::uint64_t seed) {
  SplitMix64 generator(seed);
  std::vector<T> values;
  for (Index i = 0; i < count; ++i) {
    const auto bits = generator.next();
    switch (bits % 8) {
      case 0: values.push_back(std::bit_cast<T>(static_cast<Bits<T>>(generator.next()))); break;
      case 1: values.push_back(std::bit_cast<T>(static_cast<Bits<T>>(generator.next() & 0xfff))); break;
      case 2: values.push_back(T{0}); break;
      case 3:
        values.push_back(static_cast<T>(std::ldexp(generator.uniform() - 0.5, static_cast<int>(bits >> 32) % 40 - 30)));
        break;
      case 4:
        values.push_back(bits & 256 ? std::numeric_limits<T>::infinity() : std::numeric_limits<T>::quiet_NaN());
        break;
      default: values.push_back(static_cast<T>(generator.uniform() - 0.5));
    }
  }
  return values;
}

template <class T>
std::vector<T> finite_values(Index count, std::uint64_t seed) {
  SplitMix64 generator(seed);
  std::vector<T> values(static_cast<std::size_t>(count));
  for (auto& v : values) v = generator.next() % 5 == 0 ? T{0} : static_cast<T>(generator.uniform() - 0.5);
  return values;
}

/// Equal bits; of NaN, any is as good as another.
template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if constexpr (std::is_floating_point_v<T>) {
      if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    }
    if (std::memcmp(&a[i], &b[i], sizeof(T)) != 0) return false;
  }
  return true;
}

const std::vector<InstructionSet> kWideSets{InstructionSet::kAvx2, InstructionSet::kAvx512};
const std::vector<Index> kLengths{0, 1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1000, 5003};

/// Compares what `run` returns with the plain set's, for lengths around the vectors' and from an odd place on.
template <class T, class Run>
void check_same(const char* what, Run run) {
  for (const auto set : kWideSets) {
    const auto* wide = span_kernels<T>(set);
    if (wide == nullptr) continue;
    for (const Index length : kLengths) {
      INFO(what << ", " << wide->name << ", " << length << " of " << sizeof(T) << " bytes");
      CHECK(same(run(*span_kernels<T>(InstructionSet::kPlain), length), run(*wide, length)));
    }
  }
}

struct Format {
  int precision, smallest_exponent, largest_exponent;
};
constexpr Format kF16{11, -14, 15}, kBF16{8, -126, 127};

/// The nearest value of a format, halfway cases to the even neighbour, by scaling so that its last place is 1.
double rounded(double x, Format format) {
  if (x == 0.0 || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), format.smallest_exponent) - format.precision + 1;
  const double y = std::ldexp(std::nearbyint(std::ldexp(x, -exponent)), exponent);
  return std::ilogb(y) > format.largest_exponent ? std::copysign(INFINITY, x) : y;
}

template <class T>
void check_rounding(const SpanKernels<T>& k, const std::vector<T>& values) {
  const auto n = static_cast<Index>(values.size());
  std::vector<std::uint16_t> stored(values.size());
  std::vector<T> back(values.size());
  for (const bool half : {true, false}) {
    const auto not_finite =
        half ? k.narrow_f16(n, values.data(), stored.data()) : k.narrow_bf16(n, values.data(), stored.data());
    half ? k.widen_f16(n, stored.data(), back.data()) : k.widen_bf16(n, stored.data(), back.data());
    Index expected_not_finite = 0;
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      const double expected = rounded(static_cast<double>(values[i]), half ? kF16 : kBF16);
      if (!std::isfinite(expected)) ++expected_not_finite;
      const double got = static_cast<double>(back[i]);
      const bool right = std::isnan(expected) ? stored[i] == (half ? 0x7e00 : 0x7fc0)
                                              : got == expected && std::signbit(got) == std::signbit(expected);
      if (!right) ++wrong;
    }
    INFO(k.name << (half ? ", float16" : ", bfloat16") << " from " << sizeof(T) << " bytes");
    CHECK(wrong == 0);
    CHECK(not_finite == expected_not_finite);
  }
}

template <class T>
void for_each_set(const std::function<void(const SpanKernels<T>&)>& test) {
  for (const auto set : {InstructionSet::kPlain, InstructionSet::kAvx2, InstructionSet::kAvx512}) {
    if (const auto* k = span_kernels<T>(set)) test(*k);
  }
}

}  // namespace

TEST_CASE("16-bit values widen to what their bits mean", "[merging][law]") {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  const auto meaning = [](std::uint16_t bits, int mantissa_bits, int bias) {
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const int exponent = (bits & 0x7fff) >> mantissa_bits;
    const int largest = (0x7fff >> mantissa_bits);
    const double size = exponent == largest ? (mantissa == 0 ? INFINITY : NAN)
                        : exponent == 0     ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                        : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
    return bits & 0x8000 ? -size : size;
  };
  const auto check = [&]<class T>(const SpanKernels<T>& k) {
    std::vector<T> f16(all.size()), bf16(all.size());
    k.widen_f16(65536, all.data(), f16.data());
    k.widen_bf16(65536, all.data(), bf16.data());
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      for (const auto& [got, expected] : {std::pair{static_cast<double>(f16[i]), meaning(all[i], 10, 15)},
                                          std::pair{static_cast<double>(bf16[i]), meaning(all[i], 7, 127)}}) {
        const bool right =
            std::isnan(expected) ? std::isnan(got) : got == expected && std::signbit(got) == std::signbit(expected);
        if (!right) ++wrong;
      }
    }
    INFO(k.name);
    CHECK(wrong == 0);
  };
  for_each_set<float>([&](const auto& k) { check(k); });
  for_each_set<double>([&](const auto& k) { check(k); });
}

TEST_CASE("narrowing rounds once to the nearest, halfway cases to even", "[merging][law]") {
  auto floats = any_values<float>(100'000, 1);
  auto doubles = any_values<double>(100'000, 2);
  // Every 16-bit value, the middles between neighbours, and their neighbours: where a second rounding would show.
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    for (const float edge : {std::bit_cast<float>(bits << 16), std::bit_cast<float>((bits << 16) + 0x8000),
                             static_cast<float>(std::ldexp(static_cast<double>(bits) + 0.5, -25))}) {
      for (const float x : {edge, std::nextafter(edge, 0.0f), std::nextafter(edge, INFINITY)}) floats.push_back(x);
      const double wide = static_cast<double>(edge);
      for (const double x : {wide, std::nextafter(wide, 0.0), std::nextafter(wide, INFINITY)}) doubles.push_back(x);
    }
  }
  for (const double x : {65519.0, 65519.99999, 65520.0, 3.3961775e38, 3.4e38, 1e300, 5e-324, 1e-46}) {
    for (const double signed_x : {x, -x}) {
      doubles.push_back(signed_x);
      floats.push_back(static_cast<float>(signed_x));
    }
  }
  for_each_set<float>([&](const auto& k) { check_rounding(k, floats); });
  for_each_set<double>([&](const auto& k) { check_rounding(k, doubles); });
}

TEST_CASE("float32 and float64 are stored as they are, NaN as one", "[merging][law]") {
  const auto values = any_values<float>(5003, 3);
  for_each_set<float>([&](const auto& k) {
    std::vector<float> stored(values.size());
    const auto not_finite = k.narrow_f32(5003, values.data(), stored.data());
    Index expected = 0;
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (!std::isfinite(values[i])) ++expected;
      const auto bits = std::isnan(values[i]) ? 0x7fc00000u : std::bit_cast<std::uint32_t>(values[i]);
      if (std::bit_cast<std::uint32_t>(stored[i]) != bits) ++wrong;
    }
    INFO(k.name);
    CHECK(wrong == 0);
    CHECK(not_finite == expected);
  });
}

TEMPLATE_TEST_CASE("every instruction set computes the same bits", "[merging][law]", float, double) {
  using T = TestType;
  using K = SpanKernels<T>;
  const auto a = any_values<T>(5100, 10), b = any_values<T>(5100, 11), c = finite_values<T>(3 * 5100, 12);
  const auto at = [](const std::vector<T>& v, Index offset) { return v.data() + offset; };
  const auto part = [](const std::vector<T>& v, Index offset, Index n) {
    return std::vector<T>(v.begin() + offset, v.begin() + offset + n);
  };

  // Stored values that begin at an odd byte.
  std::vector<std::byte> bytes(5100 * 8 + 1);
  std::memcpy(bytes.data() + 1, any_values<double>(5100, 13).data(), 5100 * 8);
  for (auto widen : {&K::widen_f16, &K::widen_bf16, &K::widen_f32, &K::widen_f64}) {
    check_same<T>("widen", [&](const K& k, Index n) {
      std::vector<T> out(static_cast<std::size_t>(n));
      (k.*widen)(n, bytes.data() + 1, out.data());
      return out;
    });
  }
  for (auto narrow : {&K::narrow_f16, &K::narrow_bf16, &K::narrow_f32, &K::narrow_f64}) {
    check_same<T>("narrow", [&](const K& k, Index n) {
      std::vector<std::byte> out(static_cast<std::size_t>(n) * 8 + 1 + sizeof(Index));
      const Index not_finite = (k.*narrow)(n, at(a, 3), out.data() + 1);
      std::memcpy(out.data() + out.size() - sizeof(Index), &not_finite, sizeof(Index));
      return out;
    });
  }
  check_same<T>("difference", [&](const K& k, Index n) {
    std::vector<T> out(static_cast<std::size_t>(n));
    k.difference(n, at(a, 1), at(b, 2), out.data());
    return out;
  });
  check_same<T>("scale", [&](const K& k, Index n) {
    auto x = part(a, 1, n);
    k.scale(n, T(0.3), x.data());
    return x;
  });
  check_same<T>("add", [&](const K& k, Index n) {
    auto x = part(a, 1, n);
    k.add(n, at(b, 5), x.data());
    return x;
  });
  check_same<T>("divide", [&](const K& k, Index n) {
    auto x = part(a, 1, n);
    k.divide(n, T(1.7), x.data());
    return x;
  });
  check_same<T>("divide_each", [&](const K& k, Index n) {
    auto x = part(a, 1, n);
    k.divide_each(n, at(c, 5), x.data());
    return x;
  });
  check_same<T>("multiply_add", [&](const K& k, Index n) {
    auto x = part(a, 1, n);
    k.multiply_add(n, at(b, 5), T(0.3), x.data());
    return x;
  });
  for (const bool from_base : {false, true}) {
    check_same<T>("combine", [&](const K& k, Index n) {
      std::vector<T> out(static_cast<std::size_t>(n));
      const T* const inputs[] = {at(a, 1), at(c, 2), at(c, 7)};
      const double coefficients[] = {0.3, 1.7, -0.1};
      k.combine(n, 3, inputs, coefficients, from_base ? at(b, 3) : nullptr, out.data());
      return out;
    });
    check_same<double>("dot", [&](const auto& same_set, Index n) {
      const auto* k = span_kernels<T>(std::string_view(same_set.name) == "plain"  ? InstructionSet::kPlain
                                      : std::string_view(same_set.name) == "avx2" ? InstructionSet::kAvx2
                                                                                  : InstructionSet::kAvx512);
      std::vector<double> lanes(2 * kLanes, 0.25);
      k->dot(n, n % kLanes, at(c, 1), at(c, 3), from_base ? at(c, 5) : nullptr, lanes.data());
      k->sum_magnitudes(n, 5, at(c, 1), lanes.data() + kLanes);
      return lanes;
    });
    check_same<double>("compare", [&](const auto& same_set, Index n) {
      const auto* k = span_kernels<T>(std::string_view(same_set.name) == "plain"  ? InstructionSet::kPlain
                                      : std::string_view(same_set.name) == "avx2" ? InstructionSet::kAvx2
                                                                                  : InstructionSet::kAvx512);
      std::vector<double> lanes(4 * kLanes, 0.25);
      std::vector<Bits<T>> signs(static_cast<std::size_t>(n));
      k->compare(n, at(c, 1), at(c, 3), at(c, 5), from_base ? signs.data() : nullptr, lanes.data());
      k->compare(n, at(c, 7), at(c, 3), at(c, 5), from_base ? signs.data() : nullptr, lanes.data());
      lanes.push_back(static_cast<double>(k->count_conflicts(n, signs.data())));
      return lanes;
    });
    check_same<T>("elect", [&](const K& k, Index n) {
      std::vector<T> out(2 * static_cast<std::size_t>(n));
      const T factors[] = {T(1), T(0.3), T(-2)}, shares[] = {T(0.2), T(0.5), T(0.9)};
      k.elect(n, 3, at(c, 1), 5100, factors, shares, from_base, out.data(), out.data() + n);
      return out;
    });
  }
  check_same<T>("variance", [&](const K& k, Index n) {
    std::vector<T> out(static_cast<std::size_t>(n));
    k.variance(n, 3, at(c, 1), 5100, out.data());
    return out;
  });
  const auto one = std::bit_cast<Bits<T>>(T(0.25)), two = std::bit_cast<Bits<T>>(T(0.4));
  check_same<T>("keep_between", [&](const K& k, Index n) {
    auto x = part(a, 1, n);
    k.keep_between(n, at(c, 3), one, two, x.data());
    return x;
  });
  for (auto values : {&a, &c}) {
    check_same<T>("counts", [&](const K& k, Index n) {
      std::vector<std::uint32_t> counts(2 * 65536 + 2);
      k.count_first_digit(n, at(*values, 1), counts.data());
      const int shift = sizeof(T) == 4 ? 0 : 32;
      k.count_next_digit(n, at(*values, 1), shift, one >> shift >> 16, counts.data() + 65536);
      counts[2 * 65536] = static_cast<std::uint32_t>(k.count_nonzero(n, at(*values, 1)));
      counts[2 * 65536 + 1] = static_cast<std::uint32_t>(k.count_equal(n, at(*values, 1), Bits<T>{0}));
      return std::vector<T>(counts.begin(), counts.end());
    });
    check_same<T>("count_around", [&](const K& k, Index n) {
      std::vector<Bits<T>> others(static_cast<std::size_t>(n + kBlock + kLanes));
      const auto tenth = std::bit_cast<Bits<T>>(T(0.1));
      CountsAround all;
      for (Index begin = 0; begin < n; begin += kBlock) {
        const auto found = k.count_around(std::min(kBlock, n - begin), at(*values, 1) + begin, begin > 0 ? tenth : 0,
                                          begin > 0 ? one : 0, two, others.data() + all.others);
        all.above += found.above;
        all.equal += found.equal;
        all.others += found.others;
      }
      Index above = 0, inside = 0;
      for (Index i = 0; i < n; ++i) {
        const auto size = std::bit_cast<Bits<T>>(std::abs(at(*values, 1)[i]));
        above += size > two ? 1 : 0;
        inside += size <= two && (i < kBlock || size >= tenth) ? 1 : 0;
      }
      CHECK(all.above == above);
      CHECK(all.equal + all.others == inside);
      others.resize(static_cast<std::size_t>(all.others));
      others.push_back(static_cast<Bits<T>>(all.equal));
      return others;
    });
  }
  std::vector<std::uint32_t> words(64 * 80);
  span_kernels<T>().random_words(0, 80, 99, words.data());
  check_same<T>("keep_drawn", [&](const K& k, Index n) {
    auto x = part(a, 1, n);
    k.keep_drawn(n, words.data() + 3, 0x60000000u, x.data());
    return x;
  });
}

TEST_CASE("sums do not depend on where a span is cut", "[merging][law]") {
  const auto a = finite_values<float>(1000, 20), b = finite_values<float>(1000, 21);
  const auto& k = span_kernels<float>();
  std::vector<double> whole(kLanes), cut(kLanes);
  k.dot(1000, 0, a.data(), b.data(), nullptr, whole.data());
  for (Index begin = 0, step = 1; begin < 1000; begin += step, step = step * 2 % 131 + 1) {
    k.dot(std::min(step, 1000 - begin), begin % kLanes, a.data() + begin, b.data() + begin, nullptr, cut.data());
  }
  CHECK(whole == cut);
  double sum = 0.0, expected = 0.0;
  for (const double lane : whole) sum += lane;
  for (std::size_t i = 0; i < a.size(); ++i) expected += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  CHECK(sum == Approx(expected).epsilon(1e-12));
}

TEST_CASE("random words are Philox's, with the position as the counter", "[merging][law]") {
  constexpr std::uint64_t kKey = 0x299f31d0a4093822;
  for_each_set<float>([&](const auto& k) {
    INFO(k.name);
    // The last block before the counter's low word is full, and the first after.
    for (const std::uint64_t first : {std::uint64_t{0}, (std::uint64_t{1} << 28) - 1}) {
      std::vector<std::uint32_t> words(2 * 64), expected;
      k.random_words(first, 2, kKey, words.data());
      for (std::uint64_t block = first; block < first + 2; ++block) {
        for (std::size_t w = 0; w < 4; ++w) {
          for (std::uint64_t lane = 0; lane < 16; ++lane) {
            const auto counter = block * 16 + lane;
            expected.push_back(
                philox4x32({static_cast<std::uint32_t>(counter), static_cast<std::uint32_t>(counter >> 32), 0, 0},
                           {static_cast<std::uint32_t>(kKey), static_cast<std::uint32_t>(kKey >> 32)})[w]);
          }
        }
      }
      CHECK(words == expected);
    }
  });
}

}  // namespace mergex::merging
