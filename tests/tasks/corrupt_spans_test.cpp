#include "tasks/corrupt_spans.h"

#include <algorithm>

#include "support/catch.h"

// Numbers of the T5 repository's own tests of its preprocessors.

using namespace mergex::tasks;

TEST_CASE("span corruption equals T5's examples", "[tasks][golden]") {
  const std::vector<std::int32_t> tokens{10, 11, 12, 13, 14, 15};
  const std::vector<bool> mask{true, true, false, false, true, false};
  const auto sentinel = [](int i) { return 999 - i; };
  CHECK(replace_spans(tokens, mask, true, sentinel) == std::vector<std::int32_t>{999, 12, 13, 998, 15});
  CHECK(replace_spans(tokens, mask, false, sentinel) == std::vector<std::int32_t>{10, 11, 999, 14, 998});
  const auto spans_of_two = span_lengths(64, {.noise_density = 0.2, .mean_span_length = 2.0});
  CHECK(spans_of_two.text == 70);
  CHECK(spans_of_two.targets == 22);
  CHECK(spans_of_two.spans == 7);
  const auto spans_of_one = span_lengths(64, {.noise_density = 0.2, .mean_span_length = 1.0});
  CHECK(spans_of_one.text == 63);
  CHECK(spans_of_one.targets == 27);
}

TEST_CASE("the noise mask holds its counts", "[tasks]") {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    const auto mask = random_spans_noise_mask(32, {.noise_density = 0.25, .mean_span_length = 2.0}, seed);
    CHECK(mask.size() == 32);
    CHECK(std::ranges::count(mask, true) == 8);
    int spans = 0;
    for (std::size_t i = 0; i < mask.size(); ++i) spans += mask[i] && (i == 0 || !mask[i - 1]) ? 1 : 0;
    CHECK(spans == 4);
    CHECK(!mask[0]);
  }
  CHECK(random_spans_noise_mask(32, {}, 1) == random_spans_noise_mask(32, {}, 1));
  CHECK(random_spans_noise_mask(32, {}, 1) != random_spans_noise_mask(32, {}, 2));
  for (std::int64_t length = 0; length < 12; ++length) {
    const auto mask = random_spans_noise_mask(length, {.noise_density = 0.9, .mean_span_length = 1.0}, 3);
    CHECK(mask.size() == static_cast<std::size_t>(length));
    if (length > 1) CHECK(std::ranges::count(mask, false) > 0);
  }
}
