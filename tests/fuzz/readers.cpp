#include "fuzz/readers.h"

#include <fmt/format.h>
#include <unistd.h>
#include <zlib.h>

#include <array>
#include <bit>
#include <cstring>
#include <fstream>

#include "backbones/t5_config.h"
#include "core/error.h"
#include "io/adapter_folder.h"
#include "io/atomic_file.h"
#include "io/checkpoint_folder.h"
#include "io/safetensors.h"
#include "io/torch_file.h"
#include "io/yaml.h"
#include "io/zip_archive.h"
#include "merging/adapter_source.h"
#include "recipes/recipe.h"
#include "support/sentencepiece_bytes.h"
#include "support/zip_bytes.h"
#include "tasks/encoded_data.h"
#include "tasks/files.h"
#include "tasks/registry.h"
#include "text/t5_tokenizer.h"

namespace mergex::fuzz {
namespace {
namespace fs = std::filesystem;
using Inputs = std::span<const std::string>;

void require(bool holds, const char* what) {
  if (!holds) throw std::logic_error(what);
}

void write(const fs::path& path, std::string_view bytes) {
  fs::remove(path);
  std::ofstream(path, std::ios::binary) << bytes;
}

/// How many there are, roughly: inputs that differ in it are kept.
auto magnitude(std::size_t count) { return std::bit_width(count); }

std::string mutate_bytes(Mutator& mutator, const std::string& input, Inputs others) { return mutator(input, others); }

// --- safetensors ---

std::string safetensors_bytes(const std::string& header, std::string_view data) {
  std::string length(8, '\0');
  const std::uint64_t size = header.size();
  std::memcpy(length.data(), &size, sizeof size);
  return length.append(header).append(data);
}

std::vector<std::string> safetensors_seeds() {
  const auto with = [](const char* header, std::size_t num_bytes) {
    return safetensors_bytes(header, std::string(num_bytes, '\1'));
  };
  return {with(R"({"__metadata__":{"format":"pt"},"a.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
               R"("b":{"dtype":"BF16","shape":[],"data_offsets":[24,26]},"c":{"dtype":"I64","shape":[0,4],)"
               R"("data_offsets":[26,26]},"d":{"dtype":"U8","shape":[5],"data_offsets":[26,31]}})",
               31),
          with("{}", 0), with(R"({"x":{"dtype":"F64","shape":[1],"data_offsets":[0,8]}}   )", 8)};
}

/// Half of the time the header alone, its length corrected.
std::string mutate_safetensors(Mutator& mutator, const std::string& input, Inputs others) {
  std::uint64_t size = 0;
  if (mutator.one_in(2) || input.size() < sizeof size) return mutator(input, others);
  std::memcpy(&size, input.data(), sizeof size);
  if (size > input.size() - sizeof size) return mutator(input, others);
  return safetensors_bytes(mutator(input.substr(sizeof size, size), {}), std::string_view(input).substr(sizeof size + size));
}

std::string read_safetensors(const fs::path& file, const std::string& input) {
  const auto opened = io::SafetensorsFile::open(file);
  std::size_t num_bytes = 0;
  unsigned sum = 0;
  for (const auto& tensor : opened.tensors()) {
    for (const auto byte : tensor.bytes) sum += std::to_integer<unsigned>(byte);
    num_bytes += tensor.bytes.size();
    require(opened.find(tensor.name) == &tensor, "a tensor is not found by its name");
    require(tensor.num_elements() >= 0, "a negative number of elements");
  }
  require(num_bytes <= input.size() && sum <= 255 * num_bytes, "more data than the file has");
  return fmt::format("read, {} tensors, {} bytes, {} metadata", magnitude(opened.tensors().size()),
                     magnitude(num_bytes), magnitude(opened.metadata().size()));
}

// --- recipes ---

constexpr std::string_view kBase = "\n=== base.json\n", kSet = "\n=== --set\n";

std::vector<std::string> recipe_seeds() {
  return {R"({
  "name": "sst2-ties", "description": "row Ties-CA", "seed": 42, "extends": "base.json",
  "paper": {"expected": 94.61, "known": true, "note": "caf\u00e9"},
  "model": {"checkpoint": "../t5-base", "head": "classification", "dtype": "float32", "dropout": 0.1},
  "task": {"name": "glue/sst2", "data_dir": "glue/SST-2", "files": {"validation": ["a.tsv", "b.tsv.gz"]},
           "max_length": 128, "on_bad_line": "skip"},
  "training": {"epochs": 5, "optimizer": {"name": "adamw", "learning_rate": 2e-4}, "batch_size": null},
  "sweep": {"/experts": {"dense": null, "ties": {"method": "camex"}}, "/seed": [1, 2, 3]}
}
=== base.json
{"training": {"epochs": 3, "batch_size": 16}, "experts": {"num_experts": 7, "linears": ["wi", "wo"]}}
=== --set
/training/batch_size=8)",
          R"({"model": {"config": {"d_model": 16}, "tokenizer": "t"}, "training": {"max_steps": 5},
  "task": {"name": "classification", "files": {"train": "a.csv", "validation": "b.jsonl"}, "labels": ["x", "y"],
           "columns": {"text": "t", "text_pair": "u", "label": "l", "id": "i"}, "metrics": ["accuracy"],
           "select_by": "accuracy"}})",
          R"({"model": {}, "training": {}, "task": {"name": "span_corruption", "files": {"train": "a.txt"},
  "column": "text", "max_length": 64, "noise_density": 0.15, "mean_span_length": 3.0}}
