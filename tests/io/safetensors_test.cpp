#include "io/safetensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "core/random.h"
#include "io/atomic_file.h"
#include "io/json.h"
#include "io/sha256.h"
#include "support/catch.h"
#include "support/paths.h"

using namespace mergex;
using io::DType;
using io::SafetensorsFile;
using io::TensorView;
namespace fs = std::filesystem;

namespace {

constexpr DType kAllTypes[] = {DType::kBool, DType::kU8,  DType::kI8,  DType::kU16, DType::kI16, DType::kF16, DType::kBF16,
                               DType::kU32,  DType::kI32, DType::kF32, DType::kU64, DType::kI64, DType::kF64};

std::vector<std::byte> random_bytes(std::size_t count, std::uint64_t seed) {
  SplitMix64 random(seed);
  std::vector<std::byte> bytes(count);
  for (auto& byte : bytes) byte = static_cast<std::byte>(random.below(256));
  return bytes;
}

// A file of this header and that many zero bytes of data.
std::string file_bytes(const std::string& header, std::size_t data_size) {
  std::string bytes(8, '\0');
  const std::uint64_t size = header.size();
  std::memcpy(bytes.data(), &size, sizeof size);
  return bytes + header + std::string(data_size, '\0');
}

bool same_bytes(std::span<const std::byte> a, std::span<const std::byte> b) { return std::ranges::equal(a, b); }

// Reference models: those of the test tree, else of the data folder.
std::vector<fs::path> reference_files() {
  auto folder = test::golden_folder("models");
  if (!folder) folder = test::data_path("golden/models");
  std::vector<fs::path> files;
  if (!folder) return files;
  for (const auto& item : fs::recursive_directory_iterator(*folder)) {
    if (item.path().extension() == ".safetensors") files.push_back(item.path());
  }
  std::ranges::sort(files);
  return files;
}

}  // namespace

TEST_CASE("tensors of every type and size come back bit by bit", "[io][law]") {
  const std::vector<std::vector<std::int64_t>> shapes{{}, {0}, {1}, {7}, {3, 5}, {2, 0, 4}, {1, 1, 1, 1, 3}, {257}};
  std::vector<std::vector<std::byte>> storage;
  std::vector<TensorView> tensors;
  for (const auto dtype : kAllTypes) {
    for (const auto& shape : shapes) {
      std::size_t count = io::dtype_size(dtype);
      for (const auto size : shape) count *= static_cast<std::size_t>(size);
      storage.push_back(random_bytes(count, storage.size()));
      tensors.push_back({fmt::format("w.{}.{}", io::dtype_name(dtype), tensors.size()), dtype, shape, storage.back()});
    }
  }
  test::TemporaryFolder folder;
  const std::map<std::string, std::string> metadata{{"format", "pt"}, {"note", "caf\u00e9 \"x\"\n"}};
  io::write_safetensors(folder / "a.safetensors", tensors, metadata);
  auto opened = SafetensorsFile::open(folder / "a.safetensors");
  const auto file = std::move(opened);  // views and the index survive a move
  CHECK(file.metadata() == metadata);
  CHECK(file.path() == folder / "a.safetensors");
  REQUIRE(file.tensors().size() == tensors.size());
  for (const auto& tensor : tensors) {
    INFO(tensor.name);
    const auto* found = file.find(tensor.name);
    REQUIRE(found != nullptr);
    CHECK(found->name == tensor.name);
    CHECK(found->dtype == tensor.dtype);
    CHECK(found->shape == tensor.shape);
    CHECK(found->num_elements() == tensor.num_elements());
    CHECK(same_bytes(found->bytes, tensor.bytes));
  }
  CHECK(file.find("w") == nullptr);
  const auto* previous = file.tensors().front().bytes.data();
  for (const auto& tensor : file.tensors()) {
    CHECK(tensor.bytes.data() >= previous);
    previous = tensor.bytes.data();
  }

  // The same set in another order is the same file; so is what was read.
  std::ranges::reverse(tensors);
  io::write_safetensors(folder / "b.safetensors", tensors, metadata);
  io::write_safetensors(folder / "c.safetensors", file.tensors(), metadata);
  CHECK(io::read_file(folder / "a.safetensors") == io::read_file(folder / "b.safetensors"));
  CHECK(io::read_file(folder / "a.safetensors") == io::read_file(folder / "c.safetensors"));
}

