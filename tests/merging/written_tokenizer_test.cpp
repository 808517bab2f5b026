#include "merging/written_tokenizer.h"

#include <fmt/format.h>

#include <cstdlib>
#include <iostream>

#include "core/error.h"
#include "merging/vocabulary_support.h"
#include "support/catch.h"
#include "support/paths.h"
#include "support/process.h"

using namespace mergex;
using namespace mergex::merging;
using test::SmallTokenizer;
namespace fs = std::filesystem;

namespace {

text::Token added_token(const std::string& text, std::int64_t id, text::AddedTokenFlags flags = {}) {
  return {.text = text, .id = id, .added = flags};
}

SmallTokenizer base_tokenizer() {
  auto tokenizer = SmallTokenizer::of({"a", "b", "c", "d", "e", "ab", "cd", "abcd", "de"});
  tokenizer.merges = {{"a", "b"}, {"c", "d"}, {"ab", "cd"}, {"d", "e"}};
  tokenizer.added = {added_token("<s>", 9, {.special = true})};  // only in the list: what the base has behind its model
  tokenizer.config = {{"vocab_size", 10}, {"bos_token_id", 9}};
  tokenizer.tokenizer_config = {{"bos_token", "<s>"},
                                {"added_tokens_decoder", {{"9", {{"content", "<s>"}, {"special", true}}}}}};
  return tokenizer;
}

SmallTokenizer donor_tokenizer() {
  auto tokenizer = SmallTokenizer::of({"e", "d", "c", "b", "a", "f", "ab", "bc", "abc", "abcde", "cde", "ef", "<s>", "fe"});
  // "abcde" is cut elsewhere than in the base: abc + de there, abcd + e here
  tokenizer.merges = {{"b", "c"}, {"a", "b"}, {"a", "bc"}, {"d", "e"}, {"abc", "de"}, {"c", "de"}, {"e", "f"}, {"f", "e"}, {"abc", "d"}};
  tokenizer.vocab["de"] = 14;
  tokenizer.vocab["abcd"] = 16;  // the base has it, from other parts: its merge stays out
  tokenizer.added = {added_token("<s>", 12, {.special = true}), added_token("<tool>", 15, {.lstrip = true})};
  tokenizer.config = {{"vocab_size", 17}};
  return tokenizer;
}

VocabularyPlan union_of(const fs::path& base, std::int64_t base_rows, const fs::path& donor, std::int64_t donor_rows) {
  const std::vector<VocabularyModel> models{{"base", base, base_rows, 4}, {"donor", donor, donor_rows, 4}};
  return plan_vocabulary(models, 0, 0, {.where = "recipe.yaml"});
}

io::Json written(const VocabularyPlan& plan, const std::string& name) {
  const auto file = std::ranges::find(plan.written_files, name, &std::pair<std::string, std::string>::first);
  REQUIRE(file != plan.written_files.end());
  return io::parse_json(file->second, name);
}

}  // namespace

TEST_CASE("a union's tokenizer.json", "[merging]") {
  test::TemporaryFolder folder;
  const auto plan = union_of(base_tokenizer().write(folder / "base"), 10, donor_tokenizer().write(folder / "donor"), 17);
  const auto tokenizer = written(plan, "tokenizer.json");
  CHECK(tokenizer["model"]["vocab"] ==
        io::Json{{"a", 0}, {"ab", 5}, {"abcd", 7}, {"b", 1}, {"c", 2}, {"cd", 6}, {"d", 3}, {"de", 8}, {"e", 4},
                 {"<s>", 9}, {"f", 10}, {"bc", 11}, {"abc", 12}, {"abcde", 13}, {"cde", 14}, {"ef", 15}, {"fe", 16},
                 {"<tool>", 17}});
  // The base's merges first; then the donor's that make something new, and one for "abcde" as the base cuts it.
  CHECK(tokenizer["model"]["merges"] ==
        io::Json::parse(R"([["a","b"],["c","d"],["ab","cd"],["d","e"],["b","c"],["a","bc"],["ab","c"],["abc","de"],
                            ["abcd","e"],["c","de"],["cd","e"],["e","f"],["f","e"]])"));
  REQUIRE(tokenizer["added_tokens"].size() == 2);
  CHECK(tokenizer["added_tokens"][1] == io::Json{{"id", 17}, {"content", "<tool>"}, {"single_word", false}, {"lstrip", true},
                                                 {"rstrip", false}, {"normalized", false}, {"special", false}});
  CHECK(written(plan, "tokenizer_config.json")["added_tokens_decoder"]["17"]["content"] == "<tool>");
  CHECK(plan.config_edits == std::vector<std::pair<std::string, io::Json>>{{"/vocab_size", 18}});
  CHECK(plan.copied_files.empty());
}