=== --set
/sweep/~1seed=[1,2])"};
}

std::string read_recipe(const fs::path& file, const std::string& input) {
  const auto folder = file.parent_path();
  std::string_view recipe = input, base, set;
  if (const auto at = recipe.find(kSet); at != std::string_view::npos) {
    set = recipe.substr(at + kSet.size());
    recipe = recipe.substr(0, at);
  }
  fs::remove(folder / "base.json");
  if (const auto at = recipe.find(kBase); at != std::string_view::npos) {
    base = recipe.substr(at + kBase.size());
    recipe = recipe.substr(0, at);
    write(folder / "base.json", base);
  }
  write(folder / "recipe.json", recipe);
  std::vector<std::string> sets;
  if (!set.empty()) sets.emplace_back(set);
  const auto whole = recipes::read_recipe(folder / "recipe.json", sets, std::nullopt);
  const auto rows = recipes::expand_sweep(whole);
  std::string tasks;
  for (const auto& row : rows) {
    auto resolved = std::make_shared<io::Json>();
    io::JsonObject root(row.document, resolved);
    std::string text;
    std::int64_t seed = 42;
    root.optional("name", text);
    root.optional("description", text);
    root.optional("seed", seed, {.at_least = 0});
    root.any("paper");
    root.any("experts");
    auto model = root.required_object("model");
    model.path("checkpoint");
    model.any("config");
    model.path("tokenizer");
    static const std::vector<std::string> kHeads{"classification", "language_model"}, kTypes{"float32", "float64"};
    model.choice("head", kHeads, 0);
    model.choice("dtype", kTypes, 0);
    model.maybe<double>("dropout", {.at_least = 0.0, .below = 1.0});
    model.finish();
    auto training = root.required_object("training");
    training.maybe<std::int64_t>("epochs", {.at_least = 1, .at_most = 1e6});
    training.maybe<std::int64_t>("max_steps", {.at_least = 0});
    training.maybe<std::int64_t>("batch_size", {.at_least = 1});
    if (auto optimizer = training.object("optimizer")) {
      optimizer->maybe<std::string>("name");
      optimizer->maybe<double>("learning_rate", {.above = 0.0});
      optimizer->maybe<std::vector<double>>("betas", {.at_least = 0.0, .below = 1.0});
      optimizer->finish();
    }
    training.finish();
    const auto task = tasks::read_task(root.required_object("task"));
    root.finish();
    tasks = task.name;
    io::write_json(folder / "resolved.json", *resolved);
  }
  return fmt::format("read, {} rows, task {}", magnitude(rows.size()), tasks);
}

