#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Merges adapters with the built program.

usage: merge_test.py PROGRAM LORA_FIXTURES [unittest arguments…]
The comparison with peft's merge_and_unload is skipped, with a reason, where peft is not installed.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import tiny_model  # noqa: E402

PROGRAM, FIXTURES = "", pathlib.Path()
try:
    import peft
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
except ImportError as error:
    peft, WHY = None, str(error)


class Merge(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="bs-merge-"))
        self.addCleanup(shutil.rmtree, self.folder)

    def run_program(self, *arguments, code=0):
        done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, timeout=300)
        self.assertEqual(done.returncode, code, done.stderr.decode())
        return done.stdout.decode(), done.stderr.decode()

    def merge(self, model, adapter, output, *more, code=0):
        return self.run_program("merge", "--model", model, "--adapter", adapter, "--output", output, *more, code=code)[1]

    def trained(self):
        model, adapter, data = tiny_model.write_model(self.folder / "model"), self.folder / "adapter", self.folder / "data.txt"
        data.write_text("In the beginning was a text, and it was not long. " * 12)
        self.run_program("finetune", "--model", model, "--device", "cpu", "--dtype", "fp32", "--data", data, "--seq-len", 40, "--lr", 1e-2,
                         "--steps", 8, "--output", adapter)  # fmt: skip
        return model, adapter, data

    def test_a_merged_model_is_the_model_with_its_adapter(self):
        model, adapter, data = self.trained()
        merged = self.folder / "merged"
        err = self.merge(model, adapter, merged)
        self.assertIn("the adapter is in 21 tensors, 8 are as they were", err)
        self.assertEqual({f.name for f in merged.iterdir()}, {f.name for f in model.iterdir()})
        for name in ["config.json", "tokenizer.json", "chat_template.jinja"]:
            self.assertEqual((merged / name).read_bytes(), (model / name).read_bytes())
        losses = []
        for arguments in [[model], [model, "--adapter", adapter], [merged]]:
            out = self.run_program("evaluate", "--device", "cpu", "--dtype", "fp32", "--data", data, "--seq-len", 40, "--model", *arguments)[0]
            losses.append(float(out.split()[1]))
        self.assertGreater(losses[0] - losses[1], 1)
        self.assertLess(abs(losses[1] - losses[2]), 0.02)  # the weights are rounded to bf16
        again, sharded = self.folder / "again", self.folder / "sharded"
        self.merge(model, adapter, again)
        self.assertEqual((again / "model.safetensors").read_bytes(), (merged / "model.safetensors").read_bytes())
        self.merge(model, adapter, sharded, "--shard-size", "20KiB")
        index = json.loads((sharded / "model.safetensors.index.json").read_text())
        self.assertGreater(len(set(index["weight_map"].values())), 2)
        out = self.run_program("evaluate", "--device", "cpu", "--dtype", "fp32", "--data", data, "--seq-len", 40, "--model", sharded)[0]
        self.assertEqual(float(out.split()[1]), losses[2])

    def test_bad_input(self):
        model, adapter, _ = self.trained()
        merged = self.folder / "merged"
        self.merge(model, adapter, merged)
        self.assertIn("not empty", self.merge(model, adapter, merged, code=1))
        self.assertIn("no-adapter", self.merge(model, self.folder / "no-adapter", self.folder / "x", code=1))
        self.assertIn("--shard-size", self.merge(model, adapter, self.folder / "x", "--shard-size", 0, code=2))
        self.assertIn("missing", self.merge(FIXTURES / "base", adapter, self.folder / "x", code=1))
        self.assertEqual({f.name for f in self.folder.iterdir()}, {"model", "adapter", "merged", "data.txt"})

    @staticmethod
    def file_count(folder):
        try:
            return len(os.listdir(folder))
        except FileNotFoundError:  # not begun yet, or moved to its place
            return 0

    def test_killed_it_leaves_no_model_and_can_be_run_again(self):
        model, adapter, _ = self.trained()
        merged, whole = self.folder / "merged", self.folder / "whole"
        self.merge(model, adapter, whole, "--shard-size", "8KiB")
        kills = 0
        for files in range(1, 40):
            running = subprocess.Popen([PROGRAM, "merge", "--model", model, "--adapter", adapter, "--output", merged, "--shard-size", "8KiB"], stderr=subprocess.DEVNULL)
            making = self.folder / ".merged.merging"
            while running.poll() is None and self.file_count(making) < files:
                os.sched_yield()
            running.kill()
            if running.wait() == 0:
                break
            kills += 1
            self.assertFalse(merged.exists() and not (merged / "model.safetensors.index.json").exists())
            shutil.rmtree(merged, ignore_errors=True)  # killed after its last move
        print(f"\n  killed {kills} times", file=sys.stderr)
        self.assertGreaterEqual(kills, 5)
        shutil.rmtree(merged, ignore_errors=True)
        self.merge(model, adapter, merged, "--shard-size", "8KiB")
        self.assertFalse((self.folder / ".merged.merging").exists())
        self.assertEqual({f.name: f.read_bytes() for f in merged.iterdir()}, {f.name: f.read_bytes() for f in whole.iterdir()})

    def test_a_second_merge_into_a_folder_is_refused_and_the_first_is_whole(self):
        model, adapter, _ = self.trained()
        merged, whole, making = self.folder / "merged", self.folder / "whole", self.folder / ".merged.merging"
        self.merge(model, adapter, whole, "--shard-size", "8KiB")
        form = [model, adapter, merged, "--shard-size", "8KiB"]
        refused = False
        while not refused:
            first = subprocess.Popen([PROGRAM, "merge", "--model", *form[:1], "--adapter", *form[1:2], "--output", *form[2:]], stderr=subprocess.DEVNULL)
            while first.poll() is None and self.file_count(making) < 3:
                os.sched_yield()
            first.send_signal(signal.SIGSTOP)
            try:
                if self.file_count(making) >= 3:  # else it has come to its end
                    before = sorted(os.listdir(making))
                    self.assertIn("is in use by another process", self.merge(*form, code=1))
                    self.assertEqual(sorted(os.listdir(making)), before)
                    refused = True
            finally:
                first.send_signal(signal.SIGCONT)
                self.assertEqual(first.wait(timeout=120), 0)
            self.assertEqual({f.name: f.read_bytes() for f in merged.iterdir()}, {f.name: f.read_bytes() for f in whole.iterdir()})
            self.assertFalse(making.exists())
            shutil.rmtree(merged)

    def test_places_that_are_not_replaced(self):
        model, adapter, _ = self.trained()
        empty, dangling, link, target = (self.folder / name for name in ["empty", "dangling", "link", "target"])
        empty.touch()
        dangling.symlink_to(self.folder / "none")
        target.mkdir()
        link.symlink_to(target)
        self.assertIn("no folder", self.merge(model, adapter, empty, code=1))
        self.assertIn("a link to nothing", self.merge(model, adapter, dangling, code=1))
        self.merge(model, adapter, link)
        self.assertEqual((empty.read_bytes(), dangling.is_symlink(), link.is_symlink()), (b"", True, True))
        self.assertTrue((target / "model.safetensors").exists())
        path = adapter / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:-4] + b"\0\0\xc0\x7f")
        self.assertRegex(self.merge(model, adapter, self.folder / "x", code=1), r"adapter_model\.safetensors: tensor base_model.*lora_.* not finite")

    def test_peft_merges_alike(self):
        if peft is None:
            self.skipTest(WHY)
        for name in ["all_linear", "patterned"]:
            for dtype in [torch.float32, torch.bfloat16, torch.float16]:
                base = self.folder / f"base-{name}-{dtype}"
                shutil.copytree(FIXTURES / "base", base)
                tensors = {n: t.to(dtype) for n, t in load_file(base / "model.safetensors").items()}
                save_file(tensors, base / "model.safetensors", {"format": "pt"})
                output = self.folder / f"merged-{name}-{dtype}"
                self.merge(base, FIXTURES / name, output)
                model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
                theirs = peft.PeftModel.from_pretrained(model, FIXTURES / name).merge_and_unload().state_dict()
                ours = load_file(output / "model.safetensors")
                self.assertLessEqual(ours.keys(), theirs.keys())
                # Both are the exact sum rounded once; fp32 products may differ in their last bit and tip a rounding over.
                unit = torch.finfo(dtype).eps
                changed, worst = 0, 0.0
                for key, tensor in ours.items():
                    self.assertEqual((tensor.dtype, tensor.shape), (dtype, theirs[key].shape))
                    bound = unit * theirs[key].double().abs() + 2e-7
                    off = (tensor.double() - theirs[key].double()).abs()
                    self.assertTrue(bool((off <= bound).all()), (name, dtype, key))
                    changed += int(not torch.equal(tensor, tensors[key]))
                    worst = max(worst, float(off.max()))
                print(f"\n  {name} {dtype}: {changed} tensors merged, largest difference {worst:.1e}", file=sys.stderr)
                self.assertGreater(changed, 0)
                transformers.AutoModelForCausalLM.from_pretrained(output)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    PROGRAM, FIXTURES = os.path.abspath(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve()
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