TEST_CASE("a union as vocab.json and merges.txt, as vocab.txt", "[merging]") {
  test::TemporaryFolder folder;
  const auto base = folder / "base", donor = folder / "donor";
  for (const auto& model : {base, donor}) {
    fs::create_directories(model);
    test::write_text(model / "config.json", R"({"vocab_size": 4})");
  }
  SECTION("vocab.json") {
    test::write_text(base / "vocab.json", R"({"a": 0, "b": 1, "ab": 2})");
    test::write_text(base / "merges.txt", "#version: 0.2\na b");
    test::write_text(base / "added_tokens.json", R"({"<s>": 3})");
    test::write_text(base / "tokenizer.model", "of another program");
    test::write_text(donor / "vocab.json", R"({"a": 0, "b": 1, "ba": 2})");
    test::write_text(donor / "merges.txt", "#version: 0.2\nb a\n");
    test::write_text(donor / "added_tokens.json", R"({"<tool>": 3})");
    const auto plan = union_of(base, 4, donor, 4);
    CHECK(written(plan, "vocab.json") == io::Json{{"a", 0}, {"b", 1}, {"ab", 2}, {"<s>", 3}, {"ba", 4}, {"<tool>", 5}});
    CHECK(written(plan, "added_tokens.json") == io::Json{{"<s>", 3}, {"<tool>", 5}});
    CHECK(plan.written_files[1] == std::pair<std::string, std::string>("merges.txt", "#version: 0.2\na b\nb a\n"));
    CHECK(plan.copied_files.empty());
    CHECK(plan.warnings == std::vector<std::string>{fmt::format(
                               "the result has more tokens than \"tokenizer.model\", which therefore is not copied from {}",
                               base.string())});
  }
  SECTION("vocab.txt") {
    test::write_text(base / "vocab.txt", "[UNK]\nhello\n");
    test::write_text(donor / "vocab.txt", "[UNK]\nhello\n##s\nworld\n");
    const auto plan = union_of(base, 2, donor, 4);
    CHECK(plan.written_files ==
          std::vector<std::pair<std::string, std::string>>{{"vocab.txt", "[UNK]\nhello\n##s\nworld\n"}});
  }
}

TEST_CASE("a union of Unigram tokenizers keeps places and scores", "[merging]") {
  test::TemporaryFolder folder;
  const auto base = folder / "base", donor = folder / "donor";
  for (const auto& model : {base, donor}) {
    fs::create_directories(model);
    test::write_text(model / "config.json", "{}");
  }
  test::write_text(base / "tokenizer.json", R"({"added_tokens": [{"id": 2, "content": "<x>"}],
    "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.25]]}})");
  test::write_text(donor / "tokenizer.json", R"({"added_tokens": [],
    "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["b", -2.5], ["a", -1.0]]}})");
  const auto plan = union_of(base, 3, donor, 3);
  CHECK(written(plan, "tokenizer.json")["model"]["vocab"] ==
        io::Json::parse(R"([["<unk>", 0.0], ["a", -1.25], ["<x>", 0.0], ["b", -2.5]])"));
  CHECK(plan.rows == 4);

  test::write_text(base / "tokenizer.json", R"({"added_tokens": [{"id": 5, "content": "<x>"}],
    "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.25]]}})");
  CHECK(test::user_error([&] { union_of(base, 6, donor, 3); }).ends_with(
      "token \"<x>\" has id 5, expected 2: this kind of tokenizer cannot be extended where ids are left out; use "
      "tokenizer_source: base"));
}

