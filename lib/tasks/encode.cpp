#include "tasks/encode.h"

#include "core/error.h"
#include "core/interrupt.h"

namespace mergex::tasks {
namespace {

template <class Encode>
void for_each_example(const Split& split, const Encode& encode_one) {
  for (const auto& example : split.examples) {
    throw_if_interrupted();
    try {
      encode_one(example);
    } catch (const UserError& error) {
      fail("{}: example {}: {}", split.file.string(), example.id, error.what());
    }
  }
}

}  // namespace

std::vector<Encoded> encode(const Split& split, const text::T5Tokenizer& tokenizer, std::int64_t max_length) {
  std::vector<Encoded> result;
  result.reserve(split.examples.size());
  for_each_example(split, [&](const Example& example) {
    result.push_back({tokenizer.encode(example.text, example.text_pair, max_length), example.label});
  });
  return result;
}

std::vector<Encoded> encode_pieces(const Split& split, const text::T5Tokenizer& tokenizer, std::int64_t piece_length) {
  std::vector<Encoded> result;
  for_each_example(split, [&](const Example& example) {
    const auto ids = tokenizer.encode(example.text);
    for (std::size_t at = 0; at + 1 < ids.size(); at += static_cast<std::size_t>(piece_length)) {
      const auto end = std::min(ids.size(), at + static_cast<std::size_t>(piece_length));
      if (end - at < 2) break;
      result.push_back(
          {{ids.begin() + static_cast<std::ptrdiff_t>(at), ids.begin() + static_cast<std::ptrdiff_t>(end)}, {}});
    }
  });
  return result;
}

}  // namespace mergex::tasks
