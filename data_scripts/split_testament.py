#!/usr/bin/env python3
"""Splits the quickstart's verses by book into three parts, of which each has verses of both testaments.

The models of docs/merge.md are trained on one part each. Needs Python's standard library alone.

    python3 data_scripts/split_testament.py            # writes runs/testament-parts/*.tsv
"""
import gzip
import pathlib

PARTS = {
    "law-gospels": "Gen Exo Lev Num Deu Mat Mark Luke John",
    "history-acts": "Josh Jdgs Ruth 1Sm 2Sm 1Ki 2Ki 1Chr 2Chr Ezra Neh Est Acts",
    "prophets-letters": "Job Psa Prv Eccl SSol Isa Jer Lam Eze Dan Hos Joel Amos Obad Jonah Mic Nahum Hab Zep Hag Zec Mal "
                        "Rom 1Cor 2Cor Gal Eph Phi Col 1Th 2Th 1Tim 2Tim Titus Phmn Heb Jas 1Pet 2Pet 1Jn 2Jn 3Jn Jude Rev",
}

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main():
    out = ROOT / "runs" / "testament-parts"
    out.mkdir(parents=True, exist_ok=True)
    part_of = {book: part for part, books in PARTS.items() for book in books.split()}
    header, *verses = gzip.open(ROOT / "recipes/quickstart/data/train.tsv.gz", "rt", encoding="utf-8").read().splitlines()
    lines = {part: [header] for part in PARTS}
    for verse in verses:
        lines[part_of[verse.split(" ", 1)[0]]].append(verse)
    for part, content in lines.items():
        (out / f"{part}.tsv").write_text("\n".join(content) + "\n", encoding="utf-8")
        print(f"{out / part}.tsv: {len(content) - 1} verses")


if __name__ == "__main__":
    main()
