#include "tasks/encoded_data.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/error.h"
#include "io/atomic_file.h"
#include "support/catch.h"
#include "support/paths.h"
#include "support/sentencepiece_bytes.h"
#include "tasks/files.h"
#include "tasks/task_section.h"

using namespace mergex;
namespace fs = std::filesystem;

namespace {

text::T5Tokenizer small_tokenizer(const test::TemporaryFolder& folder) {
  return text::T5Tokenizer::load(test::write_text(folder / "spiece.model", test::small_sentencepiece_model()));
}

bool equal(const tasks::Encoded& a, const tasks::Encoded& b) {
  return a.ids == b.ids && a.label == b.label && a.target_ids == b.target_ids && a.id == b.id;
}

tasks::Split many_examples(std::size_t count) {
  tasks::Split split{.name = "train", .examples = {}, .file = "many.tsv"};
  for (std::size_t i = 0; i < count; ++i) {
    tasks::Example example{.id = std::to_string(i), .text = "hello"};
    for (std::size_t word = 0; word < i % 7; ++word) example.text += word % 2 == 0 ? " world" : " hole";
    if (i % 3 == 0) example.text_pair = "all";
    if (i % 5 != 0) example.label = static_cast<double>(i % 2);
    split.examples.push_back(std::move(example));
  }
  return split;
}

}  // namespace

TEST_CASE("encoding does not depend on the number of threads", "[tasks][law]") {
  const test::TemporaryFolder folder;
  const auto tokenizer = small_tokenizer(folder);
  const auto count = GENERATE(std::size_t{0}, std::size_t{1}, std::size_t{64}, std::size_t{1000});
  const auto split = many_examples(count);
  const auto one = tasks::encode(split, tokenizer, 8, 1);
  const auto pieces = tasks::encode_pieces(split, tokenizer, 4, 1);
  CHECK(one.size() == count);
  for (const int threads : {2, 3, 16}) {
    CHECK(std::ranges::equal(one, tasks::encode(split, tokenizer, 8, threads), equal));
    CHECK(std::ranges::equal(pieces, tasks::encode_pieces(split, tokenizer, 4, threads), equal));
  }
}

TEST_CASE("of several examples that cannot be encoded the first is named", "[tasks][law]") {
  const test::TemporaryFolder folder;
  const auto tokenizer = small_tokenizer(folder);
  auto split = many_examples(1000);
  for (const std::size_t i : {999u, 412u, 130u, 700u}) split.examples[i].text = "bad \xFF";
  for (const int threads : {1, 2, 8}) {
    CHECK(test::user_error([&] { tasks::encode(split, tokenizer, 8, threads); })
              .starts_with("many.tsv: example 130: a text is not valid UTF-8"));
  }
}

TEST_CASE("encoded data come back from their file as they were", "[tasks][law]") {
  const test::TemporaryFolder folder;
  const auto tokenizer = small_tokenizer(folder);
  tasks::EncodedData encoded;
  encoded.data.labels = {"ja", "nein \"\u00e9\""};
  encoded.data.metrics = {"accuracy", "f1"};
  encoded.data.skipped_lines = 3;
  encoded.data.warnings = {"one", "two"};
  encoded.data.notes = {"three"};
  encoded.train = tasks::encode(many_examples(100), tokenizer, 8, 1);
  encoded.train[7].target_ids = {4, 1};
  encoded.validation = {tasks::encode(many_examples(3), tokenizer, 8, 1), {}};
  const std::vector<tasks::InputFile> files{{"train", "t.tsv"}, {"validation", "a.tsv"}, {"validation_2", "b.tsv"}};
  const auto file = folder / "encoded.safetensors";
  tasks::write_encoded_data(file, encoded);
  const auto again = tasks::read_encoded_data(file, files, tokenizer.vocab_size());
  CHECK(std::ranges::equal(again.train, encoded.train, equal));
  REQUIRE(again.validation.size() == 2);
  CHECK(std::ranges::equal(again.validation[0], encoded.validation[0], equal));
  CHECK(again.validation[1].empty());
  CHECK(again.data.labels == encoded.data.labels);
  CHECK(again.data.metrics == encoded.data.metrics);
  CHECK(again.data.skipped_lines == 3);
  CHECK(again.data.warnings == encoded.data.warnings);
  CHECK(again.data.notes == encoded.data.notes);
  CHECK(again.data.train.file == "t.tsv");
  CHECK(again.data.validation[1].name == "validation_2");
  CHECK(again.data.files == std::vector<fs::path>{"t.tsv", "a.tsv", "b.tsv"});
  CHECK(std::distance(fs::directory_iterator(folder.path()), {}) == 2);  // no temporary file is left

  // Every byte counts: whichever is changed, and wherever the file is cut.
  const auto whole = io::read_file(file);
  for (std::size_t at = 0; at < whole.size(); at += 37) {
    auto damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ 1);
    test::write_text(file, damaged);
    CHECK_THROWS_AS(tasks::read_encoded_data(file, files, tokenizer.vocab_size()), UserError);
    test::write_text(file, whole.substr(0, at));
    CHECK_THROWS_AS(tasks::read_encoded_data(file, files, tokenizer.vocab_size()), UserError);
  }
  test::write_text(file, whole);
  CHECK_THROWS_AS(tasks::read_encoded_data(file, files, 4), UserError);  // ids of another tokenizer
}

