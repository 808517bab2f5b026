#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tensor/tensor.h"

namespace mergex::tensor {

/// The random numbers of a run: one generator per purpose ("dropout", "router_noise", "dare", ...), each seeded from
/// (seed, name), so that switching one source off leaves the others as they were. Never the global generator.
class RandomStreams {
 public:
  RandomStreams(std::uint64_t seed, at::Device device) : seed_(seed), device_(device) {}

  at::Generator& stream(const std::string& name);

  /// The states of the streams used so far, as uint8 tensors by name; restoring them continues each stream.
  std::map<std::string, Tensor> states() const;
  void restore(const std::map<std::string, Tensor>& states);

 private:
  std::uint64_t seed_;
  at::Device device_;
  std::map<std::string, at::Generator> streams_;
};

/// A generator of its own on the CPU, seeded from (seed, name): initial weights are drawn there on any device.
at::Generator cpu_generator(std::uint64_t seed, const std::string& name);

}  // namespace mergex::tensor
