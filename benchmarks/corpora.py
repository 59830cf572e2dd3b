"""Time and memory that a large text file takes to prepare: ``python -m benchmarks.corpora --ranks FOLDER``.

A file of ``--megabytes`` is made under ``--folder`` (lines of the standard library's docstrings in random order) and
removed at the end. Each tokenizer prepares it in a process of its own, once anew and once out of the cache; printed are
its time, its processor time (imports included; MB/s is of this one, which other processes disturb less) and its peak
resident memory (``ru_maxrss``, mapped pages included). Without ``--ranks`` bytes alone are measured. The target: 1 GB
in under 2 GB.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._machine import machine
from stability.config.parts import part
from stability.corpora.cache import prepare
from stability.data import stdlib

LINES_PER_WRITE = 100_000


def write_text(file: Path, num_bytes: int) -> None:
    """Write lines drawn at random, so that no block repeats."""
    root = stdlib.library_folder()
    lines = [
        line + "\n"
        for source in stdlib.source_files(root)
        for text in stdlib.documents(source)
        for line in text.splitlines()
        if line.strip()
    ]
    rng, written = random.Random(0), 0
    with open(file, "wb") as stream:
        while written < num_bytes:
            written += stream.write("".join(rng.choices(lines, k=LINES_PER_WRITE)).encode())


def measure(settings: dict[str, str], cache: Path) -> dict[str, float | str]:
    """Prepare a corpus in this process; return time, peak memory, tokens and description."""
    started = time.perf_counter()
    corpus = prepare(part("data", settings), cache)
    wall_s = time.perf_counter() - started
    used = resource.getrusage(resource.RUSAGE_SELF)
    cost = {"wall_s": wall_s, "cpu_s": used.ru_utime + used.ru_stime, "peak_gb": used.ru_maxrss * 1024 / 1e9}
    return {**cost, "num_tokens": len(corpus.train_tokens) + len(corpus.val_tokens), "description": corpus.description}


def line(label: str, settings: dict[str, str], cache: Path, num_bytes: int) -> str:
    """Return one row of the table, measured in a fresh process.

    Args:
        label: begins the row.
        settings: the data source's settings.
        cache: prepared data's folder.
        num_bytes: the text's size.
    """
    command = [sys.executable, "-m", "benchmarks.corpora", "--measure", json.dumps(settings), "--cache", str(cache)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    rate = num_bytes / 1e6 / found["cpu_s"]
    times = f"{found['wall_s']:>8.1f} s, of it on the CPU {found['cpu_s']:>6.1f} s{rate:>8.1f} MB/s"
    return f"{label:22}{times}{found['peak_gb']:>8.2f} GB{found['num_tokens']:>15,} tokens   {found['description']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the file and its caches lie while they are measured; default: the system's temporary folder",
    )
    parser.add_argument("--ranks", help="folder with GPT-2's vocab.bpe and encoder.json")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(json.loads(options.measure), options.cache)))
        return
    print(machine())
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        file = Path(folder, "large.txt")
        write_text(file, options.megabytes * 1_000_000)
        num_bytes = file.stat().st_size
        print(f"{num_bytes:,} bytes of text")
        variants: dict[str, dict[str, object]] = {"bytes": {}}
        if options.ranks:
            variants["gpt2, keep 4,096"] = {
                "tokenizer": "gpt2",
                "ranks": str(Path(options.ranks).resolve()),
                "keep": 4096,
            }
        for label, settings in variants.items():
            named = {"name": "text", "path": str(file), **settings}
            for how in ("", " again"):
                print(line(label + how, named, Path(folder, "cache"), num_bytes), flush=True)


if __name__ == "__main__":
    main()
