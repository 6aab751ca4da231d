#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Packs, verifies and streams packed models with the built program.

usage: convert_test.py PROGRAM [unittest arguments…]
"""

import json
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import tiny_model  # noqa: E402

PROGRAM = ""
MANIFEST = "block_streamer.json"
JOURNAL = "block_streamer.convert.json"


def run(*arguments, largest_file=None):
    """(exit code, stdout as bytes, stderr as text)"""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))

    done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, timeout=300,
                          preexec_fn=limit if largest_file is not None else None)  # fmt: skip
    return done.returncode, done.stdout, done.stderr.decode()


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


class ConvertTest(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="bs-convert-"))
        self.addCleanup(shutil.rmtree, self.folder)
        self.model = tiny_model.write_model(self.folder / "model")
        self.packed = self.folder / "packed"

    def ok(self, *arguments):
        code, out, err = run(*arguments)
        self.assertEqual(code, 0, err)
        return out

    def refused(self, *arguments, says, **options):
        code, _, err = run(*arguments, **options)
        self.assertEqual(code, 1, err)
        errors = [line for line in err.splitlines() if line.startswith("block-streamer: error: ")]
        self.assertEqual(len(errors), 1, err)
        for part in [says] if isinstance(says, str) else says:
            self.assertIn(part, errors[0])

    def convert(self, *more):
        self.ok("convert", "--model", self.model, "--output", self.packed, "--shard-size", "40KiB", *more)

    def generate(self, model, *more):
        return self.ok("generate", "--model", model, "--device", "cpu", "--dtype", "fp32", "--prompt", "Hello", "--max-new-tokens", 8, *more)

    def block(self, number):
        """(file, offset, byte count) of a packed block"""
        manifest = json.loads((self.packed / MANIFEST).read_text())
        file, offset, size = manifest["blocks"][number]["extents"][0]
        return self.packed / manifest["files"][file]["name"], offset, size

    def test_every_tier_gives_the_text_of_the_original_verified_or_not(self):
        self.convert()
        self.assertGreater(len(list(self.packed.glob("*.safetensors"))), 1)
        expected = self.generate(self.model)
        for tier in ["ram", "mmap", "file"]:
            for more in [[], ["--verify-reads"]]:
                self.assertEqual(self.generate(self.packed, "--storage", tier, *more), expected)

    def test_other_commands_take_the_folder(self):
        self.convert()
        seen = [json.loads(self.ok("inspect", "--model", model, "--json")) for model in (self.model, self.packed)]
        for key in ["blocks", "streamed", "resident", "ignored", "dtypes", "resident_tensors", "tied_head", "warnings"]:
            self.assertEqual(seen[0][key], seen[1][key])
        self.assertEqual(seen[1]["checksums"], {"layout": "packed"})
        ids = [self.ok("tokenize", "--model", model, "--text", "abc") for model in (self.model, self.packed)]
        self.assertEqual(ids[0], ids[1])

    def test_another_type_gives_the_text_of_computing_in_it(self):
        self.convert("--dtype", "fp16")
        dtypes = json.loads(self.ok("inspect", "--model", self.packed, "--json"))["dtypes"]
        self.assertEqual(list(dtypes), ["F16"])
        texts = [self.ok("generate", "--model", model, "--device", "cpu", "--dtype", "fp16", "--prompt", "Hello",
                         "--max-new-tokens", 8) for model in (self.model, self.packed)]  # fmt: skip
        self.assertEqual(texts[0], texts[1])

    def test_a_finished_conversion_is_kept(self):
        self.convert()
        base = ["convert", "--model", self.model, "--output", self.packed]
        self.refused(*base, says=["packed", "--overwrite"])  # into one file
        self.ok(*base, "--overwrite")
        before = {path.name: path.stat().st_mtime_ns for path in self.packed.iterdir()}
        self.assertIn("complete from an earlier run", run(*base)[2])
        self.assertEqual({path.name: path.stat().st_mtime_ns for path in self.packed.iterdir()}, before)
        self.assertEqual(len(list(self.packed.glob("*.safetensors"))), 1)
        self.ok("inspect", "--model", self.packed, "--verify")
        self.refused("convert", "--model", self.model, "--output", self.model, "--overwrite", says="its own folder")

    def test_a_refusal_advises_what_helps(self):
        base = ["convert", "--model", self.model, "--output"]
        foreign = tiny_model.write_model(self.folder / "foreign", seed=2)
        before = {path.name: path.read_bytes() for path in foreign.iterdir()}
        for how in [[], ["--overwrite"]]:
            code, _, err = run(*base, foreign, *how)
            self.assertEqual(code, 1, err)
            self.assertRegex(err, "error: .*model.safetensors: there are other weights in this folder; choose another folder")
        (foreign / "model.safetensors").unlink()
        for how in [[], ["--overwrite"]]:
            self.refused(*base, foreign, *how, says=["chat_template.jinja: no conversion wrote this file", "choose another folder"])
            self.assertEqual({path.name: path.read_bytes() for path in foreign.iterdir()}, {n: b for n, b in before.items() if n != "model.safetensors"})
        notes = self.folder / "notes"
        notes.mkdir()
        (notes / "notes.txt").write_text("mine")
        self.refused(*base, notes, says=["not empty", "--overwrite"])
        self.ok(*base, notes, "--overwrite")
        self.assertEqual((notes / "notes.txt").read_text(), "mine")

    def test_a_full_disk_is_one_error_and_the_same_command_goes_on(self):
        base = ["convert", "--model", self.model, "--output", self.packed, "--shard-size", "1"]
        (self.model / "notes.txt").write_text("a" * 100_000)  # larger than any file of weights
        self.ok(*base)
        expected = {path.name: path.read_bytes() for path in self.packed.iterdir()}
        for limit, says in [(20_000, "model-00001-of-"), (64_000, "notes.txt")]:
            shutil.rmtree(self.packed)
            self.refused(*base, says=["File too large", says], largest_file=limit)
            left = {path.name: path.read_bytes() for path in self.packed.iterdir()}
            del left[JOURNAL]
            self.assertEqual(left, {name: expected[name] for name in left})
            self.assertNotIn(MANIFEST, left)
            self.refused("inspect", "--model", self.packed, says="has not ended")
        err = run(*base)[2]
        self.assertIn("complete from an earlier run", err)
        self.assertEqual({path.name: path.read_bytes() for path in self.packed.iterdir()}, expected)

    def test_a_changed_byte_is_found_at_rest_and_in_flight(self):
        self.convert()
        file, offset, size = self.block(1)
        flip(file, offset + size // 2)
        out = run("inspect", "--model", self.packed, "--verify")[1].decode()
        self.assertIn(f"{file}, offset {offset} (model.layers.1., chunk at 0): checksum ", out)
        self.refused("inspect", "--model", self.packed, "--verify", says=["checksums differ", file.name])
        self.generate(self.packed, "--storage", "file")  # nobody asked for verified reads
        for tier in ["file", "mmap", "ram"]:
            self.refused("generate", "--model", self.packed, "--device", "cpu", "--prompt", "Hello", "--storage", tier,
                         "--verify-reads", says=[str(file), "checksum ", "expected", "found"])  # fmt: skip

    def test_checksums_of_an_original_model(self):
        base = ["generate", "--model", self.model, "--device", "cpu", "--prompt", "Hello", "--storage", "file", "--verify-reads"]
        self.refused(*base, says=["needs checksums", "block-streamer checksum"])
        self.ok("checksum", "--model", self.model)
        self.ok(*base)
        self.ok("inspect", "--model", self.model, "--verify")
        tensor = "model.layers.2.mlp.up_proj.weight"
        weights = self.model / "model.safetensors"
        data = weights.read_bytes()
        header = int.from_bytes(data[:8], "little")
        begin = json.loads(data[8 : 8 + header])[tensor]["data_offsets"][0]
        flip(weights, 8 + header + begin)
        self.refused(*base, says=["block 2", "checksum "])
        self.refused("inspect", "--model", self.model, "--verify", says="model.layers.2.")
        embedding = json.loads(data[8 : 8 + header])["model.embed_tokens.weight"]["data_offsets"][0]
        weights.write_bytes(data)
        flip(weights, 8 + header + embedding)
        self.refused(*base, says="model.embed_tokens.weight")

    def test_a_newer_manifest_is_refused_in_a_sentence(self):
        self.convert()
        path = self.packed / MANIFEST
        path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
        self.refused("inspect", "--model", self.packed, says=["version 2", "up to version 1", "newer block_streamer"])


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main()
