#include "multiply_adds.h"

#include "routing/curvature.h"

namespace mergex::engine {

MultiplyAdds count_multiply_adds(const MemoryFactors& f) {
  const auto& c = f.shape;
  const auto number = [](std::int64_t x) { return static_cast<double>(x); };
  const double source = number(f.training.length), target = number(f.training.decoder_length);
  const double d = number(c.d_model), inner = number(c.num_heads * c.d_kv);
  // Two projections of `queries` tokens and two of `keys` tokens; scores and mixture.
  const auto attention = [&](double queries, double keys) {
    return 2.0 * (queries + keys) * d * inner + 2.0 * queries * keys * inner;
  };
  const double feed_forward = (c.is_gated ? 3.0 : 2.0) * d * number(c.d_ff);

  MultiplyAdds m;
  m.sentence = number(c.num_layers) * (attention(source, source) + source * feed_forward) +
               number(c.num_decoder_layers) * (attention(target, target) + attention(target, source) + target * feed_forward);
  m.sentence += f.language_model ? target * d * number(c.vocab_size) : d * d;
  for (const auto& e : f.experts) {
    const double weight = number(e.out_features * e.in_features), n = number(e.num_experts);
    if (!e.merges) {
      m.sentence += source * (number(e.top_k - 1) * weight + n * number(e.in_features));
      continue;
    }
    m.merging += n * weight;
    m.sentence += n * weight + n * number(e.in_features);
    const auto [a1, a2] = routing::factor_pair(e.out_features);
    const auto [b1, b2] = routing::factor_pair(e.in_features);
    m.curvature += number(e.curvature_rank) * n * weight * number(a1 + a2 + b1 + b2);
  }
  return m;
}

}  // namespace mergex::engine