// --- tables: the first byte chooses format and options ---

std::string gzip(const std::string& bytes) {
  z_stream stream{};
  deflateInit2(&stream, Z_DEFAULT_COMPRESSION, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
  std::string out(deflateBound(&stream, bytes.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

constexpr std::array kEndings{"tsv", "csv", "jsonl"};

std::vector<std::string> table_seeds() {
  const std::string tsv = "\xEF\xBB\xBFid\tsentence\tsentence2\tlabel\r\n7\tcaf\u00e9 \"a\tb\tpositive\r\n8\tc\t\t-1\r\n";
  const std::string csv = "text,label,text2\n\"one, \"\"two\"\"\nthree\",1,x\nfour,negative,\n\n";
  const std::string jsonl = "{\"text\": \"a\", \"label\": 1, \"text2\": \"b\"}\n{\"label\": \"positive\", \"text\": \"\\u00e9\\ud83d\\ude00\"}\n";
  return {"0" + tsv, "1" + csv, "2" + jsonl, "3" + tsv, "0" + gzip(tsv), "1" + gzip(csv), "5" + gzip(jsonl)};
}

/// A third of the time what is mutated is compressed afterwards.
std::string mutate_table(Mutator& mutator, const std::string& input, Inputs others) {
  auto mutant = mutator(input, others);
  if (mutant.size() > 1 && mutator.one_in(3)) mutant = mutant.substr(0, 1) + gzip(mutant.substr(1));
  return mutant;
}

std::string read_table(const fs::path& file, const std::string& input) {
  const auto choice = input.empty() ? 0u : static_cast<unsigned char>(input[0]);
  const auto table = file.parent_path() / fmt::format("table.{}", kEndings[choice % 3]);
  write(table, std::string_view(input).substr(input.empty() ? 0 : 1));
  const bool skip = choice / 3 % 2 == 1, scores = choice / 6 % 2 == 1;
  const std::vector<std::string> names{"negative", "positive"};
  const tasks::Columns columns{.text = {{"sentence", "text"}},
                               .text_pair = io::TableColumn{{"sentence2", "text2"}, false},
                               .label = {{"label"}, false},
                               .id = {{"id", "index"}, false}};
  std::vector<io::TableColumn> wanted{columns.text, columns.label, columns.id, *columns.text_pair};
  io::Table rows(table, wanted, {.format = io::table_format(table).value(), .skip_bad_lines = skip});
  std::size_t num_rows = 0, num_labels = 0, num_bytes = 0;
  while (const auto* row = rows.next()) {
    ++num_rows;
    require(row->cells.size() == wanted.size() && row->cells[0], "a row without its required cell");
    for (const auto& cell : row->cells) num_bytes += cell ? cell->size() : 0;
    if (!row->cells[1]) continue;
    const auto label = scores ? tasks::score_label(*row->cells[1], {.at_least = 0.0, .at_most = 5.0}, -1.0)
                              : tasks::class_label(*row->cells[1], names, "-");
    if (!label.problem.empty()) rows.reject(label.problem);
    num_labels += label.value ? 1 : 0;
  }
  if (!skip) require(rows.skipped_lines() == 0, "lines were skipped that should not be");
  return fmt::format("read, {} rows, {} labels, {} bytes, {} skipped", magnitude(num_rows), magnitude(num_labels),
                     magnitude(num_bytes), magnitude(rows.skipped_lines()));
}

// --- sentencepiece models ---

/// The first field `number` of a serialized model (the normaliser is 3).
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

std::vector<std::string> sentencepiece_seeds() {
  const auto small = test::small_sentencepiece_model();
  const auto whole = io::read_file(fs::path(MERGEX_SOURCE_DIR) / "recipes/quickstart/data/tokenizer/spiece.model");
  return {small, small + top_level_field(whole, 3), small + top_level_field(whole, 2), whole};
}

std::string read_sentencepiece(const fs::path& file, const std::string&) {
  const auto tokenizer = text::T5Tokenizer::load(file);
  std::size_t num_ids = 0;
  for (const auto* text : {"", "hello world", "caf\u00e9 \uFB01 \u2460 \uFF21\u3000\u00BD \U0001F600\n\tx</s>y<extra_id_3>",
                           "\u0130\u01C4\u1E9B\u0323 \uAC00\u1100\u1161 the quick brown fox"}) {
    const auto ids = tokenizer.encode(text);
    for (const auto id : ids) require(id >= 0 && id < tokenizer.vocab_size(), "an id outside of the vocabulary");
    tokenizer.decode(ids, false);
    tokenizer.decode(ids, true);
    num_ids += ids.size();
  }
  tokenizer.decode(std::array<std::int32_t, 4>{0, 5, 1 << 30, -7}, false);
  return fmt::format("read, {} pieces, {} ids", magnitude(static_cast<std::size_t>(tokenizer.vocab_size())),
                     magnitude(num_ids));
}

// --- config.json ---

std::vector<std::string> config_seeds() {
  return {R"({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 32128, "d_model": 512,
  "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_decoder_layers": 6, "num_heads": 8,
  "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "dropout_rate": 0.1,
  "layer_norm_epsilon": 1e-06, "initializer_factor": 1.0, "feed_forward_proj": "relu", "pad_token_id": 0,
  "eos_token_id": 1, "decoder_start_token_id": 0, "is_encoder_decoder": true, "task_specific_params": {"a": {"b": [1]}}})",
          R"({"model_type": "t5", "vocab_size": 100, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1,
  "num_decoder_layers": null, "num_heads": 2, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": true,
  "scale_decoder_outputs": false, "classifier_dropout": 0.0, "id2label": {"0": "a", "1": "b"}})"};
}

std::string read_config(const fs::path& file, const std::string&) {
  const auto json = io::read_json(file);
  const auto c = backbones::T5Config::read(json, file.string());
  require(c.vocab_size > 0 && c.d_model > 0 && c.num_layers > 0 && c.dropout_rate < 1.0, "a config out of range");
  return fmt::format("read, gated {}, activation {}, tied {}", c.is_gated, static_cast<int>(c.activation), c.tied);
}

// --- cached data sets ---

const std::vector<tasks::InputFile> kSplits{{"train", "train.tsv"}, {"validation", "dev.tsv"}};

std::vector<std::string> dataset_seeds() {
  tasks::EncodedData encoded;
  encoded.data.labels = {"negative", "positive"};
  encoded.data.metrics = {"accuracy"};
  encoded.data.warnings = {"a line was skipped"};
  encoded.train = {{.ids = {3, 4, 1}, .label = 1.0, .target_ids = {5, 1}, .id = "0"}, {.ids = {1}, .label = 0.0, .id = "x7"}};
  encoded.validation = {{{.ids = {7, 1}, .id = ""}}};
  const auto file = fs::temp_directory_path() / fmt::format("mergex-fuzz-seed-{}", ::getpid());
  std::vector<std::string> seeds;
  for (const bool is_empty : {false, true}) {
    if (is_empty) encoded.train.clear();
    tasks::write_encoded_data(file, encoded);
    seeds.push_back(io::read_file(file));
  }
  fs::remove(file);
  return seeds;
}

std::string read_dataset(const fs::path& file, const std::string& input) {
  // Most damage would end at the checksum: half of the inputs, by their last byte, are given the right one.
  auto repaired = input;
  if (!input.empty() && input.back() % 2 == 0) {
    try {
      const auto opened = io::SafetensorsFile::open(file);
      if (const auto stated = opened.metadata().find("sha256"); stated != opened.metadata().end()) {
        const auto at = repaired.find(stated->second);
        if (at != std::string::npos) repaired.replace(at, stated->second.size(), tasks::encoded_data_checksum(file));
        write(file, repaired);
      }
    } catch (const UserError&) {
    }
  }
  const auto encoded = tasks::read_encoded_data(file, kSplits, 10);
  std::size_t num_ids = 0;
  for (const auto& example : encoded.train) num_ids += example.ids.size() + example.target_ids.size() + example.id.size();
  require(encoded.validation.size() == 1 && encoded.data.validation.size() == 1, "the splits are not those asked for");
  return fmt::format("read, {} examples, {} ids", magnitude(encoded.train.size()), magnitude(num_ids));
}

// --- YAML

std::vector<std::string> yaml_seeds() {
  return {R"(# merge
models:
  - model: org/a   # first
    parameters: {weight: 0.25, density: [0.1, 1e-3, .5, 1.]}
  - model: "org/b\t\u00e9"
    parameters:
      weight:
        - filter: self_attn
          value: [0, 0.5, +1]
        - value: -2
merge_method: ties
base_model: 'it''s'
normalize: yes
chat_template: |2
    two
  lines
description: >-
  folded
  text
none: ~
---
a: &x {p: 1, q: [2, 3]}
)",
          R"(%YAML 1.1
---
base: &b {p: 1, q: &c [x, y]}
d: {<<: *b, z: *c}
e: {<<: [*b, {r: !!str 3}], "k k": on}
? long
: value
...
---
- [a, [b, {c: d}]]
- null
)"};
}

