#include "text/vocabulary.h"

#include <fmt/format.h>

#include <random>

#include "core/error.h"
#include "support/catch.h"
#include "support/paths.h"

using namespace mergex;
using text::Vocabulary;
namespace fs = std::filesystem;

namespace {

constexpr const char* kBpe = R"({"version": "1.0", "pre_tokenizer": {"type": "ByteLevel"},
 "added_tokens": [{"id": 7, "content": "<tool>", "special": false, "lstrip": true},
                  {"id": 0, "content": "<s>", "special": true}],
 "model": {"type": "BPE", "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 5}, "merges": [["a", "b"]]}})";

Vocabulary read(const std::string& tokenizer_json) {
  test::TemporaryFolder folder;
  test::write_text(folder / "tokenizer.json", tokenizer_json);
  return Vocabulary::read(folder.path());
}

std::string fault_of(const std::string& tokenizer_json) {
  const auto message = test::user_error([&] { read(tokenizer_json); });
  CHECK(message.find('\n') == std::string::npos);
  const auto at = message.find("tokenizer.json");
  REQUIRE(at != std::string::npos);
  return message.substr(at + std::string_view("tokenizer.json").size());
}

}  // namespace

TEST_CASE("tokens of tokenizer.json, by ascending id", "[text]") {
  const auto vocabulary = read(kBpe);
  CHECK(vocabulary.kind() == Vocabulary::Kind::kBpe);
  REQUIRE(vocabulary.tokens().size() == 5);
  CHECK(vocabulary.num_ids() == 8);
  std::vector<std::int64_t> ids;
  for (const auto& token : vocabulary.tokens()) ids.push_back(token.id);
  CHECK(ids == std::vector<std::int64_t>{0, 1, 2, 5, 7});
  CHECK(vocabulary.find("ab")->id == 5);
  CHECK(vocabulary.find("c") == nullptr);
  CHECK(vocabulary.at(7)->text == "<tool>");
  CHECK(vocabulary.at(3) == nullptr);
  CHECK_FALSE(vocabulary.find("a")->added);
  CHECK(vocabulary.find("<s>")->added->special);
  CHECK(vocabulary.find("<tool>")->added->lstrip);
  REQUIRE(vocabulary.merges().size() == 1);
  CHECK(vocabulary.merges()[0] == text::BpeMerge("a", "b"));
  CHECK(vocabulary.warnings().empty());
}

TEST_CASE("older spellings of tokenizer.json", "[text]") {
  const auto without_type = read(R"({"model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}})");
  CHECK(without_type.kind() == Vocabulary::Kind::kBpe);
  CHECK(without_type.merges()[0] == text::BpeMerge("a", "b"));
  CHECK(read(R"({"model": {"vocab": {"a": 0}, "max_input_chars_per_word": 100}})").kind() == Vocabulary::Kind::kWordPiece);
  CHECK(read(R"({"model": {"vocab": {"a": 0}}})").kind() == Vocabulary::Kind::kWordLevel);

  const auto unigram = read(R"({"model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.5]]}})");
  CHECK(unigram.kind() == Vocabulary::Kind::kUnigram);
  CHECK(unigram.find("a")->id == 1);
  CHECK(unigram.find("a")->score == -1.5);

  const auto twice = read(R"({"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0], ["a", -3.0]]}})");
  CHECK(twice.find("a")->id == 2);
  CHECK(twice.at(0) == nullptr);
  REQUIRE(twice.warnings().size() == 1);
  CHECK(twice.warnings()[0].ends_with("token \"a\" is there twice; the last one counts"));

  // The model's id is what every reader takes.
  const auto contradicting = read(R"({"added_tokens": [{"id": 9, "content": "a"}], "model": {"vocab": {"a": 0}}})");
  CHECK(contradicting.find("a")->id == 0);
  REQUIRE(contradicting.warnings().size() == 1);
  CHECK(contradicting.warnings()[0].find("has id 9, but 0 in the model's vocabulary") != std::string::npos);
}

