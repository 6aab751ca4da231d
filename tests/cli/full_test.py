#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Finetuning of all parameters with the built program.

usage: full_test.py PROGRAM [unittest arguments…]
What transformers is to load is skipped, with a reason, where it is not installed.
"""

import json
import os
import pathlib
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import runs_test  # noqa: E402
import tiny_model  # noqa: E402

try:
    import torch
    import transformers
except ImportError as error:
    transformers, WHY = None, str(error)

RUN_FILES = {"metrics.jsonl", "loss.svg", "resume"}


class FullTest(runs_test.RunsTest):
    FORM = ["--steps", 20, "--batch", 2, "--grad-accum", 2, "--schedule", "cosine", "--warmup-steps", 3, "--max-grad-norm", "0.5", "--seed", 11]

    def command(self, output, *arguments, model=None, data=None, rank=()):
        return super().command(output, "--mode", "full", *arguments, model=model, data=data, rank=rank)

    def product(self, output):
        """The files of the model."""
        return {f.name: f.read_bytes() for f in output.iterdir() if f.name not in RUN_FILES}

    def out(self, *arguments):
        done = subprocess.run([runs_test.PROGRAM, *map(str, arguments)], capture_output=True, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr.decode())
        return done.stdout.decode()

    def loss(self, model):
        return float(self.out("evaluate", "--device", "cpu", "--dtype", "fp32", "--data", self.data, "--seq-len", 40, "--model", model).split()[1])


class Models(FullTest):
    def test_what_comes_out_is_the_models_folder_with_trained_weights(self):
        for tied in True, False:
            model = tiny_model.write_model(self.folder / f"tied-{tied}", tied=tied)
            (model / "LICENSE").write_text("free")
            output = self.output / str(tied)
            stats = self.folder / "stats.json"
            done = subprocess.run(self.command(output, *self.FORM, "--eval-data", self.data, "--stats", stats, model=model), capture_output=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            before, after = [float(x) for x in re.findall(r"held-out loss \w+: ([\d.]+) nats", done.stdout.decode())]
            self.assertGreater(before - after, 1)
            product, source = self.product(output), {f.name: f.read_bytes() for f in model.iterdir()}
            self.assertEqual(product.keys(), source.keys())
            self.assertEqual([name for name in source if product[name] != source[name]], ["model.safetensors"])
            sizes = [len(data) - 8 - struct.unpack("<Q", data[:8])[0] for data in (files["model.safetensors"] for files in (product, source))]
            self.assertEqual(*sizes)
            self.assertEqual({f.name for f in output.iterdir()}, set(source) | RUN_FILES)
            self.assertAlmostEqual(self.loss(model), before, places=4)
            self.assertLess(abs(self.loss(output) - after), 0.02)  # rounded to bf16
            self.assertIn(b"model saved in", done.stderr)
            count = sum(shape[0] * (shape[1] if len(shape) == 2 else 1) for shape in tiny_model.shapes().values())
            count += 0 if tied else tiny_model.VOCABULARY * tiny_model.HIDDEN
            self.assertIn(f"trainable {count} of {count} parameters (100.0000 %)", done.stderr.decode())
            self.out("generate", "--model", output, "--device", "cpu", "--prompt", "In the", "--max-new-tokens", 4)
            told = json.loads(stats.read_text())
            self.assertEqual(told["steps"], 20)
            if sys.platform.startswith("linux"):  # the program's own memory is most of it here
                rss = told["memory"]["rss"]
                self.assertLess(abs(rss["measured"] / rss["predicted"] - 1), 0.5, rss)

    @unittest.skipUnless(sys.platform.startswith("linux"), "needs VmHWM")
    def test_what_it_takes_is_predicted_by_parameters_and_rows(self):
        def predicted(model, *arguments):
            stats = self.folder / "stats.json"
            self.run_program(self.output, "--steps", 1, "--overwrite", "--stats", stats, *arguments, model=model)
            return json.loads(stats.read_text())["memory"]["rss"]
        small = predicted(self.model)
        self.data.write_text(runs_test.TEXT * 40)
        rows = predicted(self.model, "--batch", 512)
        self.assertGreater(rows["predicted"] - small["predicted"], 500 * 40 * 4 * tiny_model.HIDDEN * (tiny_model.LAYERS + 3))
        self.data.write_text(runs_test.TEXT)

    def test_a_head_that_is_stored_beside_the_embedding_it_is_tied_to_stays_equal_to_it(self):
        model = tiny_model.write_model(self.folder / "redundant", tied=False)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        self.run_program(self.output, "--steps", 2, model=model)
        data = (self.output / "model.safetensors").read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8 : 8 + size])
        embedding, head = ([data[8 + size + at] for at in range(*header[n]["data_offsets"])] for n in ["model.embed_tokens.weight", "lm_head.weight"])
        self.assertEqual(embedding, head)

    def test_transformers_loads_it_and_computes_the_same_loss(self):
        if transformers is None:
            self.skipTest(WHY)
        for tied in True, False:
            model = tiny_model.write_model(self.folder / f"for-transformers-{tied}", tied=tied)
            output = self.output / str(tied)
            self.run_program(output, *self.FORM, model=model)
            loaded = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
            ids = torch.tensor([len(tiny_model.SPECIAL) + byte for byte in runs_test.TEXT.encode()])
            total = count = 0
            with torch.no_grad():
                for window in ids.split(40):
                    logits = loaded(input_ids=window.unsqueeze(0)).logits[0]
                    total += torch.nn.functional.cross_entropy(logits[:-1], window[1:], reduction="sum").item()
                    count += len(window) - 1
            self.assertAlmostEqual(total / count, self.loss(output), places=4)

    def test_weights_decay_and_the_rate_is_the_modes(self):
        self.run_program(self.output, "--steps", 2)
        self.assertEqual(self.metrics(self.output)[0]["learning_rate"], 1e-2)
        plain = self.product(self.output)
        self.run_program(self.output, "--steps", 2, "--overwrite", "--weight-decay", "0.9")
        self.assertNotEqual(self.product(self.output), plain)
        self.assertIn("configuration: --weight-decay was 0.9", self.run_program(self.output, "--steps", 2, "--resume", code=1))
        command = self.command(self.output, "--steps", 2, "--overwrite")
        at = command.index("--lr")
        subprocess.run(command[:at] + command[at + 2 :], check=True, capture_output=True)
        self.assertEqual(self.metrics(self.output)[0]["learning_rate"], 2e-5)

    def test_a_value_that_is_not_finite_is_refused_at_the_start_and_a_step_is_skipped(self):
        poisoned = tiny_model.write_model(self.folder / "nan", poison="model.layers.1.mlp.up_proj.weight")
        self.assertIn("model.layers.1.mlp.up_proj.weight", self.run_program(self.output, "--steps", 2, code=1, model=poisoned))
        self.assertFalse(self.output.exists())
        command = self.command(self.output, "--steps", 3)
        command[command.index("--lr") + 1] = "1e30"
        done = subprocess.run(command, capture_output=True)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr.decode(), "error: step 2: .* is not finite")
        done = subprocess.run([*command, "--resume", "--skip-non-finite"], capture_output=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn(b"step 3 is skipped", done.stderr)


class Memory(FullTest):
    def test_no_bit_depends_on_where_inputs_wait_and_how_much_is_resident(self):
        files, products = self.folder / "activations", []
        files.mkdir()
        for arguments in [[], ["--micro-batches", "sequential"], ["--activations", "ram"], ["--activations", f"file:{files}"],
                          ["--prefetch-ahead", 0], ["--prefetch-ahead", 5], ["--device-budget", "1MiB"], ["--storage", "ram", "--resident", "all"]]:  # fmt: skip
            self.run_program(self.output, "--overwrite", *self.FORM, *arguments)
            products.append(self.product(self.output))
        for product in products:
            self.assertEqual(product, products[0])

    def test_it_computes_in_bf16_over_masters_in_fp32(self):
        err = self.run_program(self.output, *self.FORM, "--eval-data", self.data)
        command = [*self.command(self.output, *self.FORM, "--overwrite")]
        command[command.index("--dtype") + 1] = "bf16"
        done = subprocess.run(command, capture_output=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertLess(self.loss(self.output), self.loss(self.model) - 1)
        data = (self.output / "resume" / "state.safetensors").read_bytes()
        header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        self.assertEqual({t["dtype"] for n, t in header.items() if n.startswith("parameter.")}, {"F32"})
        self.assertIn("of memory (blocks' weights in fp32", err)

    def test_a_model_that_does_not_fit_is_refused_with_numbers_before_it_is_read(self):
        large = tiny_model.write_model(self.folder / "large")
        config = json.loads((large / "config.json").read_text())
        hidden, inner, layers = 8192, 1 << 20, 64  # 26 GiB a layer in bf16
        config |= {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
        (large / "config.json").write_text(json.dumps(config))
        qkv, kv = tiny_model.HEADS * tiny_model.HEAD_DIM, tiny_model.KV_HEADS * tiny_model.HEAD_DIM
        shapes = {"model.embed_tokens.weight": [tiny_model.VOCABULARY, hidden], "model.norm.weight": [hidden]}
        for layer in range(layers):
            block = {"input_layernorm": [hidden], "self_attn.q_proj": [qkv, hidden], "self_attn.k_proj": [kv, hidden], "self_attn.v_proj": [kv, hidden],
                     "self_attn.o_proj": [hidden, qkv], "post_attention_layernorm": [hidden], "mlp.gate_proj": [inner, hidden], "mlp.up_proj": [inner, hidden],
                     "mlp.down_proj": [hidden, inner]}  # fmt: skip
            shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in block.items()}
        header, end = {}, 0
        for name, shape in shapes.items():
            size = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        with open(large / "model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            try:
                file.truncate(8 + len(text) + end)  # holes
            except OSError as error:
                self.skipTest(f"no file of {end} bytes with holes: {error}")
        err = self.run_program(self.output, "--steps", 1, code=1, model=large)
        self.assertRegex(err, r"error: --mode full needs [\d.]+ TiB of memory \(.*\), only [\d.]+ [GM]iB are available")
        self.assertFalse(self.output.exists())


class Options(FullTest):
    def test_what_makes_no_sense_with_it_is_refused_by_name(self):
        for option, value in [("--rank", 4), ("--alpha", 4), ("--dropout", 0.1), ("--targets", "q_proj"), ("--target-regex", ".*"), ("--top-fraction", 0.5),
                              ("--rank-pattern", "q_proj=2"), ("--alpha-pattern", "q_proj=2"), ("--adapter", self.folder), ("--storage", "mmap"),
                              ("--storage", "tiered"), ("--ram-budget", "1GiB"), ("--resident", "none"), ("--resident", "head")]:  # fmt: skip
            err = self.run_program(self.output, option, value, code=2)
            self.assertRegex(err, f"error: {option}.* --mode full ")
        self.assertIn("error: --rslora", self.run_program(self.output, "--rslora", code=2))
        self.assertIn("error: --graph", self.run_program(self.output, "--graph", code=2))
        self.assertIn("--mode", self.run_program(self.output, "--mode", "half", code=2))
        self.assertIn("--weight-decay", self.run_program(self.output, "--weight-decay", "-1", code=2))
        self.assertFalse(self.output.exists())

    def test_runs_of_another_kind_are_neither_gone_on_with_nor_replaced(self):
        lora, full = self.output / "lora", self.output / "full"
        adapter_run = lambda output, *how: subprocess.run(  # noqa: E731
            [*runs_test.RunsTest.command(self, output, "--steps", 2), *how], capture_output=True)
        self.assertEqual(adapter_run(lora).returncode, 0)
        self.run_program(full, "--steps", 2)
        before = [self.everything(lora), self.everything(full)]
        for how in "--overwrite", "--resume":
            self.assertIn("holds an adapter", self.run_program(lora, "--steps", 2, how, code=1))
            done = adapter_run(full, how)
            self.assertEqual(done.returncode, 1)
            self.assertIn(b"holds a model, where an adapter is to go", done.stderr)
        other = tiny_model.write_model(self.folder / "other-eps")
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-6}))
        self.assertIn("another configuration", self.run_program(full, "--steps", 2, "--overwrite", code=1, model=other))
        self.assertEqual([self.everything(lora), self.everything(full)], before)
        self.assertIn("not empty", self.run_program(full, "--steps", 2, code=1))
        self.assertIn("one folder", self.run_program(self.model, "--steps", 2, "--overwrite", code=1))
        copy = self.folder / "a-model"
        shutil.copytree(self.model, copy)
        self.assertIn("neither a run nor an adapter", self.run_program(copy, "--steps", 2, "--overwrite", code=1))


class Saving(FullTest):
    def test_killed_at_random_moments_it_ends_with_the_same_bytes(self):
        whole = self.output / "whole"
        self.run_program(whole, *self.FORM)
        rng = random.Random(7)
        output = self.output / "killed"
        moments = {
            "a step": lambda: True,
            "the state": lambda: self.within_state(output),
            "the model": lambda: (output / ".model-new").exists(),
            "the model's files": lambda: (output / ".model-new" / "model.safetensors").exists(),
        }
        kills, ends = dict.fromkeys(moments, 0), 0
        while sum(kills.values()) < 20 or ends < 2:
            state = output / "resume" / "state.safetensors"
            saved, name = int(self.state(output)["step"]) if state.exists() else 0, rng.choice(list(moments))
            target = saved + rng.randint(1, 5)
            if self.killed(output, lambda: self.lines(output) >= target and moments[name](), *self.FORM, "--resume", "--save-every", rng.choice([1, 2, 3])):
                kills[name] += 1
                if (output / "model.safetensors").exists():
                    self.loss(output)  # whole, whichever step it is of
                continue
            ends += 1
            self.assertEqual(self.product(output), self.product(whole))
            timeless = lambda o: [m | {"seconds": 0} for m in self.metrics(o)]  # noqa: E731
            self.assertEqual(timeless(output), timeless(whole))
            self.assertEqual((output / "resume" / "state.safetensors").read_bytes(), (whole / "resume" / "state.safetensors").read_bytes())
            self.assertEqual([f for f in output.rglob("*") if ".part" in f.name or "new" in f.name], [])
            shutil.rmtree(output)
        print(f"\n  killed {kills}", file=sys.stderr)
        self.assertGreaterEqual(min(kills.values()), 1)

    def test_nothing_saved_and_finished(self):
        whole, output = self.output / "whole", self.output / "killed"
        self.run_program(whole, *self.FORM)
        self.assertTrue(self.killed(output, lambda: self.lines(output) >= 4, *self.FORM))
        self.assertEqual(self.state(output)["step"], "0")
        self.assertFalse((output / "model.safetensors").exists())
        self.assertIn("the run starts from the beginning", self.run_program(output, *self.FORM, "--resume"))
        self.assertEqual(self.product(output), self.product(whole))
        before = self.everything(output)
        self.assertIn("is finished, after step 20", self.run_program(output, *self.FORM, "--resume"))
        self.assertEqual(self.everything(output), before)
        for name in ["model.safetensors", "tokenizer.json"]:  # killed between state and model
            (output / name).unlink()
            self.assertIn("wrote the rest", self.run_program(output, *self.FORM, "--resume"))
            self.assertEqual(self.product(output), self.product(whole))
        self.assertIn("configuration: --seed was 11", self.run_program(output, *self.FORM[:-1], 12, "--resume", code=1))

    def test_an_interrupted_run_goes_on(self):
        whole, output = self.output / "whole", self.output / "interrupted"
        self.run_program(whole, *self.FORM)
        running = subprocess.Popen(self.command(output, *self.FORM), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while running.poll() is None and self.lines(output) < 3:
            os.sched_yield()
        running.send_signal(signal.SIGINT)
        shown = running.communicate(timeout=60)[1]
        self.assertEqual(running.returncode, 130, shown)
        self.assertRegex(shown, rb"model saved in .* after step \d+; --resume goes on")
        self.loss(output)
        self.run_program(output, *self.FORM, "--resume")
        self.assertEqual(self.product(output), self.product(whole))

    def test_a_full_disk_leaves_the_last_good_state_and_model(self):
        output = self.output / "full"
        self.assertTrue(self.killed(output, lambda: self.lines(output) >= 3, *self.FORM, "--save-every", 2))
        before = (self.state(output), self.product(output))
        size = (output / "resume" / "state.safetensors").stat().st_size
        limited = ["bash", "-c", f"trap '' XFSZ; ulimit -f {size // 1024 - 8}; exec \"$@\"", "bash"]
        done = subprocess.run([*limited, *self.command(output, *self.FORM, "--resume", "--save-every", 2)], capture_output=True)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertRegex(done.stderr.decode(), r"error: .*state\.safetensors.*writing failed")
        self.assertEqual((self.state(output), self.product(output)), before)
        whole = self.output / "whole"
        self.run_program(whole, *self.FORM)
        self.run_program(output, *self.FORM, "--resume")
        self.assertEqual(self.product(output), self.product(whole))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    runs_test.PROGRAM = os.path.abspath(sys.argv[1])
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]], verbosity=2)
