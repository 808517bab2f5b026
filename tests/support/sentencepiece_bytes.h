#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

namespace mergex::test {

// Writes just enough of protocol buffers to build sentencepiece models by hand.
inline std::string varint(std::uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>((value & 0x7F) | 0x80);
  return bytes + static_cast<char>(value);
}
inline std::string delimited(unsigned field, std::string_view content) {
  return varint(field << 3 | 2) + varint(content.size()) + std::string(content);
}

enum class PieceType { kNormal = 1, kUnknown = 2, kControl = 3 };

inline std::string piece_message(std::string_view text, float score, PieceType type = PieceType::kNormal) {
  std::string score_bytes(sizeof score, '\0');
  std::memcpy(score_bytes.data(), &score, sizeof score);
  return delimited(1, delimited(1, text) + varint(2 << 3 | 5) + score_bytes + varint(3 << 3) +
                          varint(static_cast<std::uint64_t>(type)));
}

inline std::string specials_message() {
  return piece_message("<pad>", 0, PieceType::kControl) + piece_message("</s>", 0, PieceType::kControl) +
         piece_message("<unk>", 0, PieceType::kUnknown);
}

/// A unigram model as sentencepiece trains it with pad_id=0, eos_id=1, unk_id=2, bos_id=-1: 3 special pieces, then
/// "▁", "▁hello", "▁world", "he", and single letters.
inline std::string small_sentencepiece_model() {
  std::string model = specials_message();
  float score = -2.0f;
  for (const auto* text : {"\u2581", "\u2581hello", "\u2581world", "he", "a", "e", "h", "l", "o"}) {
    model += piece_message(text, score);
    score -= 0.5f;
  }
  return model;
}

}  // namespace mergex::test
