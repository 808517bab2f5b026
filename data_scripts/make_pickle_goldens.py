#!/usr/bin/env python3
"""Files of torch.save and the tensors that are in them: tests/golden/pickle.

Needs torch and safetensors. Usage: make_pickle_goldens.py OUTPUT_FOLDER

NAME.bin is what torch wrote, NAME.safetensors the same tensors copied one by one; refused/NAME.bin are files that are to be
refused. index.json says what wrote them.
"""
import collections
import json
import pickle
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
         torch.uint8, torch.bool]


def random(shape, dtype, generator):
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 50
    return (values > 0) if dtype == torch.bool else values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)


class Tied(torch.nn.Module):
    """Two linear layers with one weight, a batch norm with its integer buffer."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


def cases():
    generator = torch.Generator().manual_seed(5)
    types = {f"w.{str(t)[6:]}": random((3, 5), t, generator) for t in TYPES}
    shapes = {f"s{i}": random(s, torch.float32, generator)
              for i, s in enumerate([(), (1,), (0, 4), (2, 3, 4, 5), (1, 1, 6), (257,)])}
    whole = random((6, 4), torch.float32, generator)
    views = {"whole": whole, "rows": whole[2:5], "flat": whole.view(-1), "row": whole[3], "empty": whole[6:]}
    # A dimension of size 1 may have any stride.
    views["column_of_one"] = whole[:1].t()[:, :1].as_strided((1, 4), (99, 1))
    torch.manual_seed(6)
    module = Tied().state_dict()
    parameters = {"p": torch.nn.Parameter(random((2, 2), torch.float32, generator)),
                  "q": torch.nn.Parameter(random((3,), torch.float16, generator), requires_grad=False)}
    many = {f"layer.{i}.weight": random((2,), torch.float32, generator) for i in range(300)}  # a memo beyond 255
    shared = random((5, 4), torch.float32, generator)
    tied_t5 = {"shared.weight": shared, "encoder.embed_tokens.weight": shared, "decoder.embed_tokens.weight": shared,
               "first_rows": shared[:2], "lm_head.weight": shared}
    return {"types": types, "shapes": shapes, "views": views, "module": module, "parameters": parameters, "many": many,
            "tied_t5": tied_t5, "caf\u00e9": {"caf\u00e9.\u4e2d": random((2,), torch.float32, generator)}}


class Attack:
    def __reduce__(self):
        import os
        return os.system, ("echo this must not run",)


def refused(folder):
    x = torch.arange(12.0).view(3, 4)
    torch.save({"w": x}, folder / "legacy.bin", _use_new_zipfile_serialization=False)
    torch.save({"w": x.t()}, folder / "transposed.bin")
    torch.save({"w": x[:, ::2]}, folder / "strided.bin")
    torch.save({"w": x, "evil": Attack()}, folder / "attack.bin")
    torch.save({"state_dict": {"w": x}, "epoch": 3}, folder / "nested.bin")
    torch.save({"w": x, "step": 3}, folder / "step.bin")
    torch.save(x, folder / "tensor.bin")
    torch.save({"w": x.to_sparse()}, folder / "sparse.bin")
    torch.save({"w": torch.complex(x, x)}, folder / "complex.bin")
    torch.save({"w": torch.complex(x, x).conj().real}, folder / "real_of_complex.bin")
    torch.save({"w": x.to(torch.float8_e4m3fn)}, folder / "float8.bin")
    torch.save({"w": torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)}, folder / "quantised.bin")
    torch.save(Tied(), folder / "whole_module.bin")
    torch.save({0: x}, folder / "number_as_name.bin")


def main():
    folder = Path(sys.argv[1])
    (folder / "refused").mkdir(parents=True, exist_ok=True)
    for number, (name, tensors) in enumerate(cases().items()):
        name = "names" if not name.isascii() else name
        protocol = [2, 2, 2, 2, 2, 4, 2, 2][number]
        torch.save(collections.OrderedDict(tensors) if number % 2 else dict(tensors) if name != "module" else tensors,
                   folder / f"{name}.bin", pickle_protocol=protocol)
        save_file({k: v.detach().clone().contiguous() for k, v in tensors.items()}, folder / f"{name}.safetensors",
                  metadata={"format": "pt"})
    torch.save(cases()["types"], folder / "protocol5.bin", pickle_protocol=5)
    save_file(cases()["types"], folder / "protocol5.safetensors", metadata={"format": "pt"})
    refused(folder / "refused")
    (folder / "index.json").write_text(json.dumps({"script": "make_pickle_goldens.py", "torch": torch.__version__,
                                                   "python": sys.version.split()[0]}, indent=1) + "\n")


main()
