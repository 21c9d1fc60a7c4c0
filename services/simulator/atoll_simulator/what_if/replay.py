"""The simulator at the recording's pace: production machines (`atoll_simulator.fleet.rounds`), told what a recording tells.

    each life: joined ──► begins with the visible versions ──► steps by stretches drawn with a seed ──► leaves, or is silent

The same seed draws the same stretches for every setting, since each purpose has a stream of its own (`fleet.chance`). So two
settings are compared under the same luck, and the difference between them has a smaller spread than either.

A person asks for a change as text: `protocol.quorum=2`, `learner-2=10Mbit/s,80ms`. Anything else is refused.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, get_type_hints

import msgspec

from atoll.base.errors import SettingsError
from atoll.base.wording import rate
from atoll.client.join import RECOVER_S
from atoll.codec import Framing, format_of
from atoll.protocol.events import Commit
from atoll.protocol.settings import ProtocolSettings
from atoll.story.goodput import summed
from atoll_simulator.fleet.chance import Engine, stream
from atoll_simulator.fleet.parameters import Exchange, FleetParameters
from atoll_simulator.fleet.rounds import BITS_PER_GBIT, REST_STEPS, FleetLearner, FleetLink, NeverAtRest, Rounds
from atoll_simulator.scenario import LATENCY_S_MAX
from atoll_simulator.what_if.recording import (
    Life,
    MadeCommit,
    RecordedLearner,
    RecordedLink,
    Recording,
    RunFigures,
    TrainingTotals,
    outcome,
)

REST_S = 3600.0
GONE = "gone"
JOINING_TRIPS = 6
"""Requests of a learner, in turn, before it trains: the run, its member record, heads, frames, data, a peer's state."""
SETTINGS: Final = (
    "quorum",
    "grace_gamma",
    "grace_cap_steps",
    "overlap_steps",
    "interval_steps",
    "average_decay",
    "age_max",
    "silence_s",
    "shards",
    "ending",
    "codec_up",
    "codec_down",
)
"""Settings of rounds and bytes. Changes of the learning itself (merging, outer rate) need gradients: `atoll sim train`."""
_TRY_LEARNING: Final = "what changes the learning itself is tried in `atoll sim train`"
_DELAY: Final = re.compile(r"([0-9]*\.?[0-9]+)\s*(ms|s)")


@dataclass(frozen=True, slots=True)
class Change:
    """Difference from the recording: protocol settings by name, and links by learner."""

    settings: dict[str, Any]
    links: dict[str, RecordedLink]


AS_IT_WAS = Change({}, {})


def simulate_change(recording: Recording, change: Change, seed: int) -> RunFigures:
    """Return what comes of the recording's schedule under a change, from one seed."""
    world = RecordedRounds(recording, change, seed)
    for learner in recording.learners:
        for life in learner.lives:
            link = change.links.get(learner.name, learner.link)
            trainer = RecordedTrainer(world, learner, life, link)
            world.trainers.append(trainer)
            joined_s = max(0.0, life.joined_s + joining_longer_s(recording, learner, link))
            if joined_s >= life.ended_s:
                trainer.state = GONE
                continue
            world.engine.after(joined_s, trainer.begin)
            world.engine.after(life.ended_s, trainer.leave if life.in_order else trainer.die)
    world.engine.run(recording.time_s)
    if recording.over:
        world.rest()
    made: Counter[str] = Counter()
    tokens = 0
    for each in world.trainers:
        if each.machine is not None:
            made[each.name] += each.machine.steps
            tokens += each.machine.tokens
    # As in `atoll.story.goodput`, a learner that never stepped has no part in it.
    there = [(learner.there, made[learner.name]) for learner in recording.learners if made[learner.name]]
    stepped = [replace(present, stepping_s=present.stepped_s(steps)) for present, steps in there]
    trained = TrainingTotals(tokens, summed(stepped))
    return outcome(world.made, trained, recording.time_s, world.settings.fragments)


