#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tasks/task.h"
#include "text/t5_tokenizer.h"

namespace mergex::tasks {

/// An example as the model reads it.
struct Encoded {
  std::vector<std::int32_t> ids = {};
  std::optional<double> label = {};
  std::vector<std::int32_t> target_ids = {};  ///< text to text: the answer's; empty without a label
  std::string id = {};                        ///< the example's; pieces of a document have none
};

/// `text </s>` or `text </s> text_pair </s>`, at most max_length ids, and `target </s>` where there is a target.
/// Examples are shared out among threads; the result does not depend on how many there are.
/// @throws UserError naming the file and the first example that cannot be encoded
std::vector<Encoded> encode(const Split& split, const text::T5Tokenizer& tokenizer, std::int64_t max_length,
                            int num_threads);

/// Plain ids without an end token, in consecutive pieces of at most `piece_length`; pieces of one token are dropped.
std::vector<Encoded> encode_pieces(const Split& split, const text::T5Tokenizer& tokenizer, std::int64_t piece_length,
                                   int num_threads);

}  // namespace mergex::tasks