std::string read_yaml(const fs::path& file, const std::string& input) {
  const auto documents = io::parse_yaml(input, file.string());
  std::size_t num_values = 0, num_bytes = 0;
  for (const auto& document : documents) {
    num_bytes += document.value.dump().size();  // throws where a text is not UTF-8
    num_values += document.origins.size();
    if (num_values > 10'000) continue;
    for (const auto& [pointer, origin] : document.origins) {
      require(document.value.contains(io::Json::json_pointer(pointer)), "a line of a value that is not there");
      require(origin.starts_with(document.file + ":"), "a value without a line");
    }
  }
  return fmt::format("read, {} documents, {} values, {} bytes", magnitude(documents.size()), magnitude(num_values),
                     magnitude(num_bytes));
}

// --- files of torch.save: "whole" is one as it is, NAME the data.pkl of a golden one, put back among its storages

constexpr std::string_view kWhole = "whole\n";
constexpr std::array<std::string_view, 3> kPickles{"views\n", "protocol5\n", "module\n"};

std::string golden_pickle(std::string_view line) {
  return io::read_file(fs::path(MERGEX_SOURCE_DIR) / fmt::format("tests/golden/pickle/{}.bin", line.substr(0, line.size() - 1)));
}

std::vector<std::string> pickle_seeds() {
  std::vector<std::string> seeds;
  for (const auto line : kPickles) {
    const auto bytes = golden_pickle(line);
    const io::ZipArchive archive(std::as_bytes(std::span(bytes)), "golden");
    seeds.push_back(std::string(kWhole) + bytes);
    for (const auto& [name, entry] : archive.entries()) {
      if (name.ends_with("data.pkl")) seeds.push_back(std::string(line).append(archive.checked_text(name)));
    }
  }
  return seeds;
}

std::string torch_bytes(std::string_view input) {
  for (const auto line : kPickles) {
    if (!input.starts_with(line)) continue;
    const auto bytes = golden_pickle(line);
    const io::ZipArchive archive(std::as_bytes(std::span(bytes)), "golden");
    std::vector<test::ZipFile> files;
    for (const auto& [name, entry] : archive.entries()) {
      const auto content = name.ends_with("data.pkl") ? input.substr(line.size()) : archive.checked_text(name);
      files.push_back({name, std::string(content)});
    }
    return test::zip_bytes(files);
  }
  return std::string(input.substr(input.starts_with(kWhole) ? kWhole.size() : 0));
}

std::string read_pickle(const fs::path& file, const std::string& input) {
  const auto bytes = torch_bytes(input);
  const auto path = file.parent_path() / "x.bin";
  write(path, bytes);
  const auto opened = io::TorchFile::open(path);
  unsigned sum = 0;
  std::size_t num_empty = 0;
  for (const auto& tensor : opened.tensors()) {
    require(tensor.bytes.size() <= bytes.size(), "a tensor larger than the file");
    for (const auto byte : tensor.bytes) sum += std::to_integer<unsigned>(byte);
    std::size_t size = io::dtype_size(tensor.dtype);
    for (const auto dimension : tensor.shape) size *= static_cast<std::size_t>(dimension);
    require(size == tensor.bytes.size(), "a tensor without all of its bytes");
    num_empty += tensor.bytes.empty() ? 1 : 0;
  }
  return fmt::format("read, {} tensors, {} empty, {}", magnitude(opened.tensors().size()), magnitude(num_empty),
                     sum > 0 ? "data" : "zeros");
}

// --- adapters: the config, then the header of the weights, whose data are as many as it asks for ---

constexpr std::string_view kHeader = "\n=== header\n";

std::vector<std::string> adapter_seeds() {
  // [out, in] = [4, 3], rank 2, unless it says otherwise
  return {R"({"peft_type": "LORA", "r": 2, "lora_alpha": 4.5, "rank_pattern": {"o_proj": 1, "^model\\.norm": 3}, "use_rslora": true,
  "alpha_pattern": {"layers\\.(0|1)\\.q": 3, ".*[a-z]+_proj": 2}, "bias": "all", "modules_to_save": ["norm"], "target_modules": ["q"]}
=== header
{"base_model.model.layers.0.q.lora_A.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"base_model.model.layers.0.q.lora_B.weight":{"dtype":"BF16","shape":[4,2],"data_offsets":[24,40]},"base_model.model.layers.0.q.base_layer.bias":{"dtype":"F64","shape":[4],"data_offsets":[40,72]},"base_model.model.model.norm.weight":{"dtype":"F16","shape":[3],"data_offsets":[72,78]}})",
          R"({"peft_type": "LORA", "r": 1, "lora_alpha": 2, "use_dora": true, "fan_in_fan_out": true, "init_lora_weights": "gaussian"}
=== header
{"layers.0.q.lora_A.weight":{"dtype":"F32","shape":[1,3],"data_offsets":[0,12]},"layers.0.q.lora_B.weight":{"dtype":"F32","shape":[4,1],"data_offsets":[12,28]},"layers.0.q.lora_magnitude_vector":{"dtype":"F32","shape":[4],"data_offsets":[28,44]},"embed_tokens.lora_embedding_A":{"dtype":"F32","shape":[1,5],"data_offsets":[44,64]},"embed_tokens.lora_embedding_B":{"dtype":"F32","shape":[3,1],"data_offsets":[64,76]},"embed_tokens.lora_magnitude_vector":{"dtype":"F32","shape":[3],"data_offsets":[76,88]},"lm_head.weight":{"dtype":"F32","shape":[6,3],"data_offsets":[88,160]}})",
          R"({"peft_type": "LORA", "r": 1, "lora_alpha": 2, "lora_bias": true, "ensure_weight_tying": false}
=== header
{"layers.0.q.lora_A.weight":{"dtype":"F32","shape":[1,3],"data_offsets":[0,12]},"layers.0.q.lora_B.weight":{"dtype":"F32","shape":[4,1],"data_offsets":[12,28]},"layers.0.q.lora_B.bias":{"dtype":"F32","shape":[4],"data_offsets":[28,44]}})"};
}

