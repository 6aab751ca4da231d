#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Has peft load the adapters that this library writes and compares the logits.

    check_peft_loads_ours.py TEST_PROGRAM BASE_FOLDER

TEST_PROGRAM (test_lora) writes adapters and its logits into a temporary folder. Exit code 77, with
a reason, where peft is not installed.
"""
import os
import pathlib
import subprocess
import sys
import tempfile

try:
    import peft
    import torch
    import transformers
    from safetensors.torch import load_file
except ImportError as error:
    print("skipped:", error)
    sys.exit(77)


def check(folder, base):
    ours = load_file(folder / "logits.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        plain = model(input_ids=ours["ids"]).logits
        model = peft.PeftModel.from_pretrained(model, folder).eval()
        logits = model(input_ids=ours["ids"]).logits
    loaded = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    written = load_file(folder / "adapter_model.safetensors")
    assert loaded.keys() == written.keys(), loaded.keys() ^ written.keys()
    assert all(torch.equal(loaded[name], written[name]) for name in written)
    difference = (logits - ours["logits"]).abs().max().item()
    effect = (plain - ours["logits"]).abs().max().item()
    print(f"{folder.name}: {len(written)} tensors, max difference {difference:.2e}, "
          f"the adapter's effect {effect:.2f}")
    assert difference < 1e-4 and effect > 0.05


def main():
    program, base = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ, BLOCK_STREAMER_EXPORT=folder)
        subprocess.run([program, "[.export]"], check=True, env=environment)
        adapters = sorted(pathlib.Path(folder).iterdir())
        assert len(adapters) == 6
        for adapter in adapters:
            check(adapter, base)


if __name__ == "__main__":
    main()
