#include "merging/diff.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "core/thread_pool.h"
#include "merging/input_pages.h"
#include "merging/source.h"

namespace mergex::merging {
namespace {

using io::DType;
using io::Json;

constexpr std::int64_t kPiece = 8'192;   // values that are compared at once
constexpr std::int64_t kUnit = 1 << 20;  // values whose sums are one thread's

template <class Stored>
void widen_integers(std::int64_t count, const std::byte* from, double* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    Stored value;
    std::memcpy(&value, from + i * static_cast<std::int64_t>(sizeof value), sizeof value);
    to[i] = static_cast<double>(value);
  }
}

// 64-bit integers beyond 2^53 are rounded; whether they differ is told from their bytes.
void widen(const io::TensorView& view, std::int64_t begin, std::int64_t count, double* to) {
  const auto* from = view.bytes.data() + begin * static_cast<std::int64_t>(io::dtype_size(view.dtype));
  switch (view.dtype) {
    case DType::kBool:
    case DType::kU8: return widen_integers<std::uint8_t>(count, from, to);
    case DType::kI8: return widen_integers<std::int8_t>(count, from, to);
    case DType::kU16: return widen_integers<std::uint16_t>(count, from, to);
    case DType::kI16: return widen_integers<std::int16_t>(count, from, to);
    case DType::kU32: return widen_integers<std::uint32_t>(count, from, to);
    case DType::kI32: return widen_integers<std::int32_t>(count, from, to);
    case DType::kU64: return widen_integers<std::uint64_t>(count, from, to);
    case DType::kI64: return widen_integers<std::int64_t>(count, from, to);
    default: return widen_values(view.dtype, count, from, to);
  }
}

struct Sums {
  double difference = 0.0, dot = 0.0, square_a = 0.0, square_b = 0.0, max_abs = 0.0;
  std::int64_t num_differing = 0;

  Sums& operator+=(const Sums& other) {
    difference += other.difference;
    dot += other.dot;
    square_a += other.square_a;
    square_b += other.square_b;
    max_abs = std::isnan(other.max_abs) || other.max_abs > max_abs ? other.max_abs : max_abs;
    num_differing += other.num_differing;
    return *this;
  }
};

Sums compare(const io::TensorView& a, const io::TensorView& b, std::int64_t begin, std::int64_t count) {
  std::vector<double> x(static_cast<std::size_t>(kPiece)), y(x.size());
  const auto size_a = static_cast<std::int64_t>(io::dtype_size(a.dtype));
  Sums sums;
  for (const auto end = begin + count; begin < end; begin += kPiece) {
    const auto n = std::min(kPiece, end - begin);
    const bool is_same =
        a.dtype == b.dtype && std::memcmp(a.bytes.data() + begin * size_a, b.bytes.data() + begin * size_a,
                                          static_cast<std::size_t>(n * size_a)) == 0;
    widen(a, begin, n, x.data());
    if (!is_same) widen(b, begin, n, y.data());
    for (std::int64_t i = 0; i < n; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const double p = x[at], q = is_same ? p : y[at];
      sums.dot += p * q;
      sums.square_a += p * p;
      sums.square_b += q * q;
      if (p == q || (std::isnan(p) && std::isnan(q))) continue;
      const double difference = p - q;
      sums.difference += difference * difference;
      sums.max_abs =
          std::isnan(difference) || std::abs(difference) > sums.max_abs ? std::abs(difference) : sums.max_abs;
      ++sums.num_differing;
    }
    if (!is_same && size_a == 8 && a.dtype == b.dtype && a.dtype != DType::kF64) {
      for (std::int64_t i = 0; i < n; ++i) {
        const auto at = (begin + i) * size_a;
        if (x[static_cast<std::size_t>(i)] == y[static_cast<std::size_t>(i)] &&
            std::memcmp(a.bytes.data() + at, b.bytes.data() + at, 8) != 0)
          ++sums.num_differing;
      }
    }
  }
  return sums;
}

TensorDifference compare(const io::TensorView& a, const io::TensorView& b, ThreadPool& pool) {
  TensorDifference found{.name = a.name,
                         .shape_a = a.shape,
                         .shape_b = b.shape,
                         .dtype_a = a.dtype,
                         .dtype_b = b.dtype,
                         .num_elements = a.num_elements()};
  if (!found.has_same_shape()) return found;
  std::vector<Sums> units(static_cast<std::size_t>((a.num_elements() + kUnit - 1) / kUnit));
  pool.parallel_for(units.size(), [&](std::size_t unit, std::size_t) {
    const auto begin = static_cast<std::int64_t>(unit) * kUnit;
    units[unit] = compare(a, b, begin, std::min(kUnit, a.num_elements() - begin));
  });
  Sums sums;
  for (const auto& unit : units) sums += unit;
  found.num_differing = sums.num_differing;
  const auto number = [](double value) { return std::isfinite(value) ? std::optional(value) : std::nullopt; };
  found.max_abs = number(sums.max_abs);
  found.relative = sums.num_differing == 0 ? 0.0 : number(std::sqrt(sums.difference) / std::sqrt(sums.square_a));
  found.cosine = number(sums.dot / (std::sqrt(sums.square_a) * std::sqrt(sums.square_b)));
  return found;
}

std::string text_of(const std::optional<double>& value) { return value ? fmt::format("{:.4g}", *value) : "-"; }
Json json_of(const std::optional<double>& value) { return value ? Json(*value) : Json(nullptr); }

std::string types(const TensorDifference& d) {
  return d.dtype_a == d.dtype_b ? std::string(io::dtype_name(d.dtype_a))
                                : fmt::format("{} -> {}", io::dtype_name(d.dtype_a), io::dtype_name(d.dtype_b));
}

}  // namespace

