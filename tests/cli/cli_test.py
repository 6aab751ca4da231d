#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the built program as a user would.

usage: cli_test.py PROGRAM SMOLLM2_FOLDER [unittest arguments…]
Without that folder its tests are skipped; the environment's BLOCK_STREAMER_SMOLLM2 comes first.
"""

import json
import os
import pathlib
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import tiny_model  # noqa: E402

PROGRAM = ""
SMOLLM2 = ""
STATISTICS = {
    "bytes_needed", "bytes_read", "bytes_copied", "passes", "visits", "peak_resident_blocks", "peak_resident_bytes",
    "bound_bytes", "storage_wait_s", "device_wait_s", "seconds", "tokens", "tokens_per_s", "bytes_read_per_s",
}  # fmt: skip


def run(*arguments, stdin=None, timeout=300):
    """(exit code, stdout as bytes, stderr as text)"""
    done = subprocess.run([PROGRAM, *map(str, arguments)], input=stdin, capture_output=True, timeout=timeout)
    return done.returncode, done.stdout, done.stderr.decode()


class CliTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="bs-cli-"))
        cls.model = tiny_model.write_model(cls.folder / "model")

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(cls.folder)

    def ok(self, *arguments, **options):
        code, out, err = run(*arguments, **options)
        self.assertEqual(code, 0, err)
        return out

    def refused(self, *arguments, says=(), code=None, **options):
        got, out, err = run(*arguments, **options)
        self.assertIn(got, (1, 2) if code is None else (code,), err)
        errors = [line for line in err.splitlines() if line.startswith("block-streamer: error: ")]
        self.assertEqual(len(errors), 1, err)
        for part in [says] if isinstance(says, str) else says:
            self.assertIn(part, errors[0])
        self.assertNotIn("terminate called", err)
        return out

    def refused_words(self, *arguments):
        """The error alone."""
        code, _, err = run(*arguments)
        self.assertIn(code, (1, 2), err)
        return err.split("block-streamer: error: ")[1]

    def generate(self, *arguments, model=None, **options):
        return self.ok("generate", "--model", model or self.model, "--device", "cpu", "--dtype", "fp32", *arguments, **options)


class Basics(CliTest):
    def test_help_of_every_command_has_an_example(self):
        for command in ["generate", "finetune", "evaluate", "tokenize", "inspect"]:
            out = self.ok(command, "--help").decode()
            self.assertIn("Example", out)
            self.assertIn(f"block-streamer {command} --model", out)
        self.assertIn(b"generate", self.ok("--help"))
        self.assertRegex(self.ok("--version"), rb"^block-streamer \d+\.\d+\.\d+\n$")

    def test_wrong_usage_is_one_line(self):
        self.refused(code=2)
        self.refused("generate", code=2, says="--model")
        self.refused("generate", "--model", self.model, "--prompt", "a", "--no-such-option", code=2, says="--no-such-option")
        for option, value in [("--device", "tpu"), ("--device", "cuda:x"), ("--storage", "tape"), ("--dtype", "int4"),
                              ("--prefetch-ahead", "-1"), ("--device-budget", "lots"), ("--device-budget", "-5"),
                              ("--max-new-tokens", "0"), ("--top-k", "-1")]:  # fmt: skip
            self.refused("generate", "--model", self.model, "--prompt", "a", option, value, code=2, says=option)
        base = ["generate", "--model", self.model, "--device", "cpu"]
        self.refused(*base, code=2, says="--prompt")
        self.refused(*base, "--prompt", "a", "--batch", 2, code=2, says="--batch")
        self.refused(*base, "--prompt", "a", "--stop", "", code=2, says="--stop")
        self.refused("tokenize", "--model", self.model, code=2, says="--text")
        for value in ["0", "1.5", "-1", "x"]:
            self.refused("finetune", "--model", self.model, "--data", "a.txt", "--output", "b", "--top-fraction", value, code=2, says="--top-fraction")
        self.refused("generate", "--model", self.model, "--prompt", "a", "--system", "b", code=2, says="--chat")
        for option, value in [("--temperature", "-1"), ("--temperature", "nan"), ("--top-p", "0"), ("--top-p", "1.1")]:
            self.refused("generate", "--model", self.model, "--prompt", "a", option, value, code=2)

    def test_a_word_that_nobody_knows_is_named_with_the_nearest(self):
        for arguments, says in [
            ([], ["a command is needed", "generate, finetune"]),
            (["genrate", "--model", "m"], ["'genrate' is no command", "did you mean generate?"]),
            (["xyz"], ["'xyz' is no command", "generate, finetune"]),
            (["--model", "m", "generate", "--prompt", "a"], ["--model is no option of block-streamer"]),
            (["generate", "--modle", "m", "--prompt", "a"], ["--modle is no option of generate", "did you mean --model?"]),
            (["generate", "--model", "m", "--max-new=3", "--prompt", "a"], ["--max-new is no option of generate", "did you mean --max-new-tokens?"]),
            (["generate", "--model", "m", "--prompt", "a", "--quux", "3"], ["--quux is no option of generate (--help"]),
            (["generate", "--model", "m", "--prompt", "once", "upon", "a", "time"], ["'upon' belongs to no option of generate", "quotes"]),
        ]:  # fmt: skip
            self.refused(*arguments, code=2, says=says)

    def test_numbers_and_names_out_of_range_are_said_in_words(self):
        finetune = ["finetune", "--model", self.model, "--data", "a.txt", "--output", self.folder / "never"]
        generate = ["generate", "--model", self.model, "--prompt", "a"]
        for base, option, value, says in [
            (finetune, "--schedule", "square", "square not in {constant,cosine,linear}"),
            (finetune, "--micro-batches", "apart", "apart not in {sequential,together}"),
            (finetune, "--steps", "0", "'0' is no whole number from 1 to 2147483648"),
            (finetune, "--steps", "1.5", "'1.5' is no whole number"),
            (finetune, "--batch", "0x10", "'0x10' is no whole number"),
            (generate, "--prefetch-ahead", "99999999999", "from 0 to 1000000"),
            (generate, "--top-k", "99999999999999999999", "to 18446744073709551615"),
            (generate, "--temperature", "x", "--temperature: 'x' is no number"),
            (["convert", "--model", self.model, "--output", self.folder / "never"], "--shard-size", "0", "'0': a file takes at least 1 byte"),
            (["merge", "--model", self.model, "--adapter", "a", "--output", self.folder / "never"], "--shard-size", "0KiB", "'0KiB': a file takes at least 1 byte"),
        ]:  # fmt: skip
            self.assertLess(len(self.refused_words(*base, option, value)), 160)
            self.refused(*base, option, value, code=2, says=[option, says])
        self.assertFalse((self.folder / "never").exists())

    def test_what_no_file_can_mend_is_wrong_usage(self):
        text, rows = self.folder / "usage.txt", self.folder / "usage.jsonl"
        text.write_text("some text that is long enough")
        rows.write_text('{"prompt": "a"}\n')
        finetune = ["finetune", "--model", self.model, "--device", "cpu", "--output", self.folder / "never", "--data"]
        generate = ["generate", "--model", self.model, "--device", "cpu", "--prompt-file"]
        for arguments, says in [
            ([*finetune, text, "--storage", "ram", "--ram-budget", "1GiB"], ["--ram-budget", "ram"]),
            ([*finetune, text, "--steps", 3, "--warmup-steps", 3], ["--warmup-steps 3", "3 steps"]),
            ([*finetune, text, "--target-regex", "("], ['--target-regex: "(" is no', "parenthes"]),
            ([*finetune, text, "--rank-pattern", "[a=3"], ['--rank-pattern: "[a" is no', "]"]),
            ([*finetune, text, "--alpha-pattern", "(=3"], ['--alpha-pattern: "(" is no', "parenthes"]),
            ([*finetune, "notes.md"], ["--data notes.md", ".jsonl"]),
            ([*finetune, text, "--eval-data", "notes.md"], ["--eval-data notes.md", ".jsonl"]),
            (["evaluate", "--model", self.model, "--data", "notes.md"], ["--data notes.md", ".jsonl"]),
            ([*generate, "notes.md", "--batch", 2, "--output", self.folder / "never"], ["--prompt-file notes.md", ".jsonl"]),
            ([*generate, rows], ["--prompt-file", "usage.jsonl", "--batch"]),
        ]:  # fmt: skip
            self.refused(*arguments, code=2, says=says)
        self.assertFalse((self.folder / "never").exists())

    def test_sizes_that_are_none_say_why(self):
        for value, why in [("-5MiB", "negative"), ("1.5", "fraction"), ("99999999TiB", "too large"), ("5M", "units:"), ("nan", "units:")]:
            self.refused("generate", "--model", self.model, "--prompt", "a", f"--device-budget={value}", code=2, says=["--device-budget", value, why])

    def test_a_failure_of_the_world_is_1(self):
        self.refused("generate", "--model", self.folder / "nowhere", "--prompt", "a", code=1, says="nowhere")
        self.refused("tokenize", "--model", self.model, "--file", self.folder / "absent.txt", code=1, says=["absent.txt", "--text"])
        self.refused("finetune", "--model", self.model, "--data", self.folder / "absent.txt", "--output", self.folder / "o", code=1, says="absent.txt")
        self.refused("evaluate", "--model", self.model, "--data", self.folder / "absent.txt", code=1, says="absent.txt")

    def test_a_budget_that_holds_no_block(self):
        seen = json.loads(self.ok("inspect", "--model", self.model, "--json"))
        base = ["generate", "--model", self.model, "--device", "cpu", "--prompt", "a", "--max-new-tokens", 2, "--dtype", "fp32"]
        for storage, scale in [("file", 1), ("mmap", 1), ("ram", 2)]:  # in memory it is converted to fp32, twice the size
            out, says = run(*base, "--storage", storage, "--device-budget", 100)[1:]
            self.assertEqual(out, b"")
            smallest = int(re.search(r"smallest takes (\d+) bytes", says).group(1))
            self.assertGreaterEqual(smallest, scale * seen["blocks"][0]["bytes"])
            self.refused(*base, "--storage", storage, "--device-budget", smallest - 1, code=1, says=["--device-budget", str(smallest)])
            stats = self.folder / "budget.json"
            self.ok(*base, "--storage", storage, "--device-budget", smallest, "--stats", stats)
            self.assertEqual(json.loads(stats.read_text())["peak_resident_blocks"], 3)
        for budget, slots in [(smallest, "slots for all 3 blocks"), ("900TiB", "slots for all 3 blocks")]:
            self.assertRegex(run(*base, "--storage", "ram", "--device-budget", budget)[2], f"device: {slots}, .*KiB with --device-budget ")
        self.assertNotIn("device: slots", run(*base)[2])


class Tokenize(CliTest):
    TEXT = "Fünf naïve 你好 🙂\r\n  def f(x):\treturn x  <|im_end|> \u0000 end\n"

    def test_round_trip(self):
        ids = json.loads(self.ok("tokenize", "--model", self.model, "-", stdin=self.TEXT.encode()))
        self.assertIn(2, ids)  # the special token in the text
        back = self.ok("tokenize", "--model", self.model, "--decode", "--text", json.dumps(ids))
        self.assertEqual(back.decode(), self.TEXT)
        file = self.folder / "text.txt"
        file.write_bytes(self.TEXT.encode())
        self.assertEqual(json.loads(self.ok("tokenize", "--model", self.model, "--file", file)), ids)
        self.assertEqual(json.loads(self.ok("tokenize", "--model", self.model, "--text", "ab")), [3 + 97, 3 + 98])

    def test_bad_input(self):
        base = ["tokenize", "--model", self.model]
        self.refused(*base, "-", stdin=b"ab\xffc", says="2")
        self.refused(*base, "--decode", "--text", "[1, 2", says="JSON")
        self.refused(*base, "--decode", "--text", "[99999]", says="99999")
        self.refused(*base, "--decode", "--text", "[-1]", says="entry 0")
        self.refused(*base, says="--text")
        self.refused(*base, "--file", self.folder / "absent.txt", says="absent.txt")


class Inspect(CliTest):
    def test_json(self):
        seen = json.loads(self.ok("inspect", "--model", self.model, "--json"))
        self.assertEqual(seen["block_count"], tiny_model.LAYERS)
        self.assertEqual(len(seen["blocks"]), tiny_model.LAYERS)
        self.assertEqual(seen["blocks"][1]["name"], "model.layers.1")
        self.assertEqual(seen["dtypes"]["BF16"]["bytes"], seen["streamed"]["bytes"] + seen["resident"]["bytes"])
        self.assertEqual(seen["resident"]["parameters"], tiny_model.VOCABULARY * tiny_model.HIDDEN + tiny_model.HIDDEN)
        self.assertTrue(seen["tied_head"])
        self.assertEqual(seen["eos_ids"], [2])
        self.assertNotIn("verified", seen)

    def test_text(self):
        out = self.ok("inspect", "--model", self.model, "--verify").decode()
        for part in ["3 blocks", "streams", "resident", "BF16", "also the head", "all finite"]:
            self.assertIn(part, out)

    def test_verify_finds_values_that_are_not_finite(self):
        name = "model.layers.1.mlp.up_proj.weight"
        bad = tiny_model.write_model(self.folder / "bad", poison=name)
        self.assertEqual(run("inspect", "--model", bad)[0], 0)
        code, out, err = run("inspect", "--model", bad, "--json", "--verify")
        self.assertEqual(code, 1)
        found = json.loads(out)["verified"]["non_finite"]
        self.assertEqual([(f["tensor"], f["count"]) for f in found], [(name, 1)])
        data = (bad / "model.safetensors").read_bytes()
        self.assertEqual(data[found[0]["first_offset"] :][:2], b"\xc0\x7f")
        self.assertIn("not finite", err)


class Generate(CliTest):
    PROMPTS = ["Once upon a time", "A", "3 + 4 = 7, and so on and so on", "xy"]

    def test_stdout_is_the_text_alone(self):
        code, out, err = run("generate", "--model", self.model, "--device", "cpu", "--prompt", "Hello", "--max-new-tokens", 12)
        self.assertEqual(code, 0, err)
        out.decode()  # whole characters
        self.assertFalse(out.endswith(b"\n\n"))
        self.assertNotIn(b"Hello", out)
        self.assertNotIn(b"block-streamer", out)
        for part in ["storage: ", "dtype: ", "tokens/s", "GB/s", "finished "]:
            self.assertIn(part, err)
        self.assertNotIn("error", err)

    def test_the_end_is_said_in_words(self):
        base = ["generate", "--model", self.model, "--device", "cpu", "--dtype", "fp32", "--prompt", "Hello"]
        code, out, err = run(*base, "--max-new-tokens", 1)
        self.assertIn("finished after --max-new-tokens: 5 prompt and 1 new token in", err)
        self.assertNotIn("tokens/s", err)  # one token has no pace
        code, out, err = run(*base, "--max-new-tokens", 30, "--stop", self.generate("--prompt", "Hello", "--max-new-tokens", 8).decode()[4:6])
        self.assertIn("finished at a stop text: ", err)

    def test_tiers_prefetch_and_budget_give_the_same_text(self):
        texts = {
            self.generate("--prompt", "Hello", "--max-new-tokens", 10, "--storage", storage, "--prefetch-ahead", ahead, *more)
            for storage in ["ram", "tiered", "mmap", "file", "io_uring", "pinned", "auto"]
            for ahead in [0, 2]
            for more in [[], ["--device-budget", "1MiB"]]
        }
        self.assertEqual(len(texts), 1)
        self.assertGreater(len(texts.pop()), 5)

    def test_what_stays_resident_changes_no_text(self):
        ask = ["generate", "--model", self.model, "--device", "cpu", "--dtype", "fp32", "--prompt", "Hello", "--max-new-tokens", 6, "--stop", "\u2603"]
        text = self.ok(*ask)
        row = tiny_model.HIDDEN * 2  # bytes, bf16
        table = tiny_model.VOCABULARY * row
        for storage in ["ram", "mmap", "file", "io_uring", "tiered"]:
            for resident in ["all", "head", "none"]:
                stats = self.folder / "resident.json"
                code, out, err = run(*ask, "--storage", storage, "--resident", resident, "--stats", stats)
                self.assertEqual((code, out), (0, text), err)
                seen = json.loads(stats.read_text())
                self.assertEqual(seen["visits"], seen["passes"] * (tiny_model.LAYERS + (resident == "none")))
                if resident != "none":  # the tiny model is tied: its head is its embedding
                    self.assertNotIn("head", seen)
                    self.assertNotIn("embedding", seen)
                    self.assertEqual("one tensor" in err, resident == "head")
                    continue
                self.assertRegex(err, r"resident: the final norm; rows of the embedding .*, the head is streamed in 1 slice of ")
                self.assertEqual(seen["head"]["visits"], seen["passes"])
                self.assertEqual(seen["head"]["bytes_needed"], table * (2 if storage == "ram" else 1))  # ram holds fp32
                self.assertGreaterEqual(seen["bytes_needed"], seen["head"]["bytes_needed"])
                # "Hello" has 4 letters of its own; each pass but the last then reads the row of one token.
                self.assertEqual(seen["embedding"], {"rows_read": 4 + seen["passes"] - 1, "bytes_read": (4 + seen["passes"] - 1) * row})
        self.refused(*ask, "--resident", "some", code=2, says="--resident")

    def test_an_untied_head_is_resident_without_the_embedding(self):
        untied = tiny_model.write_model(self.folder / "untied", tied=False)
        ask = ["generate", "--model", untied, "--device", "cpu", "--dtype", "fp32", "--prompt", "Hello", "--max-new-tokens", 6, "--stats", self.folder / "untied.json"]
        text = self.ok(*ask)
        for resident, told in [("head", "resident: the head; rows of the embedding are read"), ("none", "resident: the final norm; ")]:
            code, out, err = run(*ask, "--resident", resident)
            self.assertEqual((code, out), (0, text), err)
            self.assertIn(told, err)
            seen = json.loads((self.folder / "untied.json").read_text())
            self.assertIn("embedding", seen)
            self.assertEqual("head" in seen, resident == "none")
        table = tiny_model.VOCABULARY * tiny_model.HIDDEN * 2
        norm = tiny_model.HIDDEN * 2
        told = json.loads(self.ok("inspect", "--model", untied, "--json"))
        self.assertEqual(told["resident_with"], {"all": 2 * table + norm, "head": table + norm, "none": norm})
        self.assertEqual(told["head_slices"], {"count": 1, "bytes": table})
        self.assertIn("--resident head keeps", self.ok("inspect", "--model", untied).decode())
        self.assertNotIn("--resident head keeps", self.ok("inspect", "--model", self.model).decode())

    def test_auto_puts_the_embedding_off_where_it_does_not_fit(self):
        # No device has so much memory for blocks that stay.
        ask = ["generate", "--model", self.model, "--device", "cpu", "--prompt", "Hello", "--max-new-tokens", 2, "--storage", "file"]
        untied = tiny_model.write_model(self.folder / "untied-auto", tied=False)
        code, out, err = run(*ask[:2], untied, *ask[3:], "--device-budget", "900TiB")
        self.assertRegex(err, r"resident: the head; .*auto: embedding and head take .* of the device may be filled")
        code, out, err = run(*ask)
        self.assertNotIn("resident: ", err)

    def test_the_tier_of_another_system_is_refused_by_name(self):
        code, out, err = run("generate", "--model", self.model, "--prompt", "Hello", "--storage", "iocp")
        self.assertNotEqual(code, 0)
        self.assertEqual(out, b"")
        self.assertRegex(err, r"'iocp'.*Windows.*io_uring")

    def test_what_reads_the_files_is_said(self):
        code, _, err = run("generate", "--model", self.model, "--device", "cpu", "--prompt", "Hello", "--max-new-tokens", 2, "--storage", "io_uring")
        self.assertEqual(code, 0, err)
        self.assertRegex(err, r"storage: (io_uring \(|thread pool, .*: )")
        self.assertRegex(err, r"O_DIRECT|page cache \(")

    def test_a_ram_budget_keeps_as_many_blocks_in_memory(self):
        args = ["generate", "--model", self.model, "--device", "cpu", "--prompt", "Hello", "--max-new-tokens", 5]
        plain = self.generate("--prompt", "Hello", "--max-new-tokens", 5, "--storage", "file")
        block = json.loads(self.ok("inspect", "--model", self.model, "--json"))["blocks"][0]["bytes"]
        for storage in [[], ["--storage", "tiered"]]:  # a budget makes auto tiered
            for budget, held in [("900TiB", "all 3 blocks stay in memory\n"), (str(block + 2048), "1 of 3 blocks stays in memory, the others are streamed from files")]:
                code, out, err = run(*args, "--dtype", "fp32", *storage, "--ram-budget", budget)
                self.assertEqual((code, out), (0, plain), err)
                self.assertIn("storage: tiered, " + held, err)
        self.refused(*args, "--ram-budget", "100", says="holds no block")
        for storage in ["file", "mmap", "ram"]:
            self.refused(*args, "--storage", storage, "--ram-budget", "1GiB", code=2, says="--ram-budget")
        self.refused(*args, "--ram-budget", "much", code=2, says="--ram-budget")

    def test_prompt_sources_are_equal(self):
        file = self.folder / "prompt.txt"
        file.write_text("Hello\n")
        direct = self.generate("--prompt", "Hello", "--max-new-tokens", 8)
        self.assertEqual(self.generate("--prompt-file", file, "--max-new-tokens", 8), direct)
        self.assertEqual(self.generate("--prompt-file", "-", "--max-new-tokens", 8, stdin=b"Hello\n"), direct)

    def test_chat_is_the_template(self):
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        head = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        tail = ["--max-new-tokens", 8]
        asked = self.generate("--chat", "--prompt", "Hi", *tail)
        self.assertEqual(asked, self.generate("--prompt", head.format(system), *tail))
        told = self.generate("--chat", "--system", "Be short.", "--prompt", "Hi", *tail)
        self.assertEqual(told, self.generate("--prompt", head.format("Be short."), *tail))
        self.assertNotEqual(asked, told)

    def test_stop_text_and_seed(self):
        whole = self.generate("--prompt", "Hello", "--max-new-tokens", 30).decode()
        stop = whole[6:9]
        self.assertEqual(self.generate("--prompt", "Hello", "--max-new-tokens", 30, "--stop", "never there", "--stop", stop).decode(), whole[: whole.index(stop)])
        draw = ["--prompt", "Hello", "--temperature", "1.5", "--top-k", "50", "--top-p", "0.95", "--max-new-tokens", "20", "--seed"]
        self.assertEqual(self.generate(*draw, 3), self.generate(*draw, 3))
        self.assertNotEqual(self.generate(*draw, 3), self.generate(*draw, 4))

    def test_batch_equals_single_runs(self):
        file, output = self.folder / "prompts.txt", self.folder / "texts.jsonl"
        file.write_text("\n".join(self.PROMPTS) + "\n\n")
        for batch in [3, 8]:
            code, out, err = run("generate", "--model", self.model, "--device", "cpu", "--dtype", "fp32", "--storage", "file", "--batch", batch,
                                 "--prompt-file", file, "--output", output, "--max-new-tokens", 9)  # fmt: skip
            self.assertEqual((code, out), (0, b""), err)
            rows = [json.loads(line) for line in output.read_text().splitlines()]
            self.assertEqual([row["prompt"] for row in rows], self.PROMPTS)
            for row in rows:
                self.assertEqual(row["text"].encode(), self.generate("--prompt", row["prompt"], "--max-new-tokens", 9))
                self.assertLessEqual(len(row["ids"]), 9)
                self.assertIn(row["finish_reason"], ["length", "eos"])

    def test_batch_of_rows(self):
        file, output = self.folder / "rows.jsonl", self.folder / "answers.jsonl"
        rows = [{"id": 7, "prompt": "Hi"}, {"messages": [{"role": "user", "content": "Hi"}]}]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.generate("--batch", 2, "--prompt-file", file, "--output", output, "--max-new-tokens", 6)
        plain, chat = [json.loads(line) for line in output.read_text().splitlines()]
        self.assertEqual(plain["id"], 7)
        self.assertEqual(plain["text"].encode(), self.generate("--prompt", "Hi", "--max-new-tokens", 6))
        self.assertEqual(chat["text"].encode(), self.generate("--chat", "--prompt", "Hi", "--max-new-tokens", 6))

    def test_statistics_and_trace(self):
        stats, trace = self.folder / "stats.json", self.folder / "trace.json"
        self.generate("--prompt", "Hello", "--max-new-tokens", 5, "--storage", "file", "--stop", "\u2603", "--stats", stats, "--trace", trace)
        seen = json.loads(stats.read_text())
        self.assertLessEqual(STATISTICS, seen.keys())
        self.assertEqual(seen["passes"], seen["tokens"])
        self.assertEqual(seen["visits"], seen["passes"] * tiny_model.LAYERS)
        self.assertEqual(seen["peak_resident_blocks"], 2)
        self.assertGreater(seen["bytes_read"], 0)
        # The file's bf16 is converted to fp32 at each visit, into a place of its own.
        block = json.loads(self.ok("inspect", "--model", self.model, "--json"))["largest_block_bytes"]
        self.assertGreaterEqual(seen["bound_bytes"], 2 * block)
        self.assertLess(seen["bound_bytes"], 2 * block * 1.02)  # tensors begin at multiples of 256
        self.assertEqual(seen["bytes_converted"], seen["visits"] * seen["bound_bytes"])
        events = json.loads(trace.read_text())["traceEvents"]
        self.assertEqual(sum(e["name"] == "convert" for e in events), seen["visits"])
        self.assertTrue({"storage", "compute"} <= {e["args"]["name"] for e in events if e["ph"] == "M" and "name" in e["args"]})

    def test_a_prompt_longer_than_the_positions(self):
        self.refused("generate", "--model", self.model, "--device", "cpu", "--prompt", "a" * 200, says=["200 tokens", "128", "max_position_embeddings"])
        self.assertIn("finished at the model's last position", run("generate", "--model", self.model, "--device", "cpu", "--prompt", "a" * 120)[2])

    def test_interrupt_ends_with_the_text_so_far(self):
        model = tiny_model.write_model(self.folder / "long")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1000000, "eos_token_id": None}))
        (model / "generation_config.json").unlink()
        running = subprocess.Popen([PROGRAM, "generate", "--model", model, "--device", "cpu", "--prompt", "Hello", "--max-new-tokens", "900000"],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
        first = running.stdout.read(4)  # it is generating
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=120)
        self.assertEqual(running.returncode, 130, err)
        (first + out).decode()
        self.assertIn("interrupted: ", err.decode())


class BadInput(CliTest):
    def broken(self, name):
        return pathlib.Path(shutil.copytree(self.model, self.folder / name))

    def refused_everywhere(self, model, says):
        self.refused("generate", "--model", model, "--device", "cpu", "--prompt", "a", says=says)
        self.refused("inspect", "--model", model, says=says)

    def test_a_missing_model(self):
        self.refused_everywhere(self.folder / "nowhere", "nowhere")
        self.refused("tokenize", "--model", self.folder / "nowhere", "--text", "a", says="nowhere")

    def test_an_unfinished_conversion_is_called_so(self):
        model, adapter = self.broken("unfinished"), self.folder / "no-adapter"
        (model / "tokenizer.json").unlink()  # comes last, as config.json does
        (model / "config.json").unlink()
        (model / "block_streamer.convert.json").write_text("{}")
        data = self.folder / "unfinished.txt"
        data.write_text("some text")
        for command in [["generate", "--prompt", "a"], ["evaluate", "--data", data], ["finetune", "--data", data, "--output", self.folder / "never"],
                        ["tokenize", "--text", "a"], ["inspect"], ["checksum"], ["convert", "--output", self.folder / "never"],
                        ["merge", "--adapter", adapter, "--output", self.folder / "never"]]:  # fmt: skip
            self.refused(*command, "--model", model, code=1, says=["unfinished: ", "has not ended; run convert again"])
        self.assertFalse((self.folder / "never").exists())

    def test_an_lfs_pointer(self):
        model = self.broken("pointer")
        (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        self.refused_everywhere(model, ["model.safetensors", "LFS"])

    def test_a_truncated_file(self):
        model = self.broken("short")
        weights = model / "model.safetensors"
        os.truncate(weights, weights.stat().st_size - 10)
        self.refused_everywhere(model, "model.safetensors")
        os.truncate(weights, 4)
        self.refused_everywhere(model, "model.safetensors")

    def test_a_folder_without_weights_or_tokenizer(self):
        model = self.broken("empty")
        (model / "tokenizer.json").unlink()
        self.refused("generate", "--model", model, "--prompt", "a", says="tokenizer.json")
        (model / "model.safetensors").unlink()
        self.refused("inspect", "--model", model, says="model.safetensors")

    def test_an_unknown_model_type(self):
        model = self.broken("other")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
        self.refused_everywhere(model, "mamba")

    def test_weights_that_are_not_finite(self):
        model = tiny_model.write_model(self.folder / "nan", poison="model.norm.weight")
        base = ["--device", "cpu", "--prompt", "a"]
        self.refused("generate", "--model", model, *base, code=1, says=["not finite", "in the logits"])
        model = tiny_model.write_model(self.folder / "nan-block", poison="model.layers.1.mlp.up_proj.weight")
        for dtype in ["fp32", "bf16"]:
            out = self.refused("generate", "--model", model, *base, "--dtype", dtype, code=1,
                               says=["the prompt, new token 1", "not finite", "in the output of block 1"])  # fmt: skip
            self.assertEqual(out, b"")
        prompts, output = self.folder / "nan.txt", self.folder / "nan.jsonl"
        prompts.write_text("a\nb\n")
        self.refused("generate", "--model", model, "--device", "cpu", "--batch", 2, "--prompt-file", prompts, "--output", output, code=1, says=["prompt 1", "block 1"])
        self.assertFalse(output.exists())

    def sharded(self, name, claims):
        """The model in one shard with an index; `claims`: what the index says besides."""
        model = self.broken(name)
        (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
        tiny_model.write_safetensors(model / "model-00002-of-00002.safetensors", {"rotary_emb.inv_freq": ((2,), [1.0, 0.5])})
        weight_map = {tensor: "model-00001-of-00002.safetensors" for tensor in tiny_model.shapes()} | claims
        (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
        return model

    def test_an_index_that_lies(self):
        name = "model.layers.1.mlp.up_proj.weight"
        lies = {name: "model-00002-of-00002.safetensors"}
        self.refused_everywhere(self.sharded("lies", lies), ["model-00002-of-00002.safetensors", name])
        # Public checkpoints name tensors that no file holds; nothing that computes needs these.
        model = self.sharded("odd", {"lm_head.weight": "model-00002-of-00002.safetensors", "mtp.fc.weight": "model-00002-of-00002.safetensors"})
        code, out, err = run("generate", "--model", model, "--device", "cpu", "--dtype", "fp32", "--prompt", "a", "--max-new-tokens", 4)
        self.assertEqual(out, self.generate("--prompt", "a", "--max-new-tokens", 4), err)
        self.assertIn("warning: ", err)
        self.assertIn("'lm_head.weight', missing in model-00002-of-00002.safetensors", err)

    def test_outputs_that_cannot_be_written(self):
        base = ["generate", "--model", self.model, "--device", "cpu", "--prompt", "a", "--max-new-tokens", 1]
        nowhere = self.folder / "nowhere" / "file.json"
        self.refused(*base, "--stats", nowhere, says="nowhere")
        self.refused(*base, "--trace", nowhere, says="nowhere")
        self.refused(*base, "--stats", self.folder, says="folder")
        prompts = self.folder / "p.txt"
        prompts.write_text("a\n")
        self.refused("generate", "--model", self.model, "--batch", 1, "--prompt-file", prompts, "--output", nowhere, says="nowhere")
        with open("/dev/full", "wb") as full:
            done = subprocess.run([PROGRAM, *map(str, base)], stdout=full, stderr=subprocess.PIPE)
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"standard output", done.stderr)

    def test_outputs_never_take_the_place_of_what_is_worked_with(self):
        data = self.folder / "data.txt"
        data.write_text("In the beginning was a text. " * 20)
        weights = (self.model / "model.safetensors").read_bytes()
        link = self.folder / "link"
        link.symlink_to(self.model)
        for option in "--stats", "--trace":
            for place, says in [(self.model / "model.safetensors", "--model"), (link / "new.json", "--model"), (data, "--data")]:
                self.refused("evaluate", "--model", self.model, "--device", "cpu", "--data", data, option, place, code=2, says=[option, says])
            output = self.folder / "trained"
            self.refused("finetune", "--model", self.model, "--device", "cpu", "--data", data, "--output", output, option, output / "adapter_model.safetensors",
                         code=2, says=[option, "--output"])  # fmt: skip
        self.assertEqual((self.model / "model.safetensors").read_bytes(), weights)
        self.assertEqual(data.read_text(), "In the beginning was a text. " * 20)

    def test_a_model_that_is_a_file_beside_nothing(self):
        (self.folder / "alone.safetensors").write_bytes(b"no tensors")
        done = subprocess.run([PROGRAM, "evaluate", "--model", "alone.safetensors", "--data", "x.txt"], cwd=self.folder, capture_output=True)
        self.assertNotIn(b"error: :", done.stderr)

    def test_prompts_that_cannot_be_used(self):
        base = ["generate", "--model", self.model, "--device", "cpu"]
        self.refused(*base, "--prompt", "", says="no token")
        self.refused(*base, "--prompt-file", "-", stdin=b"a\xff", says="1")
        self.refused(*base, "--prompt-file", self.folder / "absent.txt", says="absent.txt")
        rows, out = self.folder / "bad.jsonl", self.folder / "never.jsonl"
        for row, says in [('{"text": "b"}', 'neither "prompt" nor "messages"'), ('{"prompt": 3}', 'the row: "prompt" must be a string'),
                          ('{"prompt":', "not valid JSON: syntax error"), ('{"prompt": ""}', "the prompt has no token"), ("[1]", "the row must be an object"),
                          ('{"prompt": "%s"}' % ("a" * 200), "200 tokens, the model's positions are 128"), ('{"messages": []}', "has no messages"),
                          ('{"messages": [{"role": "x", "content": "y"}]}', 'the role "x"'), ('{"messages": [{"role": "user"}]}', 'messages[0] lacks "content"')]:  # fmt: skip
            rows.write_text('{"prompt": "a"}\n\n' + row + "\n")
            self.refused(*base, "--batch", 2, "--prompt-file", rows, "--output", out, code=1, says=[f"{rows}, line 3", says])
            self.assertNotIn("line 1", self.refused_words(*base, "--batch", 2, "--prompt-file", rows, "--output", out))
        rows.write_text("\n")
        self.refused(*base, "--batch", 2, "--prompt-file", rows, "--output", out, says="bad.jsonl")
        self.assertFalse(out.exists())

    def test_an_adapter_that_is_not_there(self):
        self.refused("generate", "--model", self.model, "--device", "cpu", "--prompt", "a", "--adapter", self.folder / "no-adapter", says="no-adapter")

    def test_cuda_where_there_is_none(self):
        code, _, err = run("generate", "--model", self.model, "--prompt", "a", "--max-new-tokens", 1)
        self.assertEqual(code, 0, err)
        if "no CUDA: " in err:
            self.refused("generate", "--model", self.model, "--prompt", "a", "--device", "cuda", says="--device cuda")


class Finetune(CliTest):
    TEXT = "In the beginning was a text, and it was not long. " * 12

    def setUp(self):
        self.data = self.folder / "data.txt"
        self.data.write_text(self.TEXT)
        self.adapter = self.folder / self.id().split(".")[-1]
        self.base = ["finetune", "--model", self.model, "--device", "cpu", "--dtype", "fp32", "--data", self.data, "--seq-len", 40, "--lr", 1e-2]

    def train(self, output, *arguments):
        code, out, err = run(*self.base, "--output", output, *arguments)
        self.assertEqual((code, "--eval-data" in arguments), (0, out != b""), err)
        return out.decode(), err

    def test_an_adapter_is_trained_saved_and_used(self):
        out, err = self.train(self.adapter, "--steps", 6, "--eval-data", self.data, "--rank", 4)
        self.assertRegex(err, r"trainable \d+ of \d+ parameters \([\d.]+ %\)")
        self.assertEqual(len(re.findall(r"step 6\b", err)), 1, err)  # the last step once
        found = re.fullmatch(r"held-out loss before: ([\d.]+) nats per token over \d+ tokens\nheld-out loss after: ([\d.]+) nats per token over \d+ tokens\n", out)
        before, after = map(float, found.groups())
        self.assertLess(after, before)
        self.assertEqual({f.name for f in self.adapter.iterdir()}, {"adapter_config.json", "adapter_model.safetensors", "metrics.jsonl", "loss.svg", "resume"})
        evaluate = ["evaluate", "--model", self.model, "--device", "cpu", "--dtype", "fp32", "--data", self.data, "--seq-len", 40]
        plain, tuned = [float(re.match(rb"loss ([\d.]+) nats per token, perplexity", self.ok(*evaluate, *more)).group(1)) for more in [[], ["--adapter", self.adapter]]]
        self.assertAlmostEqual(plain, before, places=5)
        self.assertAlmostEqual(tuned, after, places=5)
        self.refused(*self.base, "--output", self.adapter, code=1, says=["not empty", "--overwrite"])
        self.train(self.adapter, "--steps", 1, "--overwrite")

    def test_several_adapters_add_up(self):
        self.train(self.adapter, "--steps", 4, "--rank", 4)
        copy, twice = self.folder / "copy", self.folder / "twice"
        for place in (copy, twice):
            shutil.copytree(self.adapter, place)
        config = json.loads((twice / "adapter_config.json").read_text())
        (twice / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]}))
        form = ["--model", self.model, "--device", "cpu", "--dtype", "fp32"]
        evaluate = ["evaluate", *form, "--data", self.data, "--seq-len", 40]

        def loss(*adapters):
            out = self.ok(*evaluate, *[word for adapter in adapters for word in ("--adapter", adapter)])
            return float(re.match(rb"loss ([\d.]+) nats", out).group(1))

        self.assertAlmostEqual(loss(self.adapter, copy), loss(twice), places=4)
        self.assertGreater(abs(loss(self.adapter, copy) - loss(self.adapter)), 1e-3)
        generate = ["generate", *form, "--prompt", "In the", "--max-new-tokens", 8]
        self.assertEqual(self.ok(*generate, "--adapter", self.adapter, "--adapter", copy), self.ok(*generate, "--adapter", twice))
        for command in (generate, evaluate):
            self.refused(*command, "--adapter", copy, "--adapter", f"{copy}/.", code=2, says=["--adapter", str(copy), "twice"])
            self.refused(*command, "--adapter", copy, "--adapter", self.folder / "none", code=1, says=str(self.folder / "none"))
        with unittest.mock.patch.object(tiny_model, "LAYERS", 2):
            fewer = tiny_model.write_model(self.folder / "two-layers")
        other = self.folder / "other"
        self.ok("finetune", "--model", fewer, "--device", "cpu", "--data", self.data, "--seq-len", 40, "--steps", 1, "--rank", 4, "--output", other)
        names = [f"the adapter in {self.adapter}, made for {self.model},", f"does not fit the model in {fewer}"]
        self.refused("generate", "--model", fewer, "--device", "cpu", "--prompt", "a", "--adapter", other, "--adapter", self.adapter, code=1, says=names)

    def test_the_peaks_of_memory_are_predicted_and_measured(self):
        stats = self.folder / "memory.json"
        _, err = self.train(self.adapter, "--steps", 2, "--rank", 4, "--stats", stats)
        if not sys.platform.startswith("linux"):
            return
        self.assertRegex(err, r"block-streamer: peak memory: process [\d.]+ \wiB \(predicted [\d.]+ \wiB\)\n")
        memory = json.loads(stats.read_text())["memory"]
        self.assertEqual(memory.keys(), {"rss"})  # the device's memory is the process's
        self.assertEqual(memory["rss"].keys(), {"predicted", "measured"})
        few = memory["rss"]["predicted"]
        # What more inputs of blocks take shows: rows, layers and hidden size in fp32, and the flow of them.
        self.data.write_text(self.TEXT * 40)
        self.train(self.adapter, "--steps", 1, "--rank", 4, "--batch", 512, "--overwrite", "--stats", stats)
        many = json.loads(stats.read_text())["memory"]["rss"]
        per_token = 4 * tiny_model.HIDDEN * (tiny_model.LAYERS + 3)
        self.assertGreater(many["predicted"] - few, 500 * 40 * per_token)
        for command in (["evaluate", "--data", self.data, "--seq-len", 40], ["generate", "--prompt", "a", "--max-new-tokens", 2]):
            self.ok(*command, "--model", self.model, "--device", "cpu", "--stats", stats)
            self.assertEqual([type(n) for n in json.loads(stats.read_text())["memory"]["rss"].values()], [int, int])

    def test_what_stays_resident_changes_no_adapter(self):
        evaluate = ["evaluate", "--model", self.model, "--device", "cpu", "--dtype", "fp32", "--data", self.data, "--seq-len", 40]
        written = set()
        losses = set()
        for resident in ["all", "none"]:
            output = self.folder / f"resident-{resident}"
            self.train(output, "--steps", 3, "--rank", 4, "--storage", "file", "--resident", resident)
            written.add((output / "adapter_model.safetensors").read_bytes())
            losses.add(self.ok(*evaluate, "--adapter", output, "--resident", resident))
        self.assertEqual(len(written), 1)
        self.assertEqual(len(losses), 1)

    def test_an_adapter_of_a_model_of_another_name_is_told(self):
        self.train(self.adapter, "--steps", 1, "--rank", 4, "--targets", "q_proj, v_proj")  # spaces do not count
        path = self.adapter / "adapter_config.json"
        config = json.loads(path.read_text())
        self.assertEqual(config["target_modules"], ["q_proj", "v_proj"])
        command = ["generate", "--model", self.model, "--device", "cpu", "--prompt", "a", "--max-new-tokens", 1, "--adapter", self.adapter]
        name = self.model.name
        for base, told in [(str(self.model), False), (f"org/{name.upper()}", False), (f"/cache/models--org--{name}/snapshots/1f", False), ("", False),
                           ("org/another-one", True)]:  # fmt: skip
            path.write_text(json.dumps(config | {"base_model_name_or_path": base}))
            code, _, err = run(*command)
            self.assertEqual((code, "was made for" in err), (0, told), err)
        self.assertIn(f"was made for org/another-one; the model in {self.model} has the same shapes", err)
        self.refused("generate", "--model", self.adapter, "--prompt", "a", code=1, says=["is an adapter", "--adapter"])

    def test_going_on_with_an_adapter(self):
        form = ["--rank", 4, "--alpha", 8, "--dropout", "0.25", "--targets", "q_proj,down_proj", "--top-fraction", "0.5"]
        self.train(self.adapter, "--steps", 1, *form)
        more = self.folder / "more"
        self.train(more, "--steps", 1, "--adapter", self.adapter, *form)
        self.train(more, "--steps", 1, "--adapter", self.adapter, "--overwrite")
        kept = json.loads((more / "adapter_config.json").read_text())
        self.assertEqual((kept["r"], kept["lora_alpha"], kept["lora_dropout"]), (4, 8, 0.25))
        self.assertEqual(kept["target_modules"], ["down_proj", "q_proj"])
        self.assertEqual(kept["layers_to_transform"], [1, 2])
        for option, value, has in [("--rank", 16, "rank is 4"), ("--alpha", 32, "alpha is 8"), ("--dropout", 0, "dropout is 0.25"),
                                   ("--targets", "all-linear", "targets are down_proj q_proj"), ("--targets", "q_proj", "down_proj"),
                                   ("--top-fraction", 1, "2 of 3 layers, from layer 1")]:  # fmt: skip
            self.refused(*self.base, "--output", self.folder / "never", "--steps", 1, "--adapter", self.adapter, option, value, code=1, says=[option, has, str(self.adapter)])
        self.assertFalse((self.folder / "never").exists())

    def test_data_without_anything_to_train_on(self):
        for name, text, says in [("empty.txt", "", "no text"), ("empty.jsonl", "\n", "no row"),
                                 ("long.jsonl", json.dumps({"prompt": "a" * 60, "completion": "b"}) + "\n", "none of its 1 rows")]:  # fmt: skip
            data = self.folder / name
            data.write_text(text)
            self.refused("finetune", "--model", self.model, "--device", "cpu", "--data", data, "--seq-len", 40, "--output", self.folder / "never", code=1, says=[name, says])

    def test_what_is_cut_off_is_said_once_a_file(self):
        rows, held_out = self.folder / "rows.jsonl", self.folder / "held-out.jsonl"
        for file in (rows, held_out):
            file.write_text(json.dumps({"text": "a" * 60}) + "\n" + json.dumps({"text": "ab"}) + "\n")
        for file in (rows, held_out):
            base = [rows if argument == self.data else argument for argument in self.base]
            code, _, err = run(*base, "--eval-data", file, "--output", self.adapter, "--steps", 1, "--rank", 4, "--overwrite")
            self.assertEqual(code, 0, err)
            for name in {rows.name, file.name}:
                self.assertEqual(err.count(f"{name}: 1 row longer than --seq-len, cut off there"), 1, err)

    def test_overwrite_replaces_what_a_run_or_an_adapter_left(self):
        model, notes = self.folder / "a-model", self.folder / "notes"
        shutil.copytree(self.model, model)
        notes.mkdir()
        (notes / "list.txt").write_text("mine")
        for place in [model, notes]:
            before = {f.name: f.stat().st_mtime_ns for f in place.iterdir()}
            for how in [[], ["--overwrite"], ["--resume"]]:
                self.refused(*self.base, "--steps", 1, "--output", place, *how, code=1, says=[str(place), "name another --output"])
            self.assertEqual({f.name: f.stat().st_mtime_ns for f in place.iterdir()}, before)
        self.refused(*self.base, "--steps", 1, "--output", f"{self.model}/.", "--overwrite", code=1, says="--model and --output are one folder")
        theirs = self.folder / "theirs"
        self.train(self.adapter, "--steps", 1, "--rank", 4)
        shutil.copytree(self.adapter, theirs, ignore=shutil.ignore_patterns("resume", "metrics.jsonl", "loss.svg"))
        (theirs / "README.md").write_text("as PEFT writes one")
        self.refused(*self.base, "--steps", 1, "--output", theirs, code=1, says=["not empty", "--overwrite", "what it holds"])
        self.train(theirs, "--steps", 1, "--rank", 4, "--overwrite")
        shutil.copy(self.model / "model.safetensors", theirs)
        shutil.rmtree(theirs / "resume")
        self.refused(*self.base, "--steps", 1, "--output", theirs, "--overwrite", code=1, says="name another --output")

    def test_a_run_that_diverges_says_what_can_be_done(self):
        err = self.refused_words(*self.base[:-1], "1e30", "--steps", 3, "--rank", 4, "--output", self.adapter)
        self.assertRegex(err, r"step 2: the loss is not finite; .*; nothing is saved\. .*--overwrite.*--skip-non-finite")

    def test_a_finished_run_has_its_statistics(self):
        stats = self.folder / "steps.json"
        for how, steps in [([], 2), (["--resume"], 0)]:
            self.train(self.adapter, "--steps", 2, "--rank", 4, "--stats", stats, *how)
            self.assertEqual(json.loads(stats.read_text())["steps"], steps)

    def test_an_adapter_of_another_model_is_refused_with_both_names(self):
        self.train(self.adapter, "--steps", 1, "--rank", 4)
        fewer = self.folder / "fewer"
        with unittest.mock.patch.object(tiny_model, "LAYERS", 2):
            tiny_model.write_model(fewer)
        names = [f"the adapter in {self.adapter}, made for {self.model},", f"does not fit the model in {fewer}", "layers.2"]
        self.refused("generate", "--model", fewer, "--device", "cpu", "--prompt", "a", "--adapter", self.adapter, code=1, says=names)
        self.refused("merge", "--model", fewer, "--adapter", self.adapter, "--output", self.folder / "merged", code=1, says=names)


class Terminal(CliTest):
    """Standard output and error on one terminal, and something that happens while the program runs."""

    def on_a_terminal(self, arguments, sign, act):
        """(exit code, what the terminal got); act(process) is called once `sign` was seen there."""
        parent, child = pty.openpty()
        running = subprocess.Popen([PROGRAM, *map(str, arguments), "--device", "cpu", "--dtype", "fp32"],
                                   stdin=subprocess.DEVNULL, stdout=child, stderr=child)  # fmt: skip
        os.close(child)
        seen, acted = b"", False
        while True:
            try:
                piece = os.read(parent, 4096)
            except OSError:  # the program has ended
                break
            seen += piece
            if not acted and re.search(sign, seen):
                act(running)
                acted = True
        os.close(parent)
        self.assertTrue(acted, seen[-500:])
        return running.wait(timeout=120), seen

    def cut_off(self, name, sign, *arguments):
        """What is shown when the weights' file loses its end."""
        model = pathlib.Path(shutil.copytree(self.model, self.folder / name))
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1000000, "eos_token_id": None}))
        (model / "generation_config.json").unlink()
        command = ["generate", "--model", model, "--storage", "file", "--max-new-tokens", "900000", *arguments]
        code, seen = self.on_a_terminal(command, sign, lambda _: os.truncate(model / "model.safetensors", 3000))
        self.assertEqual(code, 1, seen[-500:])
        return seen

    def test_an_error_leaves_the_text_that_stands_there(self):
        seen = self.cut_off("cut-text", rb"[^\n]{10}", "--prompt", "Hello")
        text, error = seen.split(b"block-streamer: error: ")
        self.assertIn(b"model.safetensors", error)
        self.assertNotIn(b"\x1b[K", text[:10])
        self.assertTrue(text.endswith(b"\n\r\x1b[K"), text[-40:])

    def test_an_error_removes_the_progress_bar(self):
        prompts = self.folder / "bar.txt"
        prompts.write_text("Hello\n")
        seen = self.cut_off("cut-bar", rb"token \d+/900000", "--batch", 1, "--prompt-file", prompts, "--output", self.folder / "bar.jsonl")
        bar, error = seen.split(b"block-streamer: error: ")
        self.assertIn(b"model.safetensors", error)
        self.assertTrue(bar.endswith(b"\r\x1b[K"), bar[-40:])
        self.assertFalse((self.folder / "bar.jsonl").exists())

    def test_interrupts(self):
        data, adapter = self.folder / "long.txt", self.folder / "interrupted"
        data.write_text(Finetune.TEXT * 2000)
        interrupt = lambda running: running.send_signal(signal.SIGINT)  # noqa: E731
        base = ["--model", self.model, "--data", data, "--seq-len", 40]
        code, seen = self.on_a_terminal(["evaluate", *base], rb"row \d+/", interrupt)
        self.assertEqual(code, 130, seen[-500:])
        self.assertRegex(seen, rb"block-streamer: interrupted after \d+ scored tokens")
        self.assertNotIn(b"perplexity", seen)
        code, seen = self.on_a_terminal(["finetune", *base, "--output", adapter], rb"step \d+/", interrupt)
        self.assertEqual(code, 130, seen[-500:])
        self.assertRegex(seen, rb"adapter saved in \S+ after step \d+")
        self.assertTrue((adapter / "adapter_model.safetensors").exists())
        again = self.folder / "never-begun"  # the first evaluation is not reported by its half
        code, seen = self.on_a_terminal(["finetune", *base, "--eval-data", data, "--output", again], rb"held-out row \d+/", interrupt)
        self.assertEqual(code, 130, seen[-500:])
        self.assertNotIn(b"held-out loss", seen)
        self.assertIn(b"no step was finished: nothing is saved", seen)
        self.assertFalse(again.exists())
        code, seen = self.on_a_terminal(["finetune", *base, "--eval-data", data, "--output", adapter, "--overwrite"], rb"held-out row \d+/", interrupt)
        self.assertEqual(code, 130, seen[-500:])
        self.assertIn(f"no step was finished: what was in {adapter} before is still there, whole".encode(), seen)


