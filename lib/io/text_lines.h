#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

struct gzFile_s;

namespace mergex::io {

/// The lines of a text file, plain or gzip (told apart by content, not by name). A UTF-8 byte order mark at the
/// start and the line ends, LF or CRLF, are left out; a last line without a line end counts.
class TextLines {
 public:
  static constexpr std::size_t kMaxLineBytes = std::size_t{16} << 20;

  /// @throws UserError when the file is missing, a folder or unreadable
  explicit TextLines(const std::filesystem::path& path);

  /// The next line, valid until the next call; nothing at the end of the file.
  /// @throws UserError for a damaged or cut-off gzip stream and for a line of more than 16 MiB
  /// @throws Interrupted when the user asked for a stop
  std::optional<std::string_view> next();

  /// Number of the line that was returned last, counted from 1.
  std::size_t number() const { return number_; }
  /// The file, as messages show it.
  const std::string& name() const { return name_; }

 private:
  struct Close {
    void operator()(gzFile_s* file) const;
  };

  bool refill();
  std::string_view finish_line(std::string_view line);

  std::string name_;
  std::unique_ptr<gzFile_s, Close> file_;
  std::vector<char> buffer_;
  std::size_t begin_ = 0, end_ = 0;  // what of the buffer has not been returned yet
  std::string partial_;              // a line that spans two buffers
  std::size_t number_ = 0;
};

/// `path` itself, or else the file beside it that has ".gz" more (or less) in its name.
std::optional<std::filesystem::path> find_text_file(const std::filesystem::path& path);

}  // namespace mergex::io
