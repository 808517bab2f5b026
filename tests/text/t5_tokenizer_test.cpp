#include "text/t5_tokenizer.h"

#include "core/utf8.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <thread>

#include "io/json.h"
#include "support/catch.h"
#include "support/paths.h"
#include "support/sentencepiece_bytes.h"

using namespace mergex;
using Ids = std::vector<std::int32_t>;
using text::T5Tokenizer;

namespace {

constexpr std::int64_t kNoLimit = 1'000'000;

std::filesystem::path small_model(const test::TemporaryFolder& folder) {
  return test::write_text(folder / "spiece.model", test::small_sentencepiece_model());
}

}  // namespace

TEST_CASE("T5 ids equal those of the reference tokenizer", "[text][golden]") {
  const auto golden = test::golden_file("t5_tokenizer.json");
  const auto model_file = test::data_path("tokenizers/t5/spiece.model");
  if (!golden || !model_file) return;
  const auto tokenizer = T5Tokenizer::load(*model_file);
  const auto cases = io::read_json(*golden);
  REQUIRE(cases["rows"].size() == 357);
  REQUIRE(cases["pairs"].size() == 40);
  int num_different = 0;
  const auto compare = [&](const Ids& ids, const io::Json& expected) {
    CHECK(ids == expected.get<Ids>());
    num_different += ids == expected.get<Ids>() ? 0 : 1;
  };
  for (const auto& row : cases["rows"]) {
    const auto input = row["text"].get<std::string>();
    INFO(row.dump());
    compare(tokenizer.encode(input), row["transformers"]);
    compare(tokenizer.encode(input, std::nullopt, kNoLimit), row["with_eos"]);
    // Where no special token stands in the text, sentencepiece's own ids are meant to be the same.
    bool is_plain = true;
    for (const auto id : row["transformers"].get<Ids>()) is_plain = is_plain && id != tokenizer.eos_id() && id < 32000;
    if (is_plain && input.find("<unk>") == std::string::npos && input.find("<pad>") == std::string::npos) {
      compare(tokenizer.encode(input), row["sentencepiece"]);
    }
  }
  for (const auto& pair : cases["pairs"]) {
    const auto a = pair["a"].get<std::string>(), b = pair["b"].get<std::string>();
    INFO(pair.dump());
    compare(tokenizer.encode(a, b, kNoLimit), pair["ids"]);
    compare(tokenizer.encode(a, b, 24), pair["truncated_24"]);
  }
  test::log_golden("t5_tokenizer", num_different == 0 ? "ok, 357 rows and 40 pairs equal"
                                                      : fmt::format("FAILED, {} lists of ids differ", num_different));
}

TEST_CASE("T5 ids and texts that others published", "[text][golden]") {
  const auto model_file = test::data_path("tokenizers/t5/spiece.model");
  if (!model_file) return;
  const auto tokenizer = T5Tokenizer::load(model_file->parent_path());
  CHECK(tokenizer.model_file() == *model_file);
  const auto encoded = [&](const char* input) { return tokenizer.encode(input, std::nullopt, kNoLimit); };
  CHECK(encoded("Hello World!, how are you?") == Ids{8774, 1150, 55, 6, 149, 33, 25, 58, 1});
  CHECK(encoded("A long paragraph for summarization.") == Ids{71, 307, 8986, 21, 4505, 1635, 1707, 5, 1});
  CHECK(encoded("Summary of the text.") == Ids{20698, 13, 8, 1499, 5, 1});
  const Ids with_specials{0, 1960, 19, 2, 1245, 239, 1};
  CHECK(tokenizer.encode("<pad> Today is <unk> nice day </s>") == with_specials);
  CHECK(tokenizer.decode(with_specials, false) == "<pad> Today is<unk> nice day</s>");
  CHECK(tokenizer.decode(with_specials, true) == "Today is nice day");
  CHECK(tokenizer.pad_id() == 0);
  CHECK(tokenizer.eos_id() == 1);
  CHECK(tokenizer.unk_id() == 2);
  CHECK(tokenizer.sentinel_id(0) == 32099);
  CHECK(tokenizer.sentinel_id(99) == 32000);
  CHECK(tokenizer.vocab_size() == 32100);
}

