#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the chapters of Genesis kept in examples/data/ from Debian's `bible-kjv` package.

One chapter is one paragraph, without verse numbers. The held-out chapters are not in the training
file. Needed only to make the files again; they are kept in the repository.

usage: prepare_genesis.py [FOLDER]        (default: the data folder beside this script)
"""

import pathlib
import re
import subprocess
import sys

FILES = {"genesis.txt": range(1, 15), "genesis-held-out.txt": range(15, 18)}
REFERENCE = re.compile(r"^Ge\d+:\d+ ")


def chapter(number):
    # -l with a huge width keeps each verse on a line; a verse number past the last is the last.
    verses = []
    for verse in range(1, 100):
        line = subprocess.run(
            ["bible", "-f", "-l100000", f"Gen{number}:{verse}"],
            check=True, capture_output=True, text=True,
        ).stdout.strip()
        text = REFERENCE.sub("", line)
        if verses and text == verses[-1]:
            break
        verses.append(text)
    return " ".join(verses)


def main():
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).parent / "data"
    for name, chapters in FILES.items():
        (folder / name).write_text("\n\n".join(chapter(n) for n in chapters) + "\n")


if __name__ == "__main__":
    main()
