#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "merging/source.h"
#include "support/catch.h"

namespace mergex::merging {
namespace {

template <class S>
io::TensorView view_of(const std::vector<S>& values, io::DType dtype) {
  return {.name = "w",
          .dtype = dtype,
          .shape = {static_cast<std::int64_t>(values.size())},
          .bytes = std::as_bytes(std::span(values))};
}

}  // namespace

TEST_CASE("a stored tensor reads any part of itself", "[merging]") {
  const std::vector<std::uint16_t> bf16{0x3f80, 0xc000, 0x0001, 0x7f80};
  const auto view = view_of(bf16, io::DType::kBF16);
  const StoredTensor tensor(view);
  float floats[2];
  tensor.read(1, 2, floats);
  CHECK(floats[0] == -2.0f);
  CHECK(floats[1] == std::bit_cast<float>(0x00010000u));
  double doubles[4];
  tensor.read(0, 4, doubles);
  CHECK(doubles[0] == 1.0);
  CHECK(doubles[3] == std::numeric_limits<double>::infinity());
  CHECK(tensor.stored() == &view);
  CHECK_THROWS_AS(tensor.read(3, 2, floats), std::logic_error);
  CHECK_THROWS_AS(tensor.read(-1, 1, floats), std::logic_error);
}

TEST_CASE("a cast rounds once, and is forgotten where it changes nothing", "[merging]") {
  // 1 + 2^-8 + 2^-40 is above the middle between two bfloat16 values; by way of float32 it would be on it, and go down.
  const std::vector<double> values{1.0 + std::ldexp(1.0, -8) + std::ldexp(1.0, -40), 1e-3};
  const auto view = view_of(values, io::DType::kF64);
  const StoredTensor rounded(view, io::DType::kBF16);
  float got[2];
  rounded.read(0, 2, got);
  CHECK(got[0] == 1.0078125f);
  CHECK(rounded.stored() == nullptr);

  const std::vector<std::uint16_t> half{0x3c00, 0x3c01};
  const auto half_view = view_of(half, io::DType::kF16);
  CHECK(StoredTensor(half_view, io::DType::kF32).stored() == &half_view);
  CHECK(StoredTensor(half_view, io::DType::kF16).stored() == &half_view);
  const StoredTensor to_bf16(half_view, io::DType::kBF16);
  CHECK(to_bf16.stored() == nullptr);
  to_bf16.read(0, 2, got);
  CHECK(got[1] == 1.0f);
}

TEST_CASE("integers are copied, not read", "[merging]") {
  const std::vector<std::int64_t> positions{0, 1, 2};
  const auto view = view_of(positions, io::DType::kI64);
  const StoredTensor tensor(view);
  CHECK(tensor.stored() == &view);
  std::vector<float> values(3);
  CHECK_THROWS_AS(tensor.read(0, 3, values.data()), std::logic_error);
}

}  // namespace mergex::merging
