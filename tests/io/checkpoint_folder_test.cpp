#include "io/checkpoint_folder.h"

#include <fmt/format.h>

#include <array>

#include "support/catch.h"
#include "support/paths.h"

using namespace mergex;
using io::CheckpointFolder;
using io::DType;
using io::TensorView;
namespace fs = std::filesystem;

namespace {

const std::array<float, 6> kNumbers{1, 2, 3, 4, 5, 6};

TensorView numbers(const std::string& name) { return {name, DType::kF32, {2, 3}, std::as_bytes(std::span(kNumbers))}; }

// Two shards: "a" and "b" in one, "c" in the other.
void write_sharded(const fs::path& folder) {
  test::write_text(folder / "config.json", R"({"model_type": "t5"})");
  io::write_safetensors(folder / "one.safetensors", std::array{numbers("a"), numbers("b")});
  io::write_safetensors(folder / "two.safetensors", std::array{numbers("c")});
}

void write_index(const fs::path& folder, const std::string& weight_map) {
  test::write_text(folder / "model.safetensors.index.json",
                   fmt::format(R"({{"metadata": {{"total_size": 72}}, "weight_map": {}}})", weight_map));
}

std::string fault_of(const fs::path& folder) {
  const auto message = test::user_error([&] { CheckpointFolder{folder}; });
  CHECK(message.starts_with(folder.string()));
  CHECK(message.find('\n') == std::string::npos);
  return message.substr(folder.string().size());
}

}  // namespace

TEST_CASE("shards read like one file", "[io][law]") {
  test::TemporaryFolder temporary;
  const auto whole = temporary / "whole", parts = temporary / "parts";
  fs::create_directories(whole);
  write_sharded(parts);
  test::write_text(whole / "config.json", R"({"model_type": "t5"})");
  io::write_safetensors(whole / "model.safetensors", std::array{numbers("a"), numbers("b"), numbers("c")});
  write_index(parts, R"({"c": "two.safetensors", "a": "one.safetensors", "b": "one.safetensors"})");
  const CheckpointFolder first(whole);
  auto opened = CheckpointFolder(parts);
  const auto second = std::move(opened);
  CHECK(first.config() == second.config());
  REQUIRE(first.tensors().size() == 3);
  REQUIRE(second.tensors().size() == 3);
  for (std::size_t i = 0; i < 3; ++i) {
    const auto *x = first.tensors()[i], *y = second.tensors()[i];
    CHECK(x->name == y->name);
    CHECK(x->shape == y->shape);
    CHECK(std::equal(x->bytes.begin(), x->bytes.end(), y->bytes.begin(), y->bytes.end()));
    CHECK(first.find(x->name) == x);
    CHECK(second.find(x->name) == y);
  }
  CHECK(first.find("d") == nullptr);
  CHECK(first.file_of("c") == (whole / "model.safetensors").string());
  CHECK(second.file_of("c") == (parts / "two.safetensors").string());
  CHECK(second.file_of("d") == parts.string());
  CHECK(first.files() == std::vector<fs::path>{whole / "config.json", whole / "model.safetensors"});
  CHECK(second.files() == std::vector<fs::path>{parts / "config.json", parts / "model.safetensors.index.json",
                                                parts / "one.safetensors", parts / "two.safetensors"});
  CHECK(second.path() == parts);
}

