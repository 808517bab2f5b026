#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "text/vocabulary.h"

namespace mergex::merging {

/// What a tokenizer gets in addition. Ids begin behind the highest of its own, so that those keep their meaning.
struct AddedVocabulary {
  std::vector<text::Token> tokens = {};      ///< by ascending id; with flags: as added tokens
  std::vector<text::BpeMerge> merges = {};   ///< of lower priority than the tokenizer's own
  std::vector<std::string> unreached = {};   ///< tokens that no sequence of merges builds: texts never come to them
};

/// The merges that make the tokens of `added` part of `base`: those of the vocabularies that they come from, and where
/// `base` cuts a token in other places, one that joins its pieces. Every one of them builds a new token. So a text is
/// segmented as `base` does it, and then some neighbours are joined.
AddedVocabulary with_merges(const text::Vocabulary& base, std::span<const text::Vocabulary* const> others,
                            AddedVocabulary added);

/// The tokenizer files of `vocabulary` with more tokens, as (name, content): tokenizer.json, else vocab.json and
/// merges.txt, else vocab.txt; added_tokens.json and tokenizer_config.json where they are there. Its other files
/// (special_tokens_map.json, chat templates) stay true as they are.
std::vector<std::pair<std::string, std::string>> extended_tokenizer(const text::Vocabulary& vocabulary,
                                                                    const AddedVocabulary& added);

}  // namespace mergex::merging
