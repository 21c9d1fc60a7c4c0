"""What the loss of the broker's disk costs a run: `make bench-rebuild`.

One run of `atoll up` with two paced learners and two shards that keeps an archive. At a moment that the schedule does not know
everything gets SIGKILL, the broker too, and the broker's store is deleted; then `atoll up --resume` rebuilds the run on an
empty broker and trains on. What was lost is what the event log knew a moment before the kill.

    bit-identical       frame, outer state and ledgers of every head beside the archive's objects, on a broker of its own
    trained again       tokens last heard of minus tokens in the checkpoint, over tokens last heard of
    seconds             from the start of `--resume` to its broker's answer, and from there to the next commit
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import psutil

from atoll.archive.checkpoint_store import CheckpointStore
from atoll.archive.object_store import open_archive
from atoll.archive.rebuild import rebuild
from atoll.base.clock import SystemClock
from atoll.base.errors import AtollError
from atoll.bus.open import open_bus
from atoll.bus.server import EmbeddedBroker
from atoll.run.folder import read_run_file
from atoll.run.heads import read_heads
from atoll.wire.messages import Event, decode
from benchmarks.lib.harness import Figure, at_most, fact, run_benchmark, true
from benchmarks.lib.runs import as_operator, learner_names, read_report, stored_events, up_command, wait_until

OUT = Path("build/rebuild")
RUN = "rebuild"
SHARDS = 2
EVERY_S = 10
PACE = 12.0
SETTINGS = ("model.size=xs", "protocol.interval_steps=16", f"archive.every_s={EVERY_S}", f"run={RUN}")
WARM_UP_S = 20.0
WAIT_S = 180.0
POLL_S = 0.05
INTERVALS_MAX = 2.0


@dataclass(frozen=True, slots=True)
class Known:
    """The event log's last state before the disk was lost, at `at_s`: commits over all fragments, run tokens."""

    versions: int
    tokens: int
    at_s: float


def main(
    *, minutes: Annotated[float, "about how long to train before the loss, and after"] = 2.0, seed: int = 0
) -> list[Figure]:
    shutil.rmtree(OUT, ignore_errors=True)
    before_s = max(WARM_UP_S, 30.0 * minutes)
    known = train_and_lose(before_s, seed)
    identical, compared = asyncio.run(compare())
    began_s, started = time.monotonic(), subprocess.Popen(command())
    try:
        answered_s, committed_s = asyncio.run(wait_for_commit(began_s))
    finally:
        started.send_signal(signal.SIGINT)
        started.wait()
    if started.returncode:
        raise SystemExit(f"atoll up --resume left with {started.returncode}")
    report = read_report(OUT)
    rebuilt = report["rebuilt"][-1]
    again = max(0, known.tokens - rebuilt["tokens"])
    exact = bool(report["fates_exact"])
    what = f"{known.tokens} heard of, {rebuilt['tokens']} in checkpoint {rebuilt['checkpoint']}; a checkpoint every {EVERY_S} s"
    share, age_s = again / known.tokens, known.at_s - rebuilt["checkpoint_at_s"]
    bound_s = INTERVALS_MAX * EVERY_S
    return [
        true("the rebuilt run is bit-identical to the checkpoint", identical, compared, "yes"),
        fact("commits last heard of", float(known.versions), "commits", "by the event log, all fragments"),
        fact("commits rebuilt", float(rebuilt["versions"]), "commits", f"checkpoint {rebuilt['checkpoint']}"),
        fact("tokens trained again", float(again), "tokens", what),
        fact("share trained again", share, "ratio", f"of what was trained in about {before_s:.0f} s"),
        at_most("age of the checkpoint at the loss", age_s, "s", bound_s, "two intervals at most"),
        fact("from --resume to an answering broker", answered_s, "s", "process start to a rebuilt run record"),
        fact("from there to the next commit", committed_s, "s", "data check, JAX start and first round included"),
        true("fates of the rebuilt run", exact, json.dumps(report["tokens_by_fate"]), "exact"),
    ]


def command(seed: int | None = None) -> list[str]:
    paces = dict.fromkeys(learner_names(2), PACE)
    if seed is None:
        return up_command(OUT, {"tokens": 0, "resume": True}, throttle=paces)
    flags = {"tokens": 0, "learners": 2, "shards": SHARDS, "seed": seed}
    return up_command(OUT, flags, settings=SETTINGS, throttle=paces)


def train_and_lose(seconds: float, seed: int) -> Known:
    """Train until both shards have made checkpoints and `seconds` have gone by; kill everything and delete the store."""
    up = subprocess.Popen(command(seed))
    try:
        logs = [OUT / "logs" / f"shard-{shard}.jsonl" for shard in range(SHARDS)]

        def checkpointed() -> bool:
            said = [log.read_text(encoding="utf-8") if log.exists() else "" for log in logs]
            return all(text.count("archive.checkpointed") > 1 for text in said)

        wait_until("checkpoints of all shards", checkpointed, WAIT_S, up)
        # Seven tenths of an interval after a checkpoint: a moment that is neither kind nor cruel.
        time.sleep(seconds // EVERY_S * EVERY_S + 0.7 * EVERY_S)
        known = asyncio.run(heard_of())
    finally:
        for process in [*psutil.Process(up.pid).children(recursive=True), psutil.Process(up.pid)]:
            process.kill()
        up.wait()
    shutil.rmtree(OUT / "nats")
    return known


async def heard_of() -> Known:
    url = (OUT / "nats" / "url").read_text(encoding="utf-8")
    stored = await stored_events(url, RUN, "round", as_operator(OUT, RUN))
    rounds = [decode(Event, data).fields for data in stored]
    tokens = max((msgspec.json.decode(fields["run_tokens"]) for fields in rounds), default=0)
    return Known(len(rounds), tokens, time.time())


async def compare() -> tuple[bool, str]:
    """Rebuild on a broker of our own and compare every byte with the archive."""
    store = CheckpointStore(open_archive(str(OUT / "archive")), RUN)
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(Path(folder)) as broker:
        bus = await open_bus(broker.url, RUN, name="bench")
        try:
            began_s = time.monotonic()
            outcome = await rebuild(bus, store, SystemClock())
            took_s = time.monotonic() - began_s
            heads = await read_heads(bus, outcome.record)
            same, size = True, 0
            for manifest in store.newest()[1]:
                for piece in manifest.pieces:
                    head = heads[piece.head.fragment]
                    refs = [ref for ref in (head.keyframe, head.state, head.fragment_ledger) if ref is not None]
                    there = [await bus.get_blob(ref, 1 << 33) for ref in refs]
                    kept = [store.get_object(manifest.shard, found) for found in piece.objects]
                    same = same and there == kept and head.version == piece.head.version
                    size += sum(len(data) for data in kept)
        finally:
            await bus.close()
    return same, f"{len(heads)} fragments, {size} bytes of frames, state and ledgers; rebuilt in {took_s:.2f} s"


async def wait_for_commit(began_s: float) -> tuple[float, float]:
    until_s = began_s + WAIT_S
    answered_s = 0.0
    while time.monotonic() < until_s:
        file = read_run_file(OUT)
        if not answered_s and file is not None and file.sessions[-1].rebuilt is not None:
            answered_s = time.monotonic()
        if answered_s:
            try:
                if (await heard_of()).versions:
                    return answered_s - began_s, time.monotonic() - answered_s
            except (AtollError, OSError):
                pass
        await asyncio.sleep(POLL_S)
    raise SystemExit("the rebuilt run committed nothing")


if __name__ == "__main__":
    run_benchmark("bench-rebuild", main)
