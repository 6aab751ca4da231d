#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks how the headers depend on each other and on third parties, and their form.

usage: check_layers.py [ROOT] [--update]

Exit code 1 and one line a finding when a rule is broken. --update writes cmake/headers.cmake again from
the tree, which otherwise must name exactly the headers that exist.
"""

import pathlib
import re
import statistics
import sys

# A header includes its own folder and folders of lower ranks only. "" is the top of the include tree.
RANKS = {
    "core": 0,
    "os": 1, "trace": 1, "plan": 1, "text": 1,
    "checkpoint": 2, "device": 2, "io": 2,
    "storage": 3, "architecture": 3,
    "pipeline": 4,
    "simulation": 5, "testing": 5,
    "block": 6,
    "layers": 7, "optim": 7, "lora": 7, "train": 7,
    "models": 8, "capture": 8,
    "generate": 10, "finetune": 10, "planner": 10,
}  # fmt: skip
TOP_RANKS = {"streamer.hpp": 9, "block_streamer.hpp": 11}
TORCH_FREE = {"planner"} | {room for room, rank in RANKS.items() if rank < 6}
NEEDS_ASIO = {"io", "storage", "pipeline", "simulation", "testing", "planner"}
FIRST_TORCH_RANK = 6

# (what is included, where it may be, what to say). The first line that matches an include decides.
THIRD_PARTY = [
    (r"(torch/torch\.h|torch/all\.h|torch/script\.h|torch/extension\.h|ATen/ATen\.h)$", r"$^", "is an umbrella: include the narrowest headers"),
    (r"(ATen|c10|torch/csrc/.*)/cuda/", r"block/\w*cuda\w*\.hpp$", "belongs in block/*cuda*.hpp"),
    (r"(cuda|nvrtc|nvToolsExt|nvtx3|driver_types|vector_types)", r"(device/cuda_\w+|block/\w*cuda\w*)\.hpp$", "belongs in device/cuda_*.hpp"),
    (r"torch/csrc/autograd/", r"train/|block/gradient_node\.hpp", "belongs in train/ or block/gradient_node.hpp: autograd's headers are slow"),
    (r"torch/nn", r"(block/module_block|lora/lora_linear)\.hpp$", "belongs in block/module_block.hpp and lora/lora_linear.hpp"),
    (r"(ATen|c10|torch)/", r"(block|layers|optim|lora|models|capture|train|generate|finetune|[a-z_]+\.hpp)", "needs LibTorch: rank 6 and above only"),
    (r"boost/", r"(io|storage)/", "belongs in io/ and storage/"),
    (r"(nlohmann/|pcre2\.h$|utf8proc\.h$)", r"(text|checkpoint)/", "belongs in text/ and checkpoint/"),
    (r"(sys/|linux/|unistd\.h$|fcntl\.h$|poll\.h$|liburing|windows\.h$|winioctl\.h$|psapi\.h$)", r"(os|io)/", "is the operating system's: belongs in os/ and io/"),
]  # fmt: skip

MACROS_OF_OTHERS = {"PCRE2_CODE_UNIT_WIDTH", "WIN32_LEAN_AND_MEAN", "NOMINMAX"}  # a third party asks for it before its header

MAX_HEADER_LINES = 600
MAX_FUNCTION_LINES = 60
SPDX = "SPDX-License-Identifier: Apache-2.0"
SOURCE_SUFFIXES = {".hpp", ".cpp", ".h", ".py", ".sh"}
PROSE_SUFFIXES = {".md", ".txt", ".cmake", ".json", ".in", ".yml"}
# Spelled apart so that this file does not find itself.
ABSOLUTE_PATH = re.compile(r"(?<![\w.\-/}>])/(?:" + "|".join(["ho" + "me", "wo" + "rk", "ro" + "ot", "m" + "nt"]) + r")/\w")
FORBIDDEN_CODE = [
    (re.compile(r"#\s*include\s*<(latch|semaphore|barrier)>"), "use a mutex and a condition_variable"),
    (re.compile(r"\bstd::(atomic_)?(wait|notify_one|notify_all)\s*\("), "std::atomic::wait is not portable to our targets"),
    (re.compile(r"^\s*(static|thread_local)\s+(?!constexpr|const\b|inline|consteval|assert|_)[\w:<>, ]+\s\w+\s*(=|\{|;)"), "no static state in headers"),
]  # fmt: skip
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.M)
LISTS = ["CORE", "IO", "CUDA", "TORCH", "TORCH_CUDA"]


def strip_code(text):
    """The same text with comments and literals blanked out; line numbers stay."""

    def blank(match):
        kept = match.group(0)
        return re.sub(r"[^\n]", " ", kept)

    pattern = r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\''
    return re.sub(pattern, blank, text, flags=re.S)


def functions(text):
    """(name, first line, line count) of each function body. Relies on clang-format: a body's brace
    follows a space, an initialiser's does not."""
    code = re.sub(r"^[ \t]*#[^\n]*(\\\n[^\n]*)*", lambda m: re.sub(r"[^\n]", " ", m.group(0)), strip_code(text), flags=re.M)
    stack, head_start, found = [], 0, []
    for position, char in enumerate(code):
        if char == "{":
            head = code[head_start:position]
            body = position > 0 and code[position - 1] in " \n" and not re.search(r"[=,(\[]\s*$|\breturn\s*$", head)
            name = function_name(head) if body else None
            lead = re.match(r"\s*((public|private|protected)\s*:\s*)?", head)
            start = head_start + lead.end()
            stack.append((name, start, body, head_start))
            if body:
                head_start = position + 1
        elif char == "}" and stack:
            name, start, body, outer = stack.pop()
            if name:
                first = code.count("\n", 0, start) + 1
                found.append((name, first, code.count("\n", start, position) + 1))
            head_start = position + 1 if body else outer
        elif char == ";" and not (stack and not stack[-1][2]):
            head_start = position + 1
    return found


