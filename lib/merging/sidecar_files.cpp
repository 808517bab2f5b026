#include "merging/sidecar_files.h"

#include <algorithm>
#include <array>

#include "merging/vocabulary_plan.h"

namespace mergex::merging {
namespace fs = std::filesystem;

namespace {

// Weights in any format, and what trainers keep beside them.
constexpr std::array<std::string_view, 11> kWeightEndings{".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack",
                                                          ".gguf", ".onnx", ".index.json", ".partial"};
constexpr std::array<std::string_view, 11> kNotCopied{"config.json", "README.md", "manifest.json", "merge_report.json",
                                                      "timing.json", "trainer_state.json", "training_state.json",
                                                      "training_args.bin", "experts.json", "all_results.json", ".gitattributes"};
constexpr std::uintmax_t kMaxBytes = 256u << 20;  // a file beside the weights that is larger is weights, too

bool is_sidecar(const fs::directory_entry& entry) {
  const auto name = entry.path().filename().string();
  return entry.is_regular_file() && entry.file_size() <= kMaxBytes && std::ranges::find(kNotCopied, name) == kNotCopied.end() &&
         std::ranges::none_of(kWeightEndings, [&](std::string_view ending) { return name.ends_with(ending); });
}

}  // namespace

void plan_sidecar_files(MergePlan& plan, const io::Json& config, bool has_tokenizer) {
  plan.written_files.emplace_back("config.json", config.dump(2) + "\n");
  const auto is_written = [&](const fs::path& file) {
    return std::ranges::any_of(plan.written_files, [&](const auto& written) { return written.first == file; });
  };
  // One level of folders: sentence-transformers keep their pooling there.
  for (const auto& entry : fs::directory_iterator(plan.donor)) {
    const bool is_replaced = is_written(entry.path().filename()) || (has_tokenizer && is_tokenizer_file(entry.path().filename().string()));
    if (is_sidecar(entry) && !is_replaced) plan.copied_files.push_back(entry.path().filename());
    const auto name = entry.path().filename().string();
    if (!entry.is_directory() || name.starts_with('.') || name.starts_with("checkpoint") || name == "onnx" || name == "openvino") continue;
    for (const auto& inner : fs::directory_iterator(entry.path())) {
      if (is_sidecar(inner) || (inner.is_regular_file() && inner.path().filename() == "config.json")) {
        plan.copied_files.push_back(fs::path(name) / inner.path().filename());
      }
    }
  }
  std::ranges::sort(plan.copied_files);
}

}  // namespace mergex::merging
