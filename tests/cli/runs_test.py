#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Finetuning runs of the built program: schedules, saving, killing and going on.

usage: runs_test.py PROGRAM [unittest arguments…]
"""

import hashlib
import json
import math
import os
import pathlib
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import tiny_model  # noqa: E402

PROGRAM = ""
ADAPTER_FILES = ["adapter_config.json", "adapter_model.safetensors"]
RUN_FILES = {*ADAPTER_FILES, "metrics.jsonl", "loss.svg", "resume"}
TEXT = "In the beginning was a text, and it was not long. " * 24


class RunsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="bs-runs-"))
        cls.model = tiny_model.write_model(cls.folder / "model")
        cls.data = cls.folder / "data.txt"
        cls.data.write_text(TEXT)

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def setUp(self):
        self.output = self.folder / self.id().split(".")[-1]

    def command(self, output, *arguments, model=None, data=None, rank=("--rank", "4")):
        return [PROGRAM, "finetune", "--model", str(model or self.model), "--device", "cpu", "--dtype", "fp32", "--data", str(data or self.data),
                "--seq-len", "40", "--lr", "1e-2", *rank, "--output", str(output), *map(str, arguments)]  # fmt: skip

    def run_program(self, output, *arguments, code=0, **options):
        done = subprocess.run(self.command(output, *arguments, **options), capture_output=True, timeout=300)
        err = done.stderr.decode()
        self.assertEqual(done.returncode, code, err)
        self.assertNotIn("terminate called", err)
        return err

    def killed(self, output, when, *arguments):
        """Runs until when() is true, which is asked all the time, then SIGKILL. False if it ended before."""
        with tempfile.TemporaryFile() as err:
            running = subprocess.Popen(self.command(output, *arguments), stdout=subprocess.DEVNULL, stderr=err)
            while running.poll() is None and not when():
                os.sched_yield()
            running.kill()
            code = running.wait(timeout=120)
            err.seek(0)
            self.assertIn(code, (0, -signal.SIGKILL), err.read())
        return code != 0

    def lines(self, output):
        """Steps that the log tells of."""
        try:
            return (output / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def within_state(self, output):
        """While the state is written beside its place."""
        try:
            return any(".part" in name for name in os.listdir(output / "resume"))
        except FileNotFoundError:
            return False

    def adapter(self, output):
        return [(output / name).read_bytes() for name in ADAPTER_FILES]

    def metrics(self, output):
        return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]

    def state(self, output):
        """The metadata of the saved state."""
        data = (output / "resume" / "state.safetensors").read_bytes()
        return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])["__metadata__"]

    def everything(self, output):
        return {f: (f.read_bytes(), f.stat().st_mtime_ns, f.stat().st_ino) for f in sorted(output.rglob("*")) if f.is_file()}


class Schedules(RunsTest):
    def rates(self, *arguments):
        self.run_program(self.output, "--steps", 10, "--overwrite", *arguments)
        return [m["learning_rate"] for m in self.metrics(self.output)]

    def test_rates_are_those_of_the_formulas(self):
        self.assertEqual(self.rates(), [1e-2] * 10)
        warm = [0, 0.25e-2, 0.5e-2, 0.75e-2]
        for name, after in [("constant", lambda p: 1), ("linear", lambda p: 1 - p), ("cosine", lambda p: (1 + math.cos(math.pi * p)) / 2)]:
            seen = self.rates("--schedule", name, "--warmup-steps", 4)
            for got, wanted in zip(seen, warm + [1e-2 * after(i / 6) for i in range(6)]):
                self.assertAlmostEqual(got, wanted, places=12)

    def test_a_warm_up_as_long_as_the_run_is_refused(self):
        self.assertIn("--warmup-steps 10", self.run_program(self.output, "--steps", 10, "--warmup-steps", 10, code=2))
        self.assertIn("--schedule", self.run_program(self.output, "--schedule", "square", code=2))
        self.assertIn("--max-grad-norm", self.run_program(self.output, "--max-grad-norm", 0, code=2))

    def test_a_clipped_first_step_moves_less_and_the_norm_is_told_unclipped(self):
        # Adam divides the scale of a first step out again, so the second one tells.
        self.run_program(self.output, "--steps", 3)
        free, weights = self.metrics(self.output), self.adapter(self.output)[1]
        self.run_program(self.output, "--steps", 3, "--overwrite", "--max-grad-norm", free[0]["grad_norm"] / 50)
        clipped = self.metrics(self.output)
        self.assertEqual(clipped[0]["grad_norm"], free[0]["grad_norm"])
        self.assertNotEqual(self.adapter(self.output)[1], weights)
        self.run_program(self.output, "--steps", 3, "--overwrite", "--max-grad-norm", 1e9)
        self.assertEqual(self.adapter(self.output)[1], weights)

    def test_rows_come_as_the_file_has_them_or_by_the_seed(self):
        rows = self.folder / "rows.jsonl"  # each with a length of its own
        rows.write_text("".join(json.dumps({"text": "a" * (i + 2)}) + "\n" for i in range(7)))
        def order(*arguments):
            self.run_program(self.output, "--overwrite", "--epochs", 2, *arguments, data=rows)
            return [m["tokens"] - 3 for m in self.metrics(self.output)]
        self.assertEqual(order("--no-shuffle"), [0, 1, 2, 3, 4, 5, 6] * 2)
        first = order("--shuffle", "--seed", 5)
        self.assertEqual([sorted(first[:7]), sorted(first[7:])], [[0, 1, 2, 3, 4, 5, 6]] * 2)
        self.assertNotEqual(first[:7], first[7:])
        self.assertEqual(order("--seed", 5), first)
        self.assertNotEqual(order("--seed", 6), first)


class Packing(RunsTest):
    def setUp(self):
        super().setUp()
        self.rows = self.folder / "short.jsonl"
        self.rows.write_text("".join(json.dumps({"prompt": "a" * (1 + i % 3), "completion": "bcd" * (1 + i % 5)}) + "\n" for i in range(12)))

    def first(self, *arguments):
        said = self.run_program(self.output, "--overwrite", "--epochs", 1, *arguments, data=self.rows)
        return self.metrics(self.output)[0], said

    def test_a_step_over_all_rows_is_the_same_packed(self):
        apart, _ = self.first("--grad-accum", 12)
        for batch in 1, 3:
            packed, said = self.first("--pack", "--grad-accum", 12, "--batch", batch)
            self.assertRegex(said, r"12 rows packed into [2-5], \d+\.\d % full")
            self.assertEqual(packed["tokens"], apart["tokens"])
            self.assertAlmostEqual(packed["loss"], apart["loss"], places=5)
            self.assertAlmostEqual(packed["grad_norm"] / apart["grad_norm"], 1, places=4)

    def test_fewer_passes_are_made_and_a_run_does_not_change_its_mind(self):
        self.first("--pack")
        steps = len(self.metrics(self.output))
        self.assertLess(steps, 6)
        self.assertIn("--pack was on, here it is off", self.run_program(self.output, "--resume", "--epochs", 1, data=self.rows, code=1))
        self.assertIn("is finished", self.run_program(self.output, "--resume", "--pack", "--epochs", 1, data=self.rows))


class HeldOut(RunsTest):
    FORM = ["--steps", 12, "--grad-accum", 2, "--dropout", "0.25", "--eval-fraction", "0.3", "--eval-every", 5]

    def result(self, output, *arguments, **options):
        done = subprocess.run(self.command(output, *arguments, **options), capture_output=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.decode(), done.stderr.decode()

    def held_out(self, output):
        return [(m["step"], m["held_out_loss"]) for m in self.metrics(output) if "held_out_loss" in m]

    def test_the_loss_on_a_share_of_the_rows_is_told_while_training(self):
        out, err = self.result(self.output, *self.FORM)
        found = re.fullmatch("".join(rf"held-out loss {when}: ([\d.]+) nats per token over (\d+) tokens\n" for when in ("before", "after step 5", "after step 10", "after")), out)
        held, rows = map(int, re.search(r"(\d+) rows of (\d+) held out", err).groups())
        self.assertEqual(held, round(0.3 * rows))
        self.assertIn(f": {rows - held} rows, 12 steps of 2 rows", err)
        self.assertEqual({found.group(n) for n in (2, 4, 6, 8)}, {str(held * 39)})
        told = self.held_out(self.output)
        self.assertEqual([step for step, _ in told], [0, 5, 10, 12])
        for (_, loss), n in zip(told, (1, 3, 5, 7)):
            self.assertAlmostEqual(loss, float(found.group(n)), places=5)
        self.assertGreater(told[0][1], told[3][1])
        plot = (self.output / "loss.svg").read_text()
        self.assertEqual((plot.count("<polyline"), plot.count("held-out rows")), (2, 1))

    def test_no_bit_of_the_training_depends_on_the_measuring(self):
        self.result(self.output, *self.FORM)
        apart = self.output.with_suffix(".apart")
        self.result(apart, *self.FORM[:-2])
        self.assertEqual(self.adapter(apart), self.adapter(self.output))
        timeless = lambda o: [m | {"seconds": 0} for m in self.metrics(o) if "loss" in m]  # noqa: E731
        self.assertEqual(timeless(apart), timeless(self.output))

    def test_killed_it_tells_the_same(self):
        whole, parts = self.output / "whole", self.output / "parts"
        self.result(whole, *self.FORM)
        for step in (5, 7, 10):
            self.killed(parts, lambda step=step: self.lines(parts) > step, *self.FORM, "--resume", "--save-every", 1)
        self.run_program(parts, *self.FORM, "--resume")
        self.assertEqual(self.adapter(parts), self.adapter(whole))
        self.assertEqual([s for s, _ in self.held_out(parts)][:3], [0, 5, 10])
        self.assertEqual(self.held_out(parts)[:3], self.held_out(whole)[:3])
        self.assertIn("--eval-fraction was 0.3, here it is none", self.run_program(parts, *self.FORM[:-4], "--resume", code=1))

    def test_an_own_file_is_measured_on_while_training_too(self):
        out, _ = self.result(self.output, "--steps", 4, "--eval-data", self.data, "--eval-every", 2)
        self.assertEqual([line.split(":")[0] for line in out.splitlines()], ["held-out loss before", "held-out loss after step 2", "held-out loss after"])

    def test_what_cannot_be_meant_is_refused(self):
        self.assertIn("--eval-every needs --eval-data or --eval-fraction", self.run_program(self.output, "--eval-every", 2, code=2))
        for value in "0", "1", "x":
            self.assertIn("--eval-fraction", self.run_program(self.output, "--eval-fraction", value, code=2))
        self.assertIn("excludes", self.run_program(self.output, "--eval-fraction", "0.5", "--eval-data", self.data, code=2))
        short = self.folder / "one-row.txt"
        short.write_text("In the beginning")
        self.assertIn("none is left to train on", self.run_program(self.output, "--eval-fraction", "0.5", code=1, data=short))


class Forms(RunsTest):
    def config(self):
        return json.loads((self.output / "adapter_config.json").read_text())

    def test_patterns_and_scales_are_in_the_adapters_configuration(self):
        self.run_program(self.output, "--steps", 1, "--target-regex", ".*[.][12][.](mlp[.].*|self_attn[.]q_proj)", "--rslora",
                         "--rank-pattern", "layers[.]1[.]mlp[.]up_proj=2", "--rank-pattern", "mlp[.].*=3", "--alpha-pattern", "q_proj=1.5")  # fmt: skip
        seen = self.config()
        self.assertTrue(seen["use_rslora"])
        self.assertEqual(seen["rank_pattern"]["model.layers.1.mlp.up_proj"], 2)
        self.assertEqual(seen["rank_pattern"]["model.layers.2.mlp.up_proj"], 3)
        self.assertEqual(len(seen["rank_pattern"]), 6)
        self.assertEqual(seen["alpha_pattern"], {f"model.layers.{n}.self_attn.q_proj": 1.5 for n in [1, 2]})
        self.assertEqual(seen["layers_to_transform"], [1, 2])
        more = ["--steps", 1, "--adapter", self.output]
        again = self.output.with_suffix(".again")
        self.run_program(again, *more, rank=())
        for option, value in [("--rank-pattern", "q_proj=2"), ("--alpha-pattern", "q_proj=2"), ("--target-regex", ".*")]:
            self.assertIn(option, self.run_program(self.output.with_suffix(".no"), *more, option, value, code=1, rank=()))

    def test_bad_patterns_are_refused(self):
        for option, value, code in [("--rank-pattern", "q_proj", 2), ("--rank-pattern", "=3", 2), ("--rank-pattern", "q_proj=0", 2),
                                    ("--rank-pattern", "q_proj=1.5", 2), ("--alpha-pattern", "q_proj=-1", 2), ("--rank-pattern", "z_proj=3", 1),
                                    ("--target-regex", "q_proj", 1), ("--rank-pattern", "k_proj=17", 1)]:  # fmt: skip
            err = self.run_program(self.output, "--steps", 1, option, value, code=code)
            self.assertEqual(err.count("error: "), 1, err)
        self.assertIn("excludes", self.run_program(self.output, "--targets", "q_proj", "--target-regex", "a", code=2))
        self.assertFalse(self.output.exists())


class Memory(RunsTest):
    FORM = ["--steps", 4, "--batch", 2, "--grad-accum", 3, "--dropout", "0.25", "--prefetch-ahead", 0]

    def test_no_bit_depends_on_where_inputs_wait_and_how_passes_go(self):
        results = []
        files = self.folder / "activations"
        files.mkdir()
        for arguments in [], ["--micro-batches", "sequential"], ["--activations", "ram"], ["--activations", f"file:{files}"]:
            stats = self.folder / "stats.json"
            self.run_program(self.output, "--overwrite", *self.FORM, "--stats", stats, *arguments)
            losses = [m["loss"] for m in self.metrics(self.output)]
            results.append((self.adapter(self.output), losses, json.loads(stats.read_text())["bytes_needed"]))
            self.assertEqual(list(files.iterdir()), [])
        together, sequential, *others = results
        self.assertEqual(together[:2], sequential[:2])
        self.assertLess(2 * together[2], sequential[2])
        for other in others:
            self.assertEqual(other, together)

    def test_a_run_goes_on_with_other_choices(self):
        whole, parts = self.folder / "whole", self.folder / "parts"
        self.run_program(whole, *self.FORM)
        self.killed(parts, lambda: self.lines(parts) >= 2, *self.FORM, "--save-every", 1)
        self.run_program(parts, *self.FORM, "--resume", "--micro-batches", "sequential", "--activations", "ram")
        self.assertEqual(self.adapter(parts), self.adapter(whole))

    def test_bad_values_are_refused_by_name(self):
        for value in "disk", "file:", "RAM":
            self.assertIn("--activations", self.run_program(self.output, "--activations", value, code=2))
        self.assertIn("--micro-batches", self.run_program(self.output, "--micro-batches", "apart", code=2))
        err = self.run_program(self.output, "--activations", f"file:{self.folder}/none", code=1)
        self.assertIn(f"{self.folder}/none", err)
        self.assertIn("No such file", err)


class Saving(RunsTest):
    FORM = ["--steps", 24, "--batch", 2, "--grad-accum", 2, "--dropout", "0.25", "--schedule", "cosine", "--warmup-steps", 3, "--max-grad-norm", "0.5", "--seed", 11]

    def test_files_of_a_run(self):
        self.run_program(self.output, "--steps", 5, "--batch", 2)
        self.assertEqual({f.name for f in self.output.iterdir()}, RUN_FILES)
        seen = self.metrics(self.output)
        self.assertEqual([m["step"] for m in seen], [1, 2, 3, 4, 5])
        for m in seen:
            self.assertEqual(m.keys(), {"step", "loss", "learning_rate", "tokens", "grad_norm", "seconds"})
            self.assertEqual(m["tokens"], 80)
            self.assertGreater(m["grad_norm"], 0)
            self.assertGreater(m["seconds"], 0)
        plot = xml.etree.ElementTree.parse(self.output / "loss.svg").getroot()
        line = [e for e in plot if e.tag.endswith("polyline")][0].get("points").split()
        self.assertEqual(len(line), 5)
        x, y = zip(*[map(float, p.split(",")) for p in line])
        self.assertEqual(list(x), [70, 247.5, 425, 602.5, 780])
        self.assertEqual({min(y), max(y)}, {40, 370})
        losses = [m["loss"] for m in seen]
        self.assertEqual(losses.index(min(losses)), y.index(370))

    def test_killed_at_random_moments_it_ends_with_the_same_bytes(self):
        whole = self.output / "whole"
        self.run_program(whole, *self.FORM)
        rng = random.Random(20)
        output = self.output / "killed"
        moments = {
            "a step": lambda: True,
            "the state": lambda: self.within_state(output),
            "the adapter": lambda: (output / ".adapter-new").exists(),
        }
        kills, ends = dict.fromkeys(moments, 0), 0
        while sum(kills.values()) < 21 or ends < 2:
            state = output / "resume" / "state.safetensors"
            saved, name = int(self.state(output)["step"]) if state.exists() else 0, rng.choice(list(moments))
            target = saved + rng.randint(1, 5)
            if self.killed(output, lambda: self.lines(output) >= target and moments[name](), *self.FORM, "--resume", "--save-every", rng.choice([1, 2, 3])):
                kills[name] += 1
                continue
            ends += 1  # killed several times, it has come to its end
            self.assertEqual(self.adapter(output), self.adapter(whole))
            timeless = lambda o: [m | {"seconds": 0} for m in self.metrics(o)]  # noqa: E731
            self.assertEqual(timeless(output), timeless(whole))
            self.assertEqual((output / "loss.svg").read_bytes(), (whole / "loss.svg").read_bytes())
            self.assertEqual([f for f in output.rglob("*") if ".part" in f.name or "new" in f.name], [])
            shutil.rmtree(output)
        print(f"\n  killed {kills}", file=sys.stderr)
        self.assertGreaterEqual(min(kills.values()), 2)

    def test_killed_before_anything_was_saved_it_starts_from_the_beginning(self):
        whole = self.output / "whole"
        self.run_program(whole, *self.FORM)
        output = self.output / "killed"
        self.assertTrue(self.killed(output, lambda: self.lines(output) >= 4, *self.FORM))
        self.assertEqual(self.state(output)["step"], "0")
        self.assertFalse((output / ADAPTER_FILES[1]).exists())
        err = self.run_program(output, *self.FORM, "--resume")
        self.assertIn("the run starts from the beginning", err)
        self.assertEqual(self.adapter(output), self.adapter(whole))
        nowhere = self.output / "never-begun"
        self.assertIn("the run starts from the beginning", self.run_program(nowhere, *self.FORM, "--resume"))
        self.assertEqual(self.adapter(nowhere), self.adapter(whole))

    def test_resumed_when_finished_it_changes_nothing(self):
        self.run_program(self.output, *self.FORM)
        before = self.everything(self.output)
        told = self.run_program(self.output, *self.FORM, "--resume")
        self.assertIn("is finished, after step 24", told)
        self.assertIn("--adapter", told)
        self.assertEqual(self.everything(self.output), before)
        self.run_program(self.output, *self.FORM, "--resume", code=1, model=self.with_another_projection())
        self.assertEqual(self.everything(self.output), before)
        log = (self.output / "metrics.jsonl").read_bytes()
        (self.output / "metrics.jsonl").unlink()
        self.assertIn("the lines of 24 of 24 finished steps are missing", self.run_program(self.output, *self.FORM, "--resume"))
        (self.output / "metrics.jsonl").write_bytes(log)
        # Killed between the last state and the adapter's files: they are made from the state.
        whole = self.adapter(self.output)
        (self.output / ADAPTER_FILES[1]).unlink()
        self.assertIn("wrote the rest", self.run_program(self.output, *self.FORM, "--resume"))
        self.assertEqual(self.adapter(self.output), whole)

    def test_an_interrupted_run_goes_on(self):
        self.run_program(self.output / "whole", *self.FORM)
        for how in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            self.interrupted(how, self.output / "whole", self.output / how.name)

    def interrupted(self, how, whole, output):
        running = subprocess.Popen(self.command(output, *self.FORM), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                   preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))  # fmt: skip
        while running.poll() is None and self.lines(output) < 3:
            os.sched_yield()
        running.send_signal(how)
        shown = running.communicate(timeout=60)[1]
        self.assertEqual(running.returncode, 130, shown)
        step = int(re.search(rb"after step (\d+); --resume goes on", shown).group(1))
        self.assertEqual(self.state(output)["step"], str(step))
        self.assertIn(f"goes on after step {step}", self.run_program(output, *self.FORM, "--resume"))
        self.assertEqual(self.adapter(output), self.adapter(whole))

    def test_a_run_of_another_configuration_is_refused_by_name(self):
        self.run_program(self.output, *self.FORM)
        before = self.everything(self.output)
        other_data = self.folder / "other.txt"
        other_data.write_text(TEXT[:-50] + "Something else stands at the end of this text now.")
        other_model = tiny_model.write_model(self.output.with_suffix(".model"), seed=2)
        for option, value in [("--steps", 25), ("--batch", 1), ("--grad-accum", 1), ("--dropout", 0), ("--schedule", "linear"), ("--warmup-steps", 2),
                              ("--max-grad-norm", 1), ("--seed", 12), ("--lr", "2e-2"), ("--rank", 8), ("--alpha", 16), ("--targets", "q_proj"),
                              ("--top-fraction", 0.5), ("--seq-len", 30), ("--dtype", "bf16")]:  # fmt: skip
            changed = self.command(self.output, *self.FORM, "--resume")
            at = changed.index(option) + 1 if option in changed else None
            changed = changed[:at] + [str(value)] + changed[at + 1 :] if at else changed + [option, str(value)]
            done = subprocess.run(changed, capture_output=True)
            self.assertEqual(done.returncode, 1, changed)
            self.assertRegex(done.stderr.decode(), rf"another configuration: {option} was .*, here it is ")
        other_weights = self.with_another_projection()
        for option, more in [("--data", {"data": other_data}), ("--model", {"model": other_model}), ("--model", {"model": other_weights})]:
            self.assertIn(f"configuration: {option} was", self.run_program(self.output, *self.FORM, "--resume", code=1, **more))
        self.assertIn("configuration: --shuffle was on, here it is off", self.run_program(self.output, *self.FORM, "--resume", "--no-shuffle", code=1))
        self.assertEqual(self.everything(self.output), before)

    def test_a_run_goes_on_in_the_type_that_it_was_begun_in(self):
        in_bf16 = [{"fp32": "bf16"}.get(a, a) for a in self.command(self.output, "--steps", 2)]
        subprocess.run(in_bf16, check=True, capture_output=True)
        self.assertIn("--dtype is given more than once", self.run_program(self.output, "--dtype", "bf16", "--steps", 2, "--resume", code=2))
        auto = [a for a in self.command(self.output, "--steps", 2, "--resume") if a not in ("--dtype", "fp32")]
        done = subprocess.run(auto, capture_output=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(b"dtype: bf16 (auto: as the run in ", done.stderr)
        self.assertIn(b"is finished", done.stderr)

    def with_another_projection(self):
        """The model, as an adapter's merge would leave it: only one linear map has other values."""
        folder = tiny_model.write_model(self.output.with_suffix(".merged"))
        path = folder / "model.safetensors"
        data = bytearray(path.read_bytes())
        size = struct.unpack("<Q", data[:8])[0]
        name, header = "model.layers.0.mlp.down_proj.weight", json.loads(data[8 : 8 + size])
        begin, end = (8 + size + offset for offset in header[name]["data_offsets"])
        for i in range(begin, end, 2):
            data[i] ^= 1  # the last bit of every element
        path.write_bytes(data)
        return folder

    def test_folders_that_cannot_be_resumed(self):
        self.run_program(self.output, "--steps", 2)
        self.assertIn("--resume", self.run_program(self.output, "--steps", 2, code=1))
        self.assertIn("excludes", self.run_program(self.output, "--steps", 2, "--resume", "--overwrite", code=2))
        state = self.output / "resume" / "state.safetensors"
        good = state.read_bytes()
        state.write_bytes(good[:-3] + b"abc")
        self.assertRegex(self.run_program(self.output, "--steps", 2, "--resume", code=1), "crc32c; .*--overwrite begins a new one")
        self.assertIn(b'"step":"2"', good)
        for step in [b"0", b"1", b"3"]:  # not only what would be loaded: also of a run that has only begun, or is finished
            state.write_bytes(good.replace(b'"step":"2"', b'"step":"' + step + b'"'))
            self.assertRegex(self.run_program(self.output, "--steps", 2, "--resume", code=1), "has changed since it was saved.*--overwrite begins a new one")
        state.write_bytes(good[: len(good) // 2])
        self.assertIn("state.safetensors", self.run_program(self.output, "--steps", 2, "--resume", code=1))
        shutil.copy(self.output / ADAPTER_FILES[1], state)
        self.assertIn("training state", self.run_program(self.output, "--steps", 2, "--resume", code=1))
        shutil.rmtree(state.parent)
        self.assertIn("no run to resume", self.run_program(self.output, "--steps", 2, "--resume", code=1))

    def test_an_adapter_that_a_run_went_on_with(self):
        start, output = self.output / "start", self.output / "more"
        self.run_program(start, "--steps", 2)
        more = ["--steps", 6, "--adapter", start]
        self.run_program(output, *more)
        whole = self.adapter(output)
        killed = self.output / "killed"
        self.assertTrue(self.killed(killed, lambda: self.lines(killed) >= 4, *more, "--save-every", 2))
        self.run_program(killed, *more, "--resume", "--save-every", 2)
        self.assertEqual(self.adapter(killed), whole)
        self.assertIn("--adapter was", self.run_program(killed, "--steps", 6, "--resume", code=1))

    def test_a_run_cannot_replace_the_adapter_that_it_begins_with(self):
        self.run_program(self.output, "--steps", 2)
        before = self.everything(self.output)
        same = f"{self.output.parent}/./{self.output.name}/"
        for how in ["--overwrite", "--resume"]:
            err = self.run_program(same, "--steps", 3, "--adapter", self.output, how, code=1)
            self.assertIn("--adapter and --output are one folder", err)
        self.assertEqual(self.everything(self.output), before)

    def test_overwritten_and_killed_it_is_the_new_run_that_goes_on(self):
        whole, output = self.output / "whole", self.output / "killed"
        self.run_program(whole, *self.FORM)
        self.run_program(output, "--steps", 12)
        form = [*self.FORM, "--save-every", 24]
        self.assertTrue(self.killed(output, lambda: 0 < self.lines(output) < 12, *form, "--overwrite"))
        self.assertEqual(self.state(output)["step"], "0")
        self.assertIn("the run starts from the beginning", self.run_program(output, *form, "--resume"))
        self.assertEqual(self.adapter(output), self.adapter(whole))

    def test_a_second_run_in_a_folder_is_refused_and_changes_nothing(self):
        whole, output = self.output / "whole", self.output / "two"
        self.run_program(whole, *self.FORM)
        first = subprocess.Popen(self.command(output, *self.FORM), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while first.poll() is None and self.lines(output) < 2:
                os.sched_yield()
            first.send_signal(signal.SIGSTOP)
            before = self.everything(output)
            for how in [("--overwrite",), ("--resume",), ()]:
                self.assertIn("is in use by another process", self.run_program(output, *self.FORM, *how, code=1))
            self.assertEqual(self.everything(output), before)
        finally:
            first.send_signal(signal.SIGCONT)
            self.assertEqual(first.wait(timeout=120), 0)
        self.assertEqual(self.adapter(output), self.adapter(whole))

    def test_lines_that_the_log_lost_are_told_and_a_pipe_is_refused(self):
        self.assertTrue(self.killed(self.output, lambda: self.lines(self.output) >= 7, *self.FORM, "--save-every", 2))
        saved = int(self.state(self.output)["step"])
        log = self.output / "metrics.jsonl"
        lines = log.read_bytes().splitlines()[:saved]
        log.write_bytes(b"\n".join(lines))  # whole, but for the last newline
        state = self.output / "resume" / "state.safetensors"
        self.keep(state)
        self.assertNotIn("are missing", self.run_program(self.output, *self.FORM, "--resume"))
        self.assertEqual([m["step"] for m in self.metrics(self.output)], list(range(1, 25)))
        self.restore(state)
        log.write_bytes(b"\n".join([lines[0], b"x" + lines[1], *lines[3:]]) + b"\n")
        err = self.run_program(self.output, *self.FORM, "--resume")
        self.assertIn(f"metrics.jsonl: the lines of 2 of {saved} finished steps are missing", err)
        self.restore(state)
        log.unlink()
        os.mkfifo(log)
        for how in ["--resume", "--overwrite"]:
            self.assertRegex(self.run_program(self.output, *self.FORM, how, code=1), r"metrics\.jsonl: is no regular file")
        self.assertEqual(self.state(self.output)["step"], str(saved))

    def keep(self, path):
        shutil.copy(path, path.parent.parent.with_suffix(".kept"))

    def restore(self, path):
        shutil.copy(path.parent.parent.with_suffix(".kept"), path)

    def test_a_full_disk_leaves_the_last_good_state(self):
        self.run_program(self.output, *self.FORM[2:], "--steps", 9, "--save-every", 9)
        size = (self.output / "resume" / "state.safetensors").stat().st_size
        output = self.output / "full"
        self.assertTrue(self.killed(output, lambda: self.lines(output) >= 3, *self.FORM, "--save-every", 2))
        before = (self.state(output), self.adapter(output))
        limited = ["bash", "-c", f"trap '' XFSZ; ulimit -f {size // 1024 - 8}; exec \"$@\"", "bash"]
        done = subprocess.run([*limited, *self.command(output, *self.FORM, "--resume", "--save-every", 2)], capture_output=True)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr.decode(), r"error: .*state\.safetensors.*writing failed")
        self.assertEqual((self.state(output), self.adapter(output)), before)
        self.run_program(output, *self.FORM, "--resume")
        whole = self.output / "whole"
        self.run_program(whole, *self.FORM)
        self.assertEqual(self.adapter(output), self.adapter(whole))


class NotFinite(RunsTest):
    """The embedding of one letter is NaN, and the head another tensor: steps with that letter are not finite."""

    def setUp(self):
        super().setUp()
        self.poisoned = self.folder / "poisoned"
        if not self.poisoned.exists():
            self.poison()
        self.rows = self.folder / "rows-with-x.jsonl"
        texts = ["abcdefg", "hijklmn", "opxqrs", "tuvwyz", "aabbccx", "ddeeff"]
        self.rows.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))

    def poison(self):
        tiny_model.write_model(self.poisoned)
        config = json.loads((self.poisoned / "config.json").read_text())
        (self.poisoned / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
        path = self.poisoned / "model.safetensors"
        data = path.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header, tensors = json.loads(data[8 : 8 + size]), bytearray(data[8 + size :])
        embedding = header["model.embed_tokens.weight"]
        begin, end = embedding["data_offsets"]
        header["lm_head.weight"] = embedding | {"data_offsets": [len(tensors), len(tensors) + end - begin]}
        tensors += tensors[begin:end]
        row = begin + (len(tiny_model.SPECIAL) + ord("x")) * tiny_model.HIDDEN * 2
        tensors[row : row + 2] = b"\xc0\x7f"
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + tensors)

    def test_by_default_it_stops_and_the_last_good_state_stays(self):
        base = ["--epochs", 1, "--no-shuffle", "--save-every", 1]
        err = self.run_program(self.output, *base, code=1, model=self.poisoned, data=self.rows)
        self.assertRegex(err, r"error: step 3: the loss is not finite; .* in the embedding")
        self.assertEqual(self.state(self.output)["step"], "2")
        err = self.run_program(self.output, *base, "--resume", "--skip-non-finite", model=self.poisoned, data=self.rows)
        self.assertIn("goes on after step 2", err)
        self.assertIn("step 3 is skipped: the loss is not finite", err)

    def test_overwritten_a_run_stays_whole_until_a_step_has_worked(self):
        self.run_program(self.output, "--steps", 5)
        before = self.everything(self.output)
        rows = self.rows.with_suffix(".x.jsonl")
        rows.write_text(json.dumps({"text": "xx"}) + "\n")
        self.assertIn("step 1", self.run_program(self.output, "--steps", 3, "--overwrite", code=1, model=self.poisoned, data=rows))
        self.assertEqual(self.everything(self.output), before)
        self.run_program(self.output, "--steps", 3, "--overwrite")
        self.assertEqual([m["step"] for m in self.metrics(self.output)], [1, 2, 3])
        self.assertEqual(self.state(self.output)["step"], "3")

    def test_skipped_steps_change_nothing_and_are_told(self):
        base = ["--epochs", 1, "--no-shuffle", "--skip-non-finite"]
        err = self.run_program(self.output, *base, model=self.poisoned, data=self.rows)
        self.assertEqual(re.findall(r"step (\d) is skipped", err), ["3", "5"])
        self.assertIn("2 steps skipped", err)
        self.assertEqual([m["step"] for m in self.metrics(self.output) if m.get("skipped")], [3, 5])
        self.assertEqual([m["step"] for m in self.metrics(self.output) if m["loss"] is None], [3, 5])
        clean = self.folder / "rows-without-x.jsonl"
        clean.write_text("".join(line + "\n" for line in self.rows.read_text().splitlines() if "x" not in json.loads(line)["text"]))
        alone = self.output.with_suffix(".clean")
        self.run_program(alone, *base, model=self.poisoned, data=clean)
        self.assertEqual(self.adapter(alone)[1], self.adapter(self.output)[1])

    def test_steps_skipped_up_to_the_end_are_warned_of_and_show_no_loss(self):
        last = self.folder / "x-at-the-end.jsonl"
        last.write_text("".join(json.dumps({"text": t}) + "\n" for t in ["abc", "def", "xyz"]))
        err = self.run_program(self.output, "--epochs", 1, "--no-shuffle", "--skip-non-finite", model=self.poisoned, data=last)
        self.assertIn("warning: skipped up to the last step, 1 step in a row", err)
        self.assertRegex(err, r"step 3, skipped, ")
        self.assertNotRegex(err, r"step 3, loss")

    def test_a_loss_on_held_out_rows_that_is_not_finite_is_an_error(self):
        evaluate = [PROGRAM, "evaluate", "--model", str(self.poisoned), "--device", "cpu", "--dtype", "fp32", "--data", str(self.rows), "--seq-len", "40"]
        done = subprocess.run(evaluate, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (1, ""))
        self.assertRegex(done.stderr, r"error: the loss is not finite; the first value that is not is in the embedding")
        err = self.run_program(self.output, "--steps", 1, "--eval-data", self.rows, code=1, model=self.poisoned)
        self.assertIn("the loss is not finite", err)

    def test_a_run_in_which_every_step_is_skipped_fails(self):
        only = self.folder / "only-x.jsonl"
        only.write_text(json.dumps({"text": "xx"}) + "\n")
        self.assertIn("all 3 steps were skipped", self.run_program(self.output, "--steps", 3, "--skip-non-finite", code=1, model=self.poisoned, data=only))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    PROGRAM = os.path.abspath(sys.argv[1])
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]], verbosity=2)
