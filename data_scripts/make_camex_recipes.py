#!/usr/bin/env python3
"""Writes the files of recipes/camex that differ only in task, row and published number.

  python3 data_scripts/make_camex_recipes.py

Base files hold what settings share: glue-common.json (written by hand), glue-METHOD.json (the experts of one row). A
setting TASK-t5-base-METHOD.json extends its row and names its task. TASK-t5-base.json runs all rows of a task.
"""
import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "recipes/camex"

# name: (what it is called in text, folder of the data, metric of the paper, suggested tolerance in points)
TASKS = {
    "sst2": ("SST-2", "SST-2", "accuracy", 1.0),
    "mrpc": ("MRPC", "MRPC", "f1", 1.5),
    "cola": ("CoLA", "CoLA", "matthews", 1.5),
    "stsb": ("STS-B", "STS-B", "spearman", 0.5),
    "rte": ("RTE", "RTE", "accuracy", 3.0),
    "qnli": ("QNLI", "QNLI", "accuracy", 1.0),
    "mnli": ("MNLI", "MNLI", "accuracy", 1.0),
}


def camex(protocol, curvature):
    experts = {"method": "camex", "profile": "paper", "num_experts": 7, "linears": ["wi", "wo"], "protocol": protocol,
               "alpha": 1.0}
    if curvature:
        experts["curvature"] = {"rank": 1}
    experts["router"] = {"kind": "noisy_top_k", "level": "sequence"}
    return experts


SMOE = {"method": "smoe", "num_experts": 8, "linears": ["wi", "wo"],
        "router": {"kind": "noisy_top_k", "top_k": 2, "level": "token"}}

# name: (row of the paper's table 2, description, experts)
METHODS = {
    "dense": (None, "dense fine-tuning", None),
    "smoe": ("Vanilla", "sparse mixture of 8 experts, 2 a token (what the paper's own baseline used is not known)", SMOE),
    "domain-specific": ("Domain-specific", "experts merged by their scores", camex("domain_specific", False)),
    "domain-specific-ca": ("Domain-specific-CA", "experts merged by their scores, with curvature of rank 1",
                           camex("domain_specific", True)),
    "ties": ("Ties", "experts merged by sign election", camex("ties", False)),
    "ties-ca": ("Ties-CA", "experts merged by sign election, with curvature of rank 1", camex("ties", True)),
    "dare": ("Dare", "experts merged after random drops", camex("dare", False)),
    "dare-ca": ("Dare-CA", "experts merged after random drops, with curvature of rank 1", camex("dare", True)),
}
LABELS = {name: name.replace("-ca", " + curvature") for name in METHODS}

PAPER = "Nguyen et al. 2025, arXiv:2502.18821"
QUOTED = f"{PAPER}: quoted from the main text in the public review discussion"
PLOTTED = (f"{PAPER}: the endpoint alpha = 1 in the authors' plotting tools; equals the table where both are known, so "
           "likely its cell")
LATER = ("row CAMEx of the same group's arXiv:2510.16138, which for MRPC and RTE equals what is known of this row; "
         "likely the same run")

# (method, task): (expected, source, whether it is the paper's own)
PUBLISHED = {
    ("ties-ca", "sst2"): (94.61, QUOTED, True),
    ("ties-ca", "mrpc"): (92.49, QUOTED, True),
    ("ties-ca", "cola"): (60.06, QUOTED, True),
    ("ties-ca", "mnli"): (86.45, QUOTED, True),
    ("ties-ca", "rte"): (75.81, PLOTTED, False),
    ("ties-ca", "stsb"): (89.54, PLOTTED, False),
    ("domain-specific-ca", "rte"): (74.72, PLOTTED, False),
    ("domain-specific-ca", "stsb"): (89.47, PLOTTED, False),
    ("domain-specific-ca", "mrpc"): (91.16, PLOTTED, False),
    ("domain-specific-ca", "sst2"): (93.80, LATER, False),
    ("domain-specific-ca", "cola"): (58.57, LATER, False),
    ("domain-specific-ca", "mnli"): (86.44, LATER, False),
    ("dare-ca", "rte"): (78.70, PLOTTED, False),
    ("dare-ca", "stsb"): (89.56, PLOTTED, False),
    ("dare-ca", "mrpc"): (91.15, PLOTTED, False),
}

FIVE_SEEDS = [1, 2, 3, 4, 5]  # the paper's own five are not known


