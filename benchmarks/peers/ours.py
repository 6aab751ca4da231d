# SPDX-License-Identifier: Apache-2.0
"""Our own benchmark programs as one of the peers: runs them and reads their JSON. Python's standard library only.

Written to the same protocol as the rivals' scripts (harness.py): --spec FILE --out FILE.
"""
import argparse
import json
import subprocess
from pathlib import Path

from shapes import Workload

PROGRAMS = {"forward": "benchmark_link", "decoder_step": "benchmark_link", "lora_step": "benchmark_training_step",
            "decode": "benchmark_decode"}  # fmt: skip


class Programs:
    def __init__(self, spec, scratch):
        self.spec, self.scratch, self.rows, self.calls = spec, scratch, {}, 0

    def run(self, program, *options, called=()):
        """Adds the benchmarks' rows by name, or by the name that `called` gives them."""
        out = self.scratch.with_suffix(f".{program}-{self.calls}.json")
        self.calls += 1
        shape = self.spec["shape"]
        command = [str(Path(self.spec["binaries"]) / program), "--device", self.spec["device"].split(":")[0],
                   "--shape", shape["name"], "--layers", str(shape["layers"]), "--rounds", str(self.spec["runs"]), *options,
                   f"--benchmark_out={out}", "--benchmark_out_format=json"]  # fmt: skip
        print(" ".join(command), flush=True)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(done.stdout, flush=True)
        if done.returncode != 0 or not out.exists() or not out.read_text().strip():
            lines = [line for line in done.stdout.splitlines() if line.strip()]
            raise RuntimeError(f"{program} ended with {done.returncode}: {lines[-1] if lines else 'no output'}"[:300])
        for row in json.loads(out.read_text())["benchmarks"]:
            name = row["name"].removesuffix("/iterations:1/manual_time")
            self.rows[dict(called).get(name, name)] = row


UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def seconds_of(row):
    return row["real_time"] * UNITS[row["time_unit"]]


def half_of(layers):
    """Cached blocks beyond the two slots that make half of them resident; 0: too few layers."""
    return layers // 2 - 2 if layers > 4 else 0


def rows_of(workload, layers):
    """Names of the rows that answer a workload, with what distinguishes them."""
    two, half = "2 slots", "half of the blocks cached"
    size = f"{workload.batch}x{workload.tokens}"
    if workload.kind == "decode":
        return [(f"{workload.name}/2_slots", two), (f"{workload.name}/half_cached", half)] if workload.batch == 1 else []
    if workload.kind != "lora_step":
        return [(f"{workload.kind}/{size}", two)]
    rows = [(f"lora_step/2_slots/{size}", two)]
    return rows + ([(f"lora_step/{half_of(layers) + 2}_slots/{size}", half)] if half_of(layers) else [])


def link_runs(forward, steps):
    """benchmark_link takes two token counts a run, and steps at the first. @returns (first, second, whether steps) each."""
    left, runs = list(forward), []
    for few in steps:
        if few in left:
            left.remove(few)
        runs.append((few, left.pop(0) if left else few + 1, True))
    while left:
        few = left.pop(0)
        runs.append((few, left.pop(0) if left else few + 1, False))
    return runs


def tokens_of(workloads, kind):
    return sorted({w.tokens for w in workloads if w.kind == kind and w.batch == 1})


def planned_link_runs(workloads):
    """At least one: its first token count is where bits are compared."""
    return link_runs(tokens_of(workloads, "forward"), tokens_of(workloads, "decoder_step")) or [(128, 129, False)]


def run_programs(programs, workloads):
    """Runs what the workloads need; a program that fails costs its own rows. @returns reasons by kind of workload."""
    failures = {}

    def attempt(kinds, program, *options, **names):
        try:
            programs.run(program, *options, **names)
        except (OSError, RuntimeError, ValueError) as error:
            failures.update(dict.fromkeys(kinds, str(error)))

    layers, vocabulary = programs.spec["shape"]["layers"], str(programs.spec["shape"]["vocabulary"])
    forward = tokens_of(workloads, "forward")
    for i, (few, many, steps) in enumerate(planned_link_runs(workloads)):
        names = [f"forward/1x{t}/" for t in (few, many) if t in forward]
        names += ["2_slots_adamw"] * steps + ["same_bits"] * (i == 0)
        attempt(("forward", "decoder_step"), "benchmark_link", "--in-memory", "--short", str(few), "--long", str(many),
                "--benchmark_filter=" + "|".join(names), called={"lora_step/2_slots_adamw": f"decoder_step/1x{few}"})  # fmt: skip
    if tokens_of(workloads, "lora_step"):
        attempt(("lora_step",), "benchmark_training_step", "--vocabulary", vocabulary,
                "--tokens", ",".join(map(str, tokens_of(workloads, "lora_step"))),
                "--cached", ",".join(map(str, sorted({0, half_of(layers)}))), "--micro-batches", "1x1",
                "--full-shape", "none", "--benchmark_filter=lora_step/")  # fmt: skip
    for tokens in tokens_of(workloads, "decode"):
        attempt(("decode",), "benchmark_decode", "--vocabulary", vocabulary, "--context", str(tokens), "--benchmark_filter=decode/1/",
                called={f"decode/1/{row}": f"decode/{tokens}/{row}" for row in ("2_slots", "half_cached")})  # fmt: skip
    return failures


def check_of(rows, tokens):
    """What same_bits found at so many tokens: how many tensors differ from a resident run's."""
    row = rows.get("same_bits")
    if row is None or "achieved" not in row:
        return None
    return {"differing_tensors": int(row["achieved"]), "seen_in": f"a step of the decoder at {tokens} tokens"}


def cell_of(row, note, check, memory):
    cell = {"seconds": [seconds_of(row)], "note": note, "check": check}
    if "link_GB_per_s" in row:
        cell["link_GB_per_s"] = row["link_GB_per_s"]
    if "device_MiB" in row:
        cell["peak_bytes"] = row["device_MiB"] * 1048576
    elif memory is not None and "achieved" in memory:
        cell["peak_bytes"] = memory["achieved"] * 1048576
    return cell


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    spec = json.loads(arguments.spec.read_text())
    workloads = [Workload(name) for name in spec["workloads"]]
    programs = Programs(spec, arguments.out)
    failures = run_programs(programs, workloads)
    result = {"versions": {}, "cells": {}, "not_run": {}, "link_GB_per_s": []}
    check = check_of(programs.rows, planned_link_runs(workloads)[0][0])
    for workload in workloads:
        found = [(programs.rows[name], name, note) for name, note in rows_of(workload, spec["shape"]["layers"])
                 if name in programs.rows]  # fmt: skip
        if not found:
            result["not_run"][workload.name] = failures.get(workload.kind, f"{PROGRAMS[workload.kind]} has no such row")
        for row, name, note in found:
            if row.get("error_occurred"):
                result["not_run"][workload.name] = row.get("error_message", "failed")
                continue
            cell = cell_of(row, note, check, programs.rows.get("device_memory/" + name))
            result["cells"].setdefault(workload.name, []).append(cell)
            result["link_GB_per_s"] += [cell["link_GB_per_s"]] if "link_GB_per_s" in cell else []
    arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