fs::path adapter_base(const fs::path& folder) {
  const auto base = folder / "base";
  if (fs::exists(base / "config.json")) return base;
  fs::create_directories(base);
  write(base / "config.json", R"({"model_type": "llama", "tie_word_embeddings": true})");
  const std::array<float, 15> values{0.5f, -1.0f, 2.0f};
  const auto view = [&](const char* name, std::vector<std::int64_t> shape, std::size_t count) {
    return io::TensorView{name, io::DType::kF32, std::move(shape), std::as_bytes(std::span(values).first(count))};
  };
  io::write_safetensors(base / "model.safetensors",
                        std::array{view("model.layers.0.q.weight", {4, 3}, 12), view("model.layers.0.q.bias", {4}, 4),
                                   view("model.norm.weight", {3}, 3), view("model.embed_tokens.weight", {5, 3}, 15)});
  return base;
}

std::string read_adapter(const fs::path& file, const std::string& input) {
  std::string_view config = input, header = "{}";
  if (const auto at = config.find(kHeader); at != std::string_view::npos) {
    header = config.substr(at + kHeader.size());
    config = config.substr(0, at);
  }
  std::size_t num_bytes = 0;
  for (const auto& entry : io::Json::parse(header, nullptr, false)) {
    const auto offsets = entry.is_object() ? entry.find("data_offsets") : entry.end();
    if (!entry.is_object() || offsets == entry.end() || !offsets->is_array() || offsets->size() != 2) continue;
    if ((*offsets)[1].is_number_unsigned()) num_bytes = std::max(num_bytes, (*offsets)[1].get<std::size_t>());
  }
  const auto folder = file.parent_path() / "adapter";
  fs::create_directories(folder);
  write(folder / "adapter_config.json", config);
  write(folder / "adapter_model.safetensors",
        safetensors_bytes(std::string(header), std::string(std::min<std::size_t>(num_bytes, 1 << 20), '\1')));
  const auto adapter = std::make_shared<io::AdapterFolder>(folder);
  const auto base = std::make_shared<io::CheckpointFolder>(adapter_base(file.parent_path()));
  const merging::AppliedAdapter model(adapter, base, merging::AppliedAdapter::TiedWeights::kUntie);
  std::size_t num_values = 0;
  for (const auto& [name, change] : model.changes()) {
    std::int64_t count = 1;
    for (const auto size : change.shape) count *= size;
    std::vector<float> values(static_cast<std::size_t>(count));
    model.source(name)->read(0, count, values.data());
    num_values += values.size();
  }
  return fmt::format("applied, {} tensors, {} values, unties {}", magnitude(model.changes().size()), magnitude(num_values),
                     model.unties());
}

