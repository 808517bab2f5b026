#!/usr/bin/env python3
"""Loads adapters that mergex merged into PEFT and compares what they do with PEFT's reading of their inputs.

    MERGEX_ADAPTERS_OUT=DIR mergex_tests "[.peft]"
    merged_adapters_in_peft.py DIR

Needs torch, transformers and peft. Every tensor that PEFT merges (float64) must be base + sum of weight * (input - base)
within 2e-6 of the largest change, and no key may be missing or unexpected.
"""
import json
import pathlib
import sys
import warnings

import torch
from peft import PeftConfig, get_peft_model
from peft.utils.save_and_load import load_peft_weights, set_peft_model_state_dict
from transformers import AutoModelForCausalLM

TOLERANCE = 2e-6


def merged_weights(base, adapter):
    """State dict of the base with the adapter merged in, and the names of tensors in the file that PEFT did not take."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    model = get_peft_model(model, PeftConfig.from_pretrained(adapter))
    trainable = {n for n, p in model.named_parameters() if "lora_" in n or "modules_to_save" in n}
    taken = set_peft_model_state_dict(model, load_peft_weights(adapter, device="cpu"))
    problems = [*taken.unexpected_keys, *(k for k in taken.missing_keys if k in trainable)]
    return model.merge_and_unload().state_dict(), problems


def main():
    folder = pathlib.Path(sys.argv[1])
    failed = False
    for case in json.loads((folder / "cases.json").read_text()):
        before = AutoModelForCausalLM.from_pretrained(case["base"], dtype=torch.float64).state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got, problems = merged_weights(case["base"], str(folder / case["name"]))
            inputs = [(i["weight"], merged_weights(case["base"], i["adapter"])[0]) for i in case["inputs"]]
        worst = 0.0
        for name, base in before.items():
            changes = [w * (x[name] - base) for w, x in inputs]
            scale = max(c.abs().max().item() for c in changes)
            error = (got[name] - base - sum(changes)).abs().max().item()
            if scale > 0 or error > 0:
                worst = max(worst, error / scale if scale > 0 else float("inf"))
        ok = worst <= TOLERANCE and not problems
        failed |= not ok
        print(f"{'ok' if ok else 'FAILED'}  {case['name']}: largest relative error {worst:.1e}", *problems)
    sys.exit(failed)


if __name__ == "__main__":
    main()
