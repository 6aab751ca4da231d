# SPDX-License-Identifier: Apache-2.0
"""Writes small model folders with the standard library alone: weights, configuration, tokenizer, template."""

import json
import pathlib
import random
import struct

TEMPLATE = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, POSITIONS = 36, 44, 3, 6, 2, 8, 128
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 256 + len(SPECIAL)


def byte_alphabet():
    """Byte to the character that byte-level tokenizers write for it."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


def tokenizer():
    vocabulary = {text: i for i, text in enumerate(SPECIAL)}
    vocabulary |= {char: len(SPECIAL) + byte for byte, char in byte_alphabet().items()}
    added = [
        {"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, text in enumerate(SPECIAL)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocabulary, "merges": [],
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level, "model": model,
    }  # fmt: skip


def shapes():
    result = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {
            "input_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        result |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
    return result


def write_safetensors(path, tensors):
    """tensors: name to (shape, bf16 values as a list of floats)."""
    header, data = {}, bytearray()
    for name, (shape, values) in tensors.items():
        packed = b"".join(struct.pack("<f", v)[2:] for v in values)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [len(data), len(data) + len(packed)]}
        data += packed
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_model(folder, seed=1, poison=None, tied=True):
    """A llama with random weights; `poison` names a tensor that gets a NaN."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    tensors = {}
    wanted = shapes() if tied else shapes() | {"lm_head.weight": (VOCABULARY, HIDDEN)}
    for name, shape in wanted.items():
        count = shape[0] * (shape[1] if len(shape) == 2 else 1)
        center = 1.0 if name.endswith("norm.weight") else 0.0
        values = [rng.gauss(center, 0.25) for _ in range(count)]
        if name == poison:
            values[count // 2] = float("nan")
        tensors[name] = (shape, values)
    write_safetensors(folder / "model.safetensors", tensors)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": tied, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    # An end token that is wrong on purpose: it must not be believed.
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "!"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
