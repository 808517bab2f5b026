#include "cli/tiny_project.h"

#include <algorithm>
#include <array>
#include <cstdlib>

#include "core/random.h"
#include "io/atomic_file.h"

namespace mergex::test {
namespace fs = std::filesystem;
using io::Json;

Outcome run_mergex(const std::vector<std::string>& arguments, const std::optional<Interruption>& interruption,
                   const fs::path& working_directory) {
  return run_process(MERGEX_PROGRAM, arguments, interruption, working_directory);
}

fs::path tiny_tokenizer() { return fs::path(MERGEX_SOURCE_DIR) / "recipes/quickstart/data/tokenizer"; }

Json tiny_model() {
  return {{"tokenizer", tiny_tokenizer().string()},
          {"config",
           {{"model_type", "t5"},
            {"vocab_size", 2112},
            {"d_model", 16},
            {"d_kv", 4},
            {"d_ff", 32},
            {"num_layers", 1},
            {"num_decoder_layers", 1},
            {"num_heads", 2},
            {"feed_forward_proj", "relu"},
            {"dropout_rate", 0.1},
            {"tie_word_embeddings", true}}},
          {"embedding_std", 0.05}};
}

std::string tiny_sentences(std::size_t count, std::uint64_t seed) {
  constexpr std::array<std::array<const char*, 6>, 2> kWords{
      {{"king", "altar", "priest", "sons", "house", "land"}, {"faith", "grace", "church", "gospel", "love", "spirit"}}};
  constexpr std::array kLabels{"old", "new"};
  SplitMix64 random(seed);
  std::string text = "text\tlabel\n";
  for (std::size_t i = 0; i < count; ++i) {
    const auto kind = i % 2;
    for (auto left = 3 + random.below(6); left > 0; --left) text += kWords[kind][random.below(6)] + std::string(" ");
    text += std::string("the\t") + kLabels[i % 5 == 4 ? 1 - kind : kind] + "\n";
  }
  return text;
}

TinyProject::TinyProject() {
  ::setenv("MERGEX_CACHE_DIR", (folder_ / "cache").c_str(), 1);  // not the user's own
  write_text(folder_ / "train.tsv", tiny_sentences(40, 1));
  write_text(folder_ / "validation.tsv", tiny_sentences(20, 2));
}

Json TinyProject::recipe() const {
  return {{"name", "tiny"},
          {"model", tiny_model()},
          {"task",
           {{"name", "classification"},
            {"files", {{"train", "train.tsv"}, {"validation", "validation.tsv"}}},
            {"labels", {"old", "new"}},
            {"max_length", 16}}},
          {"training",
           {{"max_steps", 6}, {"batch_size", 8}, {"optimizer", {{"name", "adamw"}, {"learning_rate", 0.003}}}}},
          {"evaluation", {{"every", 3}, {"batch_size", 8}}}};
}

Json TinyProject::random_recipe(std::int64_t steps) const {
  auto recipe = this->recipe();
  recipe["experts"] = {{"method", "camex"}, {"num_experts", 3}, {"protocol", "dare"}, {"curvature", {{"rank", 2}}}};
  recipe["training"]["max_steps"] = steps;
  recipe["training"]["batch_size"] = 4;
  recipe["training"]["gradient_accumulation"] = 3;  // 40 sentences: the last step of an epoch is shorter
  recipe["training"]["log_every"] = 2;
  recipe["training"]["save_every"] = 2;
  recipe["training"]["keep_checkpoints"] = 2;
  // By the loss, the best checkpoint is not always the first.
  recipe["evaluation"] = {{"every", 5}, {"batch_size", 8}, {"select_best_by", "loss"}};
  return recipe;
}

Json TinyProject::featured_recipe(std::int64_t steps) const {
  auto recipe = random_recipe(steps);
  auto& training = recipe["training"];
  training["optimizer"] = {{"name", "adafactor"}, {"learning_rate", 0.02}, {"weight_decay", 0.01}, {"beta1", 0.5}};
  training["schedule"] = {{"name", "cosine"}, {"warmup_steps", 2}};
  training["label_smoothing"] = 0.1;
  training["class_weights"] = "balanced";
  training["precision"] = "float16";
  training["activation_checkpointing"] = true;
  training["length_bucketing"] = true;
  training["ema"] = {{"decay", 0.8}};
  training["parameter_groups"] = {{{"pattern", "encoder.*.layer_norm.weight"}, {"frozen", true}},
                                  {{"pattern", "*.router.*"}, {"learning_rate", 0.05}}};
  recipe["evaluation"]["early_stopping"] = {{"patience", 4}};
  return recipe;
}

fs::path TinyProject::write(const std::string& name, const Json& recipe) const {
  return write_text(folder_ / name, recipe.dump(2));
}

Outcome TinyProject::finetune(const Json& recipe, const std::string& out, std::vector<std::string> more,
                              int exit_code) const {
  std::vector<std::string> arguments{"finetune", write(out + ".json", recipe).string(), "--out",
                                     (folder_ / out).string(), "--threads", "1"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  auto outcome = run_mergex(arguments);
  INFO(outcome.err);
  REQUIRE(outcome.exit_code == exit_code);
  return outcome;
}

Json read_json(const fs::path& file) { return io::read_json(file); }
std::string read_text(const fs::path& file) { return io::read_file(file); }

std::vector<Json> json_lines(const fs::path& file) {
  std::vector<Json> lines;
  const auto text = read_text(file);
  for (std::size_t at = 0; at < text.size();) {
    const auto end = text.find('\n', at);
    lines.push_back(io::parse_json(text.substr(at, end - at), file.string()));
    at = end + 1;
  }
  return lines;
}

std::size_t num_lines(const std::string& text) { return static_cast<std::size_t>(std::ranges::count(text, '\n')); }

std::map<std::string, std::string> contents(const fs::path& folder) {
  std::map<std::string, std::string> found;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const auto name = entry.path().filename();
    if (name == "manifest.json" || name == "timing.jsonl" || name.string().starts_with("events.out.tfevents.")) continue;
    const auto place = fs::relative(entry.path().parent_path(), folder) / name;
    if (entry.is_symlink()) {
      found[place.lexically_normal().string()] = "-> " + fs::read_symlink(entry.path()).string();
    } else if (entry.is_regular_file()) {
      found[place.lexically_normal().string()] = read_text(entry.path());
    } else {
      found[place.lexically_normal().string()] = "folder";
    }
  }
  return found;
}

std::vector<std::string> differences(const std::map<std::string, std::string>& expected,
                                     const std::map<std::string, std::string>& got) {
  std::vector<std::string> names;
  for (const auto& [name, content] : expected) {
    const auto found = got.find(name);
    if (found == got.end()) {
      names.push_back(name + " is missing");
    } else if (found->second != content) {
      names.push_back(name + " differs");
    }
  }
  for (const auto& [name, content] : got) {
    if (!expected.contains(name)) names.push_back(name + " is too much");
  }
  return names;
}

bool holds_partial(const fs::path& folder) {
  std::error_code gone;
  for (fs::recursive_directory_iterator at(folder, gone), end; !gone && at != end; at.increment(gone)) {
    if (at->path().extension() == ".partial") return true;
  }
  return false;
}

}  // namespace mergex::test