TEST_CASE("what a checkpoint folder lacks is said with its repair", "[io]") {
  test::TemporaryFolder temporary;
  const auto folder = temporary / "t5";
  CHECK(fault_of(folder) == ": no such folder, expected a Hugging Face checkpoint (config.json and model.safetensors)");
  test::write_text(temporary / "file", "x");
  CHECK(fault_of(temporary / "file") == ": is a file, expected the folder that holds config.json and model.safetensors");
  fs::create_directories(folder);
  CHECK(fault_of(folder) == ": holds no config.json; copy it from where the weights come from");
  test::write_text(folder / "config.json", "[1]");
  CHECK(fault_of(folder) == "/config.json: got [1], expected a JSON object");
  test::write_text(folder / "config.json", "{");
  CHECK(fault_of(folder).starts_with("/config.json:1:"));
  test::write_text(folder / "config.json", "{}");
  CHECK(fault_of(folder) ==
        ": holds neither model.safetensors nor model.safetensors.index.json; download the checkpoint again");
  test::write_text(folder / "pytorch_model.bin", "x");
  CHECK(fault_of(folder) == ": holds pytorch_model.bin but no model.safetensors; convert it to safetensors first "
                            "(save_pretrained does)");
  test::write_text(folder / "model.safetensors", "x");
  CHECK(fault_of(folder).starts_with("/model.safetensors: 1 bytes, too short"));
}

TEST_CASE("an index that does not fit its shards is an error", "[io]") {
  test::TemporaryFolder temporary;
  const auto folder = temporary / "t5";
  write_sharded(folder);
  const auto with = [&](const std::string& weight_map) {
    write_index(folder, weight_map);
    return fault_of(folder);
  };
  CHECK(with(R"({"a": "one.safetensors", "b": "one.safetensors", "c": "three.safetensors"})") ==
        "/model.safetensors.index.json: tensor \"c\" lies in \"three.safetensors\", which is not there; download it");
  CHECK(with(R"({"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors", "d": "two.safetensors"})") ==
        "/model.safetensors.index.json: tensor \"d\" is not in \"two.safetensors\", where it is listed; download both "
        "again");
  CHECK(with(R"({"a": "one.safetensors", "c": "two.safetensors"})") ==
        "/one.safetensors: holds tensor \"b\", which model.safetensors.index.json does not list; download both again");
  CHECK(with(R"({"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})") ==
        "/one.safetensors: holds tensor \"b\", which model.safetensors.index.json places in \"two.safetensors\"; "
        "download both again");
  for (const auto* name : {"../t5/one.safetensors", "/etc/passwd", "..", ".", "", "a\\\\b"}) {
    CHECK(with(fmt::format(R"({{"a": "{}"}})", name)) ==
          fmt::format("/model.safetensors.index.json: tensor \"a\": got \"{}\", expected the name of a file in the same "
                      "folder", name));
  }
  CHECK(with(R"({"a": 1})") ==
        "/model.safetensors.index.json: tensor \"a\": got 1, expected the name of a file");
  CHECK(with("{}") == "/model.safetensors.index.json: \"weight_map\" is empty; download it again");
  CHECK(with("[]") == "/model.safetensors.index.json: holds no \"weight_map\" object; download it again");
  test::write_text(folder / "model.safetensors.index.json", "7");
  CHECK(fault_of(folder) == "/model.safetensors.index.json: holds no \"weight_map\" object; download it again");
}

TEST_CASE("reference checkpoints are opened", "[io][golden]") {
  auto models = test::golden_folder("models");
  if (!models) models = test::data_path("golden/models");
  if (!models) return;
  int num_opened = 0;
  for (const auto& item : fs::directory_iterator(*models)) {
    if (!fs::exists(item.path() / "config.json")) continue;
    INFO(item.path().string());
    const CheckpointFolder checkpoint(item.path());
    CHECK(checkpoint.config().contains("model_type"));
    CHECK(!checkpoint.tensors().empty());
    ++num_opened;
    if (item.path().filename() == "odd_sharded_phi3") {
      CHECK(checkpoint.tensors().size() == 15);
      CHECK(checkpoint.files().size() == 6);
      CHECK(checkpoint.file_of("lm_head.weight") == (item.path() / "model-00004-of-00004.safetensors").string());
    }
    if (item.path().filename() == "odd_bf16_llama") CHECK(checkpoint.tensors().front()->dtype == DType::kBF16);
  }
  CHECK(num_opened > 0);
  test::log_golden("models/folders", fmt::format("ok, {} checkpoint folders opened", num_opened));
}
