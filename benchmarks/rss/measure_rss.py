#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Peak host memory of `block-streamer generate --storage file`, beside that of a program that only loads LibTorch.

measure_rss.py --program build/release/bin/block-streamer --torch-only build/release/benchmarks/benchmark_torch_only
               [--model models/SmolLM2-135M-Instruct] [--synthetic FOLDER] [--dtype bf16 --dtype fp32] [--repeat 3]

--synthetic also makes a 2 GiB checkpoint of Qwen3's shape with random weights in FOLDER (kept for the next time) and compares
the excess over resident tensors and slots with the small model's. Python's standard library only.
"""
import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MIB = 1048576
BARS = {"bf16": 140, "fp32": 200}  # MiB of peak - LibTorch's on SmolLM2
EXCESS_BAR = 32  # MiB between the two models' excesses
ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
TEXT = Path(__file__).resolve().parents[2] / "examples" / "data" / "genesis.txt"


def peak_bytes(command, stdout=subprocess.DEVNULL):
    """Runs the command; its peak RSS as the kernel counted it."""
    process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE)
    errors = process.stderr.read().decode(errors="replace")
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"{command[0]} ended with {process.returncode}:\n{errors}")
    return usage.ru_maxrss * 1024


def median_peak(command, repeat):
    return statistics.median(peak_bytes(command) for _ in range(repeat))


def output_of(command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.decode()


def prompt_of(program, model, tokens):
    """A text of exactly so many tokens."""
    text = TEXT.read_text(encoding="utf-8")
    ids = json.loads(output_of([program, "tokenize", "--model", model, "--text", text[: 12 * tokens]]))
    for count in range(tokens, tokens + 8):  # cutting may join tokens anew
        cut = output_of([program, "tokenize", "--model", model, "--decode", "--text", json.dumps(ids[:count])])
        if len(json.loads(output_of([program, "tokenize", "--model", model, "--text", cut]))) == tokens:
            return cut
    sys.exit(f"no prompt of {tokens} tokens found")


def qwen3_tensors(hidden, inner, heads, kv_heads, head_dim, layers, vocabulary):
    yield "model.embed_tokens.weight", [vocabulary, hidden]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", [hidden]
        yield prefix + "self_attn.q_proj.weight", [heads * head_dim, hidden]
        yield prefix + "self_attn.k_proj.weight", [kv_heads * head_dim, hidden]
        yield prefix + "self_attn.v_proj.weight", [kv_heads * head_dim, hidden]
        yield prefix + "self_attn.o_proj.weight", [hidden, heads * head_dim]
        yield prefix + "self_attn.q_norm.weight", [head_dim]
        yield prefix + "self_attn.k_norm.weight", [head_dim]
        yield prefix + "post_attention_layernorm.weight", [hidden]
        yield prefix + "mlp.gate_proj.weight", [inner, hidden]
        yield prefix + "mlp.up_proj.weight", [inner, hidden]
        yield prefix + "mlp.down_proj.weight", [hidden, inner]
    yield "model.norm.weight", [hidden]


def random_bf16(byte_count):
    """Random signs and mantissas, magnitudes 2^-11 ... 2^-7."""
    lanes = byte_count // 2
    bits = int.from_bytes(random.Random(1).randbytes(byte_count), "little")
    mask = int.from_bytes(b"\xff\x81" * lanes, "little")
    exponent = int.from_bytes(b"\x00\x3a" * lanes, "little")
    return ((bits & mask) | exponent).to_bytes(byte_count, "little")


def write_synthetic(folder, tokenizer_of):
    """A tied Qwen3 of 2 GiB with the tokenizer, so the vocabulary, of another model."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        if (tokenizer_of / name).exists():
            shutil.copy(tokenizer_of / name, folder / name)
    vocabulary = json.loads((tokenizer_of / "config.json").read_text())["vocab_size"]
    shape = dict(hidden=2048, inner=6144, heads=16, kv_heads=8, head_dim=128, layers=19, vocabulary=vocabulary)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0,
        "head_dim": shape["head_dim"], "hidden_act": "silu", "hidden_size": shape["hidden"],
        "intermediate_size": shape["inner"], "max_position_embeddings": 8192, "num_attention_heads": shape["heads"],
        "num_hidden_layers": shape["layers"], "num_key_value_heads": shape["kv_heads"], "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "vocab_size": vocabulary, "use_cache": True,
        "bos_token_id": 1, "eos_token_id": 2}
    header, begin = {}, 0
    for name, sizes in qwen3_tensors(**shape):
        byte_count = 2
        for size in sizes:
            byte_count *= size
        header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [begin, begin + byte_count]}
        begin += byte_count
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    pool = random_bf16(16 * MIB)
    partial = folder / "model.safetensors.partial"
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, entry in header.items():
            left = entry["data_offsets"][1] - entry["data_offsets"][0]
            if name.endswith("norm.weight"):
                file.write(b"\x80\x3f" * (left // 2))
                continue
            while left:
                piece = min(left, len(pool))
                file.write(pool[:piece])
                left -= piece
    partial.rename(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2))  # last: it says that the rest is there


class Measurement:
    def __init__(self, arguments, base):
        self.arguments, self.base = arguments, base

    def excess(self, model, dtype, bar):
        a = self.arguments
        prompt = prompt_of(a.program, model, a.prompt_tokens)
        with tempfile.TemporaryDirectory() as scratch:
            stats = Path(scratch) / "stats.json"
            peak = median_peak(
                [a.program, "generate", "--model", model, "--storage", "file", "--device", "cpu", "--dtype", dtype, "--prompt",
                 prompt, "--max-new-tokens", str(a.new_tokens), "--stats", str(stats)], a.repeat)
            seen = json.loads(stats.read_text())
        about = json.loads(output_of([a.program, "inspect", "--model", model, "--json"]))
        resident = about["resident"]["parameters"] * ELEMENT_BYTES[dtype]
        slots = seen["peak_resident_bytes"] + (about["blocks"][0]["parameters"] * ELEMENT_BYTES[dtype]
                                               if seen["bytes_converted"] else 0)
        over = peak - self.base
        excess = over - resident - slots
        verdict = "" if bar is None else f"   bar <= {bar}: {'ok' if over <= bar * MIB else 'MISSED'}"
        print(f"{Path(model).name} {dtype}, {seen['prompt_tokens']} + {seen['tokens']} tokens: peak {peak / MIB:.1f} MiB, "
              f"LibTorch alone {self.base / MIB:.1f}, over it {over / MIB:.1f}{verdict}\n"
              f"    resident tensors {resident / MIB:.1f} + slots {slots / MIB:.1f}, excess over them {excess / MIB:.1f} MiB",
              flush=True)
        return excess


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--torch-only", required=True)
    parser.add_argument("--model", default=os.environ.get("BLOCK_STREAMER_SMOLLM2", "models/SmolLM2-135M-Instruct"))
    parser.add_argument("--synthetic", type=Path)
    parser.add_argument("--dtype", action="append", choices=sorted(BARS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    if not Path(arguments.model, "config.json").exists():
        print(f"skipped: no model in {arguments.model} (examples/prepare_smollm2.py makes it)")
        return
    base = median_peak([arguments.torch_only], max(arguments.repeat, 3))
    measurement = Measurement(arguments, base)
    small = {d: measurement.excess(arguments.model, d, BARS[d]) for d in arguments.dtype or sorted(BARS)}
    if arguments.synthetic is None:
        return
    if not (arguments.synthetic / "config.json").exists():
        write_synthetic(arguments.synthetic, Path(arguments.model))
    for dtype, excess in small.items():
        difference = measurement.excess(str(arguments.synthetic), dtype, None) - excess
        print(f"    differs from the small model's by {difference / MIB:+.1f} MiB   bar +- {EXCESS_BAR}: "
              f"{'ok' if abs(difference) <= EXCESS_BAR * MIB else 'MISSED'}", flush=True)


if __name__ == "__main__":
    main()
