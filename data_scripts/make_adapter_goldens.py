#!/usr/bin/env python3
"""LoRA adapters with the weights that PEFT makes of them: tests/golden/adapters/.

Needs torch, transformers and peft. Weights are random (seeded), merged weights are computed in float64.
Usage: make_adapter_goldens.py OUTPUT_FOLDER
"""
import json
import pathlib
import shutil
import sys
import warnings

import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (AutoModelForCausalLM, AutoModelForSequenceClassification, GPT2Config, GPT2LMHeadModel,
                          LlamaConfig, LlamaForCausalLM)

warnings.filterwarnings("ignore")

LLAMA = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
             vocab_size=40, max_position_embeddings=32, attention_bias=True, tie_word_embeddings=False,
             pad_token_id=0, bos_token_id=1, eos_token_id=2)
GPT2 = dict(n_embd=12, n_layer=2, n_head=2, vocab_size=30, n_positions=16, bos_token_id=1, eos_token_id=1)

# name: (base, LoraConfig, what else)
CASES = {
    "plain": ("llama", dict(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"]), {}),
    "bfloat16": ("llama", dict(r=4, lora_alpha=4, target_modules=["k_proj", "gate_proj"]), {"dtype": torch.bfloat16}),
    "patterns_rslora": ("llama", dict(
        r=4, lora_alpha=8, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"],
        rank_pattern={"q_proj": 2, "layers.1.self_attn.v_proj": 5},
        alpha_pattern={r"^model\.layers\.[01]\.mlp\.down_proj": 7, "layers.1.self_attn.q_proj": 3}), {}),
    "bias_all": ("llama", dict(r=2, lora_alpha=4, target_modules=["q_proj", "o_proj"], bias="all"), {}),
    "bias_lora_only": ("llama", dict(r=2, lora_alpha=4, target_modules=["q_proj"], bias="lora_only"), {}),
    "lora_bias": ("llama", dict(r=2, lora_alpha=5, target_modules=["q_proj", "v_proj"], lora_bias=True), {}),
    "dora": ("llama", dict(r=3, lora_alpha=6, target_modules=["q_proj", "o_proj", "down_proj"], use_dora=True), {}),
    "embedding": ("llama", dict(r=3, lora_alpha=6, target_modules=["embed_tokens", "q_proj"]), {}),
    "embedding_dora": ("llama", dict(r=3, lora_alpha=6, target_modules=["embed_tokens", "lm_head"], use_dora=True), {}),
    "modules_to_save": ("llama", dict(r=2, lora_alpha=2, target_modules=["q_proj"],
                                      modules_to_save=["lm_head", "norm"]), {}),
    "resized": ("llama", dict(r=2, lora_alpha=2, target_modules=["q_proj"]), {"vocab_size": 44}),
    "classifier": ("llama", dict(r=2, lora_alpha=2, target_modules=["q_proj"], task_type="SEQ_CLS"), {"num_labels": 3}),
    "conv1d": ("gpt2", dict(r=3, lora_alpha=5, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True), {}),
    "conv1d_unflagged": ("gpt2", dict(r=3, lora_alpha=5, target_modules=["c_proj"]), {"edit": {"fan_in_fan_out": False}}),
    "conv1d_dora": ("gpt2", dict(r=3, lora_alpha=5, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True,
                                 use_dora=True), {}),
    "torch_file": ("llama", dict(r=2, lora_alpha=3, target_modules=["q_proj", "up_proj"]), {"torch_file": True}),
}


def load_base(folder, other, dtype):
    if "num_labels" in other:
        torch.manual_seed(7)  # the head that the base lacks
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=other["num_labels"], dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if "vocab_size" in other:
        model.resize_token_embeddings(other["vocab_size"])
    return model


def main():
    out = pathlib.Path(sys.argv[1])
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    torch.manual_seed(1)
    for name, model in [("base_llama", LlamaForCausalLM(LlamaConfig(**LLAMA))),
                        ("base_gpt2", GPT2LMHeadModel(GPT2Config(**GPT2)))]:
        for p in model.parameters():
            p.data.add_(0.3 * torch.randn_like(p))
        model.save_pretrained(out / name)

    for seed, (name, (base, config, other)) in enumerate(CASES.items(), start=100):
        folder, base_folder = out / name, out / f"base_{base}"
        config = {"task_type": "CAUSAL_LM", "init_lora_weights": True if config.get("lora_bias") else False, **config}
        model = get_peft_model(load_base(base_folder, other, torch.float32), LoraConfig(**config))
        torch.manual_seed(seed)
        for p in model.parameters():
            if p.requires_grad or "vocab_size" in other:
                p.data.add_(0.2 * torch.randn_like(p))
        model.save_pretrained(folder)
        (folder / "README.md").unlink()

        weights, options = folder / "adapter_model.safetensors", folder / "adapter_config.json"
        if "dtype" in other:
            save_file({k: t.to(other["dtype"]) for k, t in load_file(weights).items()}, weights, {"format": "pt"})
        text = json.loads(options.read_text())
        text.update(other.get("edit", {}), base_model_name_or_path=f"../base_{base}",
                    target_modules=sorted(text["target_modules"]))
        options.write_text(json.dumps(text, indent=1, sort_keys=True) + "\n")

        merged = load_base(base_folder, other, torch.float64)
        merged = PeftModel.from_pretrained(merged, folder).merge_and_unload()
        before = load_file(base_folder / "model.safetensors")
        changed = {k: t.contiguous() for k, t in merged.state_dict().items()
                   if not (k in before and torch.equal(before[k].double(), t))}
        if base == "gpt2":
            changed.pop("lm_head.weight", None)  # tied: the embedding itself
        assert changed and all(t.dtype == torch.float64 for t in changed.values()), name
        save_file(changed, folder / "expected.safetensors")
        print(f"{name}: {len(changed)} tensors changed, {len(load_file(weights))} stored")
        if "torch_file" in other:  # as PEFT saved adapters before safetensors
            torch.save(load_file(weights), folder / "adapter_model.bin")
            weights.unlink()

    versions = {m.__name__: m.__version__ for m in (torch, transformers, peft)}
    (out / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
