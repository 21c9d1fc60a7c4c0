"""The standing of a run: what it does at this moment, in one word, and what it waits for; the same for people and programs.

over       it has reached its target and no learner is heard any more
stopped    it was ended before its target, or without one, and no learner is heard any more: it may go on
ending     it has reached its end, and learners are still heard
training   versions are made, or may be soon: a quorum of learners trains and every shard is served
waiting    something is missing; `waits_for` names all of it

Every process writes into the event log twice a minute. If nothing is written although learners are heard, the broker carries
messages and stores none: its disk is full. If a fragment has no version among so many rounds that each should have several, one
of the run's brokers is away or full. Heartbeats alone are no training: where none of the last intervals made a version although
a quorum trains, the run waits for one, and what its oldest open round waits for is named.

A learner that has not left and is not heard is *unheard*. A run trains on without it, so it is no reason to wait.

`RunStatus` is the same for programs: its JSON schema is made from it. None stands for what is not known. Fields may be added;
none is renamed or removed as long as `schema` stays the same.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from atoll.base.wording import few
from atoll.protocol.pacing import lower_median, plausible
from atoll.protocol.settings import ProtocolSettings
from atoll.run.history import History, RoundLine
from atoll.run.process_views import LearnerView, Noted
from atoll.wire.events import WaitingEvent
from atoll.wire.traffic import TOLD_EVERY_S

StandingWord = Literal["over", "stopped", "ending", "training", "waiting"]
NAMED_MAX: Final = 8
HEARD: Final = ("joining", "training", "draining")
"""The states of a learner that is heard."""
UNWRITTEN_S: Final = 4.0 * TOLD_EVERY_S
"""After so long without an entry in the event log the broker stores nothing; clocks of two machines differ by less."""
STALLED_TIMES: Final = 4
"""A fragment that has none of the newest rounds, this many for each fragment, has come to a stop."""
STILL_INTERVALS: Final = 3.0
STILL_S_MIN: Final = 15.0
"""A run that makes no version for so many intervals, and for so long, has come to a stop."""


@dataclass(frozen=True, slots=True)
class Standing:
    """The word for what a run does, all that it waits for, and whom it does not hear, in words."""

    word: StandingWord
    waits_for: tuple[str, ...] = ()
    unheard: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Return all of it as one line."""
        waits = f" for {'; '.join(self.waits_for)}" if self.waits_for else ""
        if not self.unheard:
            return f"{self.word}{waits}"
        return f"{self.word}{waits}; not heard, and has not left: {few(self.unheard, NAMED_MAX)}"


@dataclass(frozen=True, slots=True)
class Storing:
    """Storing, by brokers, of what they are sent.

    `unwritten_s` is for how long nobody has written into the event log; `stalled` are the fragments that have come to a stop.
    """

    unwritten_s: float = 0.0
    stalled: tuple[int, ...] = ()


ALL_STORED: Final = Storing()


@dataclass(frozen=True, slots=True)
class Making:
    """Making of versions: for how long none was made, from when on that is too long, and what is known of the cause.

    `open_round` says in words what the round waits for that was called first; `tokenless` are learners whose steps count no
    token.
    """

    still_s: float = 0.0
    late_s: float = 0.0
    open_round: str = ""
    tokenless: tuple[str, ...] = ()

    @property
    def stands_still(self) -> bool:
        """Return whether no version was made for too long."""
        return self.still_s > self.late_s

    @property
    def sentence(self) -> str:
        """Return what a run that stands still waits for."""
        told = f"a version: none was made for {self.still_s:.0f} s"
        if self.open_round:
            told += f"; {self.open_round}"
        if self.tokenless:
            told += f"; steps of {few(self.tokenless, NAMED_MAX)} count 0 tokens, and nothing of them can be merged"
        return told


MADE: Final = Making()


def late_after_s(view: History, protocol: ProtocolSettings) -> float:
    """Return after how long without a version a run stands still, by the step times that its learners tell."""
    steps_s = [
        plausible(one.report.step_s) for one in view.learners.values() if one.report is not None and one.report.step_s
    ]
    return max(STILL_S_MIN, STILL_INTERVALS * protocol.interval_steps * (lower_median(steps_s) or 0.0))


def making_of(view: History, protocol: ProtocolSettings, training: Collection[str]) -> Making:
    """Return what becomes of versions while the learners `training` train; all times are by the clocks of who wrote them.

    A run stands still from its last version on, or from when a quorum of them had joined, whichever came later.
    """
    joined = sorted(
        life.joined_at_s
        for name in training
        if (life := view.learners[name].latest) is not None and life.joined_at_s is not None
    )
    if len(joined) < protocol.quorum:
        return MADE
    since_s = max(joined[protocol.quorum - 1], view.rounds[-1].at_s if view.rounds else 0.0)
    oldest = min(view.open_rounds.values(), key=lambda one: one.at_s - one.fields.waited_s, default=None)
    return Making(
        still_s=max(0.0, view.newest_beat_s - since_s),
        late_s=late_after_s(view, protocol),
        open_round="" if oldest is None else _describe_open_round(oldest, view.newest_beat_s),
        tokenless=tuple(sorted(name for name in training if _is_tokenless(view.learners[name], protocol))),
    )


def _describe_open_round(one: Noted[WaitingEvent], now_s: float) -> str:
    event = one.fields
    for_s = max(event.waited_s, now_s - one.at_s + event.waited_s)
    return f"the round of version {event.version} of fragment {event.fragment} is open for {for_s:.0f} s ({event.why})"