CheckpointDifference diff(const io::CheckpointFolder& a, const io::CheckpointFolder& b, std::size_t num_threads) {
  CheckpointDifference found;
  ThreadPool pool(std::max<std::size_t>(1, num_threads));
  const UnreadablePageGuard guard;
  for (const auto* view : a.tensors()) {
    const auto* other = b.find(view->name);
    if (other == nullptr) {
      found.only_a.push_back(view->name);
      continue;
    }
    auto difference = compare(*view, *other, pool);
    guard.check(std::array{&a, &b});
    release(view->bytes);
    release(other->bytes);
    if (difference.is_equal()) {
      ++found.num_equal;
    } else {
      found.differing.push_back(std::move(difference));
    }
  }
  for (const auto* view : b.tensors()) {
    if (a.find(view->name) == nullptr) found.only_b.push_back(view->name);
  }
  std::ranges::stable_sort(found.differing, std::greater{}, [](const TensorDifference& d) {
    return d.has_same_shape() ? std::pair(0, d.relative.value_or(std::numeric_limits<double>::infinity()))
                              : std::pair(1, 0.0);
  });
  return found;
}

std::string CheckpointDifference::text() const {
  std::string lines;
  for (const auto& name : only_a) lines += fmt::format("only in the first: {}\n", name);
  for (const auto& name : only_b) lines += fmt::format("only in the second: {}\n", name);
  if (!differing.empty()) {
    lines += fmt::format("{:>10} {:>10} {:>10} {:>10}  {:<12} {}\n", "relative", "largest", "cosine", "differing",
                         "type", "tensor");
  }
  for (const auto& d : differing) {
    if (!d.has_same_shape()) {
      lines += fmt::format("{:>43}  {:<12} {}: {} -> {}\n", "other shape", types(d), d.name, io::shape_text(d.shape_a),
                           io::shape_text(d.shape_b));
      continue;
    }
    const auto share =
        d.num_elements == 0 ? 0.0 : 100.0 * static_cast<double>(d.num_differing) / static_cast<double>(d.num_elements);
    lines += fmt::format("{:>10} {:>10} {:>10} {:>8.2f} %  {:<12} {}\n", text_of(d.relative), text_of(d.max_abs),
                         d.cosine ? fmt::format("{:.6f}", *d.cosine) : "-", share, types(d), d.name);
  }
  return lines + fmt::format("{} tensors equal, {} differ, {} only in the first, {} only in the second\n", num_equal,
                             differing.size(), only_a.size(), only_b.size());
}

Json CheckpointDifference::json() const {
  Json tensors = Json::array();
  for (const auto& d : differing) {
    tensors.push_back({{"name", d.name},
                       {"shapes", {d.shape_a, d.shape_b}},
                       {"dtypes", {io::dtype_name(d.dtype_a), io::dtype_name(d.dtype_b)}},
                       {"elements", d.num_elements},
                       {"differing", d.has_same_shape() ? Json(d.num_differing) : Json(nullptr)},
                       {"max_abs", json_of(d.max_abs)},
                       {"relative_l2", json_of(d.relative)},
                       {"cosine", json_of(d.cosine)}});
  }
  return {{"equal", num_equal}, {"only_a", only_a}, {"only_b", only_b}, {"differing", std::move(tensors)}};
}

}  // namespace mergex::merging
