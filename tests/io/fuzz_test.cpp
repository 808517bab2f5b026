// Damaged files must end in a UserError or be read, whatever is wrong with them. The mutations are the same in every
// run; a failing one is named by its number.

#include <array>
#include <cstring>
#include <functional>

#include "core/error.h"
#include "core/random.h"
#include "io/atomic_file.h"
#include "io/json_object.h"
#include "io/safetensors.h"
#include "support/catch.h"
#include "support/paths.h"
#include "support/sentencepiece_bytes.h"
#include "text/t5_tokenizer.h"

using namespace mergex;

namespace {

class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : random_(seed) {}

  std::string operator()(std::string bytes) {
    for (auto count = 1 + random_.below(4); count > 0 && !bytes.empty(); --count) mutate(bytes);
    return bytes;
  }
  std::uint64_t below(std::uint64_t bound) { return random_.below(bound); }

 private:
  void mutate(std::string& bytes) {
    const auto size = bytes.size();
    const auto at = random_.below(size);
    const auto length = std::min<std::size_t>(size - at, 1 + random_.below(16));
    switch (random_.below(8)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << random_.below(8)));
        break;
      case 1:
        bytes[at] = static_cast<char>(random_.below(256));
        break;
      case 2:
        bytes.resize(at);
        break;
      case 3:
        bytes.erase(at, length);
        break;
      case 4:
        bytes.insert(random_.below(size), bytes.substr(at, length));
        break;
      case 5:
        bytes.replace(at, length, length, "\0\xFF\x7F\x80"[random_.below(4)]);
        break;
      default:
        edit_number(bytes, at);
    }
  }

  // The next number that is written in the text becomes a troublesome one.
  void edit_number(std::string& bytes, std::size_t from) {
    constexpr std::array kNumbers{"0", "1", "-1", "3.5", "1e309", "255", "4294967295", "4294967296", "2147483648",
                                  "9223372036854775807", "9223372036854775808", "18446744073709551615",
                                  "18446744073709551616", "null", "[]", "\"F64\""};
    constexpr const char* kDigits = "0123456789";
    const auto begin = bytes.find_first_of(kDigits, from);
    if (begin == std::string::npos) return;
    const auto end = std::min(bytes.find_first_not_of(kDigits, begin), bytes.size());
    bytes.replace(begin, end - begin, kNumbers[random_.below(kNumbers.size())]);
  }

  SplitMix64 random_;
};

// How many of the mutants could be read. Anything but a UserError fails the test.
template <class Read>
int count_readable(int num_mutants, const std::function<std::string(int)>& mutant, const Read& read) {
  int num_readable = 0;
  for (int i = 0; i < num_mutants; ++i) {
    INFO("mutant " << i);
    const auto bytes = mutant(i);
    try {
      read(bytes);
      ++num_readable;
    } catch (const UserError& error) {
      const std::string message = error.what();
      if (message.empty() || message.find('\n') != std::string::npos) FAIL("not one line: " << message);
    }
  }
  return num_readable;
}

// Removed before it is written anew: some file systems sync what replaces the content of a file.
void replace_file(const std::filesystem::path& path, const std::string& bytes) {
  std::filesystem::remove(path);
  test::write_text(path, bytes);
}

std::string safetensors_bytes(const std::string& header, const std::string& data) {
  std::string length(8, '\0');
  const std::uint64_t size = header.size();
  std::memcpy(length.data(), &size, sizeof size);
  return length + header + data;
}

void use_tokenizer(const std::filesystem::path& file) {
  const auto tokenizer = text::T5Tokenizer::load(file);
  for (const auto* input : {"", "hello world", "caf\u00e9 \uFB01 \u2460 \uFF21\u3000\u00BD \U0001F600\n\tx</s>y<extra_id_3>",
                            "\u0130\u01C4\u1E9B\u0323 \uAC00\u1100\u1161 the quick brown fox"}) {
    const auto ids = tokenizer.encode(input);
    tokenizer.decode(ids, false);
    tokenizer.decode(ids, true);
  }
  tokenizer.decode(std::array<std::int32_t, 4>{0, 5, 1 << 30, -7}, false);
}

// The first part of a serialized model that is field `number` (the normaliser is 3).
std::string top_level_field(std::string_view message, unsigned number) {
  for (std::size_t at = 0; at + 1 < message.size();) {
    const auto begin = at;
    const auto tag = static_cast<unsigned char>(message[at++]);
    std::size_t size = 0;
    for (unsigned shift = 0;; shift += 7) {
      const auto byte = static_cast<unsigned char>(message[at++]);
      size |= std::size_t{byte & 0x7Fu} << shift;
      if (byte < 0x80) break;
    }
    at += size;
    if (tag == (number << 3 | 2)) return std::string(message.substr(begin, at - begin));
  }
  return {};
}

}  // namespace