TEST_CASE("what T5 encodes decodes to the same words", "[text][law]") {
  test::TemporaryFolder folder;
  const auto tokenizer = T5Tokenizer::load(small_model(folder));
  for (const auto* input : {"", "hello", "hello world", "ah hello", "hello<extra_id_7> world", "l<extra_id_99>"}) {
    CHECK(tokenizer.decode(tokenizer.encode(input), false) == input);
  }
  // Ids that a padded embedding or a loss mask brings along are no text.
  CHECK(tokenizer.decode(Ids{-100, 4, 5, 4000, 1}, true) == "hello world");
  CHECK(tokenizer.decode(Ids{}, true).empty());
}

TEST_CASE("a T5 text never exceeds its limit and keeps its ends", "[text][law]") {
  test::TemporaryFolder folder;
  const auto tokenizer = T5Tokenizer::load(small_model(folder));
  const std::string a = "hello world hello", b = "a e h l o";
  const auto ids_a = tokenizer.encode(a), ids_b = tokenizer.encode(b);
  for (std::int64_t limit = 2; limit < 20; ++limit) {
    const auto pair = tokenizer.encode(a, b, limit);
    const auto full = static_cast<std::int64_t>(ids_a.size() + ids_b.size()) + 2;
    CHECK(static_cast<std::int64_t>(pair.size()) == std::min(limit, full));
    CHECK(std::count(pair.begin(), pair.end(), tokenizer.eos_id()) == 2);
    CHECK(pair.back() == tokenizer.eos_id());
    const auto single = tokenizer.encode(a, std::nullopt, limit);
    CHECK(single.size() == std::min<std::size_t>(static_cast<std::size_t>(limit), ids_a.size() + 1));
    CHECK(std::equal(single.begin(), single.end() - 1, ids_a.begin()));
  }
  CHECK(tokenizer.encode("", std::string(), 2) == Ids{1, 1});
  CHECK(test::user_error([&] { tokenizer.encode(a, b, 1); }) == "max_length is 1, expected at least 2 (for </s>)");
}

TEST_CASE("a model of one's own gets its sentinels above its pieces", "[text]") {
  test::TemporaryFolder folder;
  const auto tokenizer = T5Tokenizer::load(small_model(folder));
  CHECK(tokenizer.vocab_size() == 112);
  CHECK(tokenizer.sentinel_id(0) == 111);
  CHECK(tokenizer.sentinel_id(99) == 12);
  CHECK_THROWS_AS(tokenizer.sentinel_id(100), std::out_of_range);
  CHECK(tokenizer.encode("hello<extra_id_0>hello") == Ids{4, 111, 4});
  CHECK(tokenizer.encode("  hello   <extra_id_10></s>  world ") == Ids{4, 101, 1, 5});
  // Close to a sentinel, but none.
  for (const auto* input : {"<extra_id_100>", "<extra_id_01>", "<extra_id_>", "<extra_id_1", "<extra_id_-1>", "<"}) {
    for (const auto id : tokenizer.encode(input)) CHECK(id < 12);
  }
  CHECK(tokenizer.encode(std::string("hello\0world", 11)).front() == 4);
}

TEST_CASE("a file that is no sentencepiece model is an error of one line", "[text]") {
  test::TemporaryFolder folder;
  const auto load = [&](const std::string& bytes) {
    const auto file = test::write_text(folder / "m.model", bytes);
    auto message = test::user_error([&] { T5Tokenizer::load(file); });
    CHECK(message.starts_with(file.string() + ": "));
    CHECK(message.find('\n') == std::string::npos);
    return message.substr(file.string().size() + 2);
  };
  const auto damaged = [](const std::string& fault) {
    return "no T5 tokenizer model: " + fault + "; download or copy it again";
  };
  const auto specials = test::specials_message();
  CHECK(load("") == damaged("it holds no pieces"));
  CHECK(load("version https://git-lfs.github.com/spec/v1\n") == damaged("its structure is damaged or cut off"));
  CHECK(load(test::small_sentencepiece_model().substr(0, 60)) == damaged("its structure is damaged or cut off"));
  CHECK(load(specials + test::piece_message("a\xFF", 0)) == damaged("piece 3 is not valid UTF-8"));
  CHECK(load(specials + test::piece_message("", 0)) == damaged("piece 3 is empty"));
  CHECK(load(specials + test::piece_message("<pad>", 0)) == damaged("piece 3 is a repetition"));
  CHECK(load(specials + test::piece_message(std::string("a\0b", 3), 0)) == damaged("piece 3 holds a zero byte"));
  CHECK(load(specials + test::piece_message(std::string(2000, 'a'), 0)) ==
        damaged("piece 3 is 2000 bytes long, expected at most 1024"));
  CHECK(load(specials + test::piece_message("a", std::nanf(""))) == damaged("piece 3 has no finite score"));
  // A trie of one block whose root leads out of it, and one whose value lies behind the replacements.
  const auto with_table = [&](std::string trie, const std::string& replacements) {
    trie.resize(1024);
    return specials + test::delimited(3, test::delimited(2, std::string("\0\4\0\0", 4) + trie + replacements));
  };
  CHECK(load(with_table("\xFF\xFF\xFF\x7F", std::string(1, '\0'))) == damaged("its normalisation table is damaged"));
  CHECK(load(with_table({"\0\1\0\0\0\0\0\0", 8}, "x")) == damaged("its normalisation table is damaged"));
  CHECK(load(specials + test::delimited(3, test::delimited(2, "abc"))) == damaged("its normalisation table is damaged"));
  CHECK(load(specials + test::delimited(2, std::string(1, 3 << 3) + "\2")) ==
        damaged("its type is bpe, expected unigram"));
  CHECK(load(test::piece_message("<unk>", 0, test::PieceType::kUnknown) + test::piece_message("a", 0)) ==
        "the model has no padding piece, which T5 needs; train it with pad_id=0, eos_id=1, unk_id=2, bos_id=-1");
  CHECK(load(test::piece_message("a", 0)).starts_with("no T5 tokenizer model: "));  // no unknown piece

  CHECK(test::user_error([&] { T5Tokenizer::load(folder / "none.model"); }) ==
        (folder / "none.model").string() + ": no such file");
  CHECK(test::user_error([&] { T5Tokenizer::load(folder.path()); }) ==
        folder.path().string() + ": holds no spiece.model; copy the tokenizer's spiece.model from where the checkpoint "
                                 "comes from");
}

