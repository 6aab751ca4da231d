#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""benchmarks/peers/run.py with peers that are right, wrong, slow, broken or absent, and with real ones where they are installed.

usage: peers_test.py FOLDER_OF_OUR_BENCHMARKS [unittest arguments…]
"""

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks" / "peers"))
import ours  # noqa: E402
import run  # noqa: E402
import shapes  # noqa: E402
import table  # noqa: E402

BINARIES = pathlib.Path(sys.argv.pop(1)) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else pathlib.Path("absent")
SHAPE = shapes.shape_of("tiny", 2)
RIGHT = {"max_relative_difference": 0.0, "max_difference": 0.0, "finite": True}


def cell(*seconds, check=None, **more):
    return {"seconds": list(seconds), "check": RIGHT if check is None else check, "link_GB_per_s": 1.0, **more}


class Fakes(unittest.TestCase):
    """Scripts that write what the test wants."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def peer(self, name, cells=None, after="", **more):
        script = self.folder / f"{name}.py"
        script.write_text(textwrap.dedent(f"""
            import json, sys, time
            out, spec = sys.argv[4], json.load(open(sys.argv[2]))
            cells = {{k: v for k, v in {cells or {}!r}.items() if k in spec["workloads"]}}
            json.dump({{"cells": cells, "not_run": {{}}, "versions": {{}}, "link_GB_per_s": [1.0]}}, open(out, "w"))
            """) + textwrap.dedent(after))  # fmt: skip
        return run.Peer(name, name, script, devices=("cpu",), **more)

    def ran(self, peers, workloads, *arguments):
        options = run.parsed(["--device", "cpu", "--shape", "tiny", "--layers", "2", "--scratch", str(self.folder), "--out",
                              str(self.folder / "table"), *arguments])  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()):
            run.run_all(peers, options, workloads)
        return json.loads((self.folder / "table.json").read_text()), (self.folder / "table.md").read_text()

    def test_right_results_are_ranked_and_compared_with_ours(self):
        peers = [self.peer("slow", {"forward/1x4": [cell(3.0, 5.0, 4.0)]}), self.peer("ours", {"forward/1x4": [cell(2.0)]})]
        result, text = self.ran(peers, ["forward/1x4"])
        self.assertEqual([(r["peer"], r["rank"], r["seconds"]) for r in result["rows"]], [("ours", 1, 2.0), ("slow", 2, 4.0)])
        self.assertEqual(result["rows"][1]["ours_over_it"], 0.5)
        share = 2 * shapes.block_bytes(SHAPE) / 4.0 / 1e9
        self.assertAlmostEqual(result["rows"][1]["link_share"], share)
        self.assertIn("| 2 | slow | 4,000 (3,000 … 5,000) |", text)

    def test_a_step_needs_the_weights_twice(self):
        result, _ = self.ran([self.peer("ours", {"lora_step/4": [cell(1.0), cell(0.5, streamed=False)]})], ["lora_step/4"])
        self.assertEqual([row["link_share"] for row in result["rows"]], [None, 4 * shapes.block_bytes(SHAPE) / 1e9])

    def test_a_wrong_result_is_marked_and_not_ranked(self):
        wrong = {"off": dict(RIGHT, max_relative_difference=0.2, max_difference=3.0), "nan": dict(RIGHT, finite=False),
                 "bits": {"differing_tensors": 2, "seen_in": "all"}, "silent": {}}  # fmt: skip
        peers = [self.peer("ours", {"forward/1x4": [cell(2.0)]})]
        peers += [self.peer(name, {"forward/1x4": [cell(1.0, check=check)]}) for name, check in wrong.items()]
        result, text = self.ran(peers, ["forward/1x4"])
        self.assertEqual(result["rows"][0]["peer"], "ours")
        for row in result["rows"][1:]:
            self.assertEqual((row["rank"], row["ours_over_it"]), (None, None))
        self.assertEqual(text.count("WRONG"), 3)
        self.assertIn("| – | off | 1,000 | 0.001 |  |  | WRONG: 2.0e-01 of the largest value (3.0e+00) |", text)
        self.assertIn("not compared", text)

    def test_small_differences_are_said_and_allowed(self):
        check = dict(RIGHT, max_relative_difference=0.004, max_difference=0.5)
        self.assertEqual(table.verdict(check, "forward"), (True, "4.0e-03 of the largest value (5.0e-01)"))
        self.assertFalse(table.verdict(dict(check, max_relative_difference=0.02), "forward")[0])
        self.assertTrue(table.verdict(dict(check, max_relative_difference=0.02), "lora_step")[0])

    def test_what_does_not_run_is_listed_with_its_reason(self):
        peers = [self.peer("broken", after="sys.exit('no luck')"), self.peer("absent", packages=("no-such-package-anywhere",)),
                 self.peer("elsewhere")]  # fmt: skip
        peers[2] = run.Peer("elsewhere", "elsewhere", peers[2].script, devices=("cuda",))
        peers.append(run.Peer("unbuilt", "unbuilt", peers[0].script, programs=("benchmark_none",), devices=("cpu",)))
        result, text = self.ran(peers, ["forward/1x4"])
        reasons = {title: reason for title, _, reason in result["missing"]}
        self.assertEqual(reasons["broken"], "ended with 1: no luck")
        self.assertEqual(reasons["absent"], "not installed: no no-such-package-anywhere")
        self.assertEqual(reasons["elsewhere"], "runs on cuda, not on cpu")
        self.assertIn("not built: none of benchmark_none", reasons["unbuilt"])
        self.assertIn("Nobody ran it.", text)

    def test_a_peer_that_hangs_is_stopped_and_keeps_what_it_had(self):
        hanging = self.peer("hanging", {"forward/1x4": [cell(1.0)]}, after="time.sleep(600)")
        result, _ = self.ran([hanging], ["forward/1x4", "forward/1x8"], "--timeout", "2")
        self.assertEqual([row["workload"] for row in result["rows"]], ["forward/1x4"])
        self.assertIn(["hanging", None, "stopped after 2.0 s"], result["missing"])

    def test_training_has_a_process_of_its_own_where_a_peer_asks(self):
        apart = self.peer("apart", {"forward/1x4": [cell(1.0)], "lora_step/4": [cell(2.0)]},
                          after="sys.exit('two kinds') if len(spec['workloads']) > 1 else 0", apart=True)  # fmt: skip
        result, _ = self.ran([apart], ["forward/1x4", "lora_step/4"])
        self.assertEqual(len(result["rows"]), 2)
        self.assertEqual(result["missing"], [])

    def test_a_run_that_is_stopped_leaves_a_table_and_no_process(self):
        pid = self.folder / "pid"
        slow = self.peer("slow", {"forward/1x4": [cell(1.0)]}, after=f"""
            import os, pathlib
            pathlib.Path({str(pid)!r} + '.new').write_text(str(os.getpid()))
            os.rename({str(pid)!r} + '.new', {str(pid)!r})
            time.sleep(600)
            """)  # fmt: skip
        program = (f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks' / 'peers')!r}); import pathlib, run\n"
                   f"run.PEERS = (run.Peer('slow', 'slow', pathlib.Path({str(slow.script)!r}), devices=('cpu',)),)\n"
                   f"sys.exit(run.main(['--device', 'cpu', '--shape', 'tiny', '--workloads', 'forward/1x4', '--out', "
                   f"{str(self.folder / 'table')!r}]))")  # fmt: skip
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        while not pid.exists() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 1, errors.decode())
        written = json.loads((self.folder / "table.json").read_text())
        self.assertEqual(len(written["rows"]), 1)
        self.assertEqual(written["missing"], [["slow", None, "the whole run was stopped meanwhile"]])
        with self.assertRaises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)

    def test_other_workloads_are_refused(self):
        for name in ("forward", "forward/x", "dance/4", "forward/axb"):
            with self.assertRaises(ValueError, msg=name):
                shapes.Workload(name)


