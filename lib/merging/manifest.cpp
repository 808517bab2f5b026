#include "merging/manifest.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "io/file_descriptor.h"
#include "io/sha256.h"

namespace mergex::merging {
namespace fs = std::filesystem;
using io::Json;

namespace {

constexpr std::uint64_t kTailBytes = 64 << 10;  // holds the directory of a zip archive, or the end of it

std::pair<std::uint64_t, std::int64_t> size_and_date(const fs::path& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) fail("{}: no such file any more", path.string());
  return {static_cast<std::uint64_t>(info.st_size),
          info.st_mtim.tv_sec * std::int64_t{1'000'000'000} + info.st_mtim.tv_nsec};
}

std::string header_digest(const fs::path& path, std::uint64_t num_bytes) {
  std::uint64_t begin = 0, size = 0;
  const io::FileDescriptor file(path, O_RDONLY);
  if (path.extension() == ".safetensors") {
    if (num_bytes < sizeof size) return "";
    file.read_at(0, std::as_writable_bytes(std::span(&size, 1)));
    size = std::min(num_bytes, std::min(num_bytes, size) + sizeof size);
  } else if (path.extension() == ".bin") {
    size = std::min(num_bytes, kTailBytes);
    begin = num_bytes - size;
  } else {
    return io::sha256_file(path);
  }
  std::vector<std::byte> header(size);
  file.read_at(begin, header);
  return io::sha256_hex(header);
}

}  // namespace

InputFiles::File InputFiles::look_at(const fs::path& path) {
  const auto [num_bytes, modified_ns] = size_and_date(path);
  return {.path = path,
          .num_bytes = num_bytes,
          .modified_ns = modified_ns,
          .header_sha256 = header_digest(path, num_bytes)};
}

InputFiles::InputFiles(const MergePlan& plan) {
  for (const auto& model : plan.models) {
    auto& files = of_models_.emplace_back();
    for (const auto& path : model.folder->files()) files.push_back(look_at(path));
    if (model.adapter == nullptr) continue;
    for (const auto& path : model.adapter->files()) files.push_back(look_at(path));
  }
  for (const auto& statistics : plan.statistics) others_.push_back(look_at(statistics->path()));
  for (const auto& name : plan.copied_files) others_.push_back(look_at(plan.donor / name));
}

void InputFiles::check_unchanged() const {
  const auto check = [](const File& file) {
    if (size_and_date(file.path) == std::pair(file.num_bytes, file.modified_ns)) return;
    fail("{}: was changed while it was merged; merge again when it is complete", file.path.string());
  };
  for (const auto& files : of_models_) std::ranges::for_each(files, check);
  std::ranges::for_each(others_, check);
}

Json InputFiles::identity() const {
  Json all = Json::array();
  const auto add = [&](const File& file) {
    all.push_back({file.path.string(), file.num_bytes, file.modified_ns, file.header_sha256});
  };
  for (const auto& files : of_models_) std::ranges::for_each(files, add);
  std::ranges::for_each(others_, add);
  return all;
}

Json InputFiles::files_of_model(std::size_t model) const {
  Json all = Json::array();
  for (const auto& file : of_models_[model]) {
    all.push_back(
        {{"file", file.path.filename().string()}, {"bytes", file.num_bytes}, {"header_sha256", file.header_sha256}});
  }
  return all;
}

Json make_manifest(const std::string& version, const MergePlan& plan, const InputFiles& inputs,
                   const InputDigests& digests, const std::vector<OutputFile>& files) {
  // Tensors are pushed at the end: ordered objects look keys up one by one.
  Json input_models = Json::array();
  for (std::size_t i = 0; i < plan.models.size(); ++i) {
    const auto& model = plan.models[i];
    Json::object_t tensors;
    for (const auto* view : model.folder->tensors()) {
      if (const auto digest = digests.find(view); digest != digests.end())
        tensors.push_back({view->name, digest->second});
    }
    input_models.push_back({{"model", model.name},
                            {"folder", model.folder->path().string()},
                            {"files", inputs.files_of_model(i)},
                            {"tensors", std::move(tensors)}});
  }
  Json output_files = Json::array();
  for (const auto& file : files) {
    Json entry{{"file", file.name}, {"bytes", file.num_bytes}};
    if (file.sha256.empty()) {
      Json::object_t tensors;
      for (const auto& [name, digest] : file.tensors) tensors.push_back({name, digest});
      entry["tensors"] = std::move(tensors);
    } else {
      entry["sha256"] = file.sha256;
    }
    output_files.push_back(std::move(entry));
  }
  return {{"program", "mergex " + version},
          {"digests", "tensors: XXH3-128 over the XXH3-128 digests of blocks of 1 MiB; files: SHA-256"},
          {"recipe", plan.resolved},
          {"inputs", std::move(input_models)},
          {"outputs", std::move(output_files)}};
}

}  // namespace mergex::merging
