#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One page with plots out of what the benchmarks wrote. Python's standard library only.

    report.py link.json training_step.json crossover.json --trace trace.json --peers peers.json --out report.html [--svg FOLDER]

FILES are Google Benchmark's JSON (--benchmark_out=FILE --benchmark_out_format=json). --trace is what the program's --trace
wrote, --peers what peers/run.py did. --svg writes each plot as a file of its own too. What is not given is not in the page.
"""
import argparse
import json
import re
import sys
from html import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import svg  # noqa: E402

UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
GRID = re.compile(r"crossover/(?P<mode>\w+)/width:(?P<width>\d+)/tokens:(?P<tokens>\d+)$")
STYLE = """body{font:15px/1.5 system-ui,sans-serif;color:#1f2937;max-width:900px;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;font-size:13px;margin:1rem 0}td,th{padding:.2rem .7rem;border-bottom:1px solid #d1d5db;text-align:right}
td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto;margin:1rem 0}"""


class Row:
    """One benchmark's figures."""

    def __init__(self, entry):
        self.name = re.sub(r"/iterations:\d+|/manual_time|/real_time|/process_time", "", entry["name"])
        self.label, self.entry = entry.get("label", ""), entry
        self.error = entry.get("error_message") if entry.get("error_occurred") else None

    @property
    def seconds(self):
        return self.entry["real_time"] * UNITS[self.entry["time_unit"]]

    def counter(self, name):
        return self.entry.get(name)

    def share(self):
        """(of what, how much), or None: bytes moved ÷ time ÷ link, the drive's share, or least possible time ÷ time."""
        link, limit = self.counter("link_GB_per_s"), self.counter("limit")
        if self.error:
            return None
        if self.counter("share") is not None:
            return "drive", self.counter("share")
        if link and self.counter("GB_a_pass"):
            return "link", self.counter("GB_a_pass") / self.seconds / link
        if link and self.counter("bytes_per_second"):
            return "link", self.counter("bytes_per_second") / 1e9 / link
        if link and limit and not GRID.match(self.name):
            return "bound", limit / 1e3 / self.seconds
        return None


