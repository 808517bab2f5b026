#include "merging/shards.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <set>

namespace mergex::merging {
namespace {

constexpr std::size_t kWorthWritingNow = 256 << 10;

// A disk that is too small is found now, not after the work.
void reserve(const io::FileDescriptor& file, std::uint64_t num_bytes) {
  if (num_bytes == 0) return;
  const auto size = static_cast<off_t>(num_bytes);
  while (::fallocate(file.fd(), 0, 0, size) != 0) {
    if (errno == EINTR) continue;
    if (errno != EOPNOTSUPP && errno != ENOSYS) file.fail_with_errno("written");
    struct statvfs disk {};
    if (::fstatvfs(file.fd(), &disk) == 0 && num_bytes > std::uint64_t{disk.f_bavail} * disk.f_frsize) {
      errno = ENOSPC;
      file.fail_with_errno("written");
    }
    if (::ftruncate(file.fd(), size) != 0) file.fail_with_errno("written");
    return;
  }
}

}  // namespace

ShardLayout plan_shards(const std::vector<PlannedTensor>& tensors, std::uint64_t shard_bytes) {
  ShardLayout layout;
  layout.places.resize(tensors.size());
  layout.shards.emplace_back();
  std::uint64_t filled = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto size = tensors[i].num_bytes();
    if (!layout.shards.back().tensors.empty() && (size > shard_bytes || filled > shard_bytes - size)) {
      layout.shards.emplace_back();
      filled = 0;
    }
    layout.shards.back().tensors.push_back(i);
    filled += size;
    layout.data_bytes += size;
  }

  for (std::size_t s = 0; s < layout.shards.size(); ++s) {
    auto& shard = layout.shards[s];
    shard.file = layout.shards.size() == 1
                     ? "model.safetensors"
                     : fmt::format("model-{:05}-of-{:05}.safetensors", s + 1, layout.shards.size());
    std::ranges::stable_sort(shard.tensors, std::greater{},
                             [&](std::size_t i) { return io::dtype_size(tensors[i].dtype); });
    std::vector<io::TensorHeader> headers;
    for (const auto i : shard.tensors)
      headers.push_back({.name = tensors[i].name, .dtype = tensors[i].dtype, .shape = tensors[i].shape});
    shard.header = io::safetensors_header(headers, {{"format", "pt"}});
    shard.num_bytes = shard.header.size();
    for (const auto i : shard.tensors) {
      layout.places[i] = {.shard = s, .offset = shard.num_bytes};
      shard.num_bytes += tensors[i].num_bytes();
    }
  }
  return layout;
}

std::string ShardLayout::index(const std::vector<PlannedTensor>& tensors) const {
  if (shards.size() == 1) return "";
  std::vector<std::size_t> order(tensors.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::ranges::sort(order, {}, [&](std::size_t i) -> const std::string& { return tensors[i].name; });
  io::Json::object_t map;  // pushed at the end: ordered objects look keys up one by one
  for (const auto i : order) map.push_back({tensors[i].name, shards[places[i].shard].file});
  return io::Json{{"metadata", {{"total_size", data_bytes}}}, {"weight_map", std::move(map)}}.dump(2) + "\n";
}

ShardFiles::ShardFiles(const std::filesystem::path& folder, const ShardLayout& layout, bool keeps) : layout_(&layout) {
  for (const auto& shard : layout.shards) {
    files_.emplace_back(folder / shard.file, O_RDWR | O_CREAT | (keeps ? 0 : O_TRUNC));
    reserve(files_.back(), shard.num_bytes);
    files_.back().write_at(0, std::as_bytes(std::span(shard.header)));
  }
}

void ShardFiles::write(std::size_t tensor, std::uint64_t offset, std::span<const std::byte> bytes) const {
  const auto& place = layout_->places[tensor];
  const auto& file = files_[place.shard];
  file.write_at(place.offset + offset, bytes);
  // The disk begins now, so that the sync at the end is short. Only a hint.
  if (bytes.size() < kWorthWritingNow) return;
  (void)::sync_file_range(file.fd(), static_cast<off_t>(place.offset + offset), static_cast<off_t>(bytes.size()),
                          SYNC_FILE_RANGE_WRITE);
}

void ShardFiles::read(std::size_t tensor, std::uint64_t offset, std::span<std::byte> bytes) const {
  const auto& place = layout_->places[tensor];
  files_[place.shard].read_at(place.offset + offset, bytes);
}

void ShardFiles::copy(std::size_t tensor, std::uint64_t offset, const io::FileDescriptor& from,
                      std::uint64_t from_offset, std::span<const std::byte> mapped) const {
  const auto& place = layout_->places[tensor];
  const auto& file = files_[place.shard];
  auto in = static_cast<off_t>(from_offset), out = static_cast<off_t>(place.offset + offset);
  std::size_t done = 0;
  while (done < mapped.size()) {
    const auto copied = ::copy_file_range(from.fd(), &in, file.fd(), &out, mapped.size() - done, 0);
    if (copied > 0) {
      done += static_cast<std::size_t>(copied);
    } else if (copied == 0) {
      errno = EIO;
      from.fail_with_errno("read (truncated meanwhile)");
    } else if (errno != EINTR) {
      if (errno == ENOSPC || errno == EIO || errno == EDQUOT || errno == EFBIG) file.fail_with_errno("written");
      file.write_at(static_cast<std::uint64_t>(out), mapped.subspan(done));  // other file systems, old kernels
      return;
    }
  }
}

void ShardFiles::sync(std::span<const std::size_t> tensors) const {
  std::set<std::size_t> shards;
  for (const auto tensor : tensors) shards.insert(layout_->places[tensor].shard);
  for (const auto shard : shards) files_[shard].sync();
}

}  // namespace mergex::merging
