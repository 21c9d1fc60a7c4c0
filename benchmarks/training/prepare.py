"""How fast text becomes token shards, and in how much memory: `make bench-data`.

The same lines lie in one plain file of `--megabytes`, and a tenth of them in each packed form and table. Each is prepared by a
process of its own, `atoll data prepare`. Its memory is the most that it had at any moment, by the kernel's account. The limit
of speed is measured in the same run: the plain file is read, hashed twice and written again, which every preparation has to do.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import zstandard
from pyarrow import parquet

from benchmarks.lib.harness import Figure, at_most, fact, run_benchmark

MEGABYTES = 1000.0
MEMORY_MAX_GIB = 1.0
LINES_PER_DOCUMENT = 40
CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """The cost of one preparation: seconds, and the most bytes of memory."""

    took_s: float
    memory_bytes: int


def main(*, megabytes: Annotated[float, "size of the plain file"] = MEGABYTES, seed: int = 0) -> list[Figure]:
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        plain, size = work / "text.txt", int(megabytes * 1e6)
        write_text(plain, size, seed)
        size = plain.stat().st_size
        limit_s = hashed_copy_s(plain, work / "copy")
        done = prepare_timed(plain, work / "out")
        figures += of("plain text", size, done)
        share = limit_s / done.took_s
        figures.append(
            fact("plain text: share of the limit", share, "of limit", f"copied and hashed in {limit_s:.2f} s")
        )
        for name in FORMS:
            path = work / name
            # Elsewhere: the kernel counts what this process holds as its children's.
            maker = multiprocessing.get_context("spawn").Process(target=form, args=(path, seed, size // 10))
            maker.start()
            maker.join()
            figures += of(name, size // 10, prepare_timed(path, work / "out", "--field", "body"))
    return figures


def lines(seed: int, size: int) -> list[str]:
    rng = np.random.default_rng(seed)
    words = np.array(["".join(chr(97 + c) for c in rng.integers(0, 26, n)) for n in rng.integers(2, 10, 5000)])
    found, length = [], 0
    while length < size:
        line = " ".join(rng.choice(words, 12)) + "\n"
        found.append(line)
        length += len(line)
    return found


def write_text(path: Path, size: int, seed: int) -> None:
    """Write a plain file: a few megabytes of lines, repeated with a number each time."""
    block = "".join(lines(seed, min(size, 4_000_000)))
    with path.open("w", encoding="utf-8") as file:
        number = 0
        while file.tell() < size:
            file.write(f"part {number}\n{block[: size - file.tell()]}")
            number += 1


def _jsonl(part: list[str]) -> bytes:
    texts = ("".join(part[at : at + LINES_PER_DOCUMENT]) for at in range(0, len(part), LINES_PER_DOCUMENT))
    return "".join(json.dumps({"body": text}) + "\n" for text in texts).encode()


def _table(part: list[str]) -> pa.Table:
    texts = ["".join(part[at : at + LINES_PER_DOCUMENT]) for at in range(0, len(part), LINES_PER_DOCUMENT)]
    return pa.table({"body": texts})


FORMS: dict[str, Callable[[Path, list[str]], object]] = {
    "a.jsonl": lambda path, part: path.write_bytes(_jsonl(part)),
    "a.jsonl.gz": lambda path, part: path.write_bytes(gzip.compress(_jsonl(part), 1)),
    "a.txt.zst": lambda path, part: path.write_bytes(zstandard.compress("".join(part).encode())),
    "a.parquet": lambda path, part: parquet.write_table(_table(part), path),
}


def form(path: Path, seed: int, size: int) -> None:
    FORMS[path.name](path, lines(seed, size))


def hashed_copy_s(plain: Path, copy: Path) -> float:
    """Return how long it takes to read a file, hash it twice and write it again."""
    began_s = time.monotonic()
    one, two = hashlib.sha256(), hashlib.sha256()
    with plain.open("rb") as source, copy.open("wb") as target:
        while chunk := source.read(CHUNK):
            one.update(chunk)
            two.update(chunk)
            target.write(chunk)
    took_s = time.monotonic() - began_s
    copy.unlink()
    return took_s


def prepare_timed(source: Path, out: Path, *words: str) -> Prepared:
    command = [sys.executable, "-m", "atoll.cli", "data", "prepare", str(source), "--out", str(out), *words]
    began_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} left with {process.returncode}")
    return Prepared(time.monotonic() - began_s, used.ru_maxrss * 1024)


def of(name: str, size: int, done: Prepared) -> list[Figure]:
    how = f"{size / 1e6:.0f} MB in {done.took_s:.1f} s"
    return [
        fact(f"{name}: speed", size / 1e6 / done.took_s, "MB/s", how),
        at_most(f"{name}: most memory", done.memory_bytes / (1 << 30), "GiB", MEMORY_MAX_GIB, how),
    ]


if __name__ == "__main__":
    run_benchmark("bench-data", main)
