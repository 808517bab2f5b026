#include "tasks/encode.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <iterator>
#include <limits>
#include <mutex>
#include <thread>

#include "core/error.h"
#include "core/interrupt.h"

namespace mergex::tasks {
namespace {

constexpr std::size_t kChunk = 64;  // examples that a thread takes at once

/// Calls `encode_one(i)` for every example. What the first example that fails throws is thrown here.
template <class EncodeOne>
void for_each_example(const Split& split, int num_threads, const EncodeOne& encode_one) {
  const auto& examples = split.examples;
  std::atomic<std::size_t> next = 0;
  std::mutex mutex;
  std::size_t first_failed = std::numeric_limits<std::size_t>::max();
  std::exception_ptr failure;
  const auto work = [&] {
    // Chunks are taken in order, so every example before a failed one is tried, by whichever thread.
    for (std::size_t begin = next.fetch_add(kChunk); begin < examples.size(); begin = next.fetch_add(kChunk)) {
      for (auto i = begin; i < std::min(begin + kChunk, examples.size()); ++i) {
        try {
          throw_if_interrupted();
          encode_one(i);
        } catch (...) {
          next = examples.size();
          const std::lock_guard lock(mutex);
          if (i < first_failed) {
            first_failed = i;
            failure = std::current_exception();
          }
          return;
        }
      }
    }
  };
  std::vector<std::jthread> helpers;
  for (std::size_t t = 1; t < static_cast<std::size_t>(num_threads) && t * kChunk < examples.size(); ++t) {
    helpers.emplace_back(work);
  }
  work();
  helpers.clear();
  if (!failure) return;
  try {
    std::rethrow_exception(failure);
  } catch (const UserError& error) {
    fail("{}: example {}: {}", split.file.string(), examples[first_failed].id, error.what());
  }
}

}  // namespace

std::vector<Encoded> encode(const Split& split, const text::T5Tokenizer& tokenizer, std::int64_t max_length,
                            int num_threads) {
  std::vector<Encoded> result(split.examples.size());
  for_each_example(split, num_threads, [&](std::size_t i) {
    const auto& example = split.examples[i];
    result[i] = {.ids = tokenizer.encode(example.text, example.text_pair, max_length),
                 .label = example.label,
                 .id = example.id};
    if (!example.target) return;
    result[i].target_ids = tokenizer.encode(*example.target);
    result[i].target_ids.push_back(tokenizer.eos_id());
  });
  return result;
}

std::vector<Encoded> encode_pieces(const Split& split, const text::T5Tokenizer& tokenizer, std::int64_t piece_length,
                                   int num_threads) {
  std::vector<std::vector<Encoded>> by_document(split.examples.size());
  for_each_example(split, num_threads, [&](std::size_t i) {
    const auto ids = tokenizer.encode(split.examples[i].text);
    for (std::size_t at = 0; at + 1 < ids.size(); at += static_cast<std::size_t>(piece_length)) {
      const auto end = std::min(ids.size(), at + static_cast<std::size_t>(piece_length));
      if (end - at < 2) break;
      by_document[i].push_back(
          {.ids = {ids.begin() + static_cast<std::ptrdiff_t>(at), ids.begin() + static_cast<std::ptrdiff_t>(end)}});
    }
  });
  std::vector<Encoded> result;
  for (auto& pieces : by_document) std::ranges::move(pieces, std::back_inserter(result));
  return result;
}

}  // namespace mergex::tasks