TEST_CASE("vocabularies without tokenizer.json", "[text]") {
  test::TemporaryFolder folder;
  SECTION("vocab.json and merges.txt") {
    test::write_text(folder / "vocab.json", R"({"a": 0, "b": 1, "ab": 2})");
    test::write_text(folder / "merges.txt", "#version: 0.2\na b\n");
    test::write_text(folder / "added_tokens.json", R"({"<pad>": 3})");
    test::write_text(folder / "tokenizer_config.json",
                     R"({"pad_token": "<pad>", "added_tokens_decoder": {"3": {"content": "<pad>", "special": true}}})");
    const auto vocabulary = Vocabulary::read(folder.path());
    CHECK(vocabulary.kind() == Vocabulary::Kind::kBpe);
    CHECK(vocabulary.find("<pad>")->id == 3);
    CHECK(vocabulary.find("<pad>")->added->special);
    CHECK(vocabulary.merges().size() == 1);
    CHECK(vocabulary.roles().at("pad_token") == "<pad>");
  }
  SECTION("vocab.txt") {
    test::write_text(folder / "vocab.txt", "[PAD]\n[UNK]\nhello\n##s\n");
    test::write_text(folder / "tokenizer_config.json", R"({"pad_token": "[PAD]"})");
    test::write_text(folder / "special_tokens_map.json",
                     R"({"unk_token": {"content": "[UNK]"}, "mask_token": null, "pad_token": "overruled"})");
    const auto vocabulary = Vocabulary::read(folder.path());
    CHECK(vocabulary.kind() == Vocabulary::Kind::kWordPiece);
    CHECK(vocabulary.find("##s")->id == 3);
    CHECK(vocabulary.roles() == std::map<std::string, std::string>{{"pad_token", "[PAD]"}, {"unk_token", "[UNK]"}});
  }
  SECTION("bytes that are no text") {
    test::write_text(folder / "vocab.txt", "[UNK]\n\xff\n");
    CHECK(test::user_error([&] { Vocabulary::read(folder.path()); }) ==
          (folder / "vocab.txt").string() + ":2: not valid UTF-8; copy the tokenizer again");
  }
  SECTION("a sentencepiece model") {
    test::write_text(folder / "spiece.model", "bytes");
    const auto vocabulary = Vocabulary::read(folder.path());
    CHECK(vocabulary.kind() == Vocabulary::Kind::kOpaque);
    CHECK(vocabulary.tokens().empty());
    CHECK(vocabulary.digest().size() == 64);
  }
  SECTION("nothing") {
    CHECK(test::user_error([&] { Vocabulary::read(folder.path()); }).find("holds no tokenizer (tokenizer.json, ") !=
          std::string::npos);
  }
}

TEST_CASE("damaged tokenizers are refused in one line", "[text]") {
  CHECK(fault_of("[]") == ": holds no \"model\" object; copy the tokenizer again");
  CHECK(fault_of(R"({"model": {"type": "Magic", "vocab": {}}})") ==
        R"(#/model/type: got "Magic", expected "BPE", "WordPiece", "Unigram" or "WordLevel")");
  CHECK(fault_of(R"({"model": {"type": "BPE"}})") ==
        "#/model/vocab: got nothing, expected tokens and ids; copy the tokenizer again");
  CHECK(fault_of(R"({"model": {"type": "BPE", "vocab": {"a": -1}}})") ==
        ": id of token \"a\": got -1, expected a whole number of 0 to 16777215; copy the tokenizer again");
  CHECK(fault_of(R"({"model": {"type": "BPE", "vocab": {"a": 1e3}}})").starts_with(": id of token \"a\": got 1000.0"));
  CHECK(fault_of(R"({"model": {"type": "BPE", "vocab": {"a": 99999999999999999999}}})").starts_with(": id of token"));
  CHECK(fault_of(R"({"model": {"type": "BPE", "vocab": {"a": 0, "b": 0}}})") ==
        ": tokens \"a\" and \"b\" have the same id 0; copy the tokenizer again");
  CHECK(fault_of(R"({"model": {"type": "BPE", "vocab": {}, "merges": ["abc"]}})") ==
        "#/model/merges/0: got \"abc\", expected two tokens; copy the tokenizer again");
  CHECK(fault_of(R"({"model": {"type": "Unigram", "vocab": [["a"]]}})") ==
        "#/model/vocab/0: got [\"a\"], expected [piece, score]; copy the tokenizer again");
  CHECK(fault_of(R"({"added_tokens": [{"id": 3}], "model": {"vocab": {}}})") ==
        "#/added_tokens/0: got {\"id\":3}, expected an object with \"content\" and \"id\"; copy the tokenizer again");
}

TEST_CASE("changed bytes of a tokenizer give a vocabulary or a message", "[text][law]") {
  std::mt19937 random(3);
  const std::string whole = kBpe;
  int refused = 0;
  for (int i = 0; i < 2000; ++i) {
    auto bytes = whole.substr(0, i % 2 == 0 ? whole.size() : random() % whole.size());
    for (unsigned k = random() % 4; k > 0 && !bytes.empty(); --k) bytes[random() % bytes.size()] = static_cast<char>(random());
    try {
      const auto vocabulary = read(bytes);
      for (const auto& token : vocabulary.tokens()) REQUIRE(vocabulary.at(token.id) == &token);
    } catch (const UserError& error) {
      ++refused;
      REQUIRE(std::string_view(error.what()).find('\n') == std::string_view::npos);
    }
  }
  CHECK(refused > 1000);
}
