#include "merging/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "core/bytes.h"
#include "core/error.h"
#include "core/one_line.h"
#include "core/thread_pool.h"
#include "io/safetensors.h"
#include "io/sha256.h"
#include "merging/digest.h"
#include "merging/input_pages.h"
#include "merging/manifest.h"

namespace mergex::merging {
namespace fs = std::filesystem;
using io::Json;

namespace {

constexpr std::string_view kTiming = "timing.json";  // has no place in a manifest that runs share

struct Manifest {
  std::map<std::string, OutputFile> files;
  std::map<std::string, OutputTensor> tensors;
};

// The manifest is a file like any other: it may be somebody else's, or damaged.
Manifest read_manifest(const fs::path& path) {
  const auto json = io::read_json(path);
  const auto where = one_line(path.string());
  const auto member = [&](const Json& object, const char* key, Json::value_t type) -> const Json& {
    const auto found = object.is_object() ? object.find(key) : object.end();
    if (!object.is_object() || found == object.end() || found->type() != type) {
      fail("{}: no manifest of a merge: holds no \"{}\" where one is expected; merge again", where, key);
    }
    return *found;
  };
  const auto text = [&](const Json& object, const char* key) { return member(object, key, Json::value_t::string).get<std::string>(); };

  Manifest manifest;
  const auto& outputs = member(json, "outputs", Json::value_t::object);
  for (const auto& entry : member(outputs, "files", Json::value_t::array)) {
    OutputFile file{.name = text(entry, "file"), .num_bytes = member(entry, "bytes", Json::value_t::number_unsigned).get<std::uint64_t>()};
    if (entry.contains("sha256")) file.sha256 = text(entry, "sha256");
    const auto name = fs::path(file.name).lexically_normal();
    if (name.empty() || name.is_absolute() || *name.begin() == "..") {
      fail("{}: names {}, expected a file of this folder", where, io::shown(Json(file.name)));
    }
    manifest.files.emplace(file.name, file);
  }
  for (const auto& [name, entry] : member(outputs, "tensors", Json::value_t::object).items()) {
    manifest.tensors.emplace(name, OutputTensor{.name = name, .file = text(entry, "file"), .digest = text(entry, "digest")});
  }
  return manifest;
}

std::set<std::string> files_below(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_directory()) names.insert(entry.path().lexically_relative(folder).string());
  }
  return names;
}

}  // namespace

std::string Verification::text() const {
  if (is_intact()) return fmt::format("{} tensors ({}) in {} files are as they were written\n", num_tensors, bytes_text(num_bytes), num_files);
  std::string lines;
  for (const auto& problem : problems) lines += problem + "\n";
  return lines + fmt::format("{} of {} tensors and files differ from what was written\n", problems.size(), num_tensors + num_files);
}

Verification verify(const fs::path& folder, std::size_t num_threads) {
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored)) fail("{}: no such folder", folder.string());
  if (!fs::exists(folder / kManifestFile, ignored)) {
    fail("{}: holds no {}, expected the result of mergex merge", folder.string(), kManifestFile);
  }
  const auto manifest = read_manifest(folder / kManifestFile);
  Verification found{.num_tensors = manifest.tensors.size(), .num_files = manifest.files.size()};

  auto present = files_below(folder);
  present.erase(std::string(kManifestFile));
  present.erase(std::string(kTiming));
  std::vector<io::SafetensorsFile> shards;
  for (const auto& [name, file] : manifest.files) {
    const auto path = folder / name;
    if (present.erase(name) == 0) {
      found.problems.push_back(fmt::format("{}: is missing", name));
    } else if (file.sha256.empty()) {
      try {
        shards.push_back(io::SafetensorsFile::open(path));
      } catch (const UserError& error) {
        found.problems.emplace_back(error.what());
      }
    } else if (fs::file_size(path) != file.num_bytes || io::sha256_file(path) != file.sha256) {
      found.problems.push_back(fmt::format("{}: differs", name));
    }
  }
  for (const auto& name : present) found.problems.push_back(fmt::format("{}: is not of the merge", one_line(name)));

  struct Tensor {
    const io::TensorView* view;
    std::string file;
  };
  std::vector<Tensor> tensors;
  std::set<std::string> seen;
  for (const auto& shard : shards) {
    for (const auto& view : shard.tensors()) {
      const auto file = shard.path().lexically_relative(folder).string();
      const auto listed = manifest.tensors.find(view.name);
      if (listed == manifest.tensors.end() || listed->second.file != file) {
        found.problems.push_back(fmt::format("{}: tensor {} is not of the merge", file, io::shown(Json(view.name))));
        continue;
      }
      seen.insert(view.name);
      tensors.push_back({&view, file});
    }
  }
  for (const auto& [name, tensor] : manifest.tensors) {
    if (!seen.contains(name)) found.problems.push_back(fmt::format("{}: tensor {} is missing", tensor.file, io::shown(Json(name))));
  }

  // Large tensors one after another with all threads on their blocks.
  ThreadPool pool(std::max<std::size_t>(1, num_threads));
  for (const auto& [view, file] : tensors) {
    std::vector<BlockDigest> digests(num_digest_blocks(view->bytes.size()));
    pool.parallel_for(digests.size(), [&](std::size_t block, std::size_t) {
      const auto rest = view->bytes.subspan(block * kDigestBlock);
      digests[block] = digest_of_block(rest.first(std::min<std::size_t>(rest.size(), kDigestBlock)));
    });
    found.num_bytes += view->bytes.size();
    if (digest_of_tensor(digests) != manifest.tensors.at(view->name).digest) {
      found.problems.push_back(fmt::format("{}: tensor {} is damaged", file, io::shown(Json(view->name))));
    }
    release(view->bytes);
  }
  return found;
}

}  // namespace mergex::merging