TEST_CASE("a header reads the same however it is spelled", "[io][law]") {
  // The first spellings are read by the quick way, the others (tabs, escapes, names beyond ASCII) by the general one.
  const auto header = [](const std::string& gap, const std::string& name, const std::string& note) {
    std::string text = R"({"__metadata__":{"format":"pt","note":")" + note + R"("},")" + name +
                       R"(":{"shape":[2,3],"data_offsets":[4,28],"dtype":"F32"},"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)" +
                       R"("none":{"dtype":"I64","shape":[0,7],"data_offsets":[28,28]}})";
    for (std::size_t at = 0; (at = text.find_first_of(":,[{}]", at)) != std::string::npos; at += 1 + gap.size()) {
      text.insert(at + 1, gap);
    }
    return text;
  };
  test::TemporaryFolder folder;
  for (const auto& text : {header("", "w", "a"), header(" ", "w", "a"), header("\n  ", "w", "a"), header("\t", "w", "a"),
                           header("\r\n", "w", "a"), header("", "\\u0077", "a"), header("", "w", "\\u0061")}) {
    INFO(text);
    const auto file = SafetensorsFile::open(test::write_text(folder / "x.safetensors", file_bytes(text, 28)));
    CHECK(file.metadata() == std::map<std::string, std::string>{{"format", "pt"}, {"note", "a"}});
    REQUIRE(file.tensors().size() == 3);
    CHECK(file.tensors()[0].name == "s");
    CHECK(file.tensors()[1].name == "w");
    CHECK(file.tensors()[1].shape == std::vector<std::int64_t>{2, 3});
    CHECK(file.tensors()[1].dtype == DType::kF32);
    CHECK(file.tensors()[1].bytes.size() == 24);
    CHECK(file.tensors()[2].shape == std::vector<std::int64_t>{0, 7});
    CHECK(file.find("none") == &file.tensors()[2]);
  }
}

TEST_CASE("a file without tensors is one", "[io][law]") {
  test::TemporaryFolder folder;
  io::write_safetensors(folder / "none.safetensors", {});
  CHECK(SafetensorsFile::open(folder / "none.safetensors").tensors().empty());
  CHECK(SafetensorsFile::open(folder / "none.safetensors").metadata().at("format") == "pt");
  test::write_text(folder / "bare.safetensors", file_bytes("{}", 0));
  CHECK(SafetensorsFile::open(folder / "bare.safetensors").metadata().empty());
}

TEST_CASE("data that is not aligned is read as it is", "[io][law]") {
  test::TemporaryFolder folder;
  // 1 + 8 bytes after a header of odd length: nothing is where a double wants to be.
  const std::string header = R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"d":{"dtype":"F64","shape":[],"data_offsets":[1,9]}})";
  auto bytes = file_bytes(header + (header.size() % 2 == 0 ? " " : ""), 9);
  const double value = -0.1;
  std::memcpy(bytes.data() + bytes.size() - sizeof value, &value, sizeof value);
  const auto file = SafetensorsFile::open(test::write_text(folder / "odd.safetensors", bytes));
  double read = 0;
  std::memcpy(&read, file.find("d")->bytes.data(), sizeof read);
  CHECK(read == value);
}

TEST_CASE("what contradicts itself is not written", "[io]") {
  test::TemporaryFolder folder;
  const auto bytes = random_bytes(8, 1);
  const auto file = folder / "x.safetensors";
  const TensorView good{"w", DType::kF32, {2}, bytes}, short_one{"w", DType::kF32, {3}, bytes};
  CHECK_THROWS_AS(io::write_safetensors(file, std::array{short_one}), std::invalid_argument);
  CHECK_THROWS_AS(io::write_safetensors(file, std::array{good, good}), std::invalid_argument);
  const TensorView reserved{"__metadata__", DType::kF32, {2}, bytes}, negative{"w", DType::kF32, {-2}, bytes};
  CHECK_THROWS_AS(io::write_safetensors(file, std::array{reserved}), std::invalid_argument);
  CHECK_THROWS_AS(io::write_safetensors(file, std::array{negative}), std::invalid_argument);
  CHECK(fs::is_empty(folder.path()));
}

