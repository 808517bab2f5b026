#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace mergex::text {

/// An entry of a sentencepiece vocabulary; its id is its place.
struct SentencePiece {
  enum class Type { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };
  std::string text;
  float score = 0.0f;
  Type type = Type::kNormal;
};

/// A model file, read as far as mergex needs it itself.
struct SentencePieceModel {
  std::string serialized;  // the whole file
  std::vector<SentencePiece> pieces;
};

/// Reads a unigram model and checks it where the sentencepiece library trusts it: its normaliser walks a table of the
/// file without bounds, and broken pieces end the process instead of returning an error.
/// @throws UserError when the file is missing, damaged, or of another kind
SentencePieceModel read_sentencepiece_model(const std::filesystem::path& path);

}  // namespace mergex::text
