#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tasks/task.h"
#include "text/t5_tokenizer.h"

namespace mergex::tasks {

/// An example as the model reads it.
struct Encoded {
  std::vector<std::int32_t> ids;
  std::optional<double> label;
};

/// `text </s>` or `text </s> text_pair </s>`, at most max_length ids. @throws UserError naming the file and the example
std::vector<Encoded> encode(const Split& split, const text::T5Tokenizer& tokenizer, std::int64_t max_length);

/// Plain ids without an end token, in consecutive pieces of at most `piece_length`; pieces of one token are dropped.
std::vector<Encoded> encode_pieces(const Split& split, const text::T5Tokenizer& tokenizer, std::int64_t piece_length);

}  // namespace mergex::tasks