def lines(key, value, indent):
    """`"key": value`; an object that does not fit one line has a line for each of its keys."""
    flat = f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}"
    if not isinstance(value, dict) or indent + len(flat) <= 118:
        return " " * indent + flat
    inner = ",\n".join(lines(k, v, indent + 2) for k, v in value.items())
    return f"{' ' * indent}{json.dumps(key)}: {{\n{inner}\n{' ' * indent}}}"


def write(name, recipe):
    order = ["extends", "name", "description", "paper", "model", "task", "experts", "sweep"]
    text = "{\n" + ",\n".join(lines(k, recipe[k], 2) for k in order if k in recipe) + "\n}\n"
    (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")


def task_section(task):
    return {"name": f"glue/{task}", "data_dir": f"../../data/glue/{TASKS[task][1]}"}


def paper_section(task, method):
    row, metric, tolerance = METHODS[method][0], TASKS[task][2], TASKS[task][3]
    section = {"table": "CAMEx-T2", "row": row, "metric": metric}
    if (method, task) not in PUBLISHED:
        return section | {"known": False}
    expected, source, known = PUBLISHED[method, task]
    return section | {"expected": expected, "tolerance": tolerance, "source": source, "known": known}


def main():
    for method, (_, description, experts) in METHODS.items():
        if experts is not None:
            write(f"glue-{method}", {"extends": "glue-common.json", "description": description, "experts": experts})
    write("glue-rows", {"extends": "glue-common.json", "description": "all rows of the GLUE table",
                        "sweep": {"/experts": {LABELS[m]: experts for m, (_, _, experts) in METHODS.items()}}})
    for task, (title, *_) in TASKS.items():
        for method, (row, description, experts) in METHODS.items():
            name = f"{task}-t5-base-{method}"
            recipe = {"extends": "glue-common.json" if experts is None else f"glue-{method}.json", "name": name,
                      "description": f"{title}, T5-base: {description}"}
            if row is not None:
                recipe["paper"] = paper_section(task, method)
            write(name, recipe | {"task": task_section(task)})
        write(f"{task}-t5-base", {
            "extends": "glue-rows.json", "name": f"{task}-t5-base", "description": f"{title}, T5-base: all rows in one table",
            "paper": {"table": "CAMEx-T2", "metric": TASKS[task][2], "known": False,
                      "rows": {LABELS[m]: PUBLISHED[m, task][0] for m in METHODS if (m, task) in PUBLISHED}},
            "task": task_section(task)})
    for task in ("rte", "stsb", "mrpc"):
        title, _, metric, _ = TASKS[task]
        setting = {"extends": "glue-ties-ca.json", "task": task_section(task)}

        def ablation(name, figure, description, sweep, more=None):
            write(f"{task}-{name}", setting | (more or {}) | {
                "name": f"{task}-{name}", "description": f"{title}: {description}",
                "paper": {"table": figure, "metric": metric, "known": False}, "sweep": sweep})

        protocols = ["domain_specific", "ties", "dare"]
        ablation("t5-base-alpha", "CAMEx-F4", "the step size of the merge, T5-base, curvature of rank 1",
                 {"/experts/protocol": protocols, "/experts/alpha": [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]})
        ablation("t5-base-alpha-wide", "CAMEx-F8",
                 "the step size of the merge over a wide range (the paper's own steps are not known), five seeds",
                 {"/experts/protocol": protocols[1:], "/experts/alpha": [round(0.1 * i, 1) for i in range(1, 17)],
                  "/seed": FIVE_SEEDS})
        ablation("t5-small-rank", "CAMEx-F5", "the Kronecker rank of the curvature, T5-small",
                 {"/experts/protocol": protocols, "/experts/curvature/rank": [1, 2, 4, 6]},
                 {"model": {"checkpoint": "../../models/t5-small"}})
        ablation("t5-base-num-experts", "CAMEx-F9",
                 "the number of experts, the base counted (the paper's exact grid is not known), T5-base",
                 {"/experts/num_experts": {str(n): n - 1 for n in (4, 8, 12, 16)}})
    write("cost-t5-base", {
        "extends": "glue-common.json", "name": "cost-t5-base",
        "description": "Parameters and multiply-adds of dense, sparse and merged T5-base: read with --dry-run",
        "paper": {"table": "CAMEx-COST", "known": False}, "task": task_section("rte"),
        "sweep": {"/experts": {"dense": None, "smoe": SMOE, "camex, rank 1": camex("ties", True),
                               "camex, rank 8": camex("ties", True) | {"curvature": {"rank": 8}}}}})


if __name__ == "__main__":
    main()
