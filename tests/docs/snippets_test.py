#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every C++ snippet of the documents stands word for word in a source that is compiled and run.

A snippet follows a line `<!-- SOURCE: MARK -->`; in the source its lines stand between `// [MARK]` and `// [/MARK]`, pairs
that may repeat. Indentation and blank lines at the ends do not count.

usage: snippets_test.py [--update]    --update writes the sources' lines into the documents
"""

import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", "docs/concepts.md", "docs/graphs.md", "docs/training.md"]
SNIPPET = re.compile(r"(?:<!-- (?P<source>\S+): (?P<mark>\S+) -->\n)?```cpp\n(?P<text>.*?)```", re.S)


def lines_between(source, mark):
    text = (ROOT / source).read_text()
    pieces = re.findall(rf"^ *// \[{re.escape(mark)}\]\n(.*?)^ *// \[/{re.escape(mark)}\]\n", text, re.S | re.M)
    if not pieces:
        sys.exit(f"{source} has no // [{mark}] … // [/{mark}]")
    return textwrap.dedent("".join(pieces)).strip("\n") + "\n"


def main():
    wrong = 0
    for name in DOCUMENTS:
        document = (ROOT / name).read_text()

        def corrected(match):
            nonlocal wrong
            line = document[: match.start()].count("\n") + 1
            if match["source"] is None:
                print(f"{name}:{line}: the snippet names no source that is compiled")
                wrong += 1
                return match[0]
            expected = lines_between(match["source"], match["mark"])
            if match["text"] == expected:
                return match[0]
            if "--update" not in sys.argv:
                print(f"{name}:{line}: differs from [{match['mark']}] in {match['source']}; --update writes it again")
                wrong += 1
            return f"<!-- {match['source']}: {match['mark']} -->\n```cpp\n{expected}```"

        updated = SNIPPET.sub(corrected, document)
        if "--update" in sys.argv:
            (ROOT / name).write_text(updated)
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document):  # links within the repository
            if not ((ROOT / name).parent / target).exists():
                print(f"{name}: links to {target}, which is not there")
                wrong += 1
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
