#include "merging/execute.h"

#include <fmt/chrono.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <unordered_set>

#include "core/error.h"
#include "core/log.h"
#include "core/thread_pool.h"
#include "io/sha256.h"
#include "merging/digest.h"
#include "merging/driver.h"
#include "merging/input_pages.h"
#include "merging/journal.h"
#include "merging/manifest.h"
#include "merging/merge_report.h"
#include "merging/model_card.h"
#include "merging/shards.h"

namespace mergex::merging {
namespace fs = std::filesystem;
using io::Json;

namespace {

using Clock = std::chrono::steady_clock;

bool lies_in(const fs::path& path, const fs::path& folder) {
  const auto inner = fs::weakly_canonical(path);
  return std::ranges::mismatch(folder, inner).in1 == folder.end();
}

// What --overwrite would take away from under the merge, and from the user.
void check_keeps_inputs(const MergePlan& plan, const fs::path& out) {
  const auto check = [&](const fs::path& input) {
    if (lies_in(input, out))
      fail("{}: holds an input of this merge ({}); choose another --out", out.string(), input.string());
  };
  for (const auto& model : plan.models) {
    check(model.folder->path());
    if (model.adapter != nullptr) check(model.adapter->path());
  }
  for (const auto& statistics : plan.statistics) check(statistics->path());
  if (!plan.donor.empty()) check(plan.donor);
}

bool is_finished(const fs::path& out, const MergePlan& plan) {
  std::error_code ignored;
  if (!fs::exists(out / kManifestFile, ignored)) return false;
  const auto manifest = io::read_json(out / kManifestFile);
  return manifest.is_object() && manifest.contains("recipe") && manifest["recipe"] == plan.resolved;
}

std::string hash_of(const MergePlan& plan, const InputFiles& inputs, const ShardLayout& layout,
                    const std::string& version) {
  Json shards = Json::array();
  for (const auto& shard : layout.shards) shards.push_back(io::sha256_hex(std::as_bytes(std::span(shard.header))));
  const auto text = Json{{"program", version},
                         {"recipe", plan.resolved},
                         {"inputs", inputs.identity()},
                         {"shards", shards},
                         {"files", plan.written_files}}
                        .dump(-1, ' ', false, Json::error_handler_t::replace);
  return io::sha256_hex(std::as_bytes(std::span(text)));
}

/// Bytes done, passed on at most 50 times a second.
class ProgressMeter {
 public:
  ProgressMeter(const ExecuteOptions& options, std::uint64_t total) : callback_(options.progress), total_(total) {}

  void add(std::uint64_t bytes, const std::string& tensor) {
    if (!callback_) return;
    const std::lock_guard lock(mutex_);
    done_ += bytes;
    const auto now = Clock::now();
    if (now < next_ && done_ < total_) return;
    next_ = now + std::chrono::milliseconds(20);
    callback_(done_, total_, tensor);
  }

 private:
  std::function<void(std::uint64_t, std::uint64_t, std::string_view)> callback_;
  std::uint64_t total_, done_ = 0;
  std::mutex mutex_;
  Clock::time_point next_ = {};
};

template <class Visit>
void for_each_origin(const PlannedTensor& tensor, Visit visit) {
  if (tensor.method == nullptr) return visit(*tensor.copied);
  if (tensor.base) visit(*tensor.base);
  for (const auto& input : tensor.inputs) visit(input);
}

/// One run of a plan: groups of tensors, from reading to the journal, and then the files beside them.
class Execution {
 public:
  Execution(const MergePlan& plan, const ExecuteOptions& options, const ShardLayout& layout, const InputFiles& inputs,
            OutputFolder& folder, bool keeps)
      : plan_(plan),
        options_(options),
        layout_(layout),
        inputs_(inputs),
        folder_(folder),
        pool_(std::max<std::size_t>(1, options.threads)),
        files_(folder.path(), layout, keeps),
        report_(plan),
        digests_(plan.tensors.size()),
        meter_(options, layout.data_bytes) {
    for (const auto& model : plan.models) folders_.push_back(model.folder.get());
    for (std::size_t i = 0; i < plan.tensors.size(); ++i) {
      auto& stored = inputs_of_tensors_.emplace_back();
      for_each_origin(plan.tensors[i], [&](const PlannedTensor::Origin& origin) {
        const auto* view = folders_[origin.model]->find(origin.tensor);
        if (view == nullptr) return;
        stored.push_back({origin.model, view});
        last_uses_[view] = i;
      });
    }
  }

