#!/usr/bin/env python3
"""Numbers that the optimisers, schedules and losses of mergex are compared with: tests/golden/training.json.

Needs numpy, torch and transformers; everything is float64. Usage: make_training_goldens.py OUTPUT.json
"""
import json
import sys

import numpy as np
import torch
import transformers
from transformers.optimization import Adafactor, get_cosine_schedule_with_warmup

SHAPES = [[4, 3], [5], [2, 3, 4]]
STEPS = 6

ADAFACTOR = [
    {"lr": 0.01, "relative_step": False, "scale_parameter": False},
    {"lr": 0.01, "relative_step": False, "scale_parameter": True},
    {"lr": None, "relative_step": True, "scale_parameter": True},
    {"lr": None, "relative_step": True, "scale_parameter": True, "warmup_init": True},
    {"lr": 0.02, "relative_step": False, "scale_parameter": False, "beta1": 0.9, "weight_decay": 0.1},
    {"lr": 0.02, "relative_step": False, "scale_parameter": True, "clip_threshold": 0.5, "decay_rate": -0.5,
     "eps": [1e-10, 0.5]},
]


def adafactor_cases(rng):
    start = [rng.normal(size=s) for s in SHAPES]
    gradients = [[rng.normal(size=s) * 10.0 ** rng.integers(-3, 2) for s in SHAPES] for _ in range(STEPS)]
    gradients[2][1] *= 0.0
    cases = []
    for options in ADAFACTOR:
        parameters = [torch.nn.Parameter(torch.tensor(p)) for p in start]
        optimizer = Adafactor(parameters, **{**options, "eps": tuple(options.get("eps", (1e-30, 1e-3)))})
        for step in gradients:
            for p, g in zip(parameters, step):
                p.grad = torch.tensor(g)
            optimizer.step()
        cases.append({"options": options, "final": [p.detach().flatten().tolist() for p in parameters]})
    return {"shapes": SHAPES, "start": [p.flatten().tolist() for p in start],
            "gradients": [[g.flatten().tolist() for g in step] for step in gradients], "cases": cases}


def cosine_cases():
    cases = []
    for warmup, steps in [(0, 10), (3, 20), (5, 7)]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        schedule = get_cosine_schedule_with_warmup(optimizer, warmup, steps)
        factors = []
        for _ in range(steps + 1):
            factors.append(schedule.get_last_lr()[0])
            optimizer.step()
            schedule.step()
        cases.append({"warmup_steps": warmup, "steps": steps, "factors": factors})
    return cases


def loss_cases(rng):
    cases = []
    for smoothing, weighted, ignored in [(0.1, False, True), (0.2, False, False), (0.0, True, False), (0.3, True, False)]:
        logits = torch.tensor(rng.normal(size=(7, 4)) * 2.0, requires_grad=True)
        labels = torch.tensor(rng.integers(0, 4, size=7))
        if ignored:
            labels[[1, 4]] = -100
        weights = torch.tensor(rng.uniform(0.2, 3.0, size=4)) if weighted else None
        mean = torch.nn.functional.cross_entropy(logits, labels, weight=weights, label_smoothing=smoothing)
        mean.backward()
        cases.append({"label_smoothing": smoothing, "class_weights": weights.tolist() if weighted else None,
                      "logits": logits.detach().tolist(), "labels": labels.tolist(), "mean": mean.item(),
                      "gradient": logits.grad.tolist()})
    return cases


def main():
    rng = np.random.default_rng(4)
    result = {
        "origin": f"transformers {transformers.__version__}, torch {torch.__version__}, numpy {np.__version__}, float64",
        "adafactor": adafactor_cases(rng),
        "cosine": cosine_cases(),
        "cross_entropy": loss_cases(rng),
    }
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        json.dump(result, out, indent=None, separators=(", ", ": "))
        out.write("\n")


main()
