#include "io/text_lines.h"

#include <zlib.h>

#include <cerrno>
#include <cstring>

#include "core/error.h"
#include "core/interrupt.h"

namespace mergex::io {
namespace fs = std::filesystem;
namespace {

constexpr std::size_t kBufferBytes = std::size_t{256} << 10;

}  // namespace

void TextLines::Close::operator()(gzFile_s* file) const { gzclose_r(file); }

TextLines::TextLines(const fs::path& path) : name_(path.string()), buffer_(kBufferBytes) {
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) fail("{}: is a folder, expected a file", name_);
  file_.reset(gzopen(name_.c_str(), "rb"));
  if (!file_) fail("{}: {}", name_, fs::exists(path, ignored) ? "cannot be read (permissions?)" : "no such file");
  gzbuffer(file_.get(), static_cast<unsigned>(kBufferBytes));
}

std::optional<std::string_view> TextLines::next() {
  partial_.clear();
  while (true) {
    if (begin_ == end_ && !refill()) {
      if (partial_.empty()) return std::nullopt;
      return finish_line(partial_);
    }
    const char* start = buffer_.data() + begin_;
    const auto* line_end = static_cast<const char*>(std::memchr(start, '\n', end_ - begin_));
    const auto length = line_end == nullptr ? end_ - begin_ : static_cast<std::size_t>(line_end - start);
    if (partial_.size() + length > kMaxLineBytes) {
      fail("{}:{}: the line is longer than 16 MiB; split it (is this a text file?)", name_, number_ + 1);
    }
    begin_ += length + (line_end == nullptr ? 0 : 1);
    if (line_end != nullptr && partial_.empty()) return finish_line({start, length});
    partial_.append(start, length);
    if (line_end != nullptr) return finish_line(partial_);
  }
}

bool TextLines::refill() {
  throw_if_interrupted();
  const int read = gzread(file_.get(), buffer_.data(), static_cast<unsigned>(buffer_.size()));
  // A stream that ends too early is only told apart from a complete one by the error state.
  int error = Z_OK;
  const char* message = gzerror(file_.get(), &error);
  if (error == Z_ERRNO) fail("{}: reading failed: {}", name_, std::strerror(errno));
  if (error != Z_OK && error != Z_STREAM_END) {
    std::string_view what = message;  // zlib puts the file's name in front
    if (what.starts_with(name_ + ": ")) what.remove_prefix(name_.size() + 2);
    fail("{}: damaged or cut-off gzip file ({}); fetch it again", name_, what);
  }
  begin_ = 0;
  end_ = read > 0 ? static_cast<std::size_t>(read) : 0;
  return end_ > 0;
}

std::string_view TextLines::finish_line(std::string_view line) {
  if (++number_ == 1 && line.starts_with("\xEF\xBB\xBF")) line.remove_prefix(3);
  if (line.ends_with('\r')) line.remove_suffix(1);
  return line;
}

std::optional<fs::path> find_text_file(const fs::path& path) {
  auto other = path;
  if (path.extension() == ".gz") {
    other.replace_extension();
  } else {
    other += ".gz";
  }
  const auto is_file = [](const fs::path& candidate) {
    std::error_code ignored;
    return fs::exists(candidate, ignored) && !fs::is_directory(candidate, ignored);
  };
  if (is_file(path)) return path;
  if (is_file(other)) return other;
  return std::nullopt;
}

}  // namespace mergex::io
