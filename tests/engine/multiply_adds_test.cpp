#include "engine/multiply_adds.h"

#include "support/catch.h"

using namespace mergex::engine;

TEST_CASE("multiply-adds of T5-base with 7 merged experts, as counted by hand", "[engine]") {
  MemoryFactors f;
  f.shape.d_model = 768;
  f.shape.d_kv = 64;
  f.shape.d_ff = 3072;
  f.shape.num_heads = f.shape.num_layers = f.shape.num_decoder_layers = 12;
  f.training = {.size = 16, .length = 128, .decoder_length = 128};
  const auto dense = count_multiply_adds(f);
  CHECK(dense.merging == 0.0);
  // A block: 4 * 128 * 768^2 + 2 * 128^2 * 768 for each attention (36), 2 * 128 * 768 * 3072 for each feed-forward (24).
  CHECK(dense.sentence == Approx(36 * (301989888.0 + 25165824.0) + 24 * 603979776.0 + 589824.0).epsilon(1e-12));

  for (int i = 0; i < 48; ++i) {
    f.experts.push_back({.num_experts = 7, .out_features = i % 2 ? 768 : 3072, .in_features = i % 2 ? 3072 : 768,
                         .merges = true, .top_k = 7, .curvature_rank = 1});
  }
  const auto merged = count_multiply_adds(f);
  const double applied = 48 * 128.0 * 768 * 3072;
  CHECK(merged.merging / applied == Approx(0.055).margin(5e-4));    // 5.5 %: 7 / 128
  CHECK(merged.curvature / applied == Approx(9.2).margin(0.05));    // (24 + 32 + 48 + 64) * 7 / 128 sentences
  for (auto& e : f.experts) e.curvature_rank = 8;
  CHECK(count_multiply_adds(f).curvature == 8 * merged.curvature);

  for (auto& e : f.experts) e = {.num_experts = 8, .out_features = e.out_features, .in_features = e.in_features, .top_k = 2};
  CHECK((count_multiply_adds(f).sentence - dense.sentence) / applied == Approx(1.0).margin(0.01));  // two instead of one
}
