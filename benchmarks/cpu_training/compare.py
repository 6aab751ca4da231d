#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Seconds of a training step on the CPU: the program, streaming from a file and from memory, beside transformers and peft with everything resident.

usage: compare.py PROGRAM MODEL_FOLDER [--mode lora|full] [--tokens T] [--steps N] [--rounds R]

All compute in fp32, recompute each layer in the backward, and take an AdamW step. They take turns; a process's first step is left out.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

WORDS = "It was a long way to the river, and nobody had told them how cold the water would be in spring. "


def resident(args):
    """Prints the seconds of each step."""
    import time

    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if args.mode == "lora":
        import peft

        model.enable_input_require_grads()
        model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    ids = torch.arange(1000, 1000 + args.tokens).unsqueeze(0)
    for _ in range(args.steps + 1):
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        print(time.perf_counter() - begin, flush=True)


def of_program(args, folder, *more):
    output = pathlib.Path(folder) / "out"
    command = [args.program, "finetune", "--model", args.model, "--device", "cpu", "--dtype", "fp32", "--mode", args.mode, "--data", f"{folder}/data.txt",
               "--seq-len", args.tokens, "--steps", args.steps + 1, "--lr", "1e-5", "--save-every", 10**6, "--overwrite", "--output", output, *more]  # fmt: skip
    subprocess.run([str(c) for c in command], check=True, capture_output=True)
    return [json.loads(line)["seconds"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def of_transformers(args):
    done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--resident"], check=True, capture_output=True, text=True)
    return [float(line) for line in done.stdout.split()]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("--mode", choices=["lora", "full"], default="lora")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--resident", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.resident:
        return resident(args)
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "data.txt").write_text(WORDS * (args.tokens * (args.steps + 1) // 16 + 1))
        ways = {"transformers, resident": lambda: of_transformers(args), "in memory": lambda: of_program(args, folder)}
        if args.mode == "lora":
            ways["in memory"] = lambda: of_program(args, folder, "--storage", "ram")
            ways["from a file"] = lambda: of_program(args, folder, "--storage", "file")
        seconds = {way: [] for way in ways}
        for _ in range(args.rounds):
            for way, run in ways.items():
                seconds[way] += run()[1:]
    for way, all_of in seconds.items():
        median = statistics.median(all_of)
        ratios = ", ".join(f"{median / statistics.median(seconds[other]):.3f} x {other}" for other in seconds if other != way)
        print(f"{args.mode}, {args.tokens} tokens, {way}: {median:.3f} s a step ({min(all_of):.3f} ... {max(all_of):.3f}); {ratios}")


if __name__ == "__main__":
    main()
