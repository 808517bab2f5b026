#include "text/unigram.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

namespace mergex::text {
namespace {

constexpr double kUnknownPenalty = 10.0;  // sentencepiece's: how much worse than the worst piece

std::size_t character_size(char lead) {
  const auto byte = static_cast<unsigned char>(lead);
  return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

}  // namespace

Unigram::Unigram(std::span<const SentencePiece> pieces) : scores_(pieces.size()) {
  double lowest = std::numeric_limits<double>::max(), highest = std::numeric_limits<double>::lowest();
  std::vector<std::pair<std::string_view, std::int32_t>> sorted;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const auto& [text, score, type] = pieces[i];
    scores_[i] = score;
    if (type == SentencePiece::Type::kUnknown) unknown_id_ = static_cast<std::int32_t>(i);
    if (type == SentencePiece::Type::kNormal) {
      lowest = std::min(lowest, scores_[i]);
      highest = std::max(highest, scores_[i]);
    }
    if (type == SentencePiece::Type::kNormal || type == SentencePiece::Type::kUserDefined) {
      sorted.emplace_back(text, static_cast<std::int32_t>(i));
    }
  }
  if (lowest > highest) lowest = highest = 0.0;  // no normal piece
  unknown_score_ = lowest - kUnknownPenalty;
  for (const auto& [text, id] : sorted) {
    // Symbols of the user's always win over their parts.
    if (pieces[static_cast<std::size_t>(id)].type == SentencePiece::Type::kUserDefined) {
      scores_[static_cast<std::size_t>(id)] = static_cast<double>(text.size()) * highest - 0.1;
    }
  }

  // Level by level: a node is a range of the sorted pieces that agree in their first `depth` bytes.
  std::ranges::sort(sorted);
  struct Range {
    std::size_t begin, end, depth;
  };
  std::vector<Range> ranges{{0, sorted.size(), 0}};
  nodes_.emplace_back();
  for (std::size_t n = 0; n < nodes_.size(); ++n) {
    auto [begin, end, depth] = ranges[n];
    if (begin < end && sorted[begin].first.size() == depth) nodes_[n].id = sorted[begin++].second;
    nodes_[n].first_child = static_cast<std::uint32_t>(nodes_.size());
    while (begin < end) {
      const char byte = sorted[begin].first[depth];
      const auto next = std::find_if(sorted.begin() + static_cast<std::ptrdiff_t>(begin),
                                     sorted.begin() + static_cast<std::ptrdiff_t>(end),
                                     [&](const auto& piece) { return piece.first[depth] != byte; });
      const auto next_begin = static_cast<std::size_t>(next - sorted.begin());
      ranges.push_back({begin, next_begin, depth + 1});
      nodes_.push_back({.byte = static_cast<unsigned char>(byte)});
      ++nodes_[n].num_children;
      begin = next_begin;
    }
  }
}

const Unigram::Node* Unigram::child(const Node& node, char byte) const {
  const auto* begin = nodes_.data() + node.first_child;
  const auto* end = begin + node.num_children;
  const auto wanted = static_cast<unsigned char>(byte);
  const auto* found = std::ranges::lower_bound(begin, end, wanted, {}, &Node::byte);
  return found == end || found->byte != wanted ? nullptr : found;
}

std::vector<std::int32_t> Unigram::encode(std::string_view normalized) const {
  // The best way to each position: its score, and its last piece.
  struct Step {
    double score = 0.0;
    std::size_t start = 0;
    std::int32_t id = kNone;
  };
  std::vector<Step> best(normalized.size() + 1);
  for (std::size_t start = 0; start < normalized.size();) {
    const double score = best[start].score;
    const auto propose = [&](std::size_t end, std::int32_t id, double gain) {
      auto& step = best[end];
      if (step.id == kNone || score + gain > step.score) step = {score + gain, start, id};
    };
    const auto next = std::min(start + character_size(normalized[start]), normalized.size());
    bool has_character = false;
    const Node* node = nodes_.data();
    for (auto end = start; end < normalized.size();) {
      node = child(*node, normalized[end++]);
      if (node == nullptr) break;
      if (node->id == kNone) continue;
      propose(end, node->id, scores_[static_cast<std::size_t>(node->id)]);
      has_character = has_character || end == next;
    }
    if (!has_character) propose(next, unknown_id_, unknown_score_);
    start = next;
  }

  std::vector<std::int32_t> ids;
  for (auto end = normalized.size(); end > 0; end = best[end].start) {
    const auto id = best[end].id;
    if (id != unknown_id_ || ids.empty() || ids.back() != unknown_id_) ids.push_back(id);
  }
  std::ranges::reverse(ids);
  return ids;
}

}  // namespace mergex::text
