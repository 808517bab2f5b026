#!/usr/bin/env python3
"""Times `mergex merge` against the input and output of the same bytes, and against mergekit, in turn.

Makes a Llama-shaped base of 362 million parameters and three experts (bfloat16, two shards of each, 0.72 GB a model) in
--dir, where they stay for the next time. The floor reads every byte of the inputs (from the page cache) and writes and
syncs as many as the merge writes. Every round runs the floor and every program once; the figures are medians over rounds.

    bench/merge_speed.py --mergex build/release/mergex --dir /tmp/merge-bench --rounds 5
    bench/merge_speed.py ... --mergekit /path/to/venv/bin/python     # mergekit 0.1.5 in a virtual environment of its own
"""
import argparse
import json
import os
import shutil
import statistics
import struct
import subprocess
import threading
import time

import numpy as np

HIDDEN, LAYERS, INNER, VOCAB, KEY_VALUE = 960, 32, 2560, 49152, 320


def shapes():
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        yield p + "self_attn.q_proj.weight", (HIDDEN, HIDDEN)
        yield p + "self_attn.k_proj.weight", (KEY_VALUE, HIDDEN)
        yield p + "self_attn.v_proj.weight", (KEY_VALUE, HIDDEN)
        yield p + "self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield p + "mlp.gate_proj.weight", (INNER, HIDDEN)
        yield p + "mlp.up_proj.weight", (INNER, HIDDEN)
        yield p + "mlp.down_proj.weight", (HIDDEN, INNER)
        yield p + "input_layernorm.weight", (HIDDEN,)
        yield p + "post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)


CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
          "intermediate_size": INNER, "num_attention_heads": 15, "num_key_value_heads": 5, "vocab_size": VOCAB,
          "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True,
          "torch_dtype": "bfloat16"}


def to_bf16(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_shard(path, tensors):
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, data in tensors:
        header[name] = {"dtype": "BF16", "shape": list(data.shape), "data_offsets": [offset, offset + data.nbytes]}
        offset += data.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        for _, data in tensors:
            f.write(data.tobytes())


def make_models(folder):
    if os.path.exists(os.path.join(folder, "done")):
        return
    for m, model in enumerate(["base", "a", "b", "c"]):
        place = os.path.join(folder, model)
        os.makedirs(place, exist_ok=True)
        shards, index = [[], []], {"metadata": {"total_size": 0}, "weight_map": {}}
        for i, (name, shape) in enumerate(shapes()):
            values = np.random.default_rng([7, i]).standard_normal(shape, dtype=np.float32) * 0.02
            if m > 0:
                values += np.random.default_rng([m, i]).standard_normal(shape, dtype=np.float32) * 0.001
            shard = 0 if i < 150 else 1
            shards[shard].append((name, to_bf16(values)))
            index["weight_map"][name] = f"model-0000{shard + 1}-of-00002.safetensors"
            index["metadata"]["total_size"] += values.size * 2
        for shard, tensors in enumerate(shards):
            write_shard(os.path.join(place, f"model-0000{shard + 1}-of-00002.safetensors"), tensors)
        json.dump(index, open(os.path.join(place, "model.safetensors.index.json"), "w"))
        json.dump(CONFIG, open(os.path.join(place, "config.json"), "w"))
    open(os.path.join(folder, "done"), "w").close()


def recipes(folder):
    path = lambda m: os.path.join(folder, m)
    def task(method, inputs, shared=None, models=("a", "b", "c")):
        lines = ["models:"]
        for model, weight in zip(models, (0.6, 0.3, 0.2)):
            lines += [f"  - model: {path(model)}", "    parameters:", f"      weight: {weight}"] if inputs is not None else [f"  - model: {path(model)}"]
            lines += [f"      {k}: {v}" for k, v in (inputs or {}).items()]
        lines += [f"merge_method: {method}"]
        if method not in ("linear", "karcher"):
            lines += [f"base_model: {path('base')}"]
        if shared:
            lines += ["parameters:"] + [f"  {k}: {v}" for k, v in shared.items()]
        return "\n".join(lines + ["dtype: float32", "out_dtype: bfloat16", ""])
    slerp = (f"models:\n  - model: {path('a')}\n  - model: {path('b')}\nmerge_method: slerp\nbase_model: {path('a')}\n"
             "parameters:\n  t: 0.4\ndtype: float32\nout_dtype: bfloat16\n")
    passthrough = (f"slices:\n  - sources:\n      - {{model: {path('a')}, layer_range: [0, {LAYERS}]}}\nmerge_method: passthrough\n")
    two = f"models:\n  - model: {path('a')}\n  - model: {path('base')}\nmerge_method: METHOD\nbase_model: {path('base')}\nPdtype: float32\nout_dtype: bfloat16\n"
    return {
        "linear": task("linear", {}), "task_arithmetic": task("task_arithmetic", {}), "slerp": slerp,
        "ties": task("ties", {"density": 0.3}), "dare_ties": task("dare_ties", {"density": 0.3}),
        "dare_linear": task("dare_linear", {"density": 0.3}), "breadcrumbs": task("breadcrumbs", {"density": 0.6, "gamma": 0.02}),
        "della": task("della", {"density": 0.5, "epsilon": 0.2}), "sce": task("sce", None, {"select_topk": 0.3}),
        "model_stock": task("model_stock", None), "karcher": task("karcher", None),
        "multislerp": task("multislerp", {}), "ram": task("ram", None),
        "nearswap": two.replace("METHOD", "nearswap").replace("P", "parameters:\n  t: 0.001\n"),
        "arcee_fusion": two.replace("METHOD", "arcee_fusion").replace("P", ""),
        "passthrough": passthrough,
    }


def inputs_of(text, folder):
    return [m for m in ("base", "a", "b", "c") if f"{os.path.join(folder, m)}\n" in text or f"{os.path.join(folder, m)}," in text]


def floor(folder, models, out):
    """Reads all inputs, writes and syncs as many bytes as one of them has."""
    start, buffer = time.perf_counter(), bytearray(8 << 20)
    for model in models:
        for name in sorted(os.listdir(os.path.join(folder, model))):
            with open(os.path.join(folder, model, name), "rb", buffering=0) as f:
                while f.readinto(buffer):
                    pass
    size = sum(os.path.getsize(os.path.join(folder, models[0], n)) for n in os.listdir(os.path.join(folder, models[0])))
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(out, "model.safetensors"), "wb", buffering=0) as f:
        while size > 0:
            size -= f.write(memoryview(buffer)[: min(size, len(buffer))])
        os.fsync(f.fileno())
    return time.perf_counter() - start


