#include "merging/row_source.h"

#include <numeric>
#include <random>
#include <stdexcept>
#include <thread>

#include "merging/vocabulary_support.h"
#include "support/catch.h"

using namespace mergex;
using namespace mergex::merging;

namespace {

// Value j of row r of model m is 1000 m + 10 r + j.
test::MemorySource numbered(std::size_t model, std::int64_t rows, std::int64_t length) {
  std::vector<float> values;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t j = 0; j < length; ++j) values.push_back(static_cast<float>(1000 * static_cast<int>(model) + 10 * r + j));
  }
  return test::MemorySource(std::move(values));
}

std::shared_ptr<const RowMap> mixed_map() {
  auto map = std::make_shared<RowMap>();
  map->append(RowRun::Kind::kStored, 0, 2);
  map->append(RowRun::Kind::kStored, 0, 3);
  map->append(RowRun::Kind::kStored, 1, 4);  // of the other model
  map->append(RowRun::Kind::kStored, 0, 0);  // back
  map->append(RowRun::Kind::kZero);
  map->append(RowRun::Kind::kZero);
  map->append_mean({{0, 1}, {1, 1}});
  map->append_mean({{1, 0}, {1, 3}, {0, 3}});
  map->append(RowRun::Kind::kMeanOfAll);
  map->append(RowRun::Kind::kMeanOfAll);
  return map;
}

}  // namespace

TEST_CASE("a row source reads what its map says", "[merging]") {
  const auto a = numbered(0, 4, 3), b = numbered(1, 5, 3);
  const auto map = mixed_map();
  CHECK(map->rows == 10);
  CHECK(map->runs.size() == 7);
  const RowSource source(map, {{&a, 4}, {&b, 5}}, 3);
  const auto values = test::all_values(source, 30);
  const std::vector<std::vector<double>> expected{
      {20, 21, 22},    {30, 31, 32},    {1040, 1041, 1042}, {0, 1, 2}, {0, 0, 0}, {0, 0, 0},
      {510, 511, 512}, {(1000 + 1030 + 30) / 3.0, (1001 + 1031 + 31) / 3.0, (1002 + 1032 + 32) / 3.0}};
  for (std::size_t r = 0; r < expected.size(); ++r) {
    for (std::size_t j = 0; j < 3; ++j) CHECK(values[r * 3 + j] == Approx(expected[r][j]).epsilon(1e-15));
  }
  for (std::size_t j = 0; j < 3; ++j) {
    double mean = 0.0;
    for (const auto& row : expected) mean += row[j] / 8.0;
    CHECK(values[24 + j] == Approx(mean).epsilon(1e-14));
    CHECK(values[27 + j] == values[24 + j]);
  }
  CHECK(source.stored() == nullptr);
}

TEST_CASE("a row source reads the same in pieces and from several threads", "[merging][law]") {
  const std::int64_t length = GENERATE(1, 7, 600);
  const auto a = numbered(0, 4, length), b = numbered(1, 5, length);
  const RowSource source(mixed_map(), {{&a, 4}, {&b, 5}}, length);
  const auto count = 10 * length;
  const auto fresh = [&] { return std::make_unique<RowSource>(mixed_map(), std::vector<RowSource::Part>{{&a, 4}, {&b, 5}}, length); };
  const auto whole = test::all_values(source, count);

  std::mt19937 random(7);
  for (int i = 0; i < 200; ++i) {
    const auto begin = std::uniform_int_distribution<std::int64_t>(0, count)(random);
    const auto n = std::uniform_int_distribution<std::int64_t>(0, count - begin)(random);
    std::vector<double> wide(static_cast<std::size_t>(n));
    std::vector<float> narrow(static_cast<std::size_t>(n));
    source.read(begin, n, wide.data());
    source.read(begin, n, narrow.data());
    for (std::size_t k = 0; k < wide.size(); ++k) {
      REQUIRE(wide[k] == whole[static_cast<std::size_t>(begin) + k]);
      REQUIRE(narrow[k] == static_cast<float>(wide[k]));
    }
  }

  const auto shared = fresh();
  std::vector<std::vector<double>> results(4);
  std::vector<std::thread> threads;
  for (auto& result : results) threads.emplace_back([&] { result = test::all_values(*shared, count); });
  for (auto& thread : threads) thread.join();
  for (const auto& result : results) CHECK(result == whole);
}

TEST_CASE("leading rows are the tensor's own bytes", "[merging][law]") {
  const auto stored = numbered(0, 5, 3);
  io::TensorView view = *stored.stored();
  view.name = "embedding";
  view.shape = {5, 3};
  const test::MemorySource a(view);

  const RowSource all(std::make_shared<RowMap>(leading_rows(0, 5)), {{&a, 5}}, 3);
  CHECK(all.stored() == a.stored());
  const RowSource some(std::make_shared<RowMap>(leading_rows(0, 2)), {{&a, 5}}, 3);
  REQUIRE(some.stored() != nullptr);
  CHECK(some.stored()->shape == std::vector<std::int64_t>{2, 3});
  CHECK(some.stored()->bytes.data() == a.stored()->bytes.data());
  CHECK(some.stored()->bytes.size() == 2 * 3 * sizeof(float));
  CHECK(test::all_values(some, 6) == std::vector<double>{0, 1, 2, 10, 11, 12});

  const RowSource empty(std::make_shared<RowMap>(leading_rows(0, 0)), {{&a, 5}}, 3);
  CHECK(test::all_values(empty, 0).empty());
}

TEST_CASE("a row source refuses rows that no part has", "[merging]") {
  const auto a = numbered(0, 4, 3);
  CHECK_THROWS_AS(RowSource(std::make_shared<RowMap>(leading_rows(0, 5)), {{&a, 4}}, 3), std::invalid_argument);
  CHECK_THROWS_AS(RowSource(std::make_shared<RowMap>(leading_rows(1, 1)), {{&a, 4}}, 3), std::invalid_argument);
  CHECK_THROWS_AS(RowSource(mixed_map(), {{&a, 4}, {nullptr, 5}}, 3), std::invalid_argument);
}

TEST_CASE("tensors with a row per token are known by name and size", "[merging]") {
  const std::vector<std::int64_t> matrix{32, 8}, bias{32}, other{31, 8};
  for (const auto* name : {"model.embed_tokens.weight", "lm_head.weight", "transformer.wte.weight", "wte.weight", "shared.weight",
                           "encoder.embed_tokens.weight", "roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight",
                           "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"}) {
    CHECK(is_vocabulary_tensor(name, matrix, 32));
    CHECK_FALSE(is_vocabulary_tensor(name, other, 32));
  }
  for (const auto* name : {"lm_head.bias", "lm_head.decoder.bias", "cls.predictions.bias"}) {
    CHECK(is_vocabulary_tensor(name, bias, 32));
  }
  for (const auto* name : {"model.layers.0.mlp.up_proj.weight", "transformer.wpe.weight", "lm_head.dense.weight",
                           "roberta.embeddings.token_type_embeddings.weight", "my_lm_head.weight", "classifier.weight"}) {
    CHECK_FALSE(is_vocabulary_tensor(name, matrix, 32));
  }
  CHECK_FALSE(is_vocabulary_tensor("lm_head.weight", std::vector<std::int64_t>{}, 32));
}
