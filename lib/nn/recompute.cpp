#include "nn/recompute.h"

#include <torch/torch.h>

#include "tensor/autocast.h"

namespace mergex::nn {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// The random streams as they were at another moment, while this object lives.
class Rewound {
 public:
  Rewound(tensor::RandomStreams* random, const std::map<std::string, Tensor>& states) : random_(random) {
    if (random_ == nullptr) return;
    now_ = random_->states();
    random_->restore(states);
  }
  ~Rewound() {
    if (random_ != nullptr) random_->restore(now_);
  }
  Rewound(const Rewound&) = delete;
  Rewound& operator=(const Rewound&) = delete;

 private:
  tensor::RandomStreams* random_;
  std::map<std::string, Tensor> now_;
};

/// All that has to be as it was for a part to give the same again.
struct Replay : torch::CustomClassHolder {
  Part part;
  ForwardContext context;
  std::map<std::string, Tensor> streams;
  at::ScalarType precision = at::kFloat;

  /// The part's output, then its balance losses.
  variable_list run(std::span<const Tensor> inputs) const {
    auto pass = context;
    variable_list outputs{part(inputs, pass)};
    outputs.insert(outputs.end(), pass.auxiliary_losses.begin(), pass.auxiliary_losses.end());
    return outputs;
  }
};

struct Recomputed : torch::autograd::Function<Recomputed> {
  /// @param anchor  makes the outputs need a gradient where only parameters do
  static variable_list forward(AutogradContext* autograd, const c10::intrusive_ptr<Replay>& replay,
                               [[maybe_unused]] const Tensor& anchor, at::TensorList inputs) {
    autograd->save_for_backward(inputs.vec());
    autograd->saved_data["replay"] = c10::IValue::make_capsule(replay);
    return replay->run({inputs.data(), inputs.size()});
  }

  static variable_list backward(AutogradContext* autograd, const variable_list& output_gradients) {
    const auto capsule = autograd->saved_data["replay"].toCapsule();
    const auto& replay = static_cast<const Replay&>(*capsule);
    variable_list inputs;
    for (const auto& t : autograd->get_saved_variables()) {
      inputs.push_back(t.detach().requires_grad_(t.requires_grad()));
    }
    variable_list outputs;
    {
      const at::AutoGradMode with_graph(true);
      const tensor::Autocast precision(inputs[0].device().type(), replay.precision);
      const Rewound streams(replay.context.random, replay.streams);
      outputs = replay.run(inputs);
    }
    variable_list roots, root_gradients;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].requires_grad()) continue;
      roots.push_back(outputs[i]);
      root_gradients.push_back(output_gradients[i]);
    }
    if (!roots.empty()) torch::autograd::backward(roots, root_gradients);
    variable_list gradients{Tensor(), Tensor()};  // of the replay and the anchor
    for (const auto& t : inputs) gradients.push_back(t.grad());
    return gradients;
  }
};

}  // namespace

Tensor recomputed(const Part& part, const std::vector<Tensor>& inputs, ForwardContext& context) {
  auto replay = c10::make_intrusive<Replay>();
  replay->part = part;
  replay->context = context;
  replay->context.auxiliary_losses.clear();
  replay->context.probe = nullptr;  // activations are observed once, between parts
  if (context.random != nullptr) replay->streams = context.random->states();
  replay->precision = tensor::Autocast::current(inputs[0].device().type());
  const auto anchor = torch::empty({0}, inputs[0].options().requires_grad(true));
  const auto outputs = Recomputed::apply(replay, anchor, at::TensorList(inputs));
  context.auxiliary_losses.insert(context.auxiliary_losses.end(), outputs.begin() + 1, outputs.end());
  return outputs[0];
}

}  // namespace mergex::nn
