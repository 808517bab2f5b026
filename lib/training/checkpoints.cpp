#include "training/checkpoints.h"

#include <torch/torch.h>

#include <fcntl.h>
#include <unistd.h>

#include <charconv>

#include "core/error.h"
#include "io/atomic_file.h"
#include "io/safetensors.h"
#include "tensor/convert.h"

namespace mergex::training {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kRegular = "step-", kInterrupted = "interrupted-step-";

std::optional<std::int64_t> step_of(const fs::path& path, std::string_view prefix) {
  const auto name = path.filename().string();
  if (!name.starts_with(prefix)) return std::nullopt;
  std::int64_t step = 0;
  const auto* end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + prefix.size(), end, step);
  if (error != std::errc() || stop != end) return std::nullopt;
  return step;
}

}  // namespace

void CheckpointFolders::write(const fs::path& name, const TrainingState& state,
                              const std::function<void(const fs::path&)>& write_model) {
  fs::create_directories(folder_);
  const auto temporary = folder_ / (name.string() + ".partial");
  fs::remove_all(temporary);
  fs::create_directory(temporary);
  write_model(temporary);
  std::vector<io::TensorView> views;
  std::vector<Tensor> on_cpu;  // keeps the bytes alive until they are written
  for (const auto& [key, value] : state.tensors) {
    on_cpu.push_back(value.detach().to(at::kCPU).contiguous());
    views.push_back(tensor::view_of(key, on_cpu.back()));
  }
  io::write_safetensors(temporary / "training_state.safetensors", views);
  io::write_json(temporary / "training_state.json", state.values);
  io::sync_folder(temporary);
  fs::rename(temporary, folder_ / name);
  io::sync_folder(folder_);
}

void CheckpointFolders::save(std::int64_t step, const TrainingState& state,
                             const std::function<void(const fs::path&)>& write_model) {
  write(fmt::format("{}{}", kRegular, step), state, write_model);
}

void CheckpointFolders::save_interrupted(std::int64_t step, const TrainingState& state,
                                         const std::function<void(const fs::path&)>& write_model) {
  const auto name = fmt::format("{}{}", kInterrupted, step);
  if (fs::exists(folder_ / name)) return;  // stopped twice at the same step: nothing has changed
  write(name, state, write_model);
}

std::map<std::int64_t, fs::path> CheckpointFolders::regular() const {
  std::map<std::int64_t, fs::path> found;
  if (!fs::exists(folder_)) return found;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    if (const auto step = step_of(entry.path(), kRegular)) found.emplace(*step, entry.path());
  }
  return found;
}

std::optional<fs::path> CheckpointFolders::newest() {
  if (!fs::exists(folder_)) return std::nullopt;
  std::int64_t best_rank = -1;
  std::optional<fs::path> result;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    if (entry.path().extension() == ".partial") {
      fs::remove_all(entry.path());
      continue;
    }
    // At the same step the regular one is later: it was written after that step's evaluation.
    auto rank = step_of(entry.path(), kRegular);
    if (rank) {
      rank = 2 * *rank + 1;
    } else if ((rank = step_of(entry.path(), kInterrupted))) {
      rank = 2 * *rank;
    }
    if (rank && *rank > best_rank) {
      best_rank = *rank;
      result = entry.path();
    }
  }
  return result;
}

TrainingState CheckpointFolders::load_state(const fs::path& checkpoint) const {
  TrainingState state;
  state.values = io::read_json(checkpoint / "training_state.json");
  const auto file = io::SafetensorsFile::open(checkpoint / "training_state.safetensors");
  for (const auto& view : file.tensors()) state.tensors.emplace(view.name, tensor::to_tensor(view));
  return state;
}

void CheckpointFolders::point_best(std::int64_t step) {
  const auto target = fmt::format("{}{}", kRegular, step);
  std::error_code none;
  if (fs::read_symlink(best(), none) == target) return;
  const auto temporary = folder_ / "best.partial";
  fs::remove(temporary);
  fs::create_directory_symlink(target, temporary);
  fs::rename(temporary, best());
  io::sync_folder(folder_);
}

void CheckpointFolders::prune(std::int64_t keep, std::int64_t best_step) {
  const auto found = regular();
  auto remaining = static_cast<std::int64_t>(found.size());
  for (const auto& [step, path] : found) {
    if (remaining-- <= std::max<std::int64_t>(keep, 1)) continue;
    if (step != best_step) {
      fs::remove_all(path);
      continue;
    }
    // The best one is kept for its weights; a run goes on from the newest.
    fs::remove(path / "training_state.safetensors");
    fs::remove(path / "training_state.json");
  }
  if (found.empty()) return;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    const auto step = step_of(entry.path(), kInterrupted);
    if (step && *step <= found.rbegin()->first) fs::remove_all(entry.path());
  }
}

}  // namespace mergex::training
