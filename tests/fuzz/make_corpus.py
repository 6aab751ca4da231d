#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the seeds of the fuzz targets, odd but legal files and near misses, into corpus/.

usage: make_corpus.py [FOLDER]
Files whose names begin with "found-" are inputs that once were findings, those with "reached-" what a search of two
million runs added to the coverage; both are left alone.
"""

import json
import pathlib
import struct
import sys

SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "U8": 1, "I8": 1, "BOOL": 1, "F8_E4M3": 1, "F6_X": 1}


def safetensors(tensors, metadata=None, pad=8, remainder=0, tail=b""):
    """tensors: (name, dtype, shape). The header is padded so that the data begins at remainder mod pad."""
    header, at = {}, 0
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, dtype, shape in tensors:
        size = SIZES[dtype]
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    while (8 + len(text)) % pad != remainder:
        text += b" "
    return struct.pack("<Q", len(text)) + text + bytes(i * 7 % 251 for i in range(at)) + tail


def safetensors_seeds():
    yield "plain", safetensors([("a.weight", "F32", [2, 3]), ("b.bias", "BF16", [4])], {"format": "pt"})
    yield "scalars", safetensors([("s", "F32", []), ("u", "U8", [])])
    yield "no-elements", safetensors([("x", "F32", [0]), ("y", "F32", [2, 0]), ("z", "U8", [3])])
    yield "unaligned", safetensors([("a", "I64", [1]), ("b", "F16", [3])], remainder=3)
    yield "unknown-type", safetensors([("a", "F6_X", [4]), ("b", "F8_E4M3", [2])])
    yield "nothing", safetensors([])
    yield "unicode", safetensors([("grüße.\U0001f642", "U8", [1])], {"k": "ü\n\u0000"})
    yield "page", safetensors([("block_streamer.padding.0", "U8", [16]), ("a", "U8", [16])], {"format": "pt"}, pad=4096)
    yield "trailing", safetensors([("a", "U8", [4])], tail=b"!")
    header = b'{"a":{"dtype":"F32","shape":[1000,1000],"data_offsets":[0,4]}}'
    yield "shape-lies", struct.pack("<Q", len(header)) + header + b"abcd"
    header = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"note":{"deep":[1,{"x":null}]}}}'
    yield "unknown-key", struct.pack("<Q", len(header)) + header + b"abcd"
    header = b'{"a":{"dtype":"U8","shape":[18446744073709551615,2],"data_offsets":[0,4]},"a":{}}'
    yield "overflow", struct.pack("<Q", len(header)) + header + b"abcd"
    yield "huge-length", struct.pack("<Q", 2**64 - 1) + b"{}"
    yield "lfs", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n"


def index_seeds():
    yield "plain", json.dumps({"metadata": {"total_size": 9}, "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "x"}})
    yield "escape", json.dumps({"weight_map": {"a": "../secret"}})
    yield "zero", '{"weight_map":{"a":"b\\u0000c"}}'
    yield "twice", '{"weight_map":{"a":"b","a":"c"}}'
    yield "empty", '{"weight_map":{}}'
    yield "deep", "[" * 100 + "]" * 100
    yield "numbers", '{"weight_map":{"a":1e999,"b":-0}}'


LLAMA = {
    "model_type": "llama", "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 33, "max_position_embeddings": 128, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip


def config_seeds():
    yield "llama", json.dumps(LLAMA)
    yield "qwen3", json.dumps({**LLAMA, "model_type": "qwen3", "tie_word_embeddings": False, "attention_bias": True,
                               "max_window_layers": 3, "layer_types": ["full_attention"] * 3, "sliding_window": None})  # fmt: skip
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    yield "rope-old", json.dumps({**LLAMA, "rope_scaling": rope})
    new = {key: value for key, value in LLAMA.items() if key not in ("rope_theta", "torch_dtype", "head_dim")}
    yield "rope-new", json.dumps({**new, "dtype": "float32", "rope_parameters": {**rope, "rope_theta": 5e5}})
    yield "ids", json.dumps({**LLAMA, "eos_token_id": [1, 2], "bos_token_id": -1, "pad_token_id": 99})
    yield "generation", json.dumps(LLAMA) + "\x1e" + json.dumps({"eos_token_id": [3, 4], "temperature": 0.6})
    yield "active", json.dumps({**LLAMA, "alibi": False, "clip_qkv": None, "num_local_experts": 4})
    yield "quantised", json.dumps({**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    yield "large", json.dumps({**LLAMA, "num_hidden_layers": 2**63, "vocab_size": 2**64 - 1, "head_dim": 2**40})


PEFT = {
    "peft_type": "LORA", "base_model_name_or_path": "x", "r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "bias": "none",
    "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "use_rslora": False, "use_dora": False,
    "init_lora_weights": True, "fan_in_fan_out": False, "modules_to_save": None, "layers_to_transform": None,
}  # fmt: skip


def peft_seeds():
    yield "plain", json.dumps(PEFT)
    yield "pattern", json.dumps({**PEFT, "target_modules": r".*\.(q|v)_proj", "exclude_modules": ["lm_head"]})
    yield "ranks", json.dumps({**PEFT, "rank_pattern": {r"layers\.0\..*q_proj": 4}, "alpha_pattern": {"v_proj": 1.5}})
    yield "layers", json.dumps({**PEFT, "layers_to_transform": [0, 2], "layers_pattern": "layers"})
    yield "one-layer", json.dumps({**PEFT, "layers_to_transform": 1, "layers_pattern": ["h", "layers"], "use_rslora": True})
    yield "dora", json.dumps({**PEFT, "use_dora": True})


def tokenizer(**changes):
    token = {"id": 4, "content": "<e>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": None,
             "fuse_unk": False, "byte_fallback": False, "vocab": {"a": 0, "b": 1, "ab": 2, "c": 3}, "merges": ["a b"]}  # fmt: skip
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [token], "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "post_processor": None, "decoder": {"type": "ByteLevel"}, "model": model,
    }  # fmt: skip
    for key, value in changes.items():
        whole[key] = {**whole[key], **value} if key == "model" else value
    return json.dumps(whole, ensure_ascii=False)


def tokenizer_seeds():
    yield "plain", tokenizer()
    yield "pairs", tokenizer(model={"merges": [["a", "b"]], "ignore_merges": True})
    split = {"type": "Split", "pattern": {"Regex": r"\p{N}{1,3}| ?[^\s\p{L}]+|\s+(?!\S)|\s+"}, "behavior": "Isolated", "invert": False}
    yield "split", tokenizer(pre_tokenizer={"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": True}, split,
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]})  # fmt: skip
    yield "nfc", tokenizer(normalizer={"type": "NFC"})
    template = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<e>", "type_id": 0}}],
                "pair": [], "special_tokens": {"<e>": {"id": "<e>", "ids": [4], "tokens": ["<e>"]}}}  # fmt: skip
    yield "template", tokenizer(post_processor=template)
    yield "fallback", tokenizer(
        pre_tokenizer=None,
        normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]},
        decoder={"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                                                 {"type": "ByteFallback"}, {"type": "Fuse"}]},
        model={"byte_fallback": True, "unk_token": "c", "fuse_unk": True,
               "vocab": {"a": 0, "b": 1, "ab": 2, "c": 3, **{f"<0x{i:02X}>": 10 + i for i in range(3)}}})  # fmt: skip


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def summed(name, extents, chunk=4096):
    data = bytes(sum(extent[2] for extent in extents))
    chunks = "".join(f"{crc32c(data[at:at + chunk]):08x}" for at in range(0, len(data), chunk))
    return {"name": name, "byte_count": len(data), "crc32c": f"{crc32c(data):08x}", "extents": extents, "chunks": chunks}


def manifest(**changes):
    whole = {
        "format": "block_streamer manifest", "version": 1, "layout": "packed", "written_by": "block_streamer 0.1.0",
        "algorithm": "crc32c", "chunk_byte_count": 4096,
        "files": [{"name": "a.safetensors", "byte_count": 20000, "crc32c": "00000000"}, {"name": "b", "byte_count": 9000}],
        "copied": [{"name": "config.json", "byte_count": 3, "crc32c": "01234567"}],
        "resident": [summed("embed", [[1, 4096, 9]])], "blocks": [summed("l.0.", [[0, 4096, 8200]]), summed("l.1.", [])],
    }  # fmt: skip
    return json.dumps({**whole, **changes})


def manifest_seeds():
    yield "packed", manifest()
    yield "original", manifest(layout="original", blocks=[summed("l.0.", [[0, 1, 5000], [0, 5001, 1], [1, 0, 20]])])
    yield "newer", manifest(version=2)
    yield "unknown-keys", manifest(later={"a": [1, 2]}, copied=[])
    yield "escape", manifest(files=[{"name": "../a", "byte_count": 1}])
    yield "huge", manifest(files=[{"name": "a", "byte_count": 2**64 - 1}], blocks=[{**summed("x", []), "byte_count": 2**64 - 1}])
    yield "beyond", manifest(layout="original", blocks=[summed("l", [[0, 19999, 2]])])
    yield "nothing", manifest(files=[], copied=[], resident=[], blocks=[])


DICTIONARY = """\
# Tokens of the JSON files that the targets read.
"\\"dtype\\":" "\\"shape\\":" "\\"data_offsets\\":" "\\"__metadata__\\":" "\\"weight_map\\":" "\\"F32\\"" "\\"BF16\\"" "\\"U8\\""
"null" "true" "false" "[]" "{}" "[0,0]" "-1" "1e308" "18446744073709551615" "9223372036854775808" "0.5"
"\\"rope_scaling\\":" "\\"rope_parameters\\":" "\\"rope_type\\":" "\\"llama3\\"" "\\"eos_token_id\\":" "\\"head_dim\\":"
"\\"rank_pattern\\":" "\\"layers_to_transform\\":" "\\"type\\":" "\\"Split\\"" "\\"Regex\\":" "\\"String\\":" "\\"Sequence\\""
"\\"ByteLevel\\"" "\\"merges\\":" "\\"vocab\\":" "\\"added_tokens\\":" "\\"special_tokens\\":" "\\"normalizer\\":"
"\\"version\\":" "\\"chunks\\":" "\\"extents\\":" "\\"crc32c\\":" "\\"blocks\\":" "\\"files\\":" "\\"byte_count\\":"
"\\\\u0000" "\\\\ud83d\\\\ude42" "\\\\p{L}" "(?!" "(?i:" "{1,3}" "\\\\s+" "[^" "\\x00" "\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff"
"""


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "corpus")
    targets = {"safetensors_header": safetensors_seeds, "checkpoint_index": index_seeds, "model_config": config_seeds,
               "peft_config": peft_seeds, "tokenizer_json": tokenizer_seeds, "shard_manifest": manifest_seeds}  # fmt: skip
    for target, seeds in targets.items():
        (folder / target).mkdir(parents=True, exist_ok=True)
        for name, content in seeds():
            data = content if isinstance(content, bytes) else content.encode()
            (folder / target / name).write_bytes(data)
    # libFuzzer wants one entry a line.
    lines = []
    for line in DICTIONARY.splitlines():
        lines += [line] if line.startswith("#") else ['"' + entry + '"' for entry in line[1:-1].split('" "')]
    (folder.parent / "json.dict").write_text("\n".join(lines) + "\n")


main()
