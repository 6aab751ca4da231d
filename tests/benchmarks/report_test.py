#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The page that benchmarks/report/report.py makes. usage: report_test.py [unittest arguments…]

fixtures/report/link.json is what benchmark_link --device cpu --shape tiny wrote, a selection of its rows and figures.
"""

import contextlib
import io
import json
import pathlib
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINK = ROOT / "tests" / "fixtures" / "report" / "link.json"
sys.path.insert(0, str(ROOT / "benchmarks" / "report"))
import report  # noqa: E402


def cell(mode, width, tokens, milliseconds, **more):
    name = f"crossover/{mode}/width:{width}/tokens:{tokens}/iterations:1/manual_time"
    return {"name": name, "run_type": "iteration", "real_time": milliseconds, "time_unit": "ms", **more}


def event(lane, begin, duration, block):
    return {"ph": "X", "pid": 0, "tid": lane, "ts": begin, "dur": duration, "name": "work", "args": {"block": block}}


class Report(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, name, content):
        path = self.folder / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    def made(self, *arguments):
        with contextlib.redirect_stdout(io.StringIO()):
            report.main([*arguments, "--out", str(self.folder / "page.html"), "--svg", str(self.folder / "svg")])
        plots = {path.stem: path.read_text() for path in (self.folder / "svg").iterdir()}
        for drawing in plots.values():
            ElementTree.fromstring(drawing)  # well formed
        return (self.folder / "page.html").read_text(), plots

    def refused(self, *arguments):
        with self.assertRaises(SystemExit) as caught:
            self.made(*arguments)
        return str(caught.exception.code)

    def test_shares_of_the_link_are_bytes_over_time_over_the_probe(self):
        page, plots = self.made(str(LINK))
        row = next(r for r in json.loads(LINK.read_text())["benchmarks"] if r["name"].startswith("forward/1x8/"))
        share = row["bytes_per_second"] / 1e9 / row["link_GB_per_s"]
        self.assertEqual(report.Row(row).share(), ("link", share))
        self.assertIn("link: forward/1x8", plots["share-link"])
        self.assertIn(report.number(share), plots["share-link"])
        self.assertIn("resident/forward/1x8", page)  # in the table, though no share of anything
        self.assertNotIn("resident", plots["share-link"])

    def test_a_step_is_compared_with_its_bound(self):
        step = {"name": "lora_step/2_slots/1x128", "real_time": 500.0, "time_unit": "ms", "limit": 480.0, "link_GB_per_s": 55.0}
        self.assertEqual(report.Row(step).share(), ("bound", 0.96))
        decode = {"name": "decode/1/2_slots", "real_time": 250.0, "time_unit": "ms", "limit": 3.0, "link_GB_per_s": 56.0, "GB_a_pass": 14.0}
        self.assertEqual(report.Row(decode).share(), ("link", 1.0))

    def test_a_failed_benchmark_is_named_and_in_no_plot(self):
        rows = [cell("resident", 128, 32, 1.0), cell("transfer", 128, 32, 0, error_occurred=True, error_message="no capture here")]
        page, plots = self.made(self.write("crossover.json", {"benchmarks": rows}))
        self.assertIn("failed: no capture here", page)
        self.assertNotIn("transfer", plots["crossover-32"])

    def test_the_grid_says_where_the_regime_changes(self):
        rows = []
        for width, regime in ((128, "compute-bound"), (256, "compute-bound"), (512, "bandwidth-bound")):
            rows += [cell("resident", width, 32, width / 100, label=regime, peak_bytes=3 * 1048576),
                     cell("streamed_eager", width, 32, width / 50, label=regime, overlap=0.625)]  # fmt: skip
        page, plots = self.made(self.write("crossover.json", {"benchmarks": rows}))
        self.assertIn("32 tokens: compute-bound at width 256, bandwidth-bound at 512.", page)
        self.assertEqual(plots["crossover-32"].count("<circle"), 6)
        self.assertIn("<td>0.625</td>", page)
        self.assertIn("<td>128 × 32, resident</td><td>1.28</td><td></td><td>3</td>", page)

    def test_the_timeline_counts_what_overlaps(self):
        names = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}
                 for tid, name in ((2000, "copy in"), (3000, "compute"), (2001, "copy in 2"))]  # fmt: skip
        work = [event(2000, 0, 1000, 0), event(2001, 500, 1500, 1), event(3000, 1000, 500, 0), event(3000, 1800, 700, 1)]
        trace = self.write("trace.json", {"otherData": {"dropped": "7"}, "traceEvents": names + work})
        page, plots = self.made("--trace", trace)
        self.assertIn("copy in: 2 ms busy, 35% of it while compute was busy.", page)  # 0.5 + 0.2 of 2
        self.assertIn("7 events were dropped", page)
        self.assertNotIn("copy in 2<", plots["timeline"])  # one lane
        part, plots = self.made("--trace", trace, "--window", "0:1")
        self.assertNotIn("block 1: 0.7", plots["timeline"])
        self.assertIn("copy in: 1 ms busy, 0% of it", part)

    def test_of_the_peers_only_right_results_are_drawn(self):
        rows = [dict(workload="forward/1x8", peer=peer, title=peer, note="", seconds=1.0, right=peer != "liar") for peer in ("ours", "liar")]
        run = {"shape": {"name": "tiny", "layers": 2}, "date": "2026-01-01", "workloads": ["forward/1x8", "decode/8"], "rows": rows}
        _, plots = self.made("--peers", self.write("peers.json", run))
        self.assertEqual(list(plots), ["peers-forward-1x8"])
        self.assertNotIn("liar", plots["peers-forward-1x8"])

    def test_other_files_are_refused_by_name(self):
        for arguments in ([self.write("a.json", "{")], [self.write("b.json", {"rows": []})], ["--trace", self.write("c.json", [])],
                          ["--trace", self.write("d.json", {"traceEvents": []})], ["--peers", self.write("e.json", {})],
                          [str(self.folder / "absent.json")]):  # fmt: skip
            with self.subTest(arguments[-1]):
                self.assertIn(pathlib.Path(arguments[-1]).name, self.refused(*arguments))


if __name__ == "__main__":
    unittest.main()
