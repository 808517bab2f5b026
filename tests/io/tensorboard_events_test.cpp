#include "io/tensorboard_events.h"

#include <cstring>
#include <map>
#include <vector>

#include "io/atomic_file.h"
#include "support/catch.h"
#include "support/paths.h"

using namespace mergex;

namespace {

/// Fields of a protobuf message by number, in the order of the bytes; numbers as they are, floats as their bits.
struct Field {
  std::uint64_t number = 0;
  std::string bytes;
};
using Message = std::vector<std::pair<int, Field>>;

std::uint64_t take_varint(std::string_view& bytes) {
  std::uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    REQUIRE_FALSE(bytes.empty());
    const auto byte = static_cast<unsigned char>(bytes[0]);
    bytes.remove_prefix(1);
    value |= static_cast<std::uint64_t>(byte & 0x7F) << shift;
    if (byte < 0x80) return value;
  }
}

std::uint64_t take_fixed(std::string_view& bytes, std::size_t size) {
  REQUIRE(bytes.size() >= size);
  std::uint64_t value = 0;
  std::memcpy(&value, bytes.data(), size);  // the tests run where numbers are little-endian
  bytes.remove_prefix(size);
  return value;
}

Message parse_message(std::string_view bytes) {
  Message message;
  while (!bytes.empty()) {
    const auto key = take_varint(bytes);
    Field field;
    switch (key & 7) {
      case 0: field.number = take_varint(bytes); break;
      case 1: field.number = take_fixed(bytes, 8); break;
      case 5: field.number = take_fixed(bytes, 4); break;
      case 2: {
        const auto size = take_varint(bytes);
        REQUIRE(bytes.size() >= size);
        field.bytes = bytes.substr(0, size);
        bytes.remove_prefix(size);
        break;
      }
      default: FAIL("wire type " << (key & 7));
    }
    message.emplace_back(static_cast<int>(key >> 3), field);
  }
  return message;
}

const Field* find(const Message& message, int number) {
  for (const auto& [key, field] : message) {
    if (key == number) return &field;
  }
  return nullptr;
}

std::uint32_t unmasked(std::uint64_t masked) {
  const auto turned = static_cast<std::uint32_t>(masked) - 0xA282EAD8u;
  return turned << 15 | turned >> 17;
}

std::vector<Message> read_events(const std::filesystem::path& path) {
  std::vector<Message> events;
  const auto text = io::read_file(path);
  std::string_view bytes = text;
  while (!bytes.empty()) {
    const auto length_bytes = bytes.substr(0, 8);
    const auto length = take_fixed(bytes, 8);
    REQUIRE(unmasked(take_fixed(bytes, 4)) == io::crc32c(length_bytes));
    REQUIRE(bytes.size() >= length + 4);
    const auto event = bytes.substr(0, length);
    bytes.remove_prefix(length);
    REQUIRE(unmasked(take_fixed(bytes, 4)) == io::crc32c(event));
    events.push_back(parse_message(event));
  }
  return events;
}

}  // namespace

TEST_CASE("CRC-32C of known strings", "[io]") {
  // RFC 3720, B.4 (its bytes are the number from the low end), and the check value of the catalogue of CRCs.
  CHECK(io::crc32c(std::string(32, '\0')) == 0x8A9136AAu);
  CHECK(io::crc32c(std::string(32, '\xFF')) == 0x62A8AB43u);
  std::string rising, falling;
  for (int i = 0; i < 32; ++i) {
    rising += static_cast<char>(i);
    falling += static_cast<char>(31 - i);
  }
  CHECK(io::crc32c(rising) == 0x46DD794Eu);
  CHECK(io::crc32c(falling) == 0x113FDB5Cu);
  CHECK(io::crc32c("123456789") == 0xE3069283u);
  CHECK(io::crc32c("") == 0u);
}

TEST_CASE("an event file holds its version, its start, and scalars by step", "[io]") {
  const test::TemporaryFolder folder;
  std::filesystem::path path;
  {
    io::TensorboardEvents events(folder.path(), 301);
    path = events.path();
    const std::vector<std::pair<std::string, double>> scalars{{"train/loss", 0.25}, {"train/learning_rate", 1e-3}};
    events.add(310, scalars);
    events.add(1'000'000, std::vector<std::pair<std::string, double>>{{"validation/accuracy", -1.5}});
  }
  CHECK(path.filename().string().starts_with("events.out.tfevents."));
  const auto events = read_events(path);
  REQUIRE(events.size() == 4);
  for (const auto& event : events) {
    double wall_time = 0.0;
    REQUIRE(find(event, 1) != nullptr);
    std::memcpy(&wall_time, &find(event, 1)->number, 8);
    CHECK(wall_time > 1.6e9);  // seconds since 1970
  }
  REQUIRE(find(events[0], 3) != nullptr);
  CHECK(find(events[0], 3)->bytes == "brain.Event:2");

  CHECK(find(events[1], 2)->number == 301);
  REQUIRE(find(events[1], 7) != nullptr);
  CHECK(find(parse_message(find(events[1], 7)->bytes), 1)->number == 1);  // START

  CHECK(find(events[2], 2)->number == 310);
  CHECK(find(events[3], 2)->number == 1'000'000);
  std::map<std::string, float> values;
  for (const auto& event : {events[2], events[3]}) {
    REQUIRE(find(event, 5) != nullptr);
    for (const auto& [number, field] : parse_message(find(event, 5)->bytes)) {
      REQUIRE(number == 1);
      const auto value = parse_message(field.bytes);
      const auto bits = static_cast<std::uint32_t>(find(value, 2)->number);
      std::memcpy(&values[find(value, 1)->bytes], &bits, 4);
    }
  }
  CHECK(values == std::map<std::string, float>{
                      {"train/loss", 0.25f}, {"train/learning_rate", 1e-3f}, {"validation/accuracy", -1.5f}});

  const io::TensorboardEvents later(folder.path(), 0);
  CHECK(later.path().filename() > path.filename());  // readers go by name
}