const std::vector<std::string> kJsonTokens{"{", "}", "[", "]", "\"", ":", ",", "null", "true", "false", "\\u0000", "\\ud800",
                                           "\xEF\xBB\xBF", "\xC3", "1e400", "{}", "[]", "\"\"", "//", "\n"};

std::vector<std::string> with_json(std::vector<std::string> tokens) {
  tokens.insert(tokens.end(), kJsonTokens.begin(), kJsonTokens.end());
  return tokens;
}

}  // namespace

std::span<const Reader> readers() {
  static const std::vector<Reader> kReaders{
      {"safetensors", "weights: header, types, shapes, extents", safetensors_seeds,
       with_json({"\"dtype\"", "\"shape\"", "\"data_offsets\"", "__metadata__", "\"F64\"", "\"F8_E4M3\"", "\"BOOL\"", "\"F4\""}),
       mutate_safetensors, read_safetensors},
      {"recipe", "recipes with extends, --set and sweep, and all tasks' options", recipe_seeds,
       with_json({std::string(kBase), std::string(kSet), "\"extends\"", "\"base.json\"", "\"recipe.json\"", "\"sweep\"",
                  "~1", "~0", "~", "/", "/-", "/0", "\"glue/mnli\"", "\"glue/stsb\"", "\"regression\"", "\"span_corruption\"",
                  "\"files\"", "\"labels\"", "\"max_length\"", "\"format\"", "\"text_to_text\"", "\"max_examples\""}),
       mutate_bytes, read_recipe},
      {"table", "TSV, CSV and JSON Lines tables, plain or gzip", table_seeds,
       with_json({"\t", "\r\n", "\"\"", "\"\n", "-1", "nan", "inf", "1e5", "positive", "label", "text", "\x1F\x8B"}), mutate_table,
       read_table},
      {"sentencepiece", "tokenizer models", sentencepiece_seeds, {"<pad>", "</s>", "<unk>", "\u2581", "\x0A", "\x12", "\x1A"},
       mutate_bytes, read_sentencepiece},
      {"config", "config.json of a T5", config_seeds,
       with_json({"\"num_layers\"", "\"d_model\"", "\"gated-silu\"", "\"gelu_new\"", "\"gated-\"", "\"tie_word_embeddings\"",
                  "\"scale_decoder_outputs\"", "\"dropout_rate\""}),
       mutate_bytes, read_config},
      {"dataset", "encoded data sets in the cache", dataset_seeds,
       with_json({"\"dtype\"", "\"shape\"", "\"data_offsets\"", "description", "sha256", "train.ids", "train.ids_end",
                  "validation.0.labels", "\\\"version\\\"", "\\\"labels\\\""}),
       mutate_safetensors, read_dataset},
      {"yaml", "recipes of mergekit", yaml_seeds,
       {"- ", ": ", "? ", "\n", "\n  ", "\n---\n", "\n...\n", "&x ", "*x", "*b", "<<: ", "<<: *b", "!!str ", "!x ", "%TAG ! t:\n", "|", ">-", "'", "\"",
        "[", "]", "{", "}", ", ", "#", "~", "yes", "010", "1_0", "1:30", ".inf", "1e400", "\xEF\xBB\xBF", "\xC3", "\\xFF", "\\uD800",
        "\\U0010FFFF", "\t", "\r", "\xC2\x85", "\xE2\x80\xA8"},
       mutate_bytes, read_yaml},
      {"pickle", "files of torch.save", pickle_seeds,
       {std::string(kWhole), std::string(kPickles[0]), "cos\nsystem\n", "ccollections\nOrderedDict\n", "ctorch\nHalfStorage\n",
        "ctorch._utils\n_rebuild_tensor_v2\n", "ctorch._utils\n_rebuild_parameter\n", "(", "t", "u", "s", "e", "a", "}", "]", ")", "R", "Q", "b", "N", ".",
        "0", "\x80\x04", "\x85", "\x86", "\x87", "\x88", "\x8A\x01\xFF", "\x94", "h\x01", "q\x01", "r\x01\x01", "K\x02", "M\x01\x01", "J",
        "X\x01", "\x8C\x01", "\x93", "\x95", "PK\x01\x02", "PK\x03\x04", "PK\x05\x06", "PK\x06\x06", "PK\x06\x07"},
       mutate_bytes, read_pickle},
      {"adapter", "LoRA adapters, applied to a base", adapter_seeds,
       with_json({std::string(kHeader), "\"peft_type\"", "\"LORA\"", "\"IA3\"", "\"rank_pattern\"", "\"alpha_pattern\"", "\"use_dora\"",
                  "\"lora_bias\"", "\"bias\"", "\"lora_only\"", "\"modules_to_save\"", "\"ensure_weight_tying\"", ".lora_A.weight",
                  ".lora_B.weight", ".lora_B.bias", ".lora_embedding_A", ".lora_magnitude_vector", ".base_layer", "lm_head", "(?:",
                  "(?!", "[^", ")*", "\\\\d", "\\\\b", ".*", "|", "$", "\"dtype\"", "\"shape\"", "\"data_offsets\"", "\"F16\"", "\"F64\""}),
       mutate_bytes, read_adapter}};
  return kReaders;
}

}  // namespace mergex::fuzz
