#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the rivals that are installed, and our own programs, on one shape of decoder; writes one table as Markdown and JSON.

    run.py                                              Qwen3-8B's shape on the GPU
    run.py --device cpu --shape tiny --runs 1           what runs without one, to try it out
    run.py --only ours,fsdp2 --workloads forward/1x128,lora_step/2048

Each runs in a process of its own with a time limit. The table is written anew after each, so that a run that is stopped keeps
what it had. Exit code 1 if ours is missing from the table, a result is wrong, or the run was stopped.
"""
import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from shapes import SHAPES, Workload, shape_of  # noqa: E402
from table import OURS, markdown, table_of  # noqa: E402

WORKLOADS = "forward/1x128,forward/1x2048,decode/128,decoder_step/128,lora_step/128,lora_step/2048,lora_step/8192"


@dataclass(frozen=True)
class Peer:
    name: str
    title: str
    script: Path
    packages: tuple = ()  # distributions, as pip knows them
    programs: tuple = ()  # in the folder of --binaries
    devices: tuple = ("cuda",)
    apart: bool = False  # what trains needs a process of its own: a sharded model takes no adapters
    kinds: tuple = Workload.KINDS


PEERS = (
    Peer(OURS, "block_streamer", HERE / "ours.py", programs=("benchmark_link", "benchmark_training_step", "benchmark_decode"),
         devices=("cuda", "cpu")),
    Peer("resident", "transformers and peft, resident", HERE / "resident.py", ("torch", "transformers", "peft"), devices=("cuda", "cpu")),
    Peer("original", "Python block-streamer", HERE / "original.py", ("torch", "transformers", "peft", "block-streamer"), apart=True),
    Peer("fsdp2", "FSDP2, CPU offload", HERE / "fsdp2_offload.py", ("torch", "transformers", "peft"), apart=True),
    Peer("accelerate", "Accelerate cpu_offload", HERE / "accelerate_offload.py", ("torch", "transformers", "accelerate"),
         devices=("cuda", "cpu"), kinds=("forward", "decode")),
    Peer("deepspeed", "DeepSpeed ZeRO-3, CPU offload", HERE / "deepspeed_zero3.py", ("torch", "transformers", "peft", "deepspeed"),
         apart=True),
    Peer("airllm", "AirLLM", HERE / "airllm_pass.py", ("torch", "transformers", "airllm"), devices=("cuda", "cpu"),
         kinds=("forward",)),
)  # fmt: skip


def why_absent(peer, options):
    """A reason, or None where the peer can run."""
    device = options.device.split(":")[0]
    if device not in peer.devices:
        return f"runs on {' and '.join(peer.devices)}, not on {device}"
    for package in peer.packages:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"not installed: no {package}"
    programs = [program for program in peer.programs if (Path(options.binaries) / program).exists()]
    if peer.programs and not programs:
        return f"not built: none of {', '.join(peer.programs)} in {options.binaries}"
    return None


class Stopped(Exception):
    """Somebody ends the whole run: what was measured is written first."""


def stop(signal_number, frame):
    raise Stopped


def limited(command, timeout_s, log):
    """Runs the command with all that it starts; kills them together. @returns a reason if it failed. @throws Stopped"""
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return f"stopped after {timeout_s} s"
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    return None if code == 0 else f"ended with {code}: {last_line(log.name)}"


def last_line(log):
    lines = [line.strip() for line in Path(log).read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "no output"


def merge(into, part):
    into["cells"].update(part.get("cells", {}))
    into["not_run"].update(part.get("not_run", {}))
    into["versions"].update(part.get("versions", {}))
    into["link_GB_per_s"] += part.get("link_GB_per_s", [])
    if "machine" in part:
        into["machine"] = part["machine"]


def run_peer(peer, options, workloads, folder):
    """@returns what the peer measured, with `absent` or `failed` where it says why there is less."""
    result = {"title": peer.title, "cells": {}, "not_run": {}, "versions": {}, "link_GB_per_s": []}
    absent = why_absent(peer, options)
    if absent:
        return dict(result, absent=absent)
    for name in workloads:
        if Workload(name).kind not in peer.kinds:
            result["not_run"][name] = "this peer's script has no such workload"
    wanted = [name for name in workloads if name not in result["not_run"]]
    groups = [wanted]
    if peer.apart:
        groups = [[n for n in wanted if not Workload(n).trains], [n for n in wanted if Workload(n).trains]]
    for i, group in enumerate(group for group in groups if group):
        spec, out = folder / f"{peer.name}-{i}.spec.json", folder / f"{peer.name}-{i}.json"
        spec.write_text(json.dumps({
            "shape": options.shape, "device": options.device, "workloads": group, "runs": options.runs, "warmup": options.warmup,
            "patience": options.patience, "binaries": str(options.binaries), "scratch": str(folder)}))  # fmt: skip
        try:
            with (folder / f"{peer.name}-{i}.log").open("w") as log:
                failed = limited([sys.executable, str(peer.script), "--spec", str(spec), "--out", str(out)], options.timeout, log)
        except Stopped:
            failed = result["stopped"] = "the whole run was stopped meanwhile"
        if out.exists():
            merge(result, json.loads(out.read_text()))
        if failed:
            reasons = [result.get("failed"), failed]
            result["failed"] = "; ".join(dict.fromkeys(filter(None, reasons)))
        if "stopped" in result:
            break
    return result


def write(run, out):
    """Both files, whole or not at all."""
    run["rows"], run["missing"] = table_of(run["results"], run["workloads"], run["shape"])
    for suffix, text in ((".json", json.dumps(run, indent=1)), (".md", markdown(run))):
        partial = out.with_suffix(suffix + ".partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, out.with_suffix(suffix))


def run_all(peers, options, workloads):
    run = {"date": datetime.date.today().isoformat(), "shape": options.shape, "device": options.device, "runs": options.runs,
           "machine": options.device, "workloads": workloads, "results": {}}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="peers-", dir=options.scratch) as scratch:
        for peer in peers:
            print(f"{peer.title} …", flush=True)
            result = run_peer(peer, options, workloads, Path(scratch))
            run["results"][peer.name] = result
            run["machine"] = result.get("machine", run["machine"])
            for reason in filter(None, (result.get("absent"), result.get("failed"))):
                print(f"  {reason}", flush=True)
            if options.logs:
                for log in [*Path(scratch).glob(f"{peer.name}-*.log"), *Path(scratch).glob(f"{peer.name}-*.benchmark_*.json")]:
                    shutil.copy(log, options.logs)
            write(run, options.out)
            if "stopped" in result:
                break
    return run


def parsed(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--shape", default="qwen3-8b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=0, help="instead of the shape's own")
    parser.add_argument("--workloads", default=WORKLOADS, help=f"default: {WORKLOADS}")
    parser.add_argument("--only", help="names with commas: " + ", ".join(peer.name for peer in PEERS))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1, help="runs before the clock, beside the one that is compared")
    parser.add_argument("--patience", type=float, default=20, help="seconds after which a workload is not run again")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each process")
    parser.add_argument("--binaries", default=HERE.parents[1] / "build" / "release" / "benchmarks", help="our programs")
    parser.add_argument("--scratch", help="a folder for files that a peer needs meanwhile (AirLLM: twice the weights)")
    parser.add_argument("--logs", help="a folder for what the peers printed, and for the JSON of our programs")
    parser.add_argument("--out", type=Path, default=Path("peers"), help="two files: .md and .json")
    options = parser.parse_args(arguments)
    options.shape = shape_of(options.shape, options.layers)
    return options


def main(arguments=None):
    options = parsed(arguments)
    names = options.only.split(",") if options.only else [peer.name for peer in PEERS]
    unknown = set(names) - {peer.name for peer in PEERS}
    if unknown:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(peer.name for peer in PEERS)}")
    workloads = options.workloads.split(",")
    for name in workloads:
        try:
            Workload(name)
        except ValueError as error:
            sys.exit(str(error))
    if options.logs:
        Path(options.logs).mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    run = run_all([peer for peer in PEERS if peer.name in names], options, workloads)
    print(markdown(run))
    wrong = [row for row in run["rows"] if "WRONG" in row["verdict"]]
    ours_missing = OURS in names and not any(row["peer"] == OURS and row["right"] for row in run["rows"])
    stopped = any("stopped" in result for result in run["results"].values())
    return 1 if wrong or ours_missing or stopped else 0


if __name__ == "__main__":
    sys.exit(main())
