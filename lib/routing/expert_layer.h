#pragma once

#include <memory>
#include <string>
#include <vector>

#include "nn/linear.h"
#include "tensor/autocast.h"

namespace mergex::routing {

/// What a layer did, for the reader of a table: rows tie where the experts have not moved.
struct LayerReport {
  double task_vector_ratio = 0.0;  ///< mean over experts of ||tau_i|| / ||E_m|| (Frobenius)
  double kept_fraction = 1.0;      ///< of the task vectors' entries, by the protocol's mask
  double router_entropy = 0.0;     ///< mean over routed units of the scores' entropy, in nats
  double experts_per_unit = 0.0;   ///< mean number of experts with a score above zero
};

struct ExpertLayer;

/// Where an expert layer is put, and what it may share with layers that are there already.
struct LayerPlace {
  Tensor weight_OI;     ///< of the dense linear
  Tensor bias_O = {};   ///< undefined where that has none
  std::shared_ptr<ExpertLayer> first_of_feed_forward = {};  ///< runs before this one; null: this is the first
  std::shared_ptr<ExpertLayer> first_of_role = {};  ///< of those of the same stack, name and shape; null: as above
};

struct ParameterCounts {
  std::int64_t experts = 0, routers = 0, curvature = 0;
};

/// A linear with experts. What depends on parameters alone is computed in `begin` and kept until the next one, so
/// that it costs once an optimiser step (however many micro-batches it has) and once an evaluation.
struct ExpertLayer : nn::Projection {
  /// @param random  the run's streams, needed while training
  void begin(bool training, tensor::RandomStreams* random) {
    const tensor::NoAutocast own_dtype;  // masks, curvature and mixtures keep their dtype in any precision
    ++num_begun_;
    prepare(training, random);
  }
  /// For tests: how often parameters alone were worked on.
  std::int64_t num_begun() const { return num_begun_; }

  /// After the micro-batches of a step: the tensors from which gradients must flow on to the parameters, and these
  /// gradients.
  virtual void collect_backward(std::vector<Tensor>& roots, std::vector<Tensor>& gradients) = 0;

  /// The one [O, I] matrix, and [O] bias (undefined without one), that stand for this layer in a dense model.
  virtual Tensor dense_weight() const = 0;
  virtual Tensor dense_bias() const = 0;
  virtual void initialize(at::Generator& generator) = 0;
  virtual ParameterCounts count() const = 0;
  /// Over the forward passes since the last `begin`.
  virtual LayerReport report() const = 0;

 protected:
  virtual void prepare(bool training, tensor::RandomStreams* random) = 0;

 private:
  std::int64_t num_begun_ = 0;
};

/// Scores seen since the last reset; sums stay on the device until they are read.
class ScoreStatistics {
 public:
  void reset() { *this = {}; }
  /// @param scores_UN  scores of U routed units
  void add(const Tensor& scores_UN);
  double mean_entropy() const;
  double mean_experts() const;

 private:
  Tensor entropy_sum_, expert_sum_;
  std::int64_t units_ = 0;
};

/// The expert layers of one model, in the order of their places.
class ExpertSet {
 public:
  struct Place {
    std::string name;  ///< "encoder.block.0.layer.1.DenseReluDense.wi"
    std::shared_ptr<ExpertLayer> layer;
  };

  void add(std::string name, std::shared_ptr<ExpertLayer> layer) { places_.push_back({std::move(name), std::move(layer)}); }
  const std::vector<Place>& places() const { return places_; }
  bool empty() const { return places_.empty(); }

  void begin(bool training, tensor::RandomStreams* random);
  /// Sends the gradients that the micro-batches left at the mixtures on to experts, base and curvature.
  void finish_backward();

  ParameterCounts count() const;
  LayerReport report() const;  ///< mean over layers

 private:
  std::vector<Place> places_;
};

}  // namespace mergex::routing