TEST_CASE("reference files are read, and written to the same bytes", "[io][golden]") {
  const auto files = reference_files();
  if (files.empty()) return;
  test::TemporaryFolder folder;
  for (const auto& path : files) {
    INFO(path.string());
    const auto file = SafetensorsFile::open(path);
    CHECK(!file.tensors().empty());
    CHECK(file.metadata() == std::map<std::string, std::string>{{"format", "pt"}});
    io::write_safetensors(folder / "copy.safetensors", file.tensors(), file.metadata());
    const auto copy = SafetensorsFile::open(folder / "copy.safetensors");
    REQUIRE(copy.tensors().size() == file.tensors().size());
    for (std::size_t i = 0; i < copy.tensors().size(); ++i) {
      CHECK(copy.tensors()[i].name == file.tensors()[i].name);
      CHECK(same_bytes(copy.tensors()[i].bytes, file.tensors()[i].bytes));
    }
    CHECK(io::read_file(folder / "copy.safetensors") == io::read_file(path));

    if (path.parent_path().filename() == "t5_v11" && path.filename() == "model.safetensors") {
      CHECK(file.tensors().size() == 66);
      const auto* k = file.find("decoder.block.0.layer.0.SelfAttention.k.weight");
      REQUIRE(k != nullptr);
      CHECK(k->shape == std::vector<std::int64_t>{48, 32});
      CHECK(k->dtype == DType::kF32);
      CHECK(k == &file.tensors().front());
    }
  }
  test::log_golden("models", fmt::format("ok, {} safetensors files read and written to the same bytes", files.size()));
}

