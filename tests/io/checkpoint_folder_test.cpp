#include "io/checkpoint_folder.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>

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

  // Spelled in ways that only the general parser reads.
  for (const auto* weight_map : {"{\"c\":\t\"two.safetensors\", \"a\": \"one.safetensors\", \"b\": \"one.safetensors\"}",
                                 R"({"\u0063": "two.safetensors", "a": "one.safetensor\u0073", "b": "one.safetensors"})"}) {
    write_index(parts, weight_map);
    CHECK(CheckpointFolder(parts).tensors().size() == 3);
    CHECK(CheckpointFolder(parts).find("c") != nullptr);
  }
  write_index(parts, R"({"c": "two.safetensors", "a": "one.safetensors", "a": "one.safetensors", "b": "one.safetensors"})");
  CHECK(fault_of(parts) == "/model.safetensors.index.json#/weight_map/a: key given twice; keep one");
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
  test::write_text(folder / "model-q4.gguf", "x");
  CHECK(fault_of(folder) == ": holds model-q4.gguf: GGUF, a format for running models, mostly quantised; use the safetensors "
                            "that it was made from");
  test::write_text(folder / "tf_model.h5", "x");
  CHECK(fault_of(folder) == ": holds tf_model.h5 but no model.safetensors; convert it to safetensors first "
                            "(save_pretrained does)");
  test::write_text(folder / "pytorch_model.bin", "x");
  CHECK(fault_of(folder).starts_with("/pytorch_model.bin: 1 bytes that begin no zip archive"));
  test::write_text(folder / "model.safetensors", "x");
  CHECK(fault_of(folder).starts_with("/model.safetensors: 1 bytes, too short"));
}

TEST_CASE("what is no checkpoint folder is recognised", "[io]") {
  test::TemporaryFolder temporary;
  const auto file = test::write_text(temporary / "m.gguf", "GGUF");
  CHECK(fault_of(file) == ": is GGUF, a format for running models, mostly quantised; use the safetensors that it was made from");
  CHECK(fault_of(temporary.path()).starts_with(": holds m.gguf: GGUF, "));
  test::write_text(temporary / "lora/adapter_config.json", "{}");
  CHECK(fault_of(temporary / "lora") == ": holds an adapter (adapter_config.json), expected a checkpoint; name its base model (a "
                                        "merge also takes BASE+ADAPTER)");
}

TEST_CASE("an index beside a single file is an error, unless it is its own", "[io]") {
  test::TemporaryFolder temporary;
  const auto folder = temporary / "t5";
  write_sharded(folder);
  write_index(folder, R"({"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})");
  io::write_safetensors(folder / "model.safetensors", std::array{numbers("a")});
  CHECK(fault_of(folder) == ": holds both model.safetensors and model.safetensors.index.json, which names other files; one is left "
                            "from an older run: remove it");
  write_index(folder, R"({"a": "model.safetensors"})");
  const CheckpointFolder opened(folder);
  CHECK(opened.tensors().size() == 1);
  CHECK(opened.unused_files() == std::vector<std::string>{"one.safetensors", "two.safetensors"});
}

TEST_CASE("shards that the index does not name are listed, not read", "[io]") {
  test::TemporaryFolder temporary;
  const auto folder = temporary / "t5";
  write_sharded(folder);
  write_index(folder, R"({"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})");
  CHECK(CheckpointFolder(folder).unused_files().empty());
  test::write_text(folder / "model-00001-of-00009.safetensors", "not even a file of tensors");
  test::write_text(folder / "pytorch_model.bin", "a copy for other programs");
  test::write_text(folder / "vocab.json", "{}");
  CHECK(CheckpointFolder(folder).unused_files() == std::vector<std::string>{"model-00001-of-00009.safetensors"});
}

TEST_CASE("names of tied tensors that an index lists and no shard holds", "[io]") {
  test::TemporaryFolder temporary;
  const auto folder = temporary / "t5";
  const auto with = [&](const std::string& config, const std::string& listed) {
    test::write_text(folder / "config.json", config);
    write_index(folder, R"({"shared.weight": "s.safetensors", "d": "s.safetensors", )" + listed + "}");
  };
  fs::create_directories(folder);
  io::write_safetensors(folder / "s.safetensors", std::array{numbers("shared.weight"), numbers("d")});
  const std::string encoder = R"("encoder.embed_tokens.weight": "s.safetensors", "decoder.embed_tokens.weight": "s.safetensors")";
  const std::map<std::string, std::string> expected{{"encoder.embed_tokens.weight", "shared.weight"},
                                                    {"decoder.embed_tokens.weight", "shared.weight"}};
  for (const auto* config : {"{}", R"({"tie_word_embeddings": false})", R"({"tie_word_embeddings": true})"}) {
    with(config, encoder);
    const CheckpointFolder opened(folder);
    CHECK(opened.aliases() == expected);
    CHECK(opened.tensors().size() == 2);
    CHECK(opened.find("encoder.embed_tokens.weight") == nullptr);
  }

  // The head is an alias only where the config does not say that it is its own.
  const std::string head = encoder + R"(, "lm_head.weight": "s.safetensors")";
  with("{}", head);
  CHECK(CheckpointFolder(folder).aliases().at("lm_head.weight") == "shared.weight");
  for (const auto* config : {R"({"tie_word_embeddings": false})", R"({"tie_word_embeddings": true, "scale_decoder_outputs": false})"}) {
    with(config, head);
    CHECK(fault_of(folder) ==
          "/model.safetensors.index.json: tensor \"lm_head.weight\" is not in \"s.safetensors\", where it is listed; download "
          "both again");
  }
  // What is stored is no alias.
  io::write_safetensors(folder / "s.safetensors",
                        std::array{numbers("shared.weight"), numbers("d"), numbers("encoder.embed_tokens.weight")});
  with("{}", encoder);
  CHECK(CheckpointFolder(folder).aliases() == std::map<std::string, std::string>{{"decoder.embed_tokens.weight", "shared.weight"}});
  CHECK(CheckpointFolder(folder).tensors().size() == 3);
}