def rows_of(path):
    """@throws ValueError if the file is no output of Google Benchmark."""
    try:
        entries = json.loads(Path(path).read_text())["benchmarks"]
        return [Row(entry) for entry in entries if entry.get("run_type", "iteration") == "iteration"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the JSON of a benchmark ({type(error).__name__}: {error})") from error


def html_table(head, rows):
    cells = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + f"</tr>{cells}</table>"


def number(value):
    return "" if value is None else svg.figure(value)


class Page:
    """Sections in order; plots by name."""

    def __init__(self):
        self.parts, self.plots = [], {}

    def title(self, words):
        self.parts.append(f"<h2>{escape(words)}</h2>")

    def say(self, words):
        self.parts.append(f"<p>{escape(words)}</p>")

    def plot(self, name, drawing):
        self.plots[name] = drawing
        self.parts.append(drawing)

    def html(self):
        return (f'<!doctype html><html lang="en"><meta charset="utf-8"><title>block_streamer benchmarks</title><style>{STYLE}</style>'
                f"<h1>Benchmarks</h1>{''.join(self.parts)}</html>\n")  # fmt: skip


def add_shares(page, suites):
    titles = {"link": "Share of the link: bytes moved ÷ time ÷ copies alone", "bound": "Share of the bound: least possible time ÷ time",
              "drive": "Share of the drive: bytes read ÷ time ÷ reads alone"}  # fmt: skip
    for kind, title in titles.items():
        bars = [(f"{suite}: {row.name}", share[1], i) for i, (suite, rows) in enumerate(suites.items()) for row in rows
                if (share := row.share()) and share[0] == kind]  # fmt: skip
        if bars:
            page.title(title.partition(":")[0])
            page.plot(f"share-{kind}", svg.bars(title, bars, mark=1.0))


def grid_of(suites):
    """{(tokens, width): {mode: Row}}"""
    grid = {}
    for rows in suites.values():
        for row in rows:
            found = GRID.match(row.name)
            if found and not row.error:
                grid.setdefault((int(found["tokens"]), int(found["width"])), {})[found["mode"]] = row
    return grid


def crossover_sentence(tokens, regimes):
    """@param regimes  [(width, label)] by width."""
    changes = [(a, b) for a, b in zip(regimes, regimes[1:]) if a[1] != b[1]]
    if not changes:
        return f"{tokens:,} tokens: {regimes[0][1] or 'no regime named'} at every width."
    return f"{tokens:,} tokens: " + "; ".join(f"{a[1]} at width {a[0]}, {b[1]} at {b[0]}" for a, b in changes) + "."


def add_crossover(page, suites):
    """Curves of all modes that were measured, a plot for each count of tokens, and all cells as a table."""
    grid = grid_of(suites)
    if not grid:
        return
    modes = list(dict.fromkeys(mode for cell in grid.values() for mode in cell))
    page.title("Crossover of transfer and compute")
    table = []
    for tokens in sorted({tokens for tokens, _ in grid}):
        cells = {width: cell for (t, width), cell in sorted(grid.items()) if t == tokens}
        series = [(mode, [(w, cells[w][mode].seconds * 1e3) for w in cells if mode in cells[w]]) for mode in modes]
        page.plot(f"crossover-{tokens}", svg.curves(f"{tokens:,} tokens", [s for s in series if s[1]], "width", "ms"))
        regimes = [(width, next((row.label for row in cell.values() if row.label), "")) for width, cell in cells.items()]
        page.say(crossover_sentence(tokens, regimes))
        for width, regime in regimes:
            for mode, row in cells[width].items():
                peak = row.counter("peak_bytes")
                table.append([f"{width} × {tokens:,}, {mode}", number(row.seconds * 1e3), number(row.counter("overlap")),
                              number(peak and peak / 1048576), regime])  # fmt: skip
    page.parts.append(html_table(["width × tokens", "ms", "overlap", "peak, MiB", "regime"], table))


# ---- timeline


def lanes_of(trace):
    """[(lane, [(begin ms, end ms, parity of the block, tip)])], the rows of one lane together."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e.get("name") == "thread_name"}
    order, lanes = {}, {}
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        place = event["pid"], event["tid"]
        lane = re.sub(r" \d+$", "", names.get(place, f"row {event['tid']}"))
        order.setdefault(lane, place)
        block, begin = event.get("args", {}).get("block", 0), event["ts"] / 1e3
        end = begin + event["dur"] / 1e3
        lanes.setdefault(lane, []).append((begin, end, block % 2, f"{event['name']}, block {block}: {event['dur'] / 1e3:.4g} ms"))
    return [(lane, sorted(lanes[lane])) for lane in sorted(lanes, key=order.get)]


def merged(intervals):
    """Disjoint intervals that cover the same time."""
    covered = []
    for begin, end, *_ in sorted(intervals):
        if covered and begin <= covered[-1][1]:
            covered[-1][1] = max(covered[-1][1], end)
        else:
            covered.append([begin, end])
    return covered


def time_of(covered):
    return sum(end - begin for begin, end in covered)


def common(a, b):
    """Time that two lists of disjoint intervals share."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def add_timeline(page, path, window):
    """@param window  (begin, end) in ms after the first event; None: all of it. @throws ValueError if it is no trace."""
    try:
        trace = json.loads(Path(path).read_text())
        lanes = lanes_of(trace)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a trace ({type(error).__name__}: {error})") from error
    if not lanes:
        raise ValueError(f"{path}: a trace without intervals")
    zero = min(intervals[0][0] for _, intervals in lanes)
    begin, end = (zero + window[0], zero + window[1]) if window else (zero, max(i[1] for _, all_of in lanes for i in all_of))
    inside = [(lane, [(max(i[0], begin), min(i[1], end), *i[2:]) for i in all_of if i[1] > begin and i[0] < end])
              for lane, all_of in lanes]  # fmt: skip
    page.title("Timeline")
    page.plot("timeline", svg.lanes("Intervals by lane; neighbouring blocks differ in shade", inside, begin, end))
    covered = {lane: merged(intervals) for lane, intervals in inside}
    for lane in ("storage", "copy in"):
        busy = time_of(covered.get(lane, []))
        if busy and "compute" in covered:
            page.say(f"{lane}: {busy:.4g} ms busy, {common(covered[lane], covered['compute']) / busy:.0%} of it while compute was busy.")
    if trace.get("otherData", {}).get("dropped", "0") != "0":
        page.say(f"{trace['otherData']['dropped']} events were dropped when the trace's buffer was full.")


# ---- peers and figures


def add_peers(page, path):
    """@throws ValueError if it is not what peers/run.py writes."""
    try:
        run = json.loads(Path(path).read_text())
        rows = [row for row in run["rows"] if row["right"]]
        page.title("Beside others")
        page.say(f"{run['shape']['name']}, {run['shape']['layers']} layers, {run['date']}; wrong results are left out.")
        for workload in run["workloads"]:
            bars = [(row["title"] + (f", {row['note']}" if row["note"] else ""), row["seconds"] * 1e3, 0 if row["peer"] == "ours" else 5)
                    for row in rows if row["workload"] == workload]  # fmt: skip
            if bars:
                page.plot("peers-" + workload.replace("/", "-"), svg.bars(workload, bars, unit=" ms"))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not the JSON of peers/run.py ({type(error).__name__}: {error})") from error


def add_figures(page, suites):
    page.title("All figures")
    for suite, rows in suites.items():
        table = [[row.name, "failed: " + row.error if row.error else number(row.seconds * 1e3),
                  *(number(row.counter(c)) for c in ("achieved", "limit", "ratio", "bar")), row.label] for row in rows]  # fmt: skip
        page.parts.append(f"<h3>{escape(suite)}</h3>" + html_table(["", "ms", "achieved", "limit", "ratio", "bar", ""], table))


def suite_name(path):
    return Path(path).stem.removeprefix("benchmark_")


def make_page(files, trace=None, peers=None, window=None):
    suites = {}
    for path in files:
        suites.setdefault(suite_name(path), []).extend(rows_of(path))
    page = Page()
    add_shares(page, suites)
    add_crossover(page, suites)
    if trace:
        add_timeline(page, trace, window)
    if peers:
        add_peers(page, peers)
    if suites:
        add_figures(page, suites)
    return page


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="Google Benchmark's JSON; a file's name is its suite's")
    parser.add_argument("--trace")
    parser.add_argument("--window", help="part of the trace, in ms after its begin: 100:140")
    parser.add_argument("--peers")
    parser.add_argument("--out", type=Path, default=Path("report.html"))
    parser.add_argument("--svg", type=Path, help="a folder for the plots")
    options = parser.parse_args(arguments)
    if not options.files and not options.trace and not options.peers:
        parser.error("nothing to report: no file, no --trace, no --peers")
    try:
        window = tuple(float(part) for part in options.window.split(":")) if options.window else None
        page = make_page(options.files, options.trace, options.peers, window)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    options.out.write_text(page.html(), encoding="utf-8")
    if options.svg:
        options.svg.mkdir(parents=True, exist_ok=True)
        for name, drawing in page.plots.items():
            (options.svg / f"{name}.svg").write_text(drawing + "\n", encoding="utf-8")
    print(f"{options.out}: {len(page.plots)} plots")


if __name__ == "__main__":
    main()
