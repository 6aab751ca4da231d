# SPDX-License-Identifier: Apache-2.0
"""From what the peers wrote to one table: verdicts, ranks, share of the link, ratios. Python's standard library only."""
import statistics

from shapes import Workload, block_bytes

OURS = "ours"
TOLERANCE = {"forward": 0.01, "decode": 0.01, "lora_step": 0.05, "decoder_step": 0.05}  # of the largest value of a tensor
TITLES = {
    "forward": "Forward of the decoder, {size} tokens",
    "decode": "One more token of one sequence, {size} in the KV cache",
    "lora_step": "LoRA step with head, loss and AdamW, {size} tokens",
    "decoder_step": "LoRA step of the decoder alone, {size} tokens",
}


def verdict(check, kind):
    """(whether the result may be ranked, what to say about it)."""
    if not check:
        return False, "not compared"
    if "differing_tensors" in check:
        differing = check["differing_tensors"]
        text = "equal bits" if differing == 0 else f"WRONG: {differing} tensors differ"
        return differing == 0, f"{text}, {check['seen_in']}"
    if not check["finite"]:
        return False, "WRONG: not finite"
    relative = check["max_relative_difference"]
    if relative == 0:
        return True, "equal bits"
    right = relative <= TOLERANCE[kind]
    return right, f"{'' if right else 'WRONG: '}{relative:.1e} of the largest value ({check['max_difference']:.1e})"


def rows_of(workload, results, shape):
    """One row for each cell of a workload, the fastest right one first; the wrong ones behind, without a rank."""
    rows = []
    needed = workload.passes * block_bytes(shape) * shape["layers"]
    for name, result in results.items():
        for cell in result.get("cells", {}).get(workload.name, []):
            right, text = verdict(cell.get("check"), workload.kind)
            seconds = statistics.median(cell["seconds"])
            link = cell.get("link_GB_per_s")
            rows.append({
                "workload": workload.name, "peer": name, "title": result.get("title", name), "note": cell.get("note", ""),
                "seconds": seconds, "least": min(cell["seconds"]), "most": max(cell["seconds"]), "runs": len(cell["seconds"]),
                "right": right, "verdict": text, "peak_bytes": cell.get("peak_bytes"), "link_GB_per_s": link,
                "link_share": None if not link or not cell.get("streamed", True) else needed / seconds / (link * 1e9)})  # fmt: skip
    rows.sort(key=lambda row: (not row["right"], row["seconds"]))
    ours = next((row for row in rows if row["peer"] == OURS and row["right"] and "cached" not in row["note"]), None)
    for rank, row in enumerate(rows, 1):
        row["rank"] = rank if row["right"] else None
        row["ours_over_it"] = ours["seconds"] / row["seconds"] if ours and row["right"] else None
    return rows


def table_of(results, workloads, shape):
    """All rows, and what did not run: [(peer's title, workload or None for all, reason)]."""
    rows = [row for name in workloads for row in rows_of(Workload(name), results, shape)]
    missing = []
    for name, result in results.items():
        title = result.get("title", name)
        if result.get("absent"):
            missing.append((title, None, result["absent"]))
        if result.get("failed"):
            missing.append((title, None, result["failed"]))
        missing += [(title, workload, reason) for workload, reason in result.get("not_run", {}).items()]
        silent = [w for w in workloads if w not in result.get("cells", {}) and w not in result.get("not_run", {})]
        if silent and not result.get("absent") and not result.get("failed"):
            missing += [(title, workload, "said nothing about it") for workload in silent]
    return rows, missing


def milliseconds(seconds):
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def markdown_row(row):
    spread = f" ({milliseconds(row['least'])} … {milliseconds(row['most'])})" if row["runs"] > 1 else ""
    share = "" if row["link_share"] is None else f"{row['link_share']:.3f}"
    ratio = "" if row["ours_over_it"] is None else f"{row['ours_over_it']:.3f}"
    peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.2f}"
    who = row["title"] + (f", {row['note']}" if row["note"] else "")
    rank = "–" if row["rank"] is None else str(row["rank"])
    return f"| {rank} | {who} | {milliseconds(row['seconds'])}{spread} | {share} | {ratio} | {peak} | {row['verdict']} |"


def link_line(results):
    rates = [rate for result in results.values() for rate in result.get("link_GB_per_s", [])]
    if not rates:
        return "The link was not probed."
    return (f"Link: {statistics.median(rates):.1f} GB/s ({min(rates):.1f} … {max(rates):.1f}), probed {len(rates)} times in the peers' "
            "own processes.")  # fmt: skip


def markdown(run):
    """@param run  what run.py writes as JSON."""
    shape, lines = run["shape"], []
    streamed = block_bytes(shape) * shape["layers"]
    lines += [f"{shape['name']}: {shape['layers']} layers of {block_bytes(shape) / 2**20:.1f} MiB, {streamed / 1e9:.2f} GB in bf16, "
              f"on {run['machine']}. {link_line(run['results'])} Date: {run['date']}.", ""]  # fmt: skip
    lines += [f"Times are medians of up to {run['runs']} runs. Share: what a run needs of the weights with nothing kept (steps: twice) ÷ "
              "time ÷ link. Ratio: our time with 2 slots ÷ the time of the row; below 1 we are faster. Device memory is the allocator's peak: "
              "rivals hold embedding and head throughout, ours what the row needs (none in a forward, the head in a step).", ""]  # fmt: skip
    for name in run["workloads"]:
        workload = Workload(name)
        rows = [row for row in run["rows"] if row["workload"] == name]
        size = f"{workload.batch} × {workload.tokens:,}"
        lines += [f"**{TITLES[workload.kind].format(size=size)}**", ""]
        if not rows:
            lines += ["Nobody ran it.", ""]
            continue
        lines += ["| # | who | ms | share of the link | ours ÷ it | device GiB | against its own resident run |", "|---|---|---|---|---|---|---|"]
        lines += [markdown_row(row) for row in rows] + [""]
    if run["missing"]:
        lines += ["Not run:", ""]
        lines += [f"- {title}{', ' + workload if workload else ''}: {reason}" for title, workload, reason in run["missing"]] + [""]
    versions = {name: version for result in run["results"].values() for name, version in result.get("versions", {}).items()}
    if versions:
        lines += ["Versions: " + ", ".join(f"{name} {version}" for name, version in sorted(versions.items())) + ".", ""]
    return "\n".join(lines)