  /// Takes over what a journal says is done. @return false where the data does not agree with it
  bool take_over(const std::vector<Json>& groups);
  /// Groups are journaled as they are done, but for the last, which is followed by the end.
  void run(const std::string& plan_hash);
  std::uint64_t write_other_files();

 private:
  struct Input {
    std::size_t model;
    const io::TensorView* view;
  };

  /// Stored tensors that these are made of, each once.
  std::vector<Input> inputs_of(std::span<const std::size_t> group) const;
  /// @return those that were hashed now
  std::vector<Input> hash_inputs(const std::vector<Input>& inputs);
  std::vector<std::string> hash_outputs(std::span<const std::size_t> group);
  std::vector<std::string> hash(
      const std::vector<std::uint64_t>& sizes,
      const std::function<BlockDigest(std::size_t item, std::size_t block, std::size_t thread)>& digest);

  const MergePlan& plan_;
  const ExecuteOptions& options_;
  const ShardLayout& layout_;
  const InputFiles& inputs_;
  OutputFolder& folder_;
  UnreadablePageGuard guard_;
  std::vector<const io::CheckpointFolder*> folders_;
  ThreadPool pool_;
  ShardFiles files_;
  MergeReport report_;
  InputDigests input_digests_;
  std::vector<std::string> digests_;  // by tensor
  std::vector<std::vector<Input>> inputs_of_tensors_;
  std::unordered_map<const io::TensorView*, std::size_t> last_uses_;
  std::size_t num_done_ = 0;  // tensors are done in the plan's order
  ProgressMeter meter_;
  Clock::time_point start_ = Clock::now();
};

std::vector<Execution::Input> Execution::inputs_of(std::span<const std::size_t> group) const {
  std::vector<Input> inputs;
  std::unordered_set<const io::TensorView*> seen;
  for (const auto i : group) {
    for (const auto& input : inputs_of_tensors_[i]) {
      if (seen.insert(input.view).second) inputs.push_back(input);
    }
  }
  return inputs;
}

std::vector<std::string> Execution::hash(
    const std::vector<std::uint64_t>& sizes,
    const std::function<BlockDigest(std::size_t, std::size_t, std::size_t)>& digest) {
  struct Block {
    std::size_t item, block;
  };
  std::vector<Block> blocks;
  std::vector<std::size_t> first;
  for (std::size_t item = 0; item < sizes.size(); ++item) {
    first.push_back(blocks.size());
    for (std::size_t block = 0; block < num_digest_blocks(sizes[item]); ++block) blocks.push_back({item, block});
  }
  first.push_back(blocks.size());
  std::vector<BlockDigest> digests(blocks.size());
  pool_.parallel_for(blocks.size(), [&](std::size_t i, std::size_t thread) {
    digests[i] = digest(blocks[i].item, blocks[i].block, thread);
  });
  std::vector<std::string> all;
  for (std::size_t item = 0; item < sizes.size(); ++item) {
    all.push_back(digest_of_tensor(std::span(digests).subspan(first[item], first[item + 1] - first[item])));
  }
  return all;
}

std::vector<Execution::Input> Execution::hash_inputs(const std::vector<Input>& inputs) {
  std::vector<Input> fresh;
  std::vector<std::uint64_t> sizes;
  for (const auto& input : inputs) {
    if (input_digests_.contains(input.view)) continue;
    fresh.push_back(input);
    sizes.push_back(input.view->bytes.size());
  }
  const auto digests = hash(sizes, [&](std::size_t item, std::size_t block, std::size_t) {
    const auto bytes = fresh[item].view->bytes.subspan(block * kDigestBlock);
    return digest_of_block(bytes.first(std::min<std::size_t>(bytes.size(), kDigestBlock)));
  });
  for (std::size_t i = 0; i < fresh.size(); ++i) input_digests_.emplace(fresh[i].view, digests[i]);
  return fresh;
}

std::vector<std::string> Execution::hash_outputs(std::span<const std::size_t> group) {
  std::vector<std::uint64_t> sizes;
  for (const auto i : group) sizes.push_back(plan_.tensors[i].num_bytes());
  std::vector<std::vector<std::byte>> buffers(pool_.num_threads());
  return hash(sizes, [&](std::size_t item, std::size_t block, std::size_t thread) {
    auto& buffer = buffers[thread];
    const auto begin = block * kDigestBlock;
    buffer.resize(std::min<std::uint64_t>(kDigestBlock, sizes[item] - begin));
    files_.read(group[item], begin, buffer);
    return digest_of_block(buffer);
  });
}

bool Execution::take_over(const std::vector<Json>& groups) {
  std::vector<std::size_t> done;
  std::vector<std::string> digests;
  for (const auto& group : groups) {
    for (const auto& tensor : group.at("tensors")) {
      const auto i = done.size();
      if (i >= plan_.tensors.size() || tensor.at("report").at("name") != plan_.tensors[i].name) return false;
      done.push_back(i);
      digests.push_back(tensor.at("digest").get<std::string>());
    }
  }
  if (hash_outputs(done) != digests) return false;
  for (const auto& group : groups) {
    for (const auto& tensor : group.at("tensors")) {
      const auto& planned = plan_.tensors[num_done_];
      report_.add(tensor.at("report"), planned);
      meter_.add(planned.num_bytes(), planned.name);
      digests_[num_done_] = digests[num_done_];
      ++num_done_;
    }
    for (const auto& input : group.at("inputs")) {
      const auto* view = folders_.at(input.at(0).get<std::size_t>())->find(input.at(1).get<std::string>());
      if (view != nullptr) input_digests_.emplace(view, input.at(2).get<std::string>());
    }
  }
  folder_.keep();
  return true;
}

void Execution::run(const std::string& plan_hash) {
  std::vector<std::size_t> all(plan_.tensors.size());
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
  auto pending = std::span<const std::size_t>(all).subspan(num_done_);
  if (pending.empty()) return;

  std::optional<Journal> journal;
  Driver driver(plan_, pool_, files_, options_.memory_bytes,
                [&](std::uint64_t bytes, const PlannedTensor& tensor) { meter_.add(bytes, tensor.name); });
  driver.gather_model();
  auto group = pending.first(driver.group_size(pending));
  while (!group.empty()) {
    pending = pending.subspan(group.size());
    const auto next = pending.empty() ? pending : pending.first(driver.group_size(pending));
    for (const auto& input : inputs_of(next)) prefetch(input.view->bytes);

    const auto inputs = inputs_of(group);
    const auto hashed = hash_inputs(inputs);
    const auto merged = driver.merge(group);
    guard_.check(folders_);
    const auto digests = hash_outputs(group);
    std::vector<std::string> done;
    for (std::size_t i = 0; i < group.size(); ++i) {
      const auto& tensor = plan_.tensors[group[i]];
      const auto& entry = report_.add(report_.entry(tensor, merged[i]), tensor);
      done.push_back(fmt::format("{{\"digest\":\"{}\",\"report\":{}}}", digests[i], entry));
      digests_[group[i]] = digests[i];
    }
    num_done_ += group.size();
    if (!next.empty()) {
      Json read = Json::array();
      for (const auto& [model, view] : hashed) read.push_back({model, view->name, input_digests_.at(view)});
      if (!journal) journal.emplace(folder_.path() / kJournalFile, plan_hash);
      journal->add([this, tensors = std::vector(group.begin(), group.end())] { files_.sync(tensors); },
                   fmt::format("{{\"tensors\":[{}],\"inputs\":{}}}", fmt::join(done, ","), read.dump()));
      folder_.keep();
    }
    for (const auto& input : inputs) {
      if (last_uses_.at(input.view) <= group.back()) release(input.view->bytes);
    }
    group = next;
  }
  if (journal) journal->finish();
}

std::uint64_t Execution::write_other_files() {
  std::vector<OutputFile> files;
  std::uint64_t shard_bytes = 0;
  for (const auto& shard : layout_.shards) {
    auto& file =
        files.emplace_back(OutputFile{.name = shard.file, .num_bytes = fs::file_size(folder_.path() / shard.file)});
    for (const auto i : shard.tensors) file.tensors.emplace_back(plan_.tensors[i].name, digests_[i]);
    shard_bytes += file.num_bytes - shard.header.size();
  }
  if (shard_bytes != layout_.data_bytes || num_done_ != plan_.tensors.size()) {
    throw std::logic_error(fmt::format("{} of {} bytes were written, {} of {} tensors", shard_bytes, layout_.data_bytes,
                                       num_done_, plan_.tensors.size()));
  }
  const auto write = [&](const fs::path& name, const std::string& content) {
    folder_.write_file(name, content);
    files.push_back({.name = name.string(),
                     .num_bytes = content.size(),
                     .sha256 = io::sha256_hex(std::as_bytes(std::span(content)))});
  };
  if (const auto index = layout_.index(plan_.tensors); !index.empty()) write("model.safetensors.index.json", index);
  for (const auto& [name, content] : plan_.written_files) write(name, content);
  for (const auto& name : plan_.copied_files) {
    folder_.copy_file(plan_.donor / name, name);
    const auto copy = folder_.path() / name;
    files.push_back({.name = name.string(), .num_bytes = fs::file_size(copy), .sha256 = io::sha256_file(copy)});
  }
  write("merge_report.json", report_.text());
  write("README.md", model_card(plan_));
  if (report_.num_not_finite() > 0) {
    log::warn(
        "{} results are not finite numbers in the type that they are written in; merge_report.json says of which "
        "tensors",
        report_.num_not_finite());
  }
  inputs_.check_unchanged();

  const auto manifest = make_manifest(options_.version, plan_, inputs_, input_digests_, files);
  folder_.write_file(kManifestFile, manifest.dump(1, ' ', false, Json::error_handler_t::replace) + "\n");

  std::uint64_t input_bytes = 0;
  for (const auto& [view, last] : last_uses_) input_bytes += view->bytes.size();
  const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
  const Json timing{
      {"finished", fmt::format("{:%Y-%m-%dT%H:%M:%SZ}",
                               fmt::gmtime(std::chrono::system_clock::to_time_t(std::chrono::system_clock::now())))},
      {"seconds", seconds},
      {"bytes_read", input_bytes},
      {"bytes_written", layout_.data_bytes},
      {"gigabytes_per_second", 1e-9 * static_cast<double>(input_bytes + layout_.data_bytes) / std::max(seconds, 1e-9)},
      {"threads", pool_.num_threads()},
      {"memory_bytes", options_.memory_bytes}};
  folder_.write_file("timing.json", timing.dump(2) + "\n");
  return layout_.data_bytes;
}

}  // namespace

Executed execute(const MergePlan& plan, const ExecuteOptions& options) {
  const auto start = Clock::now();
  const auto out = resolved_output(options.out);
  check_keeps_inputs(plan, out);
  check_output(out, options.resume, options.overwrite);
  const auto layout = plan_shards(plan.tensors, options.shard_bytes);
  const auto journal_path = partial_folder(out) / kJournalFile;
  std::error_code ignored;
  if (options.resume && !fs::exists(journal_path, ignored)) {
    if (is_finished(out, plan)) {
      log::info("{}: is complete", out.string());
      return {.bytes = layout.data_bytes};
    }
    if (!options.overwrite && fs::exists(out, ignored) && !fs::is_empty(out, ignored)) {
      fail(
          "{}: holds no unfinished merge of this recipe to resume; choose another --out, or replace what is there by "
          "--overwrite",
          out.string());
    }
  }
  const InputFiles inputs(plan);
  const auto hash = hash_of(plan, inputs, layout, options.version);
  const auto groups = options.resume ? Journal::read(journal_path, hash) : std::vector<Json>();

  OutputFolder folder(out, !groups.empty());
  try {
    Execution execution(plan, options, layout, inputs, folder, !groups.empty());
    if (!groups.empty() && !execution.take_over(groups)) {
      log::warn("{}: what is there of the merge is damaged; starting again", folder.path().string());
      fs::remove(journal_path);
    }
    execution.run(hash);
    const auto bytes = execution.write_other_files();
    folder.publish();
    return {.bytes = bytes, .seconds = std::chrono::duration<double>(Clock::now() - start).count()};
  } catch (const UserError&) {
    folder.discard();
    throw;
  } catch (...) {
    if (folder.is_kept()) log::warn("{}: holds what is done of the merge; --resume continues", folder.path().string());
    throw;
  }
}

}  // namespace mergex::merging