def _is_tokenless(learner: LearnerView, protocol: ProtocolSettings) -> bool:
    life = learner.latest
    return life is not None and life.tokens == 0 and life.steps > protocol.interval_steps


def heard_at_s(learner: LearnerView, epoch_s: float) -> float | None:
    """Return when a learner was last heard, by date: by its heartbeat, else by what it wrote into the event log.

    `epoch_s` is the date at which the clock of arrivals shows 0. None if nothing tells.
    """
    if learner.heard_s is not None:
        return epoch_s + learner.heard_s
    life, newest = learner.latest, learner.curve.newest
    told = (None if newest is None else newest.at_s, None if life is None else life.joined_at_s)
    return max((at_s for at_s in told if at_s is not None), default=None)


def stalled_fragments(rounds: Sequence[RoundLine], fragments: int) -> tuple[int, ...]:
    """Return the fragments of so many that have come to a stop, while the rounds of others go on."""
    many = STALLED_TIMES * fragments
    if len(rounds) < many:
        return ()
    made = {line.round.fragment for line in itertools.islice(reversed(rounds), many)}
    return tuple(fragment for fragment in range(fragments) if fragment not in made)


def standing_of(  # noqa: PLR0913  (all that a standing follows from, by name)
    protocol: ProtocolSettings,
    states: Iterable[str],
    owned: Collection[int],
    *,
    ended: bool,
    stopped: bool = False,
    unheard: tuple[str, ...] = (),
    storing: Storing = ALL_STORED,
    making: Making = MADE,
) -> Standing:
    """Return how a run stands.

    Args:
        protocol: what it agreed on.
        states: those of all its learners.
        owned: the shards that a process that is heard owns.
        ended: whether the run has reached its end.
        stopped: whether that end was not its target.
        unheard: the learners that are not heard, in words.
        storing: what becomes of what brokers are to store.
        making: what becomes of versions.
    """
    counts = Counter(states)
    heard = any(counts[state] for state in HEARD)
    if ended:
        return Standing("ending" if heard else "stopped" if stopped else "over")
    training = counts["training"]
    waits_for = list(_missing_processes(protocol, training, owned, heard=heard))
    if training:
        waits_for += _storage_faults(protocol, owned, storing)
    if training and not waits_for and making.stands_still:
        waits_for.append(making.sentence)
    return Standing("waiting" if waits_for else "training", tuple(waits_for), unheard)


def _missing_processes(
    protocol: ProtocolSettings, training: int, owned: Collection[int], *, heard: bool
) -> Iterator[str]:
    if not heard:
        yield "a learner: none is heard"
    elif training < protocol.quorum:
        yield f"a quorum of {protocol.quorum}: {training} training"
    unserved = [str(shard) for shard in range(protocol.shards) if shard not in owned]
    if unserved:
        yield f"a synchronizer for shard {', '.join(unserved)}"


def _storage_faults(protocol: ProtocolSettings, owned: Collection[int], storing: Storing) -> Iterator[str]:
    served = [p for p in storing.stalled if any(p in protocol.fragments_of(shard) for shard in owned)]
    if served:
        names = few(map(str, served), NAMED_MAX)
        yield f"versions of fragment {names}, while others are made. Is a broker that keeps them away or full?"
    if storing.unwritten_s > UNWRITTEN_S:
        yield f"a broker that stores something: for {storing.unwritten_s:.0f} s it has not. Is its disk full?"


SCHEMA: Final = 1


class LearnerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A learner: `state` is joining, training, draining, silent, left or ended; `heard_s` is how long ago it was heard."""

    learner: str
    state: str
    incarnation: int
    tokens: int
    step: int | None = None
    step_s: float | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    overhead: float | None = None
    lag_versions: int | None = None
    heard_s: float | None = None


class ShardStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A shard: whether a process that is heard owns it, and how long ago that one was heard."""

    shard: int
    served: bool
    heard_s: float | None = None


class FragmentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A fragment: its newest version, and how many learners contributed to that."""

    fragment: int
    version: int
    contributors: int


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run: what it does, all that it waits for, and its parts.

    Attributes:
        waits_for: in words; empty unless it is waiting.
        unheard: learners that have not left and are not heard, each with for how long, in words; empty when the run has ended.
        broker: the address that answered.
        tokens_target: 0 for a run without an end.
        goodput: the share of learner-seconds spent stepping while this command listened, as far as merges follow.
        lag_versions_max: the most that a learner that trains is behind.
        faults: processes that were lost, as far as the event log tells.
        clipped: learners of which contributions were clipped lately, with the newest, in words.
    """

    run: str
    standing: StandingWord
    waits_for: tuple[str, ...]
    broker: str
    tokens: int
    tokens_target: int
    tokens_per_s: float
    commits: int
    quorum: int
    bits_per_byte: float | None
    goodput: float | None
    bytes_per_token: float | None
    lag_versions_max: int | None
    faults: int
    learners: tuple[LearnerStatus, ...]
    shards: tuple[ShardStatus, ...]
    fragments: tuple[FragmentStatus, ...]
    quarantined: tuple[str, ...]
    unheard: tuple[str, ...]
    clipped: tuple[str, ...]
    schema: int = SCHEMA


def status_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of `RunStatus`."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(RunStatus)}