TEST_CASE("tokenizer.model is found as well", "[text]") {
  test::TemporaryFolder folder;
  test::write_text(folder / "tokenizer.model", test::small_sentencepiece_model());
  CHECK(T5Tokenizer::load(folder.path()).model_file() == folder / "tokenizer.model");
}

TEST_CASE("UTF-8 is checked strictly", "[text]") {
  for (const auto* valid : {"", "a", "\u00e9", "\u20ac", "\U0001F600", "\uD7FF\uE000", "\U0010FFFF"}) {
    CHECK_FALSE(invalid_utf8_at(valid));
  }
  for (const auto* invalid : {"ab\x80", "ab\xC0\x80", "ab\xC3", "ab\xE0\x80\x80", "ab\xED\xA0\x80", "ab\xF0\x80\x80\x80",
                              "ab\xF4\x90\x80\x80", "ab\xF5", "ab\xE2\x82", "ab\xE2\x82z"}) {
    CHECK(invalid_utf8_at(invalid) == 2u);
  }
  test::TemporaryFolder folder;
  const auto tokenizer = T5Tokenizer::load(small_model(folder));
  CHECK(test::user_error([&] { tokenizer.encode("ab\xFF"); }) ==
        "a text is not valid UTF-8 at its byte 2 (0xff); convert the data to UTF-8");
}

TEST_CASE("of equally probable segmentations the one with the longest last piece is taken", "[text][law]") {
  const std::vector<text::SentencePiece> pieces{{"<unk>", 0, text::SentencePiece::Type::kUnknown},
                                                {"!", -6.421379566192627f},
                                                {"!!!!!", -12.307869911193848f},
                                                {"ab", -1},
                                                {"abc", -2},
                                                {"c", -1},
                                                {"x", 0, text::SentencePiece::Type::kControl},
                                                {"user", 0, text::SentencePiece::Type::kUserDefined}};
  const text::Unigram unigram(pieces);
  CHECK(unigram.encode("").empty());
  CHECK(unigram.encode("!!!!!!") == Ids{1, 2});
  CHECK(unigram.encode("abc") == Ids{4});
  CHECK(unigram.encode("ab") == Ids{3});
  CHECK(unigram.encode("user") == Ids{7});
  CHECK(unigram.encode("\u6771\u4eacx!\u6771") == Ids{0, 1, 0});  // a run of unknowns is one; control pieces match nothing
}

TEST_CASE("several threads encode alike", "[text]") {
  test::TemporaryFolder folder;
  const auto tokenizer = T5Tokenizer::load(small_model(folder));
  const std::string input = "hello world <extra_id_3> he loa hello";
  const auto expected = tokenizer.encode(input);
  std::vector<int> num_equal(4, 0);
  std::vector<std::thread> threads;
  for (auto& count : num_equal) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) count += tokenizer.encode(input) == expected ? 1 : 0;
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(num_equal == std::vector<int>(4, 200));
}
