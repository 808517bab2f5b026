#include "io/torch_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "core/error.h"
#include "support/catch.h"
#include "support/paths.h"
#include "support/zip_bytes.h"

using namespace mergex;
using io::TorchFile;
namespace fs = std::filesystem;

namespace {

// --- pickle, written by hand

const std::string kStart = "\x80\x02";

std::string text(const std::string& value) {
  std::string size(4, '\0');
  const auto count = static_cast<std::uint32_t>(value.size());
  std::memcpy(size.data(), &count, sizeof count);
  return "X" + size + value;
}

std::string integer(std::int32_t value) {
  std::string bytes(4, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return "J" + bytes;
}

std::string tuple(const std::vector<std::string>& items) {
  std::string all = "(";
  for (const auto& item : items) all += item;
  return all + "t";
}

std::string tuple_of(const std::vector<std::int32_t>& values) {
  std::vector<std::string> items;
  for (const auto value : values) items.push_back(integer(value));
  return tuple(items);
}

std::string storage(const std::string& key, std::int32_t num_elements) {
  return tuple({text("storage"), "ctorch\nFloatStorage\n", text(key), text("cpu"), integer(num_elements)}) + "Q";
}

std::string tensor(const std::string& from, std::int32_t offset, const std::vector<std::int32_t>& shape,
                   const std::vector<std::int32_t>& strides) {
  const std::string hooks = "ccollections\nOrderedDict\n)R";
  return "ctorch._utils\n_rebuild_tensor_v2\n" +
         tuple({from, integer(offset), tuple_of(shape), tuple_of(strides), "\x89", hooks}) + "R";
}

std::string state_dict(const std::string& name, const std::string& value) {
  return kStart + "}(" + text(name) + value + "u.";
}

// An archive of torch.save with one storage, "0", of `num_floats` numbers.
std::string archive(const std::string& pickle, std::size_t num_floats = 6) {
  return test::zip_bytes(
      {{"a/data.pkl", pickle}, {"a/byteorder", "little"}, {"a/data/0", std::string(num_floats * 4, '\1')}});
}

std::string fault_of(const std::string& bytes) {
  static test::TemporaryFolder folder;
  const auto path = folder / "x.bin";
  test::write_text(path, bytes);
  const auto message = test::user_error([&] { TorchFile::open(path); });
  CHECK(message.starts_with(path.string()));
  CHECK(message.find('\n') == std::string::npos);
  CHECK(message.size() < 600);
  return message.substr(path.string().size());
}

}  // namespace

TEST_CASE("files of torch.save hold the tensors that torch saved", "[io][golden]") {
  const auto folder = test::golden_folder("pickle");
  if (!folder) return;
  int num_files = 0;
  std::size_t num_tensors = 0;
  for (const auto& item : fs::directory_iterator(*folder)) {
    if (item.path().extension() != ".bin") continue;
    INFO(item.path().string());
    const auto opened = TorchFile::open(item.path());
    const auto expected = io::SafetensorsFile::open(fs::path(item.path()).replace_extension(".safetensors"));
    REQUIRE(opened.tensors().size() == expected.tensors().size());
    for (const auto& tensor : opened.tensors()) {
      INFO(tensor.name);
      const auto* wanted = expected.find(tensor.name);
      REQUIRE(wanted != nullptr);
      CHECK(tensor.dtype == wanted->dtype);
      CHECK(tensor.shape == wanted->shape);
      CHECK(std::ranges::equal(tensor.bytes, wanted->bytes));
    }
    if (item.path().stem() == "module") {
      CHECK(opened.tensors().front().name == "embed.weight");
      CHECK(opened.tensors().back().name == "head.weight");
      CHECK(opened.tensors().front().bytes.data() == opened.tensors().back().bytes.data());
    }
    num_tensors += opened.tensors().size();
    ++num_files;
  }
  CHECK(num_files == 9);
  test::log_golden("pickle", fmt::format("ok, {} tensors of {} files bit by bit", num_tensors, num_files));
}

TEST_CASE("what torch.save can write and a merge cannot use is refused by name", "[io][golden]") {
  const auto folder = test::golden_folder("pickle");
  if (!folder) return;
  const std::map<std::string, std::string> expected{
      {"attack", "names \"posix.system\", which a state dict of plain tensors does not need; nothing was run"},
      {"complex", "names \"torch.ComplexFloatStorage\""},
      {"float8", "names \"torch._utils._rebuild_tensor_v3\""},
      {"legacy", "written in the format of torch before 1.6; load and save it once with a newer torch"},
      {"nested", "tensor \"state_dict\": holds a dict, expected a tensor; save the state dict alone"},
      {"number_as_name", "a key of the state dict is an int, expected a text"},
      {"quantised", "names \"torch._utils._rebuild_qtensor\""},
      {"real_of_complex", "stored in another order than by rows (strides [8, 2] for [3, 4])"},
      {"sparse", "names \"torch._utils._rebuild_sparse_tensor\""},
      {"step", "tensor \"step\": holds an int, expected a tensor"},
      {"strided",
       "stored in another order than by rows (strides [4, 2] for [3, 2]); save it again after .contiguous()"},
      {"tensor", "holds a tensor, expected a state dict"},
      {"transposed", "tensor \"w\": stored in another order than by rows (strides [1, 4] for [4, 3])"},
      {"whole_module", "names \"__main__.Tied\""}};
  std::size_t num_files = 0;
  for (const auto& item : fs::directory_iterator(*folder / "refused")) {
    INFO(item.path().string());
    const auto found = expected.find(item.path().stem().string());
    REQUIRE(found != expected.end());
    CHECK(test::user_error([&] { TorchFile::open(item.path()); }).find(found->second) != std::string::npos);
    ++num_files;
  }
  CHECK(num_files == expected.size());
  test::log_golden("pickle/refused", fmt::format("ok, {} files", num_files));
}

TEST_CASE("the pickle of the tests is one that is read", "[io]") {
  test::TemporaryFolder folder;
  const auto pickle = state_dict("w", tensor(storage("0", 6), 1, {2, 2}, {2, 1}));
  const auto opened = TorchFile::open(test::write_text(folder / "x.bin", archive(pickle)));
  REQUIRE(opened.tensors().size() == 1);
  CHECK(opened.tensors()[0].shape == std::vector<std::int64_t>{2, 2});
  CHECK(opened.tensors()[0].bytes.size() == 16);
}

TEST_CASE("a tensor outside of its storage is refused", "[io]") {
  const auto with = [](const std::string& value, std::size_t num_floats = 6) {
    return fault_of(archive(state_dict("w", value), num_floats));
  };
  CHECK(with(tensor(storage("0", 6), 3, {2, 2}, {2, 1}))
            .starts_with(": tensor \"w\": [2, 2] elements from 3 on do not lie in its storage of 24 bytes; "));
  CHECK(with(tensor(storage("0", 6), -1, {1}, {1})).starts_with(": tensor \"w\": [1] elements from -1 on"));
  CHECK(with(tensor(storage("0", 6), 7, {0}, {1})).starts_with(": tensor \"w\": [0] elements from 7 on"));
  CHECK(with(tensor(storage("0", 6), 0, {2, 2}, {2})).starts_with(": tensor \"w\": [2, 2] elements from 0 on"));
  CHECK(with(tensor(storage("0", 6), 0, {-2}, {1})).starts_with(": tensor \"w\": its sizes are not all sizes"));
  CHECK(with(tensor(storage("0", 6), 0, {2147483647, 2147483647, 4}, {1, 1, 1}))
            .starts_with(": tensor \"w\": shape [2147483647, 2147483647, 4] is too large; "));
  CHECK(with(tensor(storage("0", 6), 0, {0, 2147483647, 2147483647, 4}, {1, 1, 1, 1}))
            .starts_with(": tensor \"w\": shape [0, 2147483647, 2147483647, 4] is too large; "));
  CHECK(with(tensor(storage("0", 6), 0, {6}, {0})).starts_with(": tensor \"w\": stored in another order than by rows"));
  CHECK(with(tensor(storage("0", 7), 0, {6}, {1}))
            .starts_with(": data.pkl: storage \"a/data/0\" holds 24 bytes, expected 7 elements of 4 bytes; "));
  CHECK(with(tensor(storage("0", -1), 0, {0}, {1})).starts_with(": data.pkl: storage \"a/data/0\" holds 24 bytes"));
  CHECK(with(tensor(storage("1", 6), 0, {6}, {1})).starts_with(": damaged archive: it holds no \"a/data/1\"; "));
  CHECK(with(tensor(storage("../data.pkl", 6), 0, {6}, {1}))
            .starts_with(": damaged archive: it holds no \"a/data/../data.pkl\""));
}

TEST_CASE("pickle is not executed", "[io]") {
  const auto pickle = [](const std::string& body) { return fault_of(archive(kStart + body)); };
  // Named as protocol 2 and as protocol 4 name it, called or not.
  CHECK(pickle("cos\nsystem\n" + tuple({text("touch /tmp/x")}) + "R.").starts_with(": data.pkl names \"os.system\""));
  CHECK(pickle(text("os") + text("system") + "\x93.").starts_with(": data.pkl names \"os.system\""));
  CHECK(pickle("cbuiltins\neval\n.").starts_with(": data.pkl names \"builtins.eval\""));
  CHECK(pickle("ctorch\nload\n.").starts_with(": data.pkl names \"torch.load\""));
  CHECK(pickle("ccollections.OrderedDict\npop\n.").starts_with(": data.pkl names \"collections.OrderedDict.pop\""));
  for (const auto* opcode :
       {"i", "o", "\x81", "\x92", "\x82", "P", "l", "d", "p", "g", "I", "F", "S", "U", "T", "V", "1", "2", "\x98"}) {
    const auto fault = pickle(opcode);
    CHECK(fault.starts_with(
        fmt::format(": data.pkl: instruction 0x{:02X} at byte 2", static_cast<unsigned char>(opcode[0]))));
  }
  CHECK(fault_of(archive("\x80\x01N.")).starts_with(": data.pkl: pickle protocol 1, expected 2 to 5"));
}

TEST_CASE("damaged pickle is refused", "[io]") {
  const auto pickle = [](const std::string& body) { return fault_of(archive(kStart + body)); };
  const auto damaged = [&](const std::string& body, const std::string& what) {
    INFO(what);
    CHECK(pickle(body).starts_with(": data.pkl: " + what));
  };
  const std::string none = "N";
  damaged("", "it ends in the middle of an instruction");
  damaged("X\xFF\xFF\xFF\xFFshort", "it ends in the middle of an instruction");
  damaged("\x8D\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFFshort", "it ends in the middle of an instruction");
  damaged("ccollections", "it ends in the middle of an instruction");
  damaged(".", "it ends with a stack of 0 values");
  damaged("NN.", "it ends with a stack of 2 values");
  damaged("t.", "it takes values from an empty stack");
  damaged("(\x85.", "it takes a value from an empty stack");
  damaged("}(Nu.", "a dict has a key without a value");
  damaged("NNNs.", "it changes None, expected a dict");
  damaged("NNa.", "it changes None, expected a list");
  damaged("NNb.", "it changes None, expected a dict");
  damaged("NNR.", "a function is called with None");
  damaged("N)R.", "None is called with arguments that it does not take");
  damaged("ctorch._utils\n_rebuild_tensor_v2\n)R.", "a function is called with arguments that it does not take");
  damaged("NQ.", "a storage is not described by its type, name, device and size");
  damaged("h\x05.", "it recalls value number 5, which it never stored");
  damaged("Nr\xFF\xFF\xFF\xFF.", "it remembers value number 4294967295");
  damaged("q" + std::string(1, '\0') + ".", "it takes a value from an empty stack");
  damaged(text("\xFF\xFE"), "a text is not valid UTF-8");
  damaged("\x8A\x09" + std::string(9, '\1') + ".", "a number has 9 bytes, expected at most 8");
  CHECK(pickle("N.").starts_with(": holds None, expected a state dict"));
  const auto w = tensor(storage("0", 6), 0, {6}, {1});
  CHECK(pickle("}(" + text("w") + w + text("w") + w + "u.").starts_with(": tensor \"w\": given twice"));
  CHECK(pickle("}(" + text("w") + "}u.").starts_with(": tensor \"w\": holds a dict, expected a tensor"));
}

TEST_CASE("pickles that would explode are refused or harmless", "[io]") {
  test::TemporaryFolder folder;
  // Nested so deep that a recursive reader, or destructor, would overflow the stack.
  CHECK(fault_of(archive(kStart + std::string(3'000'000, ')') + "."))
            .starts_with(": data.pkl: it ends with a stack of 3000000"));
  CHECK(fault_of(archive(kStart + ")" + std::string(3'000'000, '\x85') + ".")).starts_with(": holds a tuple"));
  // Each tuple holds the one before twice: 2^1000 values, if anybody counted.
  std::string doubling = "N";
  for (int i = 0; i < 1000; ++i) doubling += std::string("q\0h\0\x86", 5);
  CHECK(fault_of(archive(kStart + doubling + ".")).starts_with(": holds a tuple"));
  // A list that holds itself, as an attribute of the state dict, which is passed over.
  const auto itself = std::string("]q\0h\0a", 6);
  const auto pickle = kStart + "}(" + text("w") + tensor(storage("0", 6), 0, {6}, {1}) + "u" + itself + "b.";
  CHECK(TorchFile::open(test::write_text(folder / "x.bin", archive(pickle))).tensors().size() == 1);
  CHECK(fault_of(archive(kStart + std::string(8'000'001, 'N') + "."))
            .starts_with(": data.pkl: it makes more than 8000000 values"));
}

TEST_CASE("every fault of the archive is an error of one line", "[io]") {
  const auto pickle = state_dict("w", tensor(storage("0", 6), 0, {6}, {1}));
  const auto whole = archive(pickle);
  CHECK(fault_of("") == ": 0 bytes that begin no zip archive, expected a file of torch.save; download it again");
  CHECK(fault_of("version https://git-lfs.github.com/spec/v1\n").starts_with(": 43 bytes that begin no zip archive"));
  CHECK(fault_of("PK").starts_with(": truncated: the directory at the end of the archive is missing"));
  CHECK(fault_of(whole.substr(0, whole.size() - 1)).starts_with(": truncated: the directory at the end"));
  CHECK(fault_of(whole.substr(0, whole.size() / 2)).starts_with(": truncated: the directory at the end"));
  // A byte missing in the middle: nothing is where the directory says.
  CHECK(fault_of(std::string(whole).erase(100, 1)).find("damaged archive: ") != std::string::npos);

  using test::ZipFile;
  const ZipFile data{"a/data/0", std::string(24, '\1')};
  CHECK(fault_of(test::zip_bytes({data})) == ": holds 0 files data.pkl, expected one; is it a file of torch.save?");
  CHECK(fault_of(test::zip_bytes({{"a/data.pkl", pickle}, {"b/data.pkl", pickle}}))
            .starts_with(": holds 2 files data.pkl"));
  CHECK(fault_of(test::zip_bytes({{"a/data.pkl", pickle}, data, data})) ==
        ": damaged archive: it holds \"a/data/0\" twice; download or copy it again");
  CHECK(fault_of(test::zip_bytes({{"a/data.pkl", pickle}, {"a/byteorder", "big"}, data}))
            .starts_with(": written on a big-endian machine"));
  CHECK(
      fault_of(test::zip_bytes({{"a/data.pkl", pickle}, {.name = "a/data/0", .content = data.content, .method = 8}})) ==
      ": \"a/data/0\" is compressed; save it again with torch.save, which does not compress");
  CHECK(fault_of(test::zip_bytes({{.name = "a/data.pkl", .content = pickle, .flags = 1}, data})) ==
        ": \"a/data.pkl\" is encrypted; save the file again without a password");

  auto flipped = whole;
  flipped[flipped.find("storage")] ^= 1;
  CHECK(fault_of(flipped) == ": damaged archive: the checksum of \"a/data.pkl\" is wrong; download or copy it again");

  // Every number of the directory, made as large as it can be: never a read outside of the file.
  test::TemporaryFolder folder;
  for (std::size_t at = whole.find("PK\x01\x02"); at + 4 <= whole.size(); ++at) {
    auto damaged = whole;
    damaged.replace(at, 4, 4, '\xFF');
    const auto path = test::write_text(folder / "x.bin", damaged);
    try {
      TorchFile::open(path);
    } catch (const UserError& error) {
      CHECK(std::string(error.what()).find('\n') == std::string::npos);
    }
  }
}

TEST_CASE("archives with zip64 records and comments are read", "[io]") {
  test::TemporaryFolder folder;
  const auto pickle = state_dict("w", tensor(storage("0", 6), 0, {6}, {1}));
  const std::vector<test::ZipFile> files{{"a/data.pkl", pickle}, {"a/data/0", std::string(24, '\1')}};
  for (const auto& bytes :
       {test::zip_bytes(files, {.is_zip64 = true}), test::zip_bytes(files, {.comment = "PK\x05\x06 a comment"}),
        test::zip_bytes(files, {.is_zip64 = true, .comment = std::string(65535, 'x')})}) {
    const auto opened = TorchFile::open(test::write_text(folder / "x.bin", bytes));
    REQUIRE(opened.tensors().size() == 1);
    CHECK(std::ranges::all_of(opened.tensors()[0].bytes, [](std::byte b) { return b == std::byte{1}; }));
  }
}
