#include "merging/verify.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

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

// The manifest is a file like any other: it may be somebody else's, or damaged.
std::map<std::string, OutputFile> read_outputs(const fs::path& path) {
  const auto json = io::read_json(path);
  const auto where = one_line(path.string());
  const auto check = [&](bool holds) {
    if (!holds) fail("{}: no manifest of a merge, or damaged; merge again", where);
  };
  check(json.is_object() && json.contains("outputs") && json["outputs"].is_array());
  std::map<std::string, OutputFile> files;
  for (const auto& entry : json["outputs"]) {
    check(entry.is_object() && entry.contains("file") && entry["file"].is_string() && entry.contains("bytes") &&
          entry["bytes"].is_number_unsigned() && entry.contains("sha256") != entry.contains("tensors"));
    OutputFile file{.name = entry["file"].get<std::string>(), .num_bytes = entry["bytes"].get<std::uint64_t>()};
    const auto name = fs::path(file.name).lexically_normal();
    if (name.empty() || name.is_absolute() || *name.begin() == "..") {
      fail("{}: names {}, expected a file of this folder", where, io::shown(Json(file.name)));
    }
    if (entry.contains("sha256")) {
      check(entry["sha256"].is_string() && !entry["sha256"].empty());
      file.sha256 = entry["sha256"].get<std::string>();
    } else {
      check(entry["tensors"].is_object());
      for (const auto& [tensor, digest] : entry["tensors"].items()) {
        check(digest.is_string());
        file.tensors.emplace_back(tensor, digest.get<std::string>());
      }
    }
    files.emplace(file.name, std::move(file));
  }
  return files;
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
  if (is_intact())
    return fmt::format("{} tensors ({}) in {} files are as they were written\n", num_tensors, bytes_text(num_bytes),
                       num_files);
  std::string lines;
  for (const auto& problem : problems) lines += problem + "\n";
  return lines + fmt::format("{} of {} tensors and files differ from what was written\n", problems.size(),
                             num_tensors + num_files);
}

Verification verify(const fs::path& folder, std::size_t num_threads) {
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored)) fail("{}: no such folder", folder.string());
  if (!fs::exists(folder / kManifestFile, ignored)) {
    fail("{}: holds no {}, expected the result of mergex merge", folder.string(), kManifestFile);
  }
  const auto outputs = read_outputs(folder / kManifestFile);

  Verification found{.num_files = outputs.size()};
  auto present = files_below(folder);
  present.erase(std::string(kManifestFile));
  present.erase(std::string(kTiming));
  std::vector<io::SafetensorsFile> shards;
  struct Tensor {
    const io::TensorView* view;
    const std::string &file, &digest;
  };
  std::vector<Tensor> tensors;
  for (const auto& [name, file] : outputs) {
    found.num_tensors += file.tensors.size();
    const auto path = folder / name;
    if (present.erase(name) == 0) {
      found.problems.push_back(fmt::format("{}: is missing", name));
    } else if (!file.sha256.empty()) {
      if (fs::file_size(path) != file.num_bytes || io::sha256_file(path) != file.sha256) {
        found.problems.push_back(fmt::format("{}: differs", name));
      }
    } else {
      try {
        shards.push_back(io::SafetensorsFile::open(path));
      } catch (const UserError& error) {
        found.problems.emplace_back(error.what());
        continue;
      }
      std::set<std::string_view> listed;
      for (const auto& [tensor, digest] : file.tensors) {
        listed.insert(tensor);
        if (const auto* view = shards.back().find(tensor)) {
          tensors.push_back({view, name, digest});
        } else {
          found.problems.push_back(fmt::format("{}: tensor {} is missing", name, io::shown(Json(tensor))));
        }
      }
      for (const auto& view : shards.back().tensors()) {
        if (!listed.contains(view.name))
          found.problems.push_back(fmt::format("{}: tensor {} is not of the merge", name, io::shown(Json(view.name))));
      }
    }
  }
  for (const auto& name : present) found.problems.push_back(fmt::format("{}: is not of the merge", one_line(name)));

  // Large tensors one after another with all threads on their blocks.
  ThreadPool pool(std::max<std::size_t>(1, num_threads));
  for (const auto& [view, file, digest] : tensors) {
    std::vector<BlockDigest> digests(num_digest_blocks(view->bytes.size()));
    pool.parallel_for(digests.size(), [&](std::size_t block, std::size_t) {
      const auto rest = view->bytes.subspan(block * kDigestBlock);
      digests[block] = digest_of_block(rest.first(std::min<std::size_t>(rest.size(), kDigestBlock)));
    });
    found.num_bytes += view->bytes.size();
    if (digest_of_tensor(digests) != digest) {
      found.problems.push_back(fmt::format("{}: tensor {} is damaged", file, io::shown(Json(view->name))));
    }
    release(view->bytes);
  }
  return found;
}

}  // namespace mergex::merging
