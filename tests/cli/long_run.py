#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A LoRA run of 200 steps with a real model on the CPU: the held-out loss falls, and peft computes the same loss with the adapter that was saved.

usage: long_run.py PROGRAM SMOLLM2_FOLDER [STEPS]

Needs torch, transformers and peft; some minutes on two cores. Not among the tests that always run.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

import peft
import torch
import transformers

DATA = pathlib.Path(__file__).parents[2] / "examples" / "data"
LENGTH = 128
GOAL = 2.75  # nats per token; 3.11 before


def by_peft(folder, adapter):
    """Mean loss over the windows that evaluate cuts: every token but a window's first."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, adapter).eval()
    ids = transformers.AutoTokenizer.from_pretrained(folder)((DATA / "genesis-held-out.txt").read_text())["input_ids"]
    nats, count = 0.0, 0
    with torch.no_grad():
        for begin in range(0, len(ids), LENGTH):
            window = torch.tensor([ids[begin : begin + LENGTH]])
            if window.shape[1] < 2:
                break
            scored = window.shape[1] - 1
            nats += model(input_ids=window, labels=window).loss.item() * scored
            count += scored
    return nats / count, count


def main():
    program, folder = sys.argv[1:3]
    steps = sys.argv[3] if len(sys.argv) > 3 else "200"
    with tempfile.TemporaryDirectory() as temporary:
        adapter = pathlib.Path(temporary) / "adapter"
        done = subprocess.run([program, "finetune", "--model", folder, "--device", "cpu", "--dtype", "fp32", "--data", DATA / "genesis.txt",
                               "--eval-data", DATA / "genesis-held-out.txt", "--seq-len", str(LENGTH), "--steps", steps, "--lr", "2e-4", "--schedule", "cosine",
                               "--warmup-steps", "10", "--max-grad-norm", "1", "--dropout", "0.05", "--output", adapter],
                              check=True, stdout=subprocess.PIPE, text=True)  # fmt: skip
        before, after = [(float(loss), int(count.replace(",", ""))) for loss, count in re.findall(r"loss \w+: ([\d.]+) nats per token over ([\d,]+)", done.stdout)]
        theirs, count = by_peft(folder, adapter)
    print(f"{steps} steps: held-out loss {before[0]:.4f} -> {after[0]:.4f}; peft {theirs:.4f} over {count} tokens, ours over {after[1]}; difference {abs(theirs - after[0]):.1e}")
    if count != after[1] or abs(theirs - after[0]) > 1e-3 or after[0] > GOAL:
        sys.exit(f"expected: the same tokens, a difference of at most 1e-3, a loss of at most {GOAL}")


if __name__ == "__main__":
    main()