TEST_CASE("the key of encoded data follows contents, options and names", "[tasks]") {
  const test::TemporaryFolder folder;
  const auto tokenizer = test::write_text(folder / "spiece.model", "model");
  const auto train = test::write_text(folder / "train.tsv", "a"), dev = test::write_text(folder / "dev.tsv", "b");
  const std::vector<tasks::InputFile> files{{"train", train}, {"validation", dev}};
  const io::Json options{{"name", "glue/sst2"}, {"max_length", 128}};
  const auto key = tasks::encoded_data_key(options, files, tokenizer);
  CHECK(key.size() == 64);
  CHECK(tasks::encoded_data_key(options, files, tokenizer) == key);
  CHECK(tasks::encoded_data_key({{"name", "glue/sst2"}, {"max_length", 64}}, files, tokenizer) != key);
  CHECK(tasks::encoded_data_key(options, std::vector<tasks::InputFile>{{"train", dev}, {"validation", train}}, tokenizer) != key);
  test::write_text(folder / "dev.tsv", "c");
  CHECK(tasks::encoded_data_key(options, files, tokenizer) != key);
  test::write_text(folder / "dev.tsv", "b");
  test::write_text(folder / "spiece.model", "another");
  CHECK(tasks::encoded_data_key(options, files, tokenizer) != key);
}

TEST_CASE("max_examples keeps the same subset for every seed, in the order of the file", "[tasks]") {
  const test::TemporaryFolder folder;
  std::string table = "sentence\tlabel\n";
  for (int i = 0; i < 500; ++i) table += fmt::format("s{}\t{}\n", i, i == 17 ? -1 : i < 250 ? 0 : 1);
  const auto file = test::write_text(folder / "t.tsv", table).string();
  const auto load = [&](const std::string& limits) {
    return test::task_of(fmt::format(
                             R"({{"name": "glue/sst2", "files": {{"train": "{}", "validation": "{}"}}{}}})", file, file, limits))
        .load({});
  };
  const auto texts = [](const tasks::Split& split) {
    std::vector<std::string> found;
    for (const auto& example : split.examples) found.push_back(example.text);
    return found;
  };
  const auto all = load("");
  CHECK(all.train.examples.size() == 499);
  CHECK(all.validation[0].examples.size() == 500);
  const auto few = load(R"(, "max_examples": {"train": 40, "validation": 100})");
  REQUIRE(few.train.examples.size() == 40);
  REQUIRE(few.validation[0].examples.size() == 100);
  const auto train = texts(few.train), validation = texts(few.validation[0]);
  // Files of one source are cut alike, so the smaller subset lies in the larger one.
  const auto everything = texts(all.train);
  auto at = everything.begin();
  for (const auto& text : train) {
    CHECK(std::ranges::count(validation, text) == 1);
    at = std::find(at, everything.end(), text);  // in the order of the file
    REQUIRE(at != everything.end());
  }
  const auto positives = std::ranges::count_if(few.validation[0].examples, [](const auto& e) { return e.label == 1.0; });
  CHECK(std::abs(positives - 50) <= 25);  // 5 sigma: a file that is ordered by class is not cut by class
  for (const auto& example : few.validation[0].examples) CHECK(example.label);
  CHECK(few.notes.size() == 2);
  CHECK(texts(load(R"(, "max_examples": {"train": 499, "validation": 100})").train) == everything);
  CHECK(texts(load(R"(, "max_examples": {"validation": 7})").train) == everything);
  CHECK(test::user_error([&] { load(R"(, "max_examples": {"train": 0})"); }) ==
        "r.json#/task/max_examples/train: got 0, expected at least 1");
  CHECK(test::user_error([&] { load(R"(, "max_examples": {"test": 5})"); })
            .starts_with("r.json#/task/max_examples: unknown key \"test\""));
}
