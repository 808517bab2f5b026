#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "text/sentencepiece_model.h"

namespace mergex::text {

/// The most probable segmentation under a unigram language model (Kudo 2018, arXiv:1804.10959), in double precision.
/// sentencepiece itself adds in single precision, where equally probable segmentations ("!" + "!!!!!" and the other
/// way round) fall differently from release to release. Here the longest last piece wins, as in the tokenizers that
/// published checkpoints were used with.
class Unigram {
 public:
  /// @param pieces  by id; one of them is unknown
  explicit Unigram(std::span<const SentencePiece> pieces);

  /// Ids of a text that is normalised already (spaces are "▁"), valid UTF-8. A run of characters that no piece has
  /// is one unknown.
  std::vector<std::int32_t> encode(std::string_view normalized) const;

 private:
  static constexpr std::int32_t kNone = -1;
  // A prefix of pieces; its children lie side by side, ordered by their byte.
  struct Node {
    std::uint32_t first_child = 0;
    std::uint16_t num_children = 0;
    unsigned char byte = 0;
    std::int32_t id = kNone;
  };
  const Node* child(const Node& node, char byte) const;

  std::vector<Node> nodes_;     // the root first
  std::vector<double> scores_;  // by id
  double unknown_score_ = 0.0;
  std::int32_t unknown_id_ = kNone;
};

}  // namespace mergex::text
