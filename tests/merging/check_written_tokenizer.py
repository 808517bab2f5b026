"""Checks a written tokenizer with Hugging Face's `tokenizers`: check_written_tokenizer.py RESULT BASE DONOR TEXTS

RESULT, BASE and DONOR are folders with tokenizer.json, TEXTS a JSON list of texts. Holds the union to this:
- the base's tokens keep their ids, every token of the donor is there, and no id is given twice;
- a text is encoded as the base does it, or with some of those tokens joined to new ones;
- every token that only the donor has comes back from its own text, except those that the base cannot build
  (UNREACHED, optional, a JSON list of tokens).
Ends with 77 where `tokenizers` is not installed.
"""
import json
import sys

try:
    from tokenizers import Tokenizer
except ImportError:
    sys.exit(77)

folders, texts = sys.argv[1:4], json.load(open(sys.argv[4], encoding="utf-8"))
unreached = set(json.load(open(sys.argv[5], encoding="utf-8"))) if len(sys.argv) > 5 else set()
result, base, donor = (Tokenizer.from_file(folder + "/tokenizer.json") for folder in folders)
result_ids, base_ids, donor_ids = (tokenizer.get_vocab() for tokenizer in (result, base, donor))

moved = [token for token, row in base_ids.items() if result_ids.get(token) != row]
assert not moved, f"tokens of the base with another id: {moved[:5]}"
lost = [token for token in donor_ids if token not in result_ids]
assert not lost, f"tokens of the donor that are not there: {lost[:5]}"
assert len(set(result_ids.values())) == len(result_ids), "one id for two tokens"

# readers take ids from different places of the file: all of them must say the same
described = json.load(open(folders[0] + "/tokenizer.json", encoding="utf-8"))
for entry in described["added_tokens"]:
    assert result_ids[entry["content"]] == entry["id"], f"two ids for {entry['content']}"


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


num_joined = 0
for text in texts:
    mine, theirs = encode(result, text), encode(base, text)
    if all(token in base_ids for token in mine.tokens):
        assert mine.ids == theirs.ids, f"{text!r}: {mine.tokens}, expected {theirs.tokens}"
        continue
    num_joined += 1
    if sum(end - begin for begin, end in theirs.offsets) == len(text):  # nothing that the base does not know
        cuts = {begin for begin, _ in theirs.offsets} | {end for _, end in theirs.offsets}
        extra = [pair for pair in mine.offsets if not set(pair) <= cuts]
        assert not extra, f"{text!r}: {mine.tokens} cuts where {theirs.tokens} does not"

new = [token for token in donor_ids if token not in base_ids]
num_reached = 0
for token in new:
    text = donor.decode([donor_ids[token]], skip_special_tokens=False)
    if encode(donor, text).tokens != [token]:
        continue  # not even in its own tokenizer
    reached = encode(result, text).ids == [result_ids[token]]
    assert reached or token in unreached, f"{text!r}: {encode(result, text).tokens}, expected {token!r}"
    num_reached += reached
print(f"{len(texts)} texts, {num_joined} of them with new tokens; {num_reached} of {len(new)} new tokens reached")