TEST_CASE("every fault of a safetensors file is an error of one line", "[io]") {
  test::TemporaryFolder folder;
  const auto path = folder / "w.safetensors";
  const auto fault_of = [&](const std::string& bytes) {
    test::write_text(path, bytes);
    auto message = test::user_error([&] { SafetensorsFile::open(path); });
    CHECK(message.starts_with(path.string()));
    CHECK(message.find('\n') == std::string::npos);
    CHECK(message.size() < 700);
    return message.substr(path.string().size());
  };
  const auto with = [&](const std::string& header, std::size_t data = 0) { return fault_of(file_bytes(header, data)); };

  CHECK(fault_of("abc") == ": 3 bytes, too short for a safetensors file; download or copy it again");
  CHECK(fault_of("") == ": 0 bytes, too short for a safetensors file; download or copy it again");
  CHECK(fault_of(std::string(8, '\xFF')) ==
        ": no safetensors file: its header would be 18446744073709551615 bytes long, expected at most 100000000");
  CHECK(fault_of(std::string("\x10\0\0\0\0\0\0\0{}", 10)) ==
        ": truncated: its header needs 24 bytes, 10 are there; download or copy it again");
  CHECK(fault_of(std::string(8, '\0')) == ": no safetensors file: its header does not start with \"{\"");
  CHECK(with("[]") == ": no safetensors file: its header does not start with \"{\"");
  CHECK(with("{\"a\"").starts_with(":1:5: not valid JSON: "));
  CHECK(with("{\"\xFF\xFE\": 1}").starts_with(":1:"));
  CHECK(with("{\"" + std::string(100000, 'a')).starts_with(":1:"));
  CHECK(with(std::string("{}\0\0", 4)) == ": no safetensors file: its header holds a zero byte at 2");
  const std::string entry = R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  CHECK(with(R"({"a":)" + entry + R"(,"a":)" + entry + "}", 4) == "#/a: key given twice; keep one");
  CHECK(with(R"({"__metadata__":[]})") == ": __metadata__ is [], expected an object of strings");
  CHECK(with(R"({"__metadata__":{"k":1}})") == ": __metadata__: \"k\" is 1, expected a string");

  const auto tensor = [&](const std::string& text, std::size_t data = 4) {
    const auto fault = with(R"({"w":)" + text + "}", data);
    CHECK(fault.starts_with(": tensor \"w\""));
    return fault.substr(std::string(": tensor \"w\"").size());
  };
  CHECK(tensor("7") == ": got 7, expected an object");
  CHECK(tensor(R"({"shape":[1],"data_offsets":[0,4]})") == ": \"dtype\" is missing");
  CHECK(tensor(R"({"dtype":"F32","data_offsets":[0,4]})") == ": \"shape\" is missing");
  CHECK(tensor(R"({"dtype":"F32","shape":[1]})") == ": \"data_offsets\" is missing");
  CHECK(tensor(R"({"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":0})") ==
        ": unknown key \"x\", expected dtype, shape and data_offsets");
  CHECK(tensor(R"({"dtype":3,"shape":[1],"data_offsets":[0,4]})") == ": dtype is 3, expected a string");
  CHECK(tensor(R"({"dtype":"F33","shape":[1],"data_offsets":[0,4]})") == ": no such dtype \"F33\"");
  CHECK(tensor(R"({"dtype":"F8_E4M3","shape":[4],"data_offsets":[0,4]})") ==
        ": dtype F8_E4M3 is unsupported; convert the file to F32, BF16 or F16");
  for (const auto* shape : {"1", "[-1]", "[1.5]", "[true]", "[\"1\"]", "[9223372036854775808]", "null", "{}"}) {
    CHECK(tensor(fmt::format(R"({{"dtype":"F32","shape":{},"data_offsets":[0,4]}})", shape)) ==
          fmt::format(": shape is {}, expected an array of sizes", shape));
  }
  for (const auto* shape : {"[4294967296,4294967296]", "[9223372036854775807]", "[0,9223372036854775807,2]"}) {
    CHECK(tensor(fmt::format(R"({{"dtype":"F32","shape":{},"data_offsets":[0,4]}})", shape)) ==
          fmt::format(": shape {} is too large", shape));
  }
  for (const auto* offsets : {"0", "[0]", "[0,4,8]", "[-1,3]", "[0.0,4.0]", "[0,18446744073709551615]"}) {
    CHECK(tensor(fmt::format(R"({{"dtype":"F32","shape":[1],"data_offsets":{}}})", offsets)) ==
          fmt::format(": data_offsets is {}, expected [begin, end]", offsets));
  }
  CHECK(tensor(R"({"dtype":"F32","shape":[1],"data_offsets":[4,0]})") ==
        ": data_offsets [4,0] end before they begin");
  CHECK(tensor(R"({"dtype":"F32","shape":[2,3],"data_offsets":[0,4]})") ==
        ": data_offsets [0,4] hold 4 bytes, expected 24 for F32 [2,3]");
  CHECK(tensor(R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})", 8) ==
        " begins at byte 4 of the data, expected 0: 4 bytes belong to no tensor");

  const std::string two = R"({"v":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":{"dtype":"F32","shape":[2],"data_offsets":)";
  CHECK(with(two + "[4,12]}}", 12) == ": tensor \"w\" overlaps \"v\": it begins at byte 4 of the data, expected 8");
  CHECK(with(two + "[12,20]}}", 20) ==
        ": tensor \"w\" begins at byte 12 of the data, expected 8: 4 bytes belong to no tensor");
  const auto header_size = two.size() + std::string("[8,16]}}").size();
  CHECK(with(two + "[8,16]}}", 15) ==
        fmt::format(": truncated: {} bytes are there, expected {} (tensor \"w\" is cut); download or copy it again",
                    8 + header_size + 15, 8 + header_size + 16));
  CHECK(with(two + "[8,16]}}", 17) ==
        fmt::format(": 1 bytes after the last tensor belong to none: {} bytes are there, expected {}; download or copy "
                    "it again", 8 + header_size + 17, 8 + header_size + 16));

  CHECK(test::user_error([&] { SafetensorsFile::open(folder / "none"); }) == (folder / "none").string() + ": no such file");
  CHECK(test::user_error([&] { SafetensorsFile::open(folder.path()); }) ==
        folder.path().string() + ": is no regular file, expected a safetensors file");
}

TEST_CASE("types have names and sizes", "[io]") {
  for (const auto dtype : kAllTypes) CHECK(io::parse_dtype(io::dtype_name(dtype)) == dtype);
  CHECK(io::dtype_size(DType::kBF16) == 2);
  CHECK_FALSE(io::parse_dtype("f32"));
  CHECK(io::shape_text(std::vector<std::int64_t>{768, 32}) == "[768, 32]");
}

TEST_CASE("SHA-256 of known texts", "[io]") {
  const auto of = [](const std::string& text) { return io::sha256_hex(std::as_bytes(std::span(text))); };
  CHECK(of("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  CHECK(of("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  test::TemporaryFolder folder;
  const std::string large(3'000'001, 'a');  // several buffers
  CHECK(io::sha256_file(test::write_text(folder / "large", large)) == of(large));
  CHECK(test::user_error([&] { io::sha256_file(folder / "none"); }) == (folder / "none").string() + ": no such file");
  CHECK(test::user_error([&] { io::sha256_file(folder.path()); }).starts_with(folder.path().string() + ": cannot be read"));
}
