#!/usr/bin/env python3
"""Times training and evaluation steps of a T5 classifier: mergex, dense and with experts, against transformers.

All programs hold the same weights, read the same ids and use the same number of threads; they take turns step by
step, and what is printed are medians of ratios within a round. Needs torch and transformers.

  bench/t5_step.py --bench build/release/bench/mergex_bench --rounds 7
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
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument("--modes", default="train,evaluate")
parser.add_argument("--cases", default="dense,rank1,rank8", help="of dense, ties, rank1, rank8, smoe")
parser.add_argument("--no-transformers", action="store_true")
parser.add_argument("--layers", type=int, default=6)
arguments = parser.parse_args()

os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
import torch  # noqa: E402  (after the number of threads is set)
import transformers  # noqa: E402

torch.set_num_threads(arguments.threads)
transformers.logging.set_verbosity_error()

CAMEX = {"method": "camex", "num_experts": 7, "protocol": "ties"}
EXPERTS = {
    "dense": None,
    "ties": CAMEX,
    "rank1": CAMEX | {"curvature": {"rank": 1}},
    "rank8": CAMEX | {"curvature": {"rank": 8}},
    "smoe": {"method": "smoe", "num_experts": 8},
}


class Mergex:
    def __init__(self, folder, ids, experts):
        command = [arguments.bench, folder, ids, str(arguments.threads)]
        if experts is not None:
            command.append(json.dumps(experts))
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def do(self, what):
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            sys.exit("mergex_bench stopped")
        return json.loads(line)


class Transformers:
    def __init__(self, model, ids):
        self.model, self.ids = model, torch.tensor(ids)
        self.gold = torch.arange(len(ids)) % 2
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)

    def do(self, what):
        start = time.perf_counter()
        if what == "train":
            self.model.train()
            loss = self.model(input_ids=self.ids, attention_mask=(self.ids != 0).long(), labels=self.gold).loss
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        elif what == "evaluate":
            self.model.eval()
            with torch.no_grad():
                loss = self.model(input_ids=self.ids, attention_mask=(self.ids != 0).long(), labels=self.gold).loss
        else:
            return {"seconds": 0.0, "loss": 0.0}
        return {"seconds": time.perf_counter() - start, "loss": loss.item()}


def main():
    random.seed(1)
    ids = [[random.randrange(3, 32000) for _ in range(arguments.tokens - 1)] + [1] for _ in range(arguments.batch)]
    config = transformers.T5Config(vocab_size=32128, d_model=512, d_ff=2048, num_layers=arguments.layers, num_heads=8,
                                   num_labels=2, decoder_start_token_id=0)
    torch.manual_seed(1)
    model = transformers.T5ForSequenceClassification(config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        ids_file = os.path.join(folder, "ids.json")
        with open(ids_file, "w") as file:
            json.dump([ids], file)
        cases = {name: Mergex(folder, ids_file, EXPERTS[name]) for name in arguments.cases.split(",")}
        if not arguments.no_transformers:
            cases["transformers"] = Transformers(model, ids)
        first = {name: (case.do("begin"), case.do("evaluate"))[1]["loss"] for name, case in cases.items()}
        print(json.dumps({"first_evaluation_loss": first}))
        for mode in arguments.modes.split(","):
            for case in cases.values():  # once unmeasured
                if mode == "evaluate":
                    case.do("begin")
                case.do(mode)
            rounds = []
            for _ in range(arguments.rounds):
                rounds.append({name: case.do(mode) for name, case in cases.items()})
            report = {"mode": mode, "rounds": arguments.rounds, "threads": arguments.threads}
            for name in cases:
                seconds = [r[name]["seconds"] for r in rounds]
                entry = {"median_s": round(statistics.median(seconds), 4), "min_s": round(min(seconds), 4)}
                dense = [n for n in ("dense", "transformers") if n in cases]
                entry["over_faster_dense"] = round(
                    statistics.median(r[name]["seconds"] / min(r[n]["seconds"] for n in dense) for r in rounds), 3)
                if "transformers" in cases:
                    entry["over_transformers"] = round(
                        statistics.median(r[name]["seconds"] / r["transformers"]["seconds"] for r in rounds), 3)
                if "peak_mib" in rounds[-1][name]:
                    entry["peak_mib"] = round(rounds[-1][name]["peak_mib"])
                report[name] = entry
            print(json.dumps(report, indent=1))


main()