TEST_CASE("folders of torch.save are read, whole and sharded", "[io][golden]") {
  const auto pickles = test::golden_folder("pickle");
  if (!pickles) return;
  test::TemporaryFolder temporary;
  const auto folder = temporary / "bin";
  test::write_text(folder / "config.json", "{}");
  fs::copy_file(*pickles / "types.bin", folder / "pytorch_model.bin");
  test::write_text(folder / "training_args.bin", "not read");
  const auto expected = io::SafetensorsFile::open(*pickles / "types.safetensors");
  const CheckpointFolder whole(folder);
  CHECK(whole.tensors().size() == expected.tensors().size());
  for (const auto& tensor : expected.tensors()) {
    const auto* found = whole.find(tensor.name);
    REQUIRE(found != nullptr);
    CHECK(std::ranges::equal(found->bytes, tensor.bytes));
    CHECK(whole.file_of(tensor.name) == (folder / "pytorch_model.bin").string());
  }
  CHECK(whole.files() == std::vector<fs::path>{folder / "config.json", folder / "pytorch_model.bin"});
  CHECK(whole.unused_files().empty());

  // Safetensors come first.
  io::write_safetensors(folder / "model.safetensors", std::array{numbers("a")});
  CHECK(CheckpointFolder(folder).tensors().size() == 1);
  fs::remove(folder / "model.safetensors");

  fs::rename(folder / "pytorch_model.bin", folder / "pytorch_model-00001-of-00002.bin");
  fs::copy_file(*pickles / "views.bin", folder / "pytorch_model-00002-of-00002.bin");
  fs::copy_file(*pickles / "many.bin", folder / "pytorch_model-00009-of-00009.bin");
  io::Json weight_map;
  for (const auto& tensor : expected.tensors()) weight_map[tensor.name] = "pytorch_model-00001-of-00002.bin";
  for (const auto* name : {"whole", "rows", "flat", "row", "empty", "column_of_one"}) weight_map[name] = "pytorch_model-00002-of-00002.bin";
  io::write_json(folder / "pytorch_model.bin.index.json", {{"weight_map", weight_map}});
  const CheckpointFolder sharded(folder);
  CHECK(sharded.tensors().size() == expected.tensors().size() + 6);
  CHECK(sharded.unused_files() == std::vector<std::string>{"pytorch_model-00009-of-00009.bin"});
}

TEST_CASE("tied tensors of a .bin are stored once", "[io][golden]") {
  const auto pickles = test::golden_folder("pickle");
  if (!pickles) return;
  test::TemporaryFolder temporary;
  const auto folder = temporary / "t5";
  fs::create_directories(folder);
  fs::copy_file(*pickles / "tied_t5.bin", folder / "pytorch_model.bin");
  const auto with = [&](const std::string& config) {
    test::write_text(folder / "config.json", config);
    return CheckpointFolder(folder);
  };
  const std::map<std::string, std::string> embeddings{{"encoder.embed_tokens.weight", "shared.weight"},
                                                      {"decoder.embed_tokens.weight", "shared.weight"}};
  auto all = embeddings;
  all.emplace("lm_head.weight", "shared.weight");
  CHECK(with("{}").aliases() == all);
  CHECK(with("{}").tensors().size() == 2);
  CHECK(with("{}").find("lm_head.weight") == nullptr);
  // A head that only happens to be the same values stays.
  CHECK(with(R"({"tie_word_embeddings": false})").aliases() == embeddings);
  CHECK(with(R"({"tie_word_embeddings": false})").find("lm_head.weight") != nullptr);
  // Another name for a part of the embedding is a tensor like any other.
  CHECK(with("{}").find("first_rows")->shape == std::vector<std::int64_t>{2, 4});
}

TEST_CASE("quantised checkpoints are not for merging", "[io]") {
  test::TemporaryFolder temporary;
  const auto folder = temporary / "q";
  const auto fault = [&](const std::string& config, const std::string& name) {
    test::write_text(folder / "config.json", config);
    io::write_safetensors(folder / "model.safetensors", std::array{numbers("a"), numbers(name)});
    const auto message = test::user_error([&] { io::check_not_quantised(CheckpointFolder(folder)); });
    CHECK(message.starts_with(folder.string()));
    return message.substr(folder.string().size());
  };
  const std::string repair = "; merge the weights that it was made from (16 or 32 bit) and quantise the result";
  CHECK(fault(R"({"quantization_config": {"quant_method": "gptq", "bits": 4}})", "b") ==
        "/config.json: the weights are quantised by \"gptq\" (quantization_config)" + repair);
  for (const auto* name : {"q.qweight", "q.qzeros", "q.weight.absmax", "q.SCB"}) {
    CHECK(fault("{}", name) == fmt::format("/model.safetensors: tensor \"{}\" belongs to quantised weights{}", name, repair));
  }
  test::write_text(folder / "config.json", R"({"quantization_config": null})");
  io::write_safetensors(folder / "model.safetensors", std::array{numbers("a"), numbers("quantised")});
  CHECK_NOTHROW(io::check_not_quantised(CheckpointFolder(folder)));
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