def run(command, environment=None):
    """@return wall seconds, largest anonymous resident memory in MiB"""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
    anonymous = [0]

    def watch():
        while process.poll() is None:
            try:
                for line in open(f"/proc/{process.pid}/status"):
                    if line.startswith("RssAnon"):
                        anonymous[0] = max(anonymous[0], int(line.split()[1]))
            except OSError:
                pass
            time.sleep(0.005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    errors = process.communicate()[1]
    wall = time.perf_counter() - start
    watcher.join()
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: exit {process.returncode}\n{errors[-2000:]}")
    return wall, anonymous[0] / 1024


def many_tensors(folder, count):
    """A checkpoint of `count` tiny tensors: what planning costs."""
    for model in ("many_a", "many_b", "many_c", "many_d"):
        place = os.path.join(folder, model)
        if os.path.exists(os.path.join(place, "config.json")):
            continue
        os.makedirs(place, exist_ok=True)
        tensors = [(f"model.layers.{i // 400}.experts.{i % 400}.w.weight", np.zeros((4, 2), np.uint16)) for i in range(count)]
        write_shard(os.path.join(place, "model.safetensors"), tensors)
        json.dump(dict(CONFIG, num_hidden_layers=count // 400), open(os.path.join(place, "config.json"), "w"))
    lines = ["models:"] + [f"  - {{model: {os.path.join(folder, m)}, parameters: {{weight: 0.5}}}}" for m in ("many_a", "many_b", "many_c", "many_d")]
    return "\n".join(lines + ["merge_method: linear", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mergex", required=True)
    parser.add_argument("--mergekit", help="python of a virtual environment that has mergekit")
    parser.add_argument("--mergekit-methods", default="linear,slerp,ties,dare_ties")
    parser.add_argument("--dir", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--methods", default="")
    parser.add_argument("--tensors", type=int, default=40000)
    arguments = parser.parse_args()
    folder = os.path.abspath(arguments.dir)
    os.makedirs(folder, exist_ok=True)
    make_models(folder)
    everything = recipes(folder)
    methods = arguments.methods.split(",") if arguments.methods else list(everything)
    out = os.path.join(folder, "out")
    result = {"threads": arguments.threads, "rounds": arguments.rounds, "methods": {}}
    for method in methods:
        text = everything[method]
        recipe = os.path.join(folder, f"{method}.yaml")
        open(recipe, "w").write(text)
        models = inputs_of(text, folder)
        seconds = {"floor": [], "mergex": [], "mergekit": []}
        memory = {"mergex": 0.0, "mergekit": 0.0}
        with_mergekit = arguments.mergekit and method in arguments.mergekit_methods.split(",")
        floor(folder, models, out)  # warms the page cache
        shutil.rmtree(out)
        for _ in range(arguments.rounds):
            seconds["floor"].append(floor(folder, models, out))
            shutil.rmtree(out)
            wall, anonymous = run([arguments.mergex, "merge", recipe, "--out", out, "--threads", str(arguments.threads), "--quiet"])
            seconds["mergex"].append(wall)
            memory["mergex"] = max(memory["mergex"], anonymous)
            shutil.rmtree(out)
            if with_mergekit and len(seconds["mergekit"]) < 2:
                environment = dict(os.environ, OMP_NUM_THREADS=str(arguments.threads), HF_HUB_OFFLINE="1")
                program = "from mergekit.scripts.run_yaml import main; main()"
                wall, anonymous = run([arguments.mergekit, "-c", program, recipe, out], environment)
                seconds["mergekit"].append(wall)
                memory["mergekit"] = max(memory["mergekit"], anonymous)
                shutil.rmtree(out)
        row = {k: statistics.median(v) for k, v in seconds.items() if v}
        row["ratio_to_floor"] = row["mergex"] / row["floor"]
        if "mergekit" in row:
            row["times_faster_than_mergekit"] = row["mergekit"] / row["mergex"]
        row["anonymous_mib"] = {k: round(v) for k, v in memory.items() if v}
        result["methods"][method] = row
        print(f"{method:16} inputs {len(models)}  floor {row['floor']:6.2f} s  mergex {row['mergex']:6.2f} s  "
              f"ratio {row['ratio_to_floor']:5.2f}  memory {memory['mergex']:4.0f} MiB"
              + (f"  mergekit {row['mergekit']:6.1f} s ({row['times_faster_than_mergekit']:.0f} x, {memory['mergekit']:.0f} MiB)" if "mergekit" in row else ""),
              flush=True)
    if arguments.tensors:
        recipe = os.path.join(folder, "many.yaml")
        open(recipe, "w").write(many_tensors(folder, arguments.tensors))
        walls = [run([arguments.mergex, "merge", recipe, "--dry-run", "--json", "--quiet"])[0] for _ in range(3)]
        result["plan_seconds"] = min(walls)
        print(f"plan of {arguments.tensors} tensors x 4 models: {min(walls):.2f} s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
