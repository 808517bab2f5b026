#!/usr/bin/env python3
"""Makes recipes/quickstart/data: "is this King James verse from the Old or from the New Testament?"

Needs Debian's packages bible-kjv (the text) and sentencepiece (spm_train), and Python's standard library.
The files it makes are in the repository: neither building nor running mergex needs this script. A second run writes
the same bytes.

    python3 data_scripts/make_quickstart_data.py [--out DIR]
"""

import argparse
import gzip
import hashlib
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SEED = 1611
VALIDATION = 500  # verses of each testament
TRAIN = 5000
PIECES = 2000
FIRST_NEW_BOOK = "Mat"

HERE = pathlib.Path(__file__).resolve().parent
DEFAULT_OUT = HERE.parent / "recipes" / "quickstart" / "data"


def run(command, **options):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          encoding="utf-8", **options).stdout


def draw(purpose, name):
    """A number for `name` that depends on nothing but SEED and `purpose`; sorting by it shuffles."""
    return hashlib.sha256(f"{SEED} {purpose} {name}".encode()).digest()


def read_verses():
    """[(id, text, label)] in the order of the Bible."""
    verses, label = [], "old"
    for line in run(["bible", "-f", "Gen 1:1-Rev 22:21"]).splitlines():
        reference, text = line.split(" ", 1)
        book, place = re.fullmatch(r"([1-3]?[A-Z][A-Za-z]*)(\d+:\d+)", reference).groups()
        if book == FIRST_NEW_BOOK:
            label = "new"
        verses.append((f"{'Gen' if book == 'Ge' else book} {place}", " ".join(text.split()), label))
    if len(verses) != 31102:
        sys.exit(f"bible printed {len(verses)} verses, expected 31102")
    return verses


def without_repeats(verses):
    """The first of the verses that agree in all letters, so that no text is in both splits."""
    seen, kept = set(), []
    for verse in verses:
        letters = re.sub("[^a-z]", "", verse[1].lower())
        if letters not in seen:
            seen.add(letters)
            kept.append(verse)
    return kept


def split(verses):
    train, validation = [], []
    for label in ("old", "new"):
        shuffled = sorted((v for v in verses if v[2] == label), key=lambda v: draw("sample", v[0]))
        validation += shuffled[:VALIDATION]
        train += shuffled[VALIDATION:VALIDATION + TRAIN]
    return [sorted(part, key=lambda v: draw("order", v[0])) for part in (train, validation)]


def train_tokenizer(texts, out):
    # In a folder of its own and with relative names, because the model keeps the names.
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "train.txt").write_text("".join(t + "\n" for t in texts), encoding="utf-8")
        run(["spm_train", "--input=train.txt", "--model_prefix=spiece", f"--vocab_size={PIECES}", "--model_type=unigram",
             "--character_coverage=1.0", "--pad_id=0", "--eos_id=1", "--unk_id=2", "--bos_id=-1", "--num_threads=1",
             # The text is plain ASCII: a table of Unicode rules would be nine tenths of the model's bytes.
             "--normalization_rule_name=identity"],
            cwd=folder)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(pathlib.Path(folder, "spiece.model"), out)


def write_gzip(path, text):
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", compresslevel=9, fileobj=raw, mtime=0) as out:
        out.write(text.encode())


def write_tsv(path, verses):
    write_gzip(path, "id\ttext\tlabel\n" + "".join("\t".join(v) + "\n" for v in verses))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=DEFAULT_OUT, help="folder to write to (default: %(default)s)")
    out = parser.parse_args().out
    for program, package in (("bible", "bible-kjv"), ("spm_train", "sentencepiece")):
        if not shutil.which(program):
            sys.exit(f"{program} not found: apt-get install {package}")
    out.mkdir(parents=True, exist_ok=True)

    bible = read_verses()
    train, validation = split(without_repeats(bible))
    write_tsv(out / "train.tsv.gz", train)
    write_tsv(out / "validation.tsv.gz", validation)

    model = out / "tokenizer" / "spiece.model"
    train_tokenizer([v[1] for v in train], model)

    for path in sorted(p for p in out.rglob("*") if p.suffix in (".gz", ".model")):
        print(f"{path.stat().st_size:8d}  {path.relative_to(out)}")
    print(f"{len(train)} + {len(validation)} verses")


if __name__ == "__main__":
    main()