TEST_CASE("merges keep the spelling of the file", "[merging]") {
  test::TemporaryFolder folder;
  const auto base = base_tokenizer().write(folder / "base"), donor = donor_tokenizer().write(folder / "donor");
  test::write_text(base / "tokenizer.json", R"({"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}})");
  const auto merges = written(union_of(base, 3, donor, 17), "tokenizer.json")["model"]["merges"];
  CHECK(merges[0] == "a b");
  CHECK(merges[1] == "b c");
}

TEST_CASE("another value anywhere in a tokenizer's files gives a plan or a message", "[merging][law]") {
  test::TemporaryFolder folder;
  auto small = base_tokenizer();
  small.config["text_config"] = {{"vocab_size", 10}, {"eos_token_id", {9, 3}}};
  const auto base = small.write(folder / "base"), donor = donor_tokenizer().write(folder / "donor");
  test::write_text(base / "generation_config.json", R"({"eos_token_id": [9], "bad_words_ids": [[1, 2]]})");
  test::write_text(base / "added_tokens.json", R"({"<s>": 9})");
  const std::vector<io::Json> values{nullptr, true, -1, 3, 1e300, "x", "", io::Json::array(), io::Json::object(), {{"content", 1}}};
  int refused = 0, planned = 0;
  for (const auto& model : {base, donor}) {
    for (const auto* name : {"tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json", "added_tokens.json"}) {
      if (!fs::exists(model / name)) continue;
      const auto original = io::read_json(model / name);
      const auto leaves = original.flatten();
      for (const auto& [pointer, leaf] : leaves.items()) {
        for (io::Json::json_pointer at(pointer);; at.pop_back()) {  // the leaf and all that holds it
          for (const auto& value : values) {
            auto changed = original;
            changed[at] = value;
            test::write_text(model / name, changed.dump());
            INFO(name << at.to_string() << " = " << value.dump());
            try {
              const auto plan = union_of(base, 10, donor, 17);
              REQUIRE(plan.maps[0]->rows == plan.rows);
              ++planned;
            } catch (const UserError& error) {
              REQUIRE(std::string_view(error.what()).find('\n') == std::string_view::npos);
              ++refused;
            }
          }
          if (at.empty()) break;
        }
      }
      test::write_text(model / name, original.dump());
    }
  }
  CHECK(refused > 500);
  CHECK(planned > 500);
}

// Runs where a Python with `tokenizers` is found: $MERGEX_PYTHON, else python3.
TEST_CASE("a written tokenizer encodes as its sources do", "[merging][golden]") {
  test::TemporaryFolder folder;
  const auto base = base_tokenizer().write(folder / "base"), donor = donor_tokenizer().write(folder / "donor");
  const auto plan = union_of(base, 10, donor, 17);
  test::write_tokenizer(plan, folder / "result");
  const auto texts = test::write_text(
      folder / "texts.json", R"(["", "abcd", "abcdabcdede", "abcde", "aabbccddee", "abef", "<s>cdef <tool>ab", "bcdefabc"])");
  const char* python = std::getenv("MERGEX_PYTHON");
  const auto outcome = test::run_process(
      "/usr/bin/env", {python != nullptr ? python : "python3", MERGEX_SOURCE_DIR "/tests/merging/check_written_tokenizer.py",
                       folder / "result", base, donor, texts});
  if (outcome.exit_code == 77 || outcome.exit_code == 127) {
    std::cout << "written tokenizer: not checked, no Python with `tokenizers` (set MERGEX_PYTHON)\n";
    return;
  }
  INFO(outcome.err);
  REQUIRE(outcome.exit_code == 0);
  test::log_golden("merge/written_tokenizer", "ok, " + outcome.out.substr(0, outcome.out.find('\n')));
}
