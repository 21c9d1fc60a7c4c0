"""Fuzzes for a time on all cores, keeps what breaks something, and says how to see it again: `make fuzz MINUTES=5`.

Each worker goes through all targets, `BURST` inputs at a time, drawn from its own seed. An exception that a target may not
raise is a find: the input is written to `build/fuzz/` under its digest, with the traceback. Inputs in
`tests/fuzzing/corpus/` are played first: they broke something once, and are seeds from then on.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import multiprocessing
import os
import random
import re
import resource
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from benchmarks.lib.harness import Figure, natural, positive, write, zero
from fuzzing.targets import MISTAKES, Scene, Target, decoders, handlers

CORPUS = Path(__file__).parent / "corpus"
FINDS = Path("build/fuzz")
BURST = 500
MINUTES = 5.0
SHOWN_BYTES = 400
FINDS_MAX = 10
INPUTS_MIN = 10_000_000
GIB = float(1 << 30)
ADDRESSES_MAX = 12 << 30
TOLD_S = 10.0


@dataclass(slots=True)
class Found:
    """What one worker did: inputs by target, those that were taken and not refused, finds, and its most memory."""

    inputs: Counter[str] = field(default_factory=Counter)
    taken: Counter[str] = field(default_factory=Counter)
    finds: list[str] = field(default_factory=list)
    memory_bytes: int = 0


def main(arguments: list[str] | None = None) -> int:
    """Fuzz, and write `build/results/fuzz.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=positive, default=MINUTES)
    parser.add_argument("--seed", type=natural, default=0)
    parser.add_argument("--workers", type=natural, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    until_s = time.monotonic() + 60.0 * options.minutes
    seeds = [options.seed * 1_000_003 + worker for worker in range(options.workers)]
    # Unlike `Pool`, an executor says so when a worker is gone: an input may have cost it its life.
    with ProcessPoolExecutor(len(seeds), mp_context=multiprocessing.get_context("spawn")) as pool:
        parts = list(pool.map(fuzzed, seeds, [until_s] * len(seeds)))
    inputs, taken = Counter[str](), Counter[str]()
    for part in parts:
        inputs.update(part.inputs)
        taken.update(part.taken)
    finds = [find for part in parts for find in part.finds]
    for name in sorted(inputs):
        say(f"  {name:<32} {inputs[name]:>12,} inputs, {taken[name]:>10,} taken")
    for find in finds:
        say(find)
    total, memory = float(inputs.total()), max(part.memory_bytes for part in parts)
    enough = options.minutes < MINUTES or total >= INPUTS_MIN
    return write(
        "fuzz",
        options.seed,
        [
            Figure("inputs", total, "inputs", f">= {INPUTS_MIN:,} in {MINUTES:g} min or more", enough, "all targets"),
            zero("inputs that broke something", len(finds), "inputs", "see build/fuzz"),
            Figure("most memory of a worker", memory / GIB, "GiB", "<= 1", memory <= GIB, "resident, at its peak"),
        ],
    )


def fuzzed(seed: int, until_s: float) -> Found:
    """Fuzz in this process until a moment of the monotonic clock."""
    # An input that asks for more is a find, and not the end of the machine.
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES_MAX, ADDRESSES_MAX))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    return asyncio.run(_fuzzed(seed, until_s))


async def _fuzzed(seed: int, until_s: float) -> Found:
    chance, found, scene = random.Random(seed), Found(), await Scene.opened()
    targets = decoders(scene.run) | handlers(scene)
    told_s = time.monotonic()
    for name, target in targets.items():
        for data in (*target.seeds, *corpus(name)):
            play(name, target, data, found)
    while time.monotonic() < until_s and len(found.finds) < FINDS_MAX:
        for name, target in targets.items():
            seeds = (*target.seeds, *corpus(name))
            for _ in range(BURST):
                play(name, target, target.mutate(chance.choice(seeds), chance), found)
            await scene.rest()
        if time.monotonic() - told_s > TOLD_S and seed % 1_000_003 == 0:
            told_s = time.monotonic()
            say(f"{found.inputs.total():,} inputs in this worker, {len(found.finds)} finds")
    found.memory_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    await scene.close()
    return found


def play(name: str, target: Target, data: bytes, found: Found) -> None:
    """Give one input to a target, and keep it if it breaks something."""
    found.inputs[name] += 1
    try:
        target.take(data)
        found.taken[name] += 1
    except MISTAKES:
        keep(name, data, found)
    except target.refuses:
        pass
    except Exception:  # noqa: BLE001  (whatever it is, it is what we look for)
        keep(name, data, found)


def keep(name: str, data: bytes, found: Found) -> None:
    """Write an input down with what it did, unless the same exception was found at the same place."""
    told = traceback.format_exc()
    place = [line for line in told.splitlines() if line.startswith("  File")][-2:]
    if any(all(line in find for line in place) for find in found.finds):
        return
    digest = hashlib.blake2b(data, digest_size=6).hexdigest()
    FINDS.mkdir(parents=True, exist_ok=True)
    file = FINDS / f"{file_name(name)}-{digest}"
    file.write_bytes(data)
    file.with_suffix(".txt").write_text(told, encoding="utf-8")
    shown = repr(data[:SHOWN_BYTES])
    found.finds.append(
        f"{name}: {shown} ({len(data)} bytes)\n  kept as {file}; copy it to {CORPUS / file_name(name)}\n{told}"
    )


def corpus(name: str) -> list[bytes]:
    """Return the inputs of a target that once broke something."""
    folder = CORPUS / file_name(name)
    if name not in _KEPT:
        _KEPT[name] = [file.read_bytes() for file in sorted(folder.iterdir())] if folder.is_dir() else []
    return _KEPT[name]


def say(text: str) -> None:
    """Say something at once, whoever reads it."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def file_name(target: str) -> str:
    """Return the name of a target as a folder has it."""
    return re.sub(r"[^a-z0-9]+", "-", target.lower())


_KEPT: dict[str, list[bytes]] = {}

if __name__ == "__main__":
    sys.exit(main())
