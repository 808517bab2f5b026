#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/sentencepiece_model.h"
#include "text/unigram.h"

namespace sentencepiece {
class SentencePieceProcessor;
}

namespace mergex::text {

/// T5's tokenizer (Raffel et al. 2020, arXiv:1910.10683): a sentencepiece model and, above its pieces, 100 sentinels,
/// by Hugging Face's conventions. `<extra_id_N>`, `</s>`, `<pad>` and `<unk>` written in a text become their ids, and
/// what follows one starts a new word. Members that are const may be called from several threads at once.
class T5Tokenizer {
 public:
  static constexpr int kNumSentinels = 100;

  /// @param folder_or_model_file  a folder that holds spiece.model or tokenizer.model, or such a file
  /// @throws UserError when there is none, it is damaged, or it lacks <pad>, </s> or <unk>
  static T5Tokenizer load(const std::filesystem::path& folder_or_model_file);

  T5Tokenizer(T5Tokenizer&&) noexcept;
  T5Tokenizer& operator=(T5Tokenizer&&) noexcept;
  ~T5Tokenizer();

  /// Ids without a final `</s>`. @throws UserError when the text is not valid UTF-8
  std::vector<std::int32_t> encode(std::string_view text) const;

  /// `a </s>`, or `a </s> b </s>`, of at most max_length ids. Too long a pair loses ids one by one, the last of `a`
  /// while `a` is strictly longer, else the last of `b` (longest first).
  std::vector<std::int32_t> encode(std::string_view a, const std::optional<std::string>& b,
                                   std::int64_t max_length) const;

  /// Pieces joined, "▁" as a space except at the start of the text. Ids beyond the vocabulary (padded embeddings) and
  /// negative ones are left out. @param skip_special  also leave out <pad>, </s>, <unk> and the sentinels
  std::string decode(std::span<const std::int32_t> ids, bool skip_special) const;

  std::int32_t pad_id() const { return pad_id_; }
  std::int32_t eos_id() const { return eos_id_; }
  std::int32_t unk_id() const { return unk_id_; }
  /// Id of `<extra_id_i>`, i in 0..99: `<extra_id_0>` is the highest id.
  std::int32_t sentinel_id(int i) const;
  /// Pieces and sentinels; a checkpoint's embedding may have more rows.
  std::int64_t vocab_size() const { return num_pieces() + kNumSentinels; }
  const std::filesystem::path& model_file() const { return model_file_; }

 private:
  // A token that is recognised as it stands in a text.
  struct Special {
    std::string text;
    std::int32_t id = 0;
  };

  using Processor = sentencepiece::SentencePieceProcessor;
  T5Tokenizer(std::filesystem::path model_file, std::unique_ptr<Processor> normalizer, std::vector<SentencePiece> pieces);
  std::int32_t num_pieces() const { return static_cast<std::int32_t>(pieces_.size()); }
  const Special* special_at(std::string_view text) const;
  void append_pieces(std::string_view text, std::vector<std::int32_t>& ids) const;
  bool is_special(std::int32_t id) const;

  std::filesystem::path model_file_;
  std::unique_ptr<Processor> normalizer_;  // sentencepiece's rules for spaces and characters
  std::vector<SentencePiece> pieces_;
  Unigram unigram_;
  std::vector<Special> specials_;
  std::string special_starts_;  // their first bytes
  std::int32_t pad_id_ = 0, eos_id_ = 0, unk_id_ = 0;
};

}  // namespace mergex::text