TEST_CASE("damaged safetensors files are read or refused", "[io][law]") {
  test::TemporaryFolder folder;
  const auto path = folder / "w.safetensors";
  std::vector<std::byte> data(64);
  const std::span<const std::byte> bytes(data);
  io::write_safetensors(path, std::array{io::TensorView{"a.weight", io::DType::kF32, {2, 3}, bytes.first(24)},
                                         io::TensorView{"b", io::DType::kBF16, {}, bytes.first(2)},
                                         io::TensorView{"c", io::DType::kI64, {0, 4}, {}},
                                         io::TensorView{"d", io::DType::kU8, {5}, bytes.first(5)}});
  const auto whole = io::read_file(path);
  std::uint64_t header_size = 0;
  std::memcpy(&header_size, whole.data(), sizeof header_size);
  const auto header = whole.substr(8, header_size), tail = whole.substr(8 + header_size);

  Mutator mutate(1);
  const auto num_readable = count_readable(
      4000,
      [&](int i) { return i % 2 == 0 ? mutate(whole) : safetensors_bytes(mutate(header), tail); },
      [&](const std::string& mutant) {
        replace_file(path, mutant);
        const auto file = io::SafetensorsFile::open(path);
        unsigned sum = 0;
        std::size_t total = 0;
        for (const auto& tensor : file.tensors()) {
          for (const auto byte : tensor.bytes) sum += std::to_integer<unsigned>(byte);
          total += tensor.bytes.size();
          if (file.find(tensor.name) != &tensor) FAIL("a tensor is not found by its name");
        }
        if (total > mutant.size() || sum > 255 * total) FAIL("more data than the file has");
      });
  CHECK(num_readable > 0);
  CHECK(num_readable < 4000);
}

TEST_CASE("damaged JSON recipes are read or refused", "[io][law]") {
  const std::string recipe = R"({
  "name": "sst2-t5-base-ties", "seed": 42, "paper": {"expected": 94.61, "known": true, "note": "caf\u00e9"},
  "experts": {"method": "camex", "num_experts": 7, "linears": ["wi", "wo"], "curvature": {"rank": 1}},
  "training": {"epochs": 5, "optimizer": {"name": "adamw", "learning_rate": 2e-4}}, "sweep": {"/seed": [1, 2, 3]}
})";
  Mutator mutate(2);
  const auto num_readable = count_readable(
      4000, [&](int) { return mutate(recipe); },
      [&](const std::string& mutant) {
        auto document = std::make_shared<io::JsonDocument>();
        document->value = io::parse_json(mutant, "r.json");
        document->file = "r.json";
        auto resolved = std::make_shared<io::Json>();
        io::JsonObject root(document, resolved);
        root.required<std::string>("name");
        root.required<std::int64_t>("seed", {.at_least = 0});
        auto paper = root.required_object("paper");
        paper.required<double>("expected");
        paper.required<bool>("known");
        paper.required<std::string>("note");
        paper.finish();
        auto experts = root.required_object("experts");
        experts.choice("method", std::vector<std::string>{"camex", "smoe"}, 0);
        experts.required<std::int64_t>("num_experts", {.at_least = 1, .at_most = 1024});
        experts.required<std::vector<std::string>>("linears");
        experts.any("curvature");
        experts.finish();
        auto training = root.required_object("training");
        training.required<std::int64_t>("epochs");
        training.any("optimizer");
        training.finish();
        root.any("sweep");
        root.finish();
        resolved->dump(2, ' ', false, io::Json::error_handler_t::replace);
      });
  CHECK(num_readable > 0);
  CHECK(num_readable < 4000);
}

TEST_CASE("damaged tokenizer models are read or refused", "[io][law]") {
  test::TemporaryFolder folder;
  const auto path = folder / "spiece.model";
  const auto read = [&](const std::string& mutant) {
    replace_file(path, mutant);
    use_tokenizer(path);
  };
  Mutator mutate(3);
  const auto small = test::small_sentencepiece_model();
  const auto num_readable = count_readable(2000, [&](int) { return mutate(small); }, read);
  CHECK(num_readable > 0);
  CHECK(num_readable < 2000);

  const auto model_file = test::data_path("tokenizers/t5/spiece.model");
  if (!model_file) return;
  const auto whole = io::read_file(*model_file);
  // The real normaliser behind few pieces: most of the bytes are the table that is walked while encoding.
  const auto normalizer = top_level_field(whole, 3);
  REQUIRE(normalizer.size() > 100'000);
  read(small + normalizer);
  CHECK(count_readable(300, [&](int) { return mutate(small + normalizer); }, read) > 0);
  // Damage that keeps the lengths: only the check of the table stands between it and the library.
  const auto scratched = [&](int) {
    auto mutant = small + normalizer;
    for (auto count = 1 + mutate.below(200); count > 0; --count) {
      mutant[small.size() + 40 + mutate.below(normalizer.size() - 40)] = static_cast<char>(mutate.below(256));
    }
    return mutant;
  };
  count_readable(300, scratched, read);
  CHECK(count_readable(20, [&](int) { return mutate(whole); }, read) < 20);
}
