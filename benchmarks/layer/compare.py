#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Milliseconds of one decoder layer, ours beside that of transformers with SDPA, plain and with peft's adapters.

usage: compare.py PROGRAM [--device cuda] [--shape qwen3-8b] [--tokens 128,2048,8192]

All weights are on the device, in bf16; adapters (rank 16, all linear maps) in fp32. forward: without gradients. backward: forward
and backward into the input, the weights frozen. lora: the same with adapters that train.
"""
import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "peers"))

from shapes import SHAPES  # noqa: E402

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
UNITS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}


def of_program(args):
    """Milliseconds by name of row."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [args.program, "--device", args.device, "--shape", args.shape, "--tokens", args.tokens, "--calls", str(args.calls),
                   "--rounds", str(args.rounds), f"--benchmark_out={out}", "--benchmark_out_format=json"]  # fmt: skip
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = json.loads(out.read_text())["benchmarks"]
    return {row["name"].split("/iterations")[0]: row["real_time"] * UNITS[row["time_unit"]] for row in rows}


def make_layer(args):
    import torch
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

    s = SHAPES[args.shape]
    config = Qwen3Config(hidden_size=s["hidden"], intermediate_size=s["inner"], num_attention_heads=s["heads"], num_key_value_heads=s["kv_heads"],
                         head_dim=s["head_dim"], num_hidden_layers=1, attn_implementation="sdpa")  # fmt: skip
    layer = Qwen3DecoderLayer(config, 0).to(args.device, torch.bfloat16).requires_grad_(False)
    return layer, Qwen3RotaryEmbedding(config).to(args.device)


def of_transformers(args):
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    layer, rotary = make_layer(args)

    def settle():
        if args.device.startswith("cuda"):
            torch.cuda.synchronize()

    def timed(work):
        times = []
        for _ in range(args.rounds + 2):
            settle()
            begin = time.perf_counter()
            for _ in range(args.calls):
                work()
            settle()
            times.append((time.perf_counter() - begin) / args.calls * 1e3)
        return statistics.median(times[2:])

    def call(x):
        found = layer(x, position_embeddings=places, position_ids=positions)
        return found[0] if isinstance(found, tuple) else found

    def forward():
        with torch.no_grad():
            call(inputs)

    def backward():
        call(inputs.detach().requires_grad_(True)).backward(inputs)
        for parameter in layer.parameters():
            parameter.grad = None

    rows = {}
    for kind, work in {"forward": forward, "backward": backward, "lora": backward}.items():
        if kind == "lora":
            layer.requires_grad_(False)
            inject_adapter_in_model(LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS), layer)
            for name, parameter in layer.named_parameters():
                if "lora_" in name:
                    parameter.data = parameter.data.float()  # as PeftModel keeps them
        for tokens in map(int, args.tokens.split(",")):
            inputs = torch.randn(1, tokens, SHAPES[args.shape]["hidden"], device=args.device, dtype=torch.bfloat16)
            positions = torch.arange(tokens, device=args.device).unsqueeze(0)
            places = rotary(inputs, positions)
            rows[f"layer/{kind}/1x{tokens}"] = timed(work)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="qwen3-8b", choices=sorted(SHAPES))
    parser.add_argument("--tokens", default="128,2048,8192")
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    ours, theirs = of_program(args), of_transformers(args)
    print("| row | ours, ms | transformers, ms | ratio |\n|---|---|---|---|")
    for name, time_ms in ours.items():
        print(f"| {name} | {time_ms:.3f} | {theirs[name]:.3f} | {time_ms / theirs[name]:.3f} |")


if __name__ == "__main__":
    main()