def joining_longer_s(recording: Recording, learner: RecordedLearner, link: RecordedLink) -> float:
    """Return how much longer a learner joins over another link, negative for shorter; an estimate.

    It asks for some things in turn and reads every value. Where others step meanwhile it reads as much again, the state of a
    peer's inner optimizer, for which it waits no longer than `RECOVER_S`.
    """
    was, size_bytes = learner.link, recording.joining_bytes
    values_s = size_bytes / link.bytes_s - size_bytes / was.bytes_s
    trips_s = 2.0 * JOINING_TRIPS * (link.latency_s - was.latency_s)
    longer_s = values_s + trips_s
    peers_step = any(other is not learner for other in recording.learners) and longer_s > learner.there.step_s
    return longer_s + (min(size_bytes / link.bytes_s, RECOVER_S) if peers_step else 0.0)


class RecordedRounds(Rounds):
    """Shards and learners of a recording: its agreement with the changes, its sizes, its shards' times."""

    def __init__(self, recording: Recording, change: Change, seed: int) -> None:
        # The time of the recording ends the simulation, not a number of tokens: else a faster setting would only end sooner.
        settings = msgspec.structs.replace(recording.settings, tokens_target=0, **change.settings)
        exchange = Exchange(fragments=settings.fragments, loss=0.0, retry_s=0.0)
        super().__init__(FleetParameters(), exchange, seed, settings=settings)
        self.made: list[MadeCommit] = []
        self.on_commit = self._note
        self._reads, self._commits = stream(seed, "reads"), stream(seed, "commits")
        self._recording = recording
        self._up_bytes = self._scaled("up")
        self._down_bytes = self._scaled("down")

    def up_bytes(self, fragment: int) -> float:
        """Return the size of a contribution, the recording's where the codec is the same."""
        return self._up_bytes[fragment]

    def down_bytes(self, fragment: int) -> float:
        """Return the size of a version."""
        return self._down_bytes[fragment]

    def fetch_s(self) -> float:
        """Return a time that some contribution of the recording took to be read."""
        return self._reads.choice(self._recording.read_s)

    def commit_s(self) -> float:
        """Return a time that some commit of the recording took."""
        return self._commits.choice(self._recording.commit_s)

    def rest(self) -> None:
        """Wait until the learners have left and the shards have finished; raise `NeverAtRest` if they do not."""
        until_s = self.engine.now_s + REST_S
        there = [trainer for trainer in self.trainers if trainer.state != GONE]
        if not self.engine.run(until_s, lambda: all(trainer.state in ("left", GONE) for trainer in there)):
            raise NeverAtRest("a learner that is told to leave leaves", got=[(t.name, t.state) for t in there])
        for hub in self.hubs:
            hub.drain()
        if not self.engine.run(until_s + REST_STEPS, lambda: all(hub.finished for hub in self.hubs)):
            raise NeverAtRest("a shard without learners finishes", got=[hub.machine.shard for hub in self.hubs])

    def _scaled(self, way: str) -> dict[int, float]:
        """Return the bytes of each fragment on a way: the recording's, times what the frames of the codecs are long."""
        found = {}
        for number, fragment in self._recording.fragments.items():
            old, new = (getattr(each.of(number), f"codec_{way}") for each in (self._recording.settings, self.settings))
            found[number] = getattr(fragment, f"{way}_bytes") * _ratio(fragment.elements, old, new)
        return found

    def _note(self, commit: Commit) -> None:
        shares = tuple((share.age, share.tokens) for share in commit.shares)
        waited_s = self.engine.now_s - commit.called_s
        self.made.append(MadeCommit(commit.fragment, commit.quorum_s - commit.called_s, waited_s, shares))