class SmolLM2(CliTest):
    def setUp(self):
        if not (pathlib.Path(SMOLLM2) / "model.safetensors").exists():
            self.skipTest(f"no SmolLM2-135M-Instruct in {SMOLLM2 or 'models/'}")

    def test_names_rivers(self):
        for dtype in ["bf16", "fp32"]:
            out = self.ok("generate", "--model", SMOLLM2, "--device", "cpu", "--dtype", dtype, "--chat", "--prompt",
                          "Name three rivers in Europe.", "--max-new-tokens", 24)  # fmt: skip
            self.assertTrue(out.startswith(b"1. Danube: The largest river in Europe, it flows through the heart of Europe"), out)

    def test_text_survives_the_tokenizer(self):
        text = Tokenize.TEXT
        ids = self.ok("tokenize", "--model", SMOLLM2, "-", stdin=text.encode())
        self.assertEqual(self.ok("tokenize", "--model", SMOLLM2, "--decode", "-", stdin=ids).decode(), text)


class Surroundings(CliTest):
    """What a shell or a system hands over besides the options."""

    def setUp(self):
        self.place = self.folder / self.id().split(".")[-1]
        self.place.mkdir()
        self.data = self.place / "data.txt"
        self.data.write_text("In the beginning was a text, and it was not long. " * 12)

    def finetune(self, *arguments):
        return [PROGRAM, "finetune", "--model", str(self.model), "--device", "cpu", "--dtype", "fp32", "--data", str(self.data),
                "--seq-len", "16", "--rank", "4", "--output", str(self.place / "adapter"), *map(str, arguments)]  # fmt: skip

    def shell(self, command, *words):
        done = subprocess.run(["bash", "-c", command, "bash", *map(str, words)], capture_output=True, timeout=300)
        return done.returncode, done.stdout, done.stderr.decode()

    def test_messages_never_go_into_files_when_stderr_is_closed(self):
        code, _, _ = self.shell('"$@" 2>&-', *self.finetune("--steps", 4, "--lr", "1e30", "--skip-non-finite", "--save-every", 1))
        lines = (self.place / "adapter" / "metrics.jsonl").read_text().splitlines()
        self.assertEqual([json.loads(line)["step"] for line in lines], list(range(1, len(lines) + 1)))
        self.assertGreater(len(lines), 1)
        self.assertIn(code, (0, 1))

    def test_what_is_no_file_is_not_replaced(self):
        pipe, prompts = self.place / "pipe", self.place / "prompts.txt"
        os.mkfifo(pipe)
        prompts.write_text("hi\n")
        base = ["generate", "--model", self.model, "--device", "cpu", "--max-new-tokens", 1]
        for arguments in [["--prompt", "a", "--stats", pipe], ["--prompt", "a", "--trace", pipe],
                          ["--batch", 1, "--prompt-file", prompts, "--output", pipe]]:  # fmt: skip
            self.refused(*base, *arguments, code=1, says=["pipe", "no regular file"])
            self.assertTrue(pipe.is_fifo())

    def test_a_file_is_written_once(self):
        prompts, both = self.place / "prompts.txt", self.place / "both"
        prompts.write_text("hi\n")
        base = ["generate", "--model", self.model, "--device", "cpu", "--max-new-tokens", 1]
        self.refused(*base, "--prompt", "a", "--stats", both, "--trace", both, code=2, says=["--stats", "--trace"])
        self.refused(*base, "--batch", 1, "--prompt-file", prompts, "--output", prompts, code=2, says=["--prompt-file", "--output"])
        self.assertEqual(prompts.read_text(), "hi\n")

    def test_a_limit_of_file_size_is_an_error(self):
        code, _, err = self.shell('ulimit -f 20; "$@"', *self.finetune("--steps", 2))
        self.assertEqual(code, 1, err)
        self.assertIn("File too large", err)
        self.assertEqual([f for f in self.place.rglob(".*part*")], [])

    def test_a_reader_that_leaves_is_an_error_or_nothing(self):
        code, _, err = self.shell('set -o pipefail; "$@" | true', PROGRAM, "generate", "--model", self.model, "--device", "cpu",
                                  "--prompt", "a", "--max-new-tokens", 100)  # fmt: skip
        self.assertEqual(code, 1, err)
        self.assertIn("standard output: writing failed", err)
        code, _, _ = self.shell('set -o pipefail; "$@" 2>&1 | true', *self.finetune("--steps", 3))
        self.assertEqual(code, 0)
        self.assertTrue((self.place / "adapter" / "adapter_model.safetensors").exists())

    def test_numbers_are_numbers(self):
        for option, value in [("--lr", "nan"), ("--lr", "inf"), ("--max-grad-norm", "nan"), ("--alpha", "nan"), ("--alpha", "1e300"),
                              ("--dropout", "nan"), ("--alpha-pattern", "q_proj=nan")]:  # fmt: skip
            self.refused(*self.finetune(option, value)[1:], code=2, says=[option, value])
        self.assertFalse((self.place / "adapter").exists())

    def test_a_small_stack_is_enough(self):
        plain = {name: os.environ[name] for name in ["LD_LIBRARY_PATH", "OMP_NUM_THREADS"] if name in os.environ}  # it lies on the stack, too
        done = subprocess.run(["/bin/bash", "-c", 'ulimit -s 96; "$@"', "bash", PROGRAM, "tokenize", "--model", str(self.model), "--text", "ab"],
                              capture_output=True, env=plain)  # fmt: skip
        self.assertEqual((done.returncode, done.stdout), (0, b"[100,101]\n"), done.stderr)

    def test_texts_are_utf8_without_a_mark(self):
        broken, marked, plain = self.place / "broken.txt", self.place / "marked.txt", self.place / "plain.txt"
        broken.write_bytes(b"a\xff")
        self.refused("generate", "--model", self.model, "--device", "cpu", "--prompt-file", broken, code=1, says="broken.txt")
        plain.write_bytes(b"hi\n")
        marked.write_bytes(b"\xef\xbb\xbfhi\n")
        for name in (plain, marked):
            self.generate("--batch", 1, "--prompt-file", name, "--output", name.with_suffix(".jsonl"), "--max-new-tokens", 3)
        self.assertEqual(marked.with_suffix(".jsonl").read_text(), plain.with_suffix(".jsonl").read_text())


if __name__ == "__main__":
    # The models are tiny, and threads that wait for each other are slow where others compute as well.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    PROGRAM = os.path.abspath(sys.argv[1])
    SMOLLM2 = os.environ.get("BLOCK_STREAMER_SMOLLM2") or sys.argv[2]
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]], verbosity=2)
