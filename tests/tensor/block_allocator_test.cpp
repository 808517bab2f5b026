#include "tensor/block_allocator.h"

#include <catch2/catch.hpp>
#include <torch/torch.h>

#include <c10/core/CPUAllocator.h>

#include "tensor/tensor.h"

// Switches the allocator on for the rest of the program: whatever runs after it runs on it.
namespace mergex {

TEST_CASE("the block allocator serves tensors and raw memory of any size, and oneDNN", "[tensor]") {
  tensor::use_block_allocator();
  auto* allocator = c10::GetCPUAllocator();
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{64}, std::size_t{1} << 20, std::size_t{5} << 20}) {
    void* memory = allocator->raw_allocate(bytes);
    if (bytes > 0) std::memset(memory, 1, bytes);
    allocator->raw_deallocate(memory);
  }
  // bfloat16 products take and free their work space by raw calls.
  const auto x = torch::randn({64, 512}).to(at::kBFloat16), w = torch::randn({2048, 512}).to(at::kBFloat16);
  const auto y = torch::linear(x, w).to(at::kFloat);
  CHECK((y - torch::linear(x.to(at::kFloat), w.to(at::kFloat))).abs().max().item<double>() < 0.5);

  const auto first = torch::ones({4, 1 << 20});
  const auto* address = first.const_data_ptr<float>();
  CHECK(first.sum().item<double>() == 4.0 * (1 << 20));
  auto second = first.clone();
  const auto* kept = second.const_data_ptr<float>();
  second = Tensor();
  CHECK(torch::empty({4, 1 << 20}).const_data_ptr<float>() == kept);  // the freed block serves the next
  CHECK(first.const_data_ptr<float>() == address);
  CHECK(first.sum().item<double>() == 4.0 * (1 << 20));
}

}  // namespace mergex
