#include "text/t5_tokenizer.h"

#include <sentencepiece_processor.h>

#include <algorithm>
#include <stdexcept>

#include "core/error.h"
#include "core/utf8.h"
#include "text/sentencepiece_model.h"

// Exported by the library, but declared only in a header that is not installed.
namespace sentencepiece::logging {
void SetMinLogLevel(int level);
}

namespace mergex::text {
namespace fs = std::filesystem;
namespace {

constexpr int kFatalOnly = 3;
constexpr std::string_view kSpace = "\u2581";

fs::path find_model_file(const fs::path& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) return path;
  for (const auto* name : {"spiece.model", "tokenizer.model"}) {
    if (fs::exists(path / name, ignored)) return path / name;
  }
  fail("{}: holds no spiece.model; copy the tokenizer's spiece.model from where the checkpoint comes from",
       path.string());
}

std::string sentinel_text(int i) { return fmt::format("<extra_id_{}>", i); }

}  // namespace

T5Tokenizer::T5Tokenizer(fs::path model_file, std::unique_ptr<Processor> normalizer, std::vector<SentencePiece> pieces)
    : model_file_(std::move(model_file)),
      normalizer_(std::move(normalizer)),
      pieces_(std::move(pieces)),
      unigram_(pieces_),
      pad_id_(normalizer_->pad_id()),
      eos_id_(normalizer_->eos_id()),
      unk_id_(normalizer_->unk_id()) {
  for (const auto& [name, id] : {std::pair{"padding", pad_id_}, {"end-of-text", eos_id_}, {"unknown", unk_id_}}) {
    if (id < 0 || id >= num_pieces()) {
      fail("{}: the model has no {} piece, which T5 needs; train it with pad_id=0, eos_id=1, unk_id=2, bos_id=-1",
           model_file_.string(), name);
    }
    specials_.push_back({pieces_[static_cast<std::size_t>(id)].text, id});
  }
  for (int i = 0; i < kNumSentinels; ++i) specials_.push_back({sentinel_text(i), sentinel_id(i)});
  for (const auto& special : specials_) {
    if (special_starts_.find(special.text.front()) == std::string::npos) special_starts_ += special.text.front();
  }
}

T5Tokenizer::T5Tokenizer(T5Tokenizer&&) noexcept = default;
T5Tokenizer& T5Tokenizer::operator=(T5Tokenizer&&) noexcept = default;
T5Tokenizer::~T5Tokenizer() = default;

T5Tokenizer T5Tokenizer::load(const fs::path& folder_or_model_file) {
  sentencepiece::logging::SetMinLogLevel(kFatalOnly);
  auto file = find_model_file(folder_or_model_file);
  auto checked = read_sentencepiece_model(file);
  auto normalizer = std::make_unique<Processor>();
  try {
    if (const auto status = normalizer->LoadFromSerializedProto(checked.serialized); !status.ok()) {
      throw std::runtime_error(status.ToString());
    }
  } catch (const std::exception& error) {
    std::string reason(error.what());
    std::ranges::replace(reason, '\n', ' ');
    fail("{}: no T5 tokenizer model: {}; download or copy it again", file.string(), reason.substr(0, 200));
  }
  return T5Tokenizer(std::move(file), std::move(normalizer), std::move(checked.pieces));
}

const T5Tokenizer::Special* T5Tokenizer::special_at(std::string_view text) const {
  const auto found = std::ranges::find_if(specials_, [&](const Special& s) { return text.starts_with(s.text); });
  return found == specials_.end() ? nullptr : &*found;
}

void T5Tokenizer::append_pieces(std::string_view text, std::vector<std::int32_t>& ids) const {
  // sentencepiece normalises: its pieces joined are the text that the unigram model sees.
  std::vector<std::string> pieces;
  if (const auto status = normalizer_->Encode({text.data(), text.size()}, &pieces); !status.ok()) {
    throw std::runtime_error(fmt::format("{}: encoding failed: {}", model_file_.string(), status.ToString()));
  }
  const auto segment_ids = unigram_.encode(fmt::format("{}", fmt::join(pieces, "")));
  ids.insert(ids.end(), segment_ids.begin(), segment_ids.end());
}

std::vector<std::int32_t> T5Tokenizer::encode(std::string_view text) const {
  if (const auto at = invalid_utf8_at(text)) {
    fail("a text is not valid UTF-8 at its byte {} (0x{:02x}); convert the data to UTF-8", *at,
         static_cast<unsigned char>(text[*at]));
  }
  std::vector<std::int32_t> ids;
  std::size_t segment = 0, i = 0;
  while ((i = text.find_first_of(special_starts_, i)) != std::string_view::npos) {
    const auto* special = special_at(text.substr(i));
    if (special == nullptr) {
      ++i;
      continue;
    }
    append_pieces(text.substr(segment, i - segment), ids);
    ids.push_back(special->id);
    i += special->text.size();
    segment = i;
  }
  append_pieces(text.substr(segment), ids);
  return ids;
}

std::vector<std::int32_t> T5Tokenizer::encode(std::string_view a, const std::optional<std::string>& b,
                                              std::int64_t max_length) const {
  const std::int64_t num_ends = b ? 2 : 1;
  if (max_length < num_ends) fail("max_length is {}, expected at least {} (for </s>)", max_length, num_ends);
  auto ids = encode(a);
  auto second = b ? encode(*b) : std::vector<std::int32_t>{};
  const auto room = static_cast<std::size_t>(max_length - num_ends);
  while (ids.size() + second.size() > room) {
    if (ids.size() > second.size()) {
      ids.pop_back();
    } else {
      second.pop_back();
    }
  }
  ids.push_back(eos_id_);
  if (b) {
    ids.insert(ids.end(), second.begin(), second.end());
    ids.push_back(eos_id_);
  }
  return ids;
}

bool T5Tokenizer::is_special(std::int32_t id) const {
  return id == pad_id_ || id == eos_id_ || id == unk_id_ || (id >= num_pieces() && id < vocab_size());
}

std::string T5Tokenizer::decode(std::span<const std::int32_t> ids, bool skip_special) const {
  std::string text;
  bool is_first = true;
  for (const auto id : ids) {
    if (id < 0 || id >= vocab_size() || (skip_special && is_special(id))) continue;
    if (id >= num_pieces()) {
      text += sentinel_text(num_pieces() + kNumSentinels - 1 - id);
    } else {
      std::string_view piece = pieces_[static_cast<std::size_t>(id)].text;
      for (auto at = piece.find(kSpace); at != std::string_view::npos; at = piece.find(kSpace)) {
        text += piece.substr(0, at);
        if (!is_first) text += ' ';
        piece.remove_prefix(at + kSpace.size());
      }
      text += piece;
    }
    is_first = false;
  }
  return text;
}

std::int32_t T5Tokenizer::sentinel_id(int i) const {
  if (i < 0 || i >= kNumSentinels) {
    throw std::out_of_range(fmt::format("sentinel {} asked for, expected 0..{}", i, kNumSentinels - 1));
  }
  return num_pieces() + kNumSentinels - 1 - i;
}

}  // namespace mergex::text
