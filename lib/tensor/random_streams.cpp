#include "tensor/random_streams.h"

#include <torch/torch.h>

#include <ATen/CPUGeneratorImpl.h>

#include "core/random.h"

namespace mergex::tensor {

at::Generator& RandomStreams::stream(const std::string& name) {
  const auto found = streams_.find(name);
  if (found != streams_.end()) return found->second;
  at::Generator generator =
      device_.is_cpu() ? at::make_generator<at::CPUGeneratorImpl>(stream_seed(seed_, name))
                       : at::globalContext().defaultGenerator(device_).clone();
  generator.set_current_seed(stream_seed(seed_, name));
  return streams_.emplace(name, std::move(generator)).first->second;
}

std::map<std::string, Tensor> RandomStreams::states() const {
  std::map<std::string, Tensor> result;
  for (const auto& [name, generator] : streams_) result.emplace(name, generator.get_state());
  return result;
}

void RandomStreams::restore(const std::map<std::string, Tensor>& states) {
  streams_.clear();
  for (const auto& [name, state] : states) stream(name).set_state(state);
}

at::Generator cpu_generator(std::uint64_t seed, const std::string& name) {
  return at::make_generator<at::CPUGeneratorImpl>(stream_seed(seed, name));
}

}  // namespace mergex::tensor
