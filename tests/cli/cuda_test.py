#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The built program on a CUDA device: whatever tier the weights wait in and whatever stays on the device, the results are the same.

usage: cuda_test.py PROGRAM [unittest arguments…]
Exits with 77 (skipped) where the program cannot use a CUDA device, and says why.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import tiny_model  # noqa: E402

PROGRAM = ""
TIERS = ["ram", "mmap", "file", "io_uring", "tiered"]
RESIDENT = ["all", "head", "none"]
SKIPPED = 77


def run(*arguments):
    """(exit code, stdout as bytes, stderr as text)"""
    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, timeout=300)
    return done.returncode, done.stdout, done.stderr.decode()


class CudaTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="bs-cuda-"))
        cls.models = {
            "tied": tiny_model.write_model(cls.folder / "tied"),
            "untied": tiny_model.write_model(cls.folder / "untied", tied=False),
        }
        cls.data = cls.folder / "data.txt"
        cls.data.write_text("In the beginning was a text, and it was not long. " * 8)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def ok(self, command, model, *options):
        code, out, err = run(command, "--model", self.models[model], "--device", "cuda", *options)
        self.assertEqual(code, 0, err)
        return out, err

    def ways(self):
        """Options that must change nothing but where bytes lie."""
        block = str(3 * self.block_bytes())  # a slot is padded, and may hold fp32
        for tier in TIERS:
            for resident in RESIDENT:
                yield ["--storage", tier, "--resident", resident]
            yield ["--storage", tier, "--prefetch-ahead", "0"]
            yield ["--storage", tier, "--prefetch-ahead", "5"]
            yield ["--storage", tier, "--device-budget", block]
        for eighths in (9, 18):  # one block of the three in memory, two
            yield ["--storage", "tiered", "--ram-budget", str(eighths * self.block_bytes() // 8)]

    def of_each_way(self, work):
        """{way: work(way)}, several at a time: most of each is the start of a process."""
        ways = [[], *self.ways()]
        with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            return dict(zip((" ".join(way) for way in ways), pool.map(work, ways)))

    def block_bytes(self):
        _, out, _ = run("inspect", "--model", self.models["tied"], "--json")
        return json.loads(out)["largest_block_bytes"]

    def test_text_is_the_same(self):
        for model, dtype in [("tied", "bf16"), ("untied", "fp32")]:
            texts = self.of_each_way(
                lambda way: self.ok("generate", model, "--prompt", "In the", "--max-new-tokens", "24", "--dtype", dtype, *way)[0])
            self.assertEqual(len(set(texts.values())), 1, texts)
            self.assertTrue(texts[""])

    def test_loss_is_the_same_to_the_last_printed_digit(self):
        for model in self.models:
            def loss(way):
                out, err = self.ok("evaluate", model, "--data", self.data, "--seq-len", "48", *way)
                return re.search(r"[0-9]+\.[0-9]{3,}", out.decode() + err).group()

            losses = self.of_each_way(loss)
            self.assertEqual(len(set(losses.values())), 1, losses)

    def test_recorded_passes_give_the_same_loss(self):
        for model in self.models:
            options = ["--data", self.data, "--seq-len", "48", "--storage", "ram"]
            block = str(3 * self.block_bytes())
            losses = [self.ok("evaluate", model, *options, *more)[0]
                      for more in ([], ["--graph"], ["--graph", "--device-budget", block], ["--graph", "--resident", "none"])]  # fmt: skip
            self.assertEqual(len(set(losses)), 1, losses)

    def finetuned(self, model, name, *options):
        output = self.folder / f"graph-{model}-{name}"
        self.ok("finetune", model, "--data", self.data, "--seq-len", "48", "--rank", "4", "--lr", "1e-2", "--storage", "ram",
                "--output", output, *options)  # fmt: skip
        metrics = [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in (output / "metrics.jsonl").read_text().splitlines()]
        return (output / "adapter_model.safetensors").read_bytes(), metrics

    def test_recorded_steps_train_the_same_adapter(self):
        block = str(3 * self.block_bytes())
        forms = {
            "plain": ["--steps", "6"],
            "several": ["--steps", "5", "--batch", "2", "--grad-accum", "2", "--max-grad-norm", "0.5", "--dropout", "0.2"],
            "top": ["--steps", "4", "--top-fraction", "0.5", "--no-shuffle"],
        }
        for model in self.models:
            for name, form in forms.items():
                plain = self.finetuned(model, name, *form)
                for number, more in enumerate([[], ["--device-budget", block], ["--prefetch-ahead", "2"]]):
                    self.assertEqual(self.finetuned(model, f"{name}-{number}", *form, "--graph", *more), plain, (model, name, more))

    def test_measuring_between_recorded_steps_changes_no_bit(self):
        form = ["--steps", "6", "--dropout", "0.2", "--eval-data", self.data, "--eval-every", "2"]
        for model in self.models:
            measured = self.finetuned(model, "measured", *form)
            self.assertEqual(self.finetuned(model, "measured-graph", *form, "--graph"), measured)
            adapter, metrics = self.finetuned(model, "unmeasured", *form[:4], "--graph")
            self.assertEqual((adapter, metrics), (measured[0], [m for m in measured[1] if "loss" in m]))

    def test_a_recorded_run_that_is_interrupted_goes_on(self):
        form = ["--steps", "400", "--batch", "2", "--grad-accum", "2", "--dropout", "0.1"]
        whole = self.finetuned("tied", "whole", *form)
        output = self.folder / "graph-tied-parts"
        command = [PROGRAM, "finetune", "--model", self.models["tied"], "--device", "cuda", "--data", self.data, "--seq-len", "48", "--rank", "4",
                   "--lr", "1e-2", "--storage", "ram", "--output", output, *form, "--graph"]  # fmt: skip
        running = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE)
        metrics = output / "metrics.jsonl"
        while running.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < 5):
            time.sleep(0.005)
        running.send_signal(signal.SIGINT)
        shown = running.communicate(timeout=60)[1]
        self.assertEqual(running.returncode, 130, shown)
        self.assertEqual(self.finetuned("tied", "parts", *form, "--graph", "--resume"), whole)

    def test_steps_that_cannot_be_recorded_are_refused(self):
        for options, says in [
            (["--storage", "file"], "a graph cannot wait for reads"),
            (["--storage", "ram", "--activations", "ram"], "elsewhere than on the device"),
            (["--storage", "ram", "--resident", "none"], "its head is streamed"),
        ]:
            code, _, err = run("finetune", "--model", self.models["tied"], "--device", "cuda", "--data", self.data, "--seq-len", "48",
                               "--steps", "1", "--output", self.folder / "refused", "--graph", *options)  # fmt: skip
            self.assertEqual(code, 1, err)
            self.assertIn(says, err)
            self.assertFalse((self.folder / "refused").exists())

    def test_passes_over_files_are_not_recorded(self):
        code, _, err = run("evaluate", "--model", self.models["tied"], "--device", "cuda", "--data", self.data,
                           "--seq-len", "48", "--storage", "file", "--graph")  # fmt: skip
        self.assertEqual(code, 1, err)
        self.assertIn("a graph cannot wait for reads", err)

    def test_finetuning_gives_the_same_adapter(self):
        for model in self.models:
            def adapter(way):
                output = self.folder / f"{model}-adapter{'-'.join(way)}"
                self.ok("finetune", model, "--data", self.data, "--seq-len", "48", "--steps", "3", "--rank", "4",
                        "--lr", "1e-2", "--output", output, *way)  # fmt: skip
                return (output / "adapter_model.safetensors").read_bytes()

            adapters = self.of_each_way(adapter)
            different = [way for way, written in adapters.items() if written != adapters[""]]
            self.assertEqual(different, [])

    def test_packed_rows_train_as_apart(self):
        rows = self.folder / "short.jsonl"
        rows.write_text("".join(json.dumps({"prompt": "a" * (1 + i % 3), "completion": "bcd" * (1 + i % 5)}) + "\n" for i in range(12)))
        for dtype, places in ("fp32", 4), ("bf16", 1):
            seen = []
            for way in [], ["--pack"], ["--pack", "--batch", "3"]:
                output = self.folder / "packed"
                self.ok("finetune", "tied", "--data", rows, "--seq-len", "48", "--epochs", "1", "--grad-accum", "12", "--rank", "4", "--dtype", dtype,
                        "--overwrite", "--output", output, *way)  # fmt: skip
                seen.append(json.loads((output / "metrics.jsonl").read_text().splitlines()[0]))
            for packed in seen[1:]:
                self.assertAlmostEqual(packed["loss"], seen[0]["loss"], places=places)
                self.assertEqual(packed["tokens"], seen[0]["tokens"])

    def test_the_timeline_has_the_devices_own_times(self):
        trace, output = self.folder / "trace.json", self.folder / "traced"
        for tier in "ram", "file":
            _, err = self.ok("finetune", "tied", "--data", self.data, "--seq-len", "48", "--steps", "2", "--rank", "4", "--storage", tier,
                             "--overwrite", "--output", output, "--trace", trace)  # fmt: skip
            self.assertRegex(err, r"timeline: copying in [\d.]+ s, computing [\d.]+ s, both at once [\d.]+ s \([\d.]+ % of the shorter\)\n")
            events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
            names = {name: [e for e in events if e["name"] == name] for name in ("compute", "copy", "enqueue")}
            self.assertEqual(len(names["compute"]), 2 * 2 * tiny_model.LAYERS)  # forward and backward of two steps
            self.assertEqual(len(names["enqueue"]), sum(e["name"] in ("compute", "copy", "convert") for e in events))
            ends = sorted((e["ts"], e["ts"] + e["dur"]) for e in names["compute"])
            self.assertTrue(all(after[0] >= before[1] - 0.002 for before, after in zip(ends, ends[1:])), ends)

    def test_memory_of_full_training_is_predicted(self):
        stats = self.folder / "stats.json"
        self.ok("finetune", "tied", "--mode", "full", "--data", self.data, "--seq-len", "48", "--steps", "2", "--overwrite",
                "--output", self.folder / "full", "--stats", stats)  # fmt: skip
        memory = json.loads(stats.read_text())["memory"]
        locked = memory["page_locked"]
        self.assertLess(abs(locked["measured"] / locked["predicted"] - 1), 0.2, memory)
        self.assertGreater(memory["device"]["measured"], memory["device"]["predicted"] / 2)

    def test_what_cannot_be_is_refused_by_name(self):
        for options, says in [
            (["--device", "cuda:99"], "cuda:99"),
            (["--device", "cuda", "--device-budget", "1"], "--device-budget"),
        ]:
            code, _, err = run("generate", "--model", self.models["tied"], "--prompt", "In", "--max-new-tokens", "1", *options)
            self.assertIn(code, (1, 2), err)
            self.assertIn(says, err)
            self.assertNotIn("terminate called", err)


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        probe = tiny_model.write_model(pathlib.Path(folder) / "probe")
        code, _, err = run("generate", "--model", probe, "--prompt", "a", "--max-new-tokens", "1", "--device", "cuda")
    if code != 0 and "error: --device cuda: " in err:
        print("skipped:", err.strip())
        sys.exit(SKIPPED)
    unittest.main(verbosity=2)
