#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace mergex::io {

/// Reads JSON as programs write it (ASCII texts without escapes, whole numbers) in one pass, many times as fast as by
/// building values: a merge opens files of 40,000 tensors. Every function returns false where the text is anything
/// else, faults included; what was read so far is then worthless, and the strict parser decides.
class PlainJsonReader {
 public:
  explicit PlainJsonReader(std::string_view text) : text_(text) {}

  /// Whether nothing but space is left.
  bool at_end() {
    skip_spaces();
    return at_ == text_.size();
  }

  bool string(std::string_view& value) {
    if (!token('"')) return false;
    const auto begin = at_;
    for (; at_ < text_.size() && text_[at_] != '"'; ++at_) {
      if (text_[at_] < ' ' || text_[at_] > '~' || text_[at_] == '\\') return false;
    }
    value = text_.substr(begin, at_ - begin);
    return token('"');
  }

  bool size(std::int64_t& value) {
    skip_spaces();
    const auto begin = at_;
    for (value = 0; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
      if (at_ - begin == 18) return false;  // what has more digits might not fit
      value = 10 * value + (text_[at_] - '0');
    }
    const auto num_digits = at_ - begin;
    return num_digits == 1 || (num_digits > 1 && text_[begin] != '0');
  }

  bool sizes(std::vector<std::int64_t>& values) {
    if (!token('[')) return false;
    if (token(']')) return true;
    do {
      if (!size(values.emplace_back())) return false;
    } while (token(','));
    return token(']');
  }

  /// An object. `read(key)` reads the value of each member; it is for the caller to refuse a key that comes twice.
  template <class Read>
  bool members(const Read& read) {
    if (!token('{')) return false;
    if (token('}')) return true;
    do {
      std::string_view key;
      if (!string(key) || !token(':') || !read(key)) return false;
    } while (token(','));
    return token('}');
  }

 private:
  void skip_spaces() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }

  bool token(char wanted) {
    skip_spaces();
    if (at_ == text_.size() || text_[at_] != wanted) return false;
    ++at_;
    return true;
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace mergex::io
