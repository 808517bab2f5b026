#include "engine/memory_estimate.h"

#include "support/catch.h"
#include "support/paths.h"

using namespace mergex;
using namespace mergex::engine;
using Catch::Contains;
namespace fs = std::filesystem;

namespace {

constexpr std::int64_t kMiB = 1 << 20;

/// T5-small's shape, 7 merged experts in each of its 24 linears.
MemoryFactors small_model(bool with_experts) {
  MemoryFactors f;
  f.num_parameters = 60'500'000;
  f.num_factored = 200'000;
  if (with_experts) {
    for (int i = 0; i < 24; ++i) {
      f.experts.push_back({.num_experts = 7, .out_features = 2048, .in_features = 512, .merges = true, .top_k = 7});
      f.num_parameters += 7 * 2048 * 512;
    }
  }
  f.training = {.size = 8, .length = 128, .decoder_length = 128};
  f.evaluation = f.training;
  return f;
}

void write_file(const fs::path& path, const std::string& content) {
  fs::create_directories(path.parent_path());
  test::write_text(path, content);
}

}  // namespace

TEST_CASE("what a run holds, by its parts", "[engine]") {
  const auto f = small_model(true);
  const auto m = estimate_memory(f);
  CHECK(m.parameters == 4 * f.num_parameters);
  CHECK(m.gradients == 4 * f.num_parameters);
  CHECK(m.moments == 8 * f.num_parameters);
  CHECK(m.merging >= 2 * 24 * 7 * 2048 * 512 * 4LL);  // gamma and its gradient
  CHECK(m.peak >= m.parameters + m.gradients + m.moments + m.merging);

  auto changed = f;
  changed.adafactor = true;
  CHECK(estimate_memory(changed).moments == 4 * f.num_factored);
  changed = f;
  changed.averages_weights = true;
  CHECK(estimate_memory(changed).peak == m.peak + m.parameters);
  changed = f;
  changed.bytes_per_value = 8;
  CHECK(estimate_memory(changed).moments == 2 * m.moments);
  CHECK(std::abs(estimate_memory(changed).activations - 2 * m.activations) <= 2);
}

TEST_CASE("activations grow with the batch, and with the length faster than in proportion", "[engine][law]") {
  const auto f = small_model(false);
  const auto once = estimate_memory(f).activations;
  auto changed = f;
  changed.training.size = 16;
  CHECK(std::abs(estimate_memory(changed).activations - 2 * once) <= 2);
  changed = f;
  changed.training.length = changed.training.decoder_length = 256;
  CHECK(estimate_memory(changed).activations > 2 * once);
  changed = f;
  changed.activation_checkpointing = true;
  CHECK(estimate_memory(changed).activations < once / 2);
  changed = f;
  changed.shape.dropout_rate = 0.0;
  CHECK(estimate_memory(changed).activations < once);
  changed = f;
  changed.half_precision = true;
  CHECK(estimate_memory(changed).activations < once);
  // Micro-batches leave gradients that the next one's activations come on top of.
  changed = f;
  changed.training.size = 64;
  const auto single = estimate_memory(changed).peak;
  changed.gradient_accumulation = 2;
  CHECK(estimate_memory(changed).peak > single);
}

TEST_CASE("repairs are named in the order of what they cost, until the run fits", "[engine]") {
  auto f = small_model(true);
  f.training.size = 64;
  const auto peak = estimate_memory(f).peak;
  CHECK(memory_repairs(f, peak).empty());

  auto half = f;
  half.training.size = 32;
  half.gradient_accumulation = 2;
  CHECK(memory_repairs(f, estimate_memory(half).peak) ==
        std::vector<std::string>{"/training/batch_size=32 with /training/gradient_accumulation=2"});

  const auto many = memory_repairs(f, 3 * 1024 * kMiB);
  REQUIRE(many.size() >= 3);
  CHECK_THAT(many[0], Contains("batch_size"));
  CHECK(std::ranges::find(many, "/training/optimizer/name=adafactor") != many.end());
  CHECK(many.back() != "a smaller model or more memory");
  CHECK(memory_repairs(f, kMiB).back() == "a smaller model or more memory");
}

TEST_CASE("what is available is the least of the machine's and the control groups'", "[engine]") {
  const test::TemporaryFolder root;
  CHECK_FALSE(available_memory(root.path()));
  write_file(root / "proc/meminfo", "MemTotal:  9000 kB\nMemFree:  1 kB\nMemAvailable:    8000 kB\n");
  CHECK(available_memory(root.path()) == 8000 * 1024);

  SECTION("version 2, where a group above has the limit") {
    write_file(root / "proc/self/cgroup", "0::/jobs/mine\n");
    write_file(root / "sys/fs/cgroup/jobs/mine/memory.max", "max\n");
    CHECK(available_memory(root.path()) == 8000 * 1024);
    write_file(root / "sys/fs/cgroup/jobs/memory.max", "5000000\n");
    write_file(root / "sys/fs/cgroup/jobs/memory.stat", "anon 2000000\nfile 9000000\n");
    CHECK(available_memory(root.path()) == 3000000);
  }
  SECTION("version 1, seen from inside a container") {
    write_file(root / "proc/self/cgroup", "5:cpuset:/box\n4:memory:/box/7\n");
    write_file(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", "4000000\n");
    write_file(root / "sys/fs/cgroup/memory/memory.stat", "cache 10\nrss 5\ntotal_cache 7\ntotal_rss 5000000\n");
    CHECK(available_memory(root.path()) == 0);
  }
}
