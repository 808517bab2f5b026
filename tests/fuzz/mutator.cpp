#include "fuzz/mutator.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace mergex::fuzz {
namespace {

constexpr std::size_t kMostBytes = std::size_t{1} << 20;

}  // namespace

std::string Mutator::operator()(std::string bytes, std::span<const std::string> others) {
  for (auto count = one_in(2) ? 1 : 1 + below(6); count > 0; --count) {
    if (bytes.empty()) bytes.push_back(static_cast<char>(below(256)));
    mutate(bytes, others);
  }
  if (bytes.size() > kMostBytes) bytes.resize(kMostBytes);
  return bytes;
}

void Mutator::mutate(std::string& bytes, std::span<const std::string> others) {
  const auto size = bytes.size();
  const auto at = below(size);
  const auto length = std::min<std::size_t>(size - at, 1 + below(one_in(8) ? 4096 : 16));
  switch (below(14)) {
    case 0:
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << below(8)));
      break;
    case 1:
      bytes[at] = static_cast<char>(below(256));
      break;
    case 2:
      if (one_in(4)) bytes.resize(at);
      break;
    case 3:
      bytes.erase(at, length);
      break;
    case 4:
      bytes.insert(below(size), bytes.substr(at, length));
      break;
    case 5:
      bytes.replace(at, length, length, "\0\xFF\x7F\x80 \n"[below(6)]);
      break;
    case 6:  // scratches that keep every length
      for (auto count = 1 + below(64); count > 0; --count) bytes[below(size)] = static_cast<char>(below(256));
      break;
    case 7:
    case 8:
      if (!tokens_.empty()) {
        const auto& token = tokens_[below(tokens_.size())];
        bytes.replace(at, one_in(2) ? std::min(length, token.size()) : 0, token);
      }
      break;
    case 9:  // the beginning of this, the end of another one
      if (!others.empty()) {
        const auto& other = others[below(others.size())];
        bytes.resize(at);
        if (!other.empty()) bytes += other.substr(below(other.size()));
      }
      break;
    case 10:
      if (const auto repeats = 1 + below(one_in(16) ? 400 : 8); length * repeats < kMostBytes) {
        std::string many;
        for (std::uint64_t i = 0; i < repeats; ++i) many += bytes.substr(at, length);
        bytes.insert(at, many);
      }
      break;
    case 11:
      edit_integer(bytes, at);
      break;
    default:
      edit_number(bytes, at);
  }
}

/// The next number that is written in the text becomes a troublesome one.
void Mutator::edit_number(std::string& bytes, std::size_t from) {
  constexpr std::array kNumbers{"0", "1", "-1", "3.5", "1e309", "255", "4294967295", "4294967296", "2147483648",
                                "9223372036854775807", "9223372036854775808", "18446744073709551615",
                                "18446744073709551616", "null", "[]", "1e-400", "-0.0", "\"1\""};
  constexpr const char* kDigits = "0123456789";
  const auto begin = bytes.find_first_of(kDigits, from);
  if (begin == std::string::npos) return;
  const auto end = std::min(bytes.find_first_not_of(kDigits, begin), bytes.size());
  if (one_in(2)) {
    bytes.replace(begin, end - begin, kNumbers[below(kNumbers.size())]);
  } else {
    bytes.replace(begin, end - begin, std::to_string(below(300)));
  }
}

/// A binary number, little endian, gets a little larger or smaller, or as large as it can be.
void Mutator::edit_integer(std::string& bytes, std::size_t at) {
  const auto width = std::size_t{1} << below(4);
  if (at + width > bytes.size()) return;
  std::uint64_t value = 0;
  std::memcpy(&value, bytes.data() + at, width);
  switch (below(4)) {
    case 0:
      value += 1 + below(16);
      break;
    case 1:
      value -= 1 + below(16);
      break;
    case 2:
      value = ~std::uint64_t{0} >> below(64);
      break;
    default:
      value = std::uint64_t{1} << below(64);
  }
  std::memcpy(bytes.data() + at, &value, width);
}

}  // namespace mergex::fuzz