class RecordedTrainer(FleetLearner):
    """One life of a learner of the recording."""

    def __init__(self, world: RecordedRounds, learner: RecordedLearner, life: Life, link: RecordedLink) -> None:
        super().__init__(world, learner.name, 1.0, 1, watched=False)
        self.learner, self.life = learner, life
        self.incarnation = life.incarnation
        purpose = (learner.name, life.incarnation)
        exchange = replace(
            world.exchange, gbit_s=max(1e-6, 8.0 * link.bytes_s / BITS_PER_GBIT), latency_s=link.latency_s
        )
        self.up = RecordedLine(world.engine, exchange, stream(world.seed, "up", *purpose), learner.held_s)
        self.down = FleetLink(world.engine, exchange, stream(world.seed, "down", *purpose))
        self._dice = stream(world.seed, "stretches", *purpose)
        self._warm_s = life.warm_s
        self._left_of_stretch, self._pace_s = 0, 0.0

    def die(self) -> None:
        """Fall silent: the step under way is lost, and so is what was not pushed."""
        self.state = GONE
        self._epoch += 1

    def _next_step_s(self) -> float:
        if not self._left_of_stretch:
            stretch = self._dice.choice(self.learner.stretches)
            self._left_of_stretch, self._pace_s = stretch.steps, stretch.step_s
        self._left_of_stretch -= 1
        warm_s, self._warm_s = self._warm_s, 0.0
        return self._pace_s + warm_s

    def _step_tokens(self) -> int:
        return self.learner.step_tokens


class RecordedLine(FleetLink):
    """A way up on which an upload takes two delays more, for its request and answer, and is held up as some were."""

    def __init__(self, engine: Engine, exchange: Exchange, dice: random.Random, held_s: tuple[float, ...]) -> None:
        super().__init__(engine, exchange, dice)
        self._held_s = held_s

    def send(self, size_bytes: float, call: Any, *arguments: Any) -> None:  # noqa: ANN401  (passed on)
        """Make `call(*arguments)` at the other end when `size_bytes` have arrived there."""
        held_s = self._dice.choice(self._held_s)
        self._engine.after(held_s + 2.0 * self._latency_s, super().send, size_bytes, call, *arguments)


def _ratio(elements: int, old: str, new: str) -> float:
    return 1.0 if old == new else Framing(elements, new).size_bytes / Framing(elements, old).size_bytes


def parse_change(recording: Recording, assignments: Iterable[str], links: Iterable[str]) -> Change:
    """Return the change that the texts ask for.

    Raises:
        SettingsError: a text is no setting or link, no what-if, or nobody's; or the agreement would not hold together.
    """
    settings = dict(_setting(text) for text in assignments)
    learners = len(recording.learners)
    msgspec.structs.replace(recording.settings, **settings).check(learners)
    return Change(settings, dict(_link(text, recording) for text in links))


def _setting(text: str) -> tuple[str, Any]:
    name, equals, told = text.partition("=")
    field = name.strip().removeprefix("protocol.")
    known = field in ProtocolSettings.__struct_fields__
    if equals and not known and "." not in field:
        raise SettingsError.unknown(f"protocol.{field}", SETTINGS, todo=_TRY_LEARNING)
    if not equals or field not in SETTINGS:
        raise SettingsError(
            "this is no what-if that a recording can answer",
            got=f"--set {text}",
            allowed=", ".join(f"protocol.{each}=..." for each in SETTINGS),
            todo=_TRY_LEARNING,
        )
    try:
        value = msgspec.convert(told.strip(), get_type_hints(ProtocolSettings)[field], strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(f"protocol.{field} cannot have such a value", got=told, allowed=str(error)) from error
    if field.startswith("codec_"):
        format_of(value)
    return field, value


def _link(text: str, recording: Recording) -> tuple[str, RecordedLink]:
    name, _, told = text.partition("=")
    words = [word.strip() for word in told.split(",")]
    names = [learner.name for learner in recording.learners]
    if name not in names:
        raise SettingsError("--link names no learner of the recording", got=text, allowed=", ".join(names))
    delay = _DELAY.fullmatch(words[1]) if len(words) == 2 else None
    latency_s = float(delay[1]) * (0.001 if delay[2] == "ms" else 1.0) if delay else -1.0
    if not 0.0 <= latency_s <= LATENCY_S_MAX:
        raise SettingsError(
            "--link is not understood",
            got=text,
            allowed=f"a rate and a delay each way of at most {LATENCY_S_MAX:g} s, as {names[0]}=10Mbit/s,80ms",
        )
    bits_s = rate(re.sub(r"(?<=bit)/s$", "", words[0]), "--link")
    return name, RecordedLink(latency_s, bits_s / 8.0)