class OurPrograms(unittest.TestCase):
    def test_link_runs_cover_all_token_counts_once(self):
        self.assertEqual(ours.link_runs([128, 2048], [128]), [(128, 2048, True)])
        self.assertEqual(ours.link_runs([1, 2, 3], []), [(1, 2, False), (3, 4, False)])
        self.assertEqual(ours.link_runs([8], [4, 8]), [(4, 8, True), (8, 9, True)])

    def test_half_of_the_blocks_counts_the_two_slots(self):
        rows = ours.rows_of(shapes.Workload("lora_step/128"), 36)
        self.assertEqual(rows[1], ("lora_step/18_slots/1x128", "half of the blocks cached"))
        self.assertEqual(len(ours.rows_of(shapes.Workload("lora_step/128"), 4)), 1)

    def run_real(self, *arguments):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder) / "table"
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                code = run.main(["--device", "cpu", "--shape", "tiny", "--layers", "4", "--runs", "1", "--scratch", folder, "--timeout", "120",
                                 "--out", str(out), *arguments])  # fmt: skip
            self.assertEqual(code, 0, printed.getvalue())
            return json.loads(out.with_suffix(".json").read_text())

    @unittest.skipUnless((BINARIES / "benchmark_link").exists(), "benchmark_link is not built")
    def test_our_program_gives_a_row(self):
        result = self.run_real("--only", "ours", "--binaries", str(BINARIES), "--workloads", "forward/1x4,decoder_step/4")
        self.assertEqual([(row["workload"], row["right"]) for row in result["rows"]], [("forward/1x4", True), ("decoder_step/4", True)])

    @unittest.skipUnless(all(map(importlib.util.find_spec, ("torch", "transformers", "accelerate"))), "needs torch, transformers, accelerate")
    def test_a_real_rival_streams_what_it_computes_resident(self):
        result = self.run_real("--only", "accelerate", "--workloads", "forward/1x4,decode/4", "--warmup", "0")
        self.assertEqual([row["verdict"] for row in result["rows"]], ["equal bits", "equal bits"], result["missing"])


if __name__ == "__main__":
    unittest.main()