def function_name(head):
    if re.search(r"\[[^\[\]]*\]\s*(\([^{}]*\))?\s*(mutable|noexcept|->\s*[\w:]+|\s)*$", head):
        return None  # a lambda belongs to the function around it
    if "(" not in head or re.search(r"\b(requires|concept)\b[^{}]*\)?\s*$", head) and "->" not in head and not re.search(r"\w\s*\([^()]*\)\s*requires", head):
        return None
    if re.search(r"\b(class|struct|union|enum|namespace)\s+[\w:]+\s*(final)?\s*(:[^:].*)?$", head, re.S) and not re.search(r"\)\s*(const|noexcept|override|->.*)*\s*$", head):
        return None
    match = re.search(r"([~\w:]+|operator\s*\S+)\s*\(", head)
    name = match.group(1) if match else ""
    if name in {"", "if", "for", "while", "switch", "catch", "else", "constexpr", "requires"} or re.match(r"\s*(else|do|try)\b", head):
        return None
    return name


class Checker:
    def __init__(self, root):
        self.root = root
        self.include = root / "include" / "block_streamer"
        self.findings = []
        self.headers = sorted(p.relative_to(self.include).as_posix() for p in self.include.rglob("*") if p.is_file())
        self.edges = {}

    def report(self, path, line, text):
        self.findings.append(f"{path}:{line}: {text}")

    def rank(self, header):
        if "/" not in header:
            return TOP_RANKS.get(header)
        return RANKS.get(header.split("/")[0])

    def list_of(self, header):
        room = header.split("/")[0]
        torch = room not in TORCH_FREE
        if "cuda" in header.split("/")[-1]:
            return "TORCH_CUDA" if torch else "CUDA"
        return "TORCH" if torch else "IO" if room in NEEDS_ASIO else "CORE"

    def check_header(self, header):
        path, text = f"include/block_streamer/{header}", (self.include / header).read_text()
        lines = text.splitlines()
        if not header.endswith(".hpp"):
            self.report(path, 1, "a header's name ends in .hpp")
        if self.rank(header) is None:
            self.report(path, 1, "this folder has no rank in tests/layering/check_layers.py")
        if not lines or SPDX not in lines[0] or text.count("SPDX-License-Identifier") != 1:
            self.report(path, 1, f"the first line, and only it, is // {SPDX}")
        if len(re.findall(r"^#pragma once$", text, re.M)) != 1:
            self.report(path, 1, "exactly one #pragma once")
        if len(lines) > MAX_HEADER_LINES:
            self.report(path, 1, f"{len(lines)} lines: split at {MAX_HEADER_LINES}")
        for name, line, length in functions(text):
            if length > MAX_FUNCTION_LINES:
                self.report(path, line, f"{name}: {length} lines: split at {MAX_FUNCTION_LINES}")
        self.check_code(path, text)
        self.edges[header] = self.check_includes(header, path, text)

    def check_code(self, path, text):
        for number, line in enumerate(strip_code(text).splitlines(), 1):
            for pattern, say in FORBIDDEN_CODE:
                if pattern.search(line):
                    self.report(path, number, say)
            macro = re.match(r"\s*#\s*define\s+(\w+)", line)
            if macro and not macro.group(1).startswith("BLOCK_STREAMER_") and macro.group(1) not in MACROS_OF_OTHERS:
                self.report(path, number, f"macro {macro.group(1)} is not named BLOCK_STREAMER_…")

    def check_includes(self, header, path, text):
        own = []
        for match in INCLUDE.finditer(text):
            quote, target = match.groups()
            line = text.count("\n", 0, match.start()) + 1
            if quote == '"':
                self.report(path, line, f'"{target}": angle brackets and the full path')
            elif target.startswith("block_streamer/"):
                own.append(target.removeprefix("block_streamer/"))
                self.check_rank(header, own[-1], path, line)
            else:
                self.check_third_party(header, target, path, line)
        return own

    def check_rank(self, header, target, path, line):
        if not (self.include / target).is_file():
            self.report(path, line, f"<block_streamer/{target}> does not exist")
            return
        mine, theirs = self.rank(header), self.rank(target)
        same_room = "/" in header and header.split("/")[0] == target.split("/")[0]
        if mine is not None and theirs is not None and not same_room and theirs >= mine:
            self.report(path, line, f"rank {mine} includes <block_streamer/{target}> of rank {theirs}")
        order = {"CORE": 0, "CUDA": 0, "IO": 1, "TORCH": 2, "TORCH_CUDA": 2}
        if order[self.list_of(target)] > order[self.list_of(header)]:
            self.report(path, line, f"<block_streamer/{target}> belongs to a higher CMake target")
        if "CUDA" in self.list_of(target) and "CUDA" not in self.list_of(header):
            self.report(path, line, f"<block_streamer/{target}> exists only with CUDA")

    def check_third_party(self, header, target, path, line):
        for pattern, place, say in THIRD_PARTY:
            if re.match(pattern, target):
                if not re.match(place, header):
                    self.report(path, line, f"<{target}> {say}")
                return
        if "/" in target or target.endswith((".h", ".hpp")):
            self.report(path, line, f"<{target}>: unknown third party; name it in tests/layering/check_layers.py")

    def check_cycles(self):
        state = {}

        def visit(header, trail):
            if state.get(header) == "done" or header not in self.edges:
                return
            if header in trail:
                cycle = trail[trail.index(header) :] + [header]
                self.report(f"include/block_streamer/{header}", 1, "include cycle: " + " -> ".join(cycle))
                return
            for target in self.edges[header]:
                visit(target, trail + [header])
            state[header] = "done"

        for header in self.headers:
            visit(header, [])

    def sources(self):
        skipped = {"build", "models", "__pycache__"}

        def is_foreign(part):
            return part in skipped or part.startswith("build-") or (part.startswith(".") and part != ".ci")

        for path in sorted(self.root.rglob("*")):
            parts = path.relative_to(self.root).parts
            if path.is_file() and not any(map(is_foreign, parts[:-1])):
                yield path

    def check_tree(self):
        for path in self.sources():
            name = path.relative_to(self.root).as_posix()
            is_source = path.suffix in SOURCE_SUFFIXES or name == ".ci/run"
            if not is_source and path.suffix not in PROSE_SUFFIXES:
                continue
            text = path.read_text(errors="replace")
            if is_source and SPDX not in "\n".join(text.splitlines()[:3]):
                self.report(name, 1, f"no line {SPDX}")
            for number, line in enumerate(text.splitlines(), 1):
                if ABSOLUTE_PATH.search(line) and not line.startswith("#!"):
                    self.report(name, number, "absolute path")

    def header_lists(self):
        lists = {name: [] for name in LISTS}
        for header in self.headers:
            lists[self.list_of(header)].append(header)
        return lists

    def render_lists(self):
        text = "# The headers of each target, as installed; tests/layering/check_layers.py --update writes this file.\n"
        for name, headers in self.header_lists().items():
            entries = "".join(f"\n  {header}" for header in headers)
            text += f"set(BLOCK_STREAMER_{name}_HEADERS{entries})\n"
        return text

    def check_lists(self):
        path = self.root / "cmake" / "headers.cmake"
        if not path.is_file() or path.read_text() != self.render_lists():
            listed = set(re.findall(r"[\w/]+\.hpp", path.read_text())) if path.is_file() else set()
            differ = ", ".join(sorted(listed ^ set(self.headers))) or "order or place"
            self.report("cmake/headers.cmake", 1, f"does not match the tree ({differ}): run tests/layering/check_layers.py --update")

    def summary(self):
        if not self.headers:
            return "no headers"
        texts = {header: (self.include / header).read_text() for header in self.headers}
        sizes = sorted(len(text.splitlines()) for text in texts.values())
        p90 = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
        longest = max(((n, name, h) for h, t in texts.items() for name, _, n in functions(t)), default=(0, "", ""))
        return (
            f"{len(sizes)} headers: median {statistics.median(sizes):g} lines, p90 {p90}, longest {sizes[-1]}; "
            f"longest function {longest[1]} in {longest[2]}, {longest[0]} lines"
        )


def main():
    arguments = [a for a in sys.argv[1:] if not a.startswith("--")]
    root = pathlib.Path(arguments[0] if arguments else pathlib.Path(__file__).parent.parent.parent).resolve()
    checker = Checker(root)
    if "--update" in sys.argv:
        (root / "cmake" / "headers.cmake").write_text(checker.render_lists())
    for header in checker.headers:
        checker.check_header(header)
    checker.check_cycles()
    checker.check_lists()
    checker.check_tree()
    print("\n".join(checker.findings + [checker.summary()]))
    sys.exit(1 if checker.findings else 0)


if __name__ == "__main__":
    main()
