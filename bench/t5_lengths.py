#!/usr/bin/env python3
"""Training throughput on sentences of real lengths: padded to 128 tokens, padded to the longest of a batch, and in
batches of similar length as `length_bucketing` makes them; mergex, and transformers on the first two.

Reads a GLUE table and a sentencepiece model for the lengths alone. Needs torch, transformers and sentencepiece.

  bench/t5_lengths.py --table CoLA/train.tsv --column 3 --tokenizer spiece.model
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time

parser = argparse.ArgumentParser()
parser.add_argument("--bench", default="build/release/bench/mergex_bench")
parser.add_argument("--table", required=True)
parser.add_argument("--column", type=int, required=True, help="of the sentence, from 0")
parser.add_argument("--tokenizer", required=True)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--batches", type=int, default=12)
parser.add_argument("--rounds", type=int, default=3)
arguments = parser.parse_args()

os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
import sentencepiece  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

torch.set_num_threads(arguments.threads)
transformers.logging.set_verbosity_error()


def padded(rows, length=0):
    length = max([length] + [len(row) for row in rows])
    return [row + [0] * (length - len(row)) for row in rows]


def cut(rows, length=0):
    return [padded(rows[i : i + arguments.batch], length) for i in range(0, len(rows), arguments.batch)]


class Mergex:
    def __init__(self, folder, batches):
        self.file = tempfile.NamedTemporaryFile("w", suffix=".json")
        json.dump(batches, self.file)
        self.file.flush()
        command = [arguments.bench, folder, self.file.name, str(arguments.threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self):
        self.process.stdin.write("train\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit("mergex_bench stopped")
        return json.loads(line)["seconds"]


class Transformers:
    def __init__(self, folder, batches):
        self.model = transformers.T5ForSequenceClassification.from_pretrained(folder).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
        self.batches, self.next = [torch.tensor(b) for b in batches], 0

    def step(self):
        ids = self.batches[self.next % len(self.batches)]
        self.next += 1
        start = time.perf_counter()
        loss = self.model(input_ids=ids, attention_mask=(ids != 0).long(), labels=torch.arange(len(ids)) % 2).loss
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return time.perf_counter() - start


def main():
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=arguments.tokenizer)
    with open(arguments.table, encoding="utf-8") as file:
        sentences = [line.rstrip("\n").split("\t")[arguments.column] for line in file]
    random.seed(1)
    rows = [tokenizer.encode(s)[:127] + [1] for s in random.sample(sentences, 50 * arguments.batch)]
    count = arguments.batches * arguments.batch
    # As the trainer does: 50 steps' worth sorted by length, then the batches in random order.
    similar = cut(sorted(rows, key=len))
    random.shuffle(similar)
    # The same sentences in every case.
    similar = similar[: arguments.batches]
    rows = [[i for i in row if i != 0] for batch in similar for row in batch]
    random.shuffle(rows)

    torch.manual_seed(1)
    model = transformers.T5ForSequenceClassification(
        transformers.T5Config(vocab_size=32128, d_model=512, d_ff=2048, num_layers=6, num_heads=8, num_labels=2,
                              decoder_start_token_id=0))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        cases = {
            "mergex, padded to 128": Mergex(folder, cut(rows, 128)),
            "mergex, to the longest of the batch": Mergex(folder, cut(rows)),
            "mergex, batches of similar length": Mergex(folder, similar),
            "transformers, padded to 128": Transformers(folder, cut(rows, 128)),
            "transformers, to the longest of the batch": Transformers(folder, cut(rows)),
        }
        for case in cases.values():
            for _ in range(2):
                case.step()
        seconds = {name: [] for name in cases}
        for _ in range(arguments.rounds):
            for name, case in cases.items():
                seconds[name].append(sum(case.step() for _ in range(arguments.batches)))
        slowest = "mergex, padded to 128"
        print(json.dumps({
            "mean_tokens": round(statistics.mean(len(r) for r in rows), 1),
            "cases": {name: {"sentences_per_s": round(count / statistics.median(s), 1),
                             "times_as_fast": round(statistics.median(a / b for a, b in zip(seconds[slowest], s)), 2)}
                      for name, s in seconds.items()}}, indent=1))


main()
