#include "io/tensorboard_events.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <chrono>
#include <system_error>

#include "io/atomic_file.h"

namespace mergex::io {
namespace {

// Numbers of the fields of tensorflow.Event, .SessionLog, .Summary and .Summary.Value.
enum EventField { kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7 };
enum SessionLogField { kStatus = 1 };
enum SummaryField { kValue = 1 };
enum ValueField { kTag = 1, kSimpleValue = 2 };
constexpr std::uint64_t kSessionStart = 1;

void append_little_endian(std::string& out, std::uint64_t value, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) out += static_cast<char>(value >> (8 * i) & 0xFF);
}

void append_varint(std::string& out, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) out += static_cast<char>((value & 0x7F) | 0x80);
  out += static_cast<char>(value);
}

// Protobuf's wire types: 0 varint, 1 eight bytes, 2 length and bytes, 5 four bytes.
void append_key(std::string& out, int field, int wire_type) {
  append_varint(out, static_cast<std::uint64_t>(field << 3 | wire_type));
}

void append_integer(std::string& out, int field, std::uint64_t value) {
  append_key(out, field, 0);
  append_varint(out, value);
}

void append_double(std::string& out, int field, double value) {
  append_key(out, field, 1);
  append_little_endian(out, std::bit_cast<std::uint64_t>(value), 8);
}

void append_float(std::string& out, int field, float value) {
  append_key(out, field, 5);
  append_little_endian(out, std::bit_cast<std::uint32_t>(value), 4);
}

void append_bytes(std::string& out, int field, std::string_view bytes) {
  append_key(out, field, 2);
  append_varint(out, bytes.size());
  out += bytes;
}

std::int64_t microseconds_since_1970() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::microseconds>(now).count();
}

std::string event_at(std::int64_t step) {
  std::string event;
  append_double(event, kWallTime, static_cast<double>(microseconds_since_1970()) * 1e-6);
  append_integer(event, kStep, static_cast<std::uint64_t>(step));
  return event;
}

/// CRCs of data that holds CRCs are weak, so the format turns and shifts them.
std::uint32_t masked_crc32c(std::string_view bytes) { return std::rotr(crc32c(bytes), 15) + 0xA282EAD8u; }

}  // namespace

std::uint32_t crc32c(std::string_view bytes) {
  static constexpr auto kTable = [] {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t i = 0; i < 256; ++i) {
      table[i] = i;
      for (int bit = 0; bit < 8; ++bit) table[i] = table[i] >> 1 ^ (table[i] & 1 ? 0x82F63B78u : 0u);
    }
    return table;
  }();
  std::uint32_t crc = 0xFFFFFFFFu;
  for (const char byte : bytes) crc = crc >> 8 ^ kTable[(crc ^ static_cast<unsigned char>(byte)) & 0xFF];
  return ~crc;
}

TensorboardEvents::TensorboardEvents(const std::filesystem::path& folder, std::int64_t first_step) {
  // Readers take the files of a folder by name, which has to be by time.
  const auto now = microseconds_since_1970();
  path_ = folder / fmt::format("events.out.tfevents.{:010}.{:06}", now / 1000000, now % 1000000);
  fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), path_.string() + ": cannot be made");
  auto version = event_at(0);
  append_bytes(version, kFileVersion, "brain.Event:2");
  write(version);
  std::string session;
  append_integer(session, kStatus, kSessionStart);
  auto start = event_at(first_step);
  append_bytes(start, kSessionLog, session);
  write(start);
}

TensorboardEvents::~TensorboardEvents() { ::close(fd_); }

void TensorboardEvents::add(std::int64_t step, std::span<const std::pair<std::string, double>> scalars) {
  std::string summary;
  for (const auto& [tag, scalar] : scalars) {
    std::string value;
    append_bytes(value, kTag, tag);
    append_float(value, kSimpleValue, static_cast<float>(scalar));
    append_bytes(summary, kValue, value);
  }
  auto event = event_at(step);
  append_bytes(event, kSummary, summary);
  write(event);
}

void TensorboardEvents::write(std::string_view event) {
  std::string record;
  append_little_endian(record, event.size(), 8);
  append_little_endian(record, masked_crc32c(record), 4);
  record += event;
  append_little_endian(record, masked_crc32c(event), 4);
  try {
    write_all(fd_, record.data(), record.size());
  } catch (const std::system_error& error) {
    throw std::system_error(error.code(), path_.string() + ": cannot be written");
  }
}

}  // namespace mergex::io
