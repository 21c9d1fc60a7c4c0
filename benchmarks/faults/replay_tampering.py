"""Ten ways to change a contribution that a run has retained; a replay must name just that one, in just that round.

Whoever changes a round knows how: it gets a new digest, and objects lie under the digests that they have then. What is changed
is put back afterwards. An eleventh way makes everything anew that belongs to a contribution, its manifest too. Then only the
arithmetic can tell, and it tells the round.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from atoll.archive.checkpoints import CheckpointObject
from atoll.archive.object_store import ArchiveStore, Name
from atoll.archive.replay import ReplayedRound, RunReplay
from atoll.archive.rounds import RetainedFold, RetainedRound, RoundName, RoundStore
from atoll.base.errors import CheckpointError
from atoll.codec import FrameDecoder, FrameEncoder, Framing, StoredFrame
from atoll.protocol.events import PushKey
from atoll.run.push_keys import key_of
from atoll.wire.blobs import digest_of
from atoll.wire.messages import RunRecord

OBJECT_BYTES_MAX: Final = 1 << 40


class UndoableStore:
    """An archive whose changes can be undone."""

    def __init__(self, inner: ArchiveStore) -> None:
        """Change nothing yet."""
        self.where = inner.where
        self._inner = inner
        self._former: dict[str, bytes | None] = {}

    def put(self, path: str, data: bytes) -> None:
        """Write, and remember what was there."""
        self._remember(path)
        self._inner.put(path, data)

    def get(self, path: str, size_bytes_max: int) -> bytes:
        """Read."""
        return self._inner.get(path, size_bytes_max)

    def names(self, prefix: str) -> list[Name]:
        """List."""
        return self._inner.names(prefix)

    def remove(self, paths: list[str]) -> None:
        """Remove, and remember what was there."""
        for path in paths:
            self._remember(path)
        self._inner.remove(paths)

    def undo(self) -> None:
        """Put everything back."""
        for path, data in self._former.items():
            if data is None:
                self._inner.remove([path])
            else:
                self._inner.put(path, data)
        self._former.clear()

    def _remember(self, path: str) -> None:
        if path not in self._former:
            try:
                self._former[path] = self._inner.get(path, OBJECT_BYTES_MAX)
            except CheckpointError:
                self._former[path] = None


@dataclass(frozen=True, slots=True)
class TamperTarget:
    """A retained round of at least two contributions, of which the one at `place` is changed, perhaps with the one after it."""

    run: RunRecord
    rounds: RoundStore
    name: RoundName
    made: RetainedRound
    place: int

    @property
    def fold(self) -> RetainedFold:
        """Return what is changed."""
        return self.made.folds[self.place]

    @property
    def key(self) -> PushKey:
        """Return whose it is."""
        return key_of(self.fold.manifest)

    @property
    def beside(self) -> int:
        """Return the place of another contribution of the round."""
        return (self.place + 1) % len(self.made.folds)

    def data(self) -> bytearray:
        """Return the bytes of the contribution."""
        return bytearray(self.rounds.get_object(_frame(self.fold)))

    def rewrite(self, folds: tuple[RetainedFold, ...]) -> None:
        """Let the round be one of these contributions."""
        self.rounds.object_store.remove([self.name.path])
        self.rounds.put_round(msgspec.structs.replace(self.made, folds=folds))

    def change(self, **changes: object) -> None:
        """Change fields of the contribution in the round."""
        folds = list(self.made.folds)
        folds[self.place] = msgspec.structs.replace(self.fold, **changes)
        self.rewrite(tuple(folds))


def _frame(fold: RetainedFold) -> CheckpointObject:
    if fold.frame is None:
        raise SystemExit("a contribution was not retained")
    return fold.frame


def flipped(target: TamperTarget) -> None:
    """Change one bit of its bytes."""
    data = target.data()
    data[len(data) // 2] ^= 1
    target.rounds.object_store.put(target.rounds.place(_frame(target.fold)), bytes(data))


def cut(target: TamperTarget) -> None:
    """Cut its bytes short."""
    target.rounds.object_store.put(target.rounds.place(_frame(target.fold)), bytes(target.data()[:-4]))


def lost(target: TamperTarget) -> None:
    """Remove its bytes."""
    target.rounds.object_store.remove([target.rounds.place(_frame(target.fold))])


def exchanged(target: TamperTarget) -> None:
    """Let the round name other bytes, under their own digest."""
    data = target.data()
    data[-1] ^= 1
    target.change(frame=target.rounds.put_object(bytes(data)))


def swapped(target: TamperTarget) -> None:
    """Exchange the bytes of two contributions."""
    folds = list(target.made.folds)
    one, other = folds[target.place], folds[target.beside]
    folds[target.place] = msgspec.structs.replace(one, frame=other.frame)
    folds[target.beside] = msgspec.structs.replace(other, frame=one.frame)
    target.rewrite(tuple(folds))


def weighed(target: TamperTarget) -> None:
    """Let it count double."""
    target.change(weight=2.0 * target.fold.weight)


def damped(target: TamperTarget) -> None:
    """Let it count as late."""
    target.change(staleness_weight=0.5 * target.fold.staleness_weight)


def claiming(target: TamperTarget) -> None:
    """Let its manifest claim more tokens."""
    manifest = target.fold.manifest
    target.change(manifest=msgspec.structs.replace(manifest, tokens=manifest.tokens + 1))


def lengthened(target: TamperTarget) -> None:
    """Let its manifest claim that it is longer."""
    manifest = target.fold.manifest
    target.change(manifest=msgspec.structs.replace(manifest, norms=tuple(2.0 * norm for norm in manifest.norms)))


def left_out(target: TamperTarget) -> None:
    """Take it out of the round."""
    target.rewrite(tuple(fold for place, fold in enumerate(target.made.folds) if place != target.place))


def forged(target: TamperTarget) -> None:
    """Double it, and make its bytes, digests, norms and manifest anew, as its learner would have."""
    manifest = target.fold.manifest
    fragment = manifest.fragment
    elements, codec = target.run.layout.fragment_sizes()[fragment], target.run.protocol.of(fragment).codec_up
    slices = target.run.layout.slices(fragment)
    pieces = StoredFrame(bytes(target.data()))
    arrived = FrameDecoder(elements, codec)
    arrived.take([(number, pieces.piece(number)) for number in range(len(pieces))])
    doubled = np.float32(2.0) * arrived.values()
    encoder = FrameEncoder(Framing(elements, codec), lambda start, stop: doubled[start:stop], slices)
    data = b"".join(bytes(encoder.piece(number)) for number in range(len(encoder)))
    digest = digest_of(StoredFrame(data), collision_free=manifest.blob.collision_free)
    blob = msgspec.structs.replace(manifest.blob, size_bytes=len(data), digest=digest)
    claimed = msgspec.structs.replace(manifest, norms=tuple(encoder.norms()), blob=blob)
    target.change(frame=target.rounds.put_object(data), manifest=claimed)


WAYS: Final[tuple[Callable[[TamperTarget], None], ...]] = (
    flipped,
    cut,
    lost,
    exchanged,
    swapped,
    weighed,
    damped,
    claiming,
    lengthened,
    left_out,
)
BOTH: Final = (swapped,)
"""Ways that change two contributions."""


@dataclass(frozen=True, slots=True)
class TamperVerdict:
    """What a replay said of a change: the first round that differs, the contributions that it names, and in which words."""

    way: str
    target: TamperTarget
    found: ReplayedRound | None
    named: frozenset[PushKey]
    due: frozenset[PushKey]

    @property
    def round_found(self) -> bool:
        """Return whether the first round that differs is the changed one."""
        head = self.target.made.head
        return self.found is not None and (self.found.fragment, self.found.version) == (head.fragment, head.version)

    @property
    def pinpointed(self) -> bool:
        """Return whether it named the changed contributions and no other."""
        return self.round_found and self.named == self.due


def verdicts(
    rounds: RoundStore, seed: int, ways: tuple[Callable[[TamperTarget], None], ...] = WAYS
) -> Iterator[TamperVerdict]:
    """Change one contribution after the other, each in a round of its own, and replay that round."""
    store = UndoableStore(rounds.object_store)
    changed = RoundStore.of(store, rounds.run())
    dice = random.Random(f"{seed}/tampering")  # noqa: S311  (reproducible, not secret)
    for way, target in zip(ways, targets(changed, dice, len(ways)), strict=True):
        way(target)
        try:
            again = RunReplay(changed).fragment(target.name.fragment, until=target.name.version)
            found = next((made for made in again if not made.identical), None)
        finally:
            store.undo()
        due = {target.key}
        if way in BOTH:
            due.add(key_of(target.made.folds[target.beside].manifest))
        named = {each.push for each in found.differences if each.push is not None} if found else set()
        yield TamperVerdict(way.__name__, target, found, frozenset(named), frozenset(due))


def targets(rounds: RoundStore, dice: random.Random, count: int) -> list[TamperTarget]:
    """Return so many contributions, of different rounds that have others and whose bytes are like no other's."""
    run = rounds.run()
    names = [name for fragment in range(run.protocol.fragments) for name in rounds.rounds(fragment) if name.whole]
    made = [(name, rounds.round(name)) for name in names]
    known = Counter((each.head.fragment, each.head.version) for _, each in made)
    alone = [(name, each) for name, each in made if known[each.head.fragment, each.head.version] == 1]
    frames = Counter(fold.frame for _, each in made for fold in each.folds)
    fit = []
    for name, each in alone:
        place = dice.randrange(len(each.folds)) if each.folds else 0
        target = TamperTarget(run, rounds, name, each, place)
        if len(each.folds) > 1 and all(frames[each.folds[one].frame] == 1 for one in (place, target.beside)):
            fit.append(target)
    if len(fit) < count:
        raise SystemExit(f"only {len(fit)} rounds can be changed, and {count} are wanted: train for longer")
    return dice.sample(fit, count)
