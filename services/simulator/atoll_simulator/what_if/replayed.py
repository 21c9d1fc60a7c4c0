"""The simulator at the recording's pace: production machines (`atoll_simulator.fleet.rounds`), told what a recording tells.

    each life: joined ──► begins with the visible versions ──► steps by stretches drawn with a seed ──► leaves, or is silent

The same seed draws the same stretches for every setting, since each purpose has a stream of its own (`fleet.chance`). So two
settings are compared under the same luck, and the difference between them has a smaller spread than either.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from atoll.client.join import RECOVER_S
from atoll.codec import Framing
from atoll.protocol.events import Commit
from atoll.story.goodput import summed
from atoll_simulator.engine import Engine
from atoll_simulator.fleet.chance import stream
from atoll_simulator.fleet.links import BITS_PER_GBIT, FleetLink
from atoll_simulator.fleet.parameters import Exchange, FleetParameters
from atoll_simulator.fleet.rounds import REST_STEPS, NeverAtRest, Rounds
from atoll_simulator.fleet.trainer import FleetLearner
from atoll_simulator.what_if.outcome import MadeCommit, RunFigures, Trained, outcome
from atoll_simulator.what_if.recording import Life, RecordedLearner, RecordedLink, Recording

REST_S = 3600.0
GONE = "gone"
JOINING_TRIPS = 6
"""What a learner asks for in turn before it trains: the run, its member record, heads, frames, data, a peer's state."""


@dataclass(frozen=True, slots=True)
class Change:
    """What is different from the recording: protocol settings by name, and links by learner."""

    settings: dict[str, Any]
    links: dict[str, RecordedLink]


AS_IT_WAS = Change({}, {})


def simulated(recording: Recording, change: Change, seed: int) -> RunFigures:
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
    trained = Trained(tokens, summed(stepped))
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
        """Found the run."""
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
        """Prepare; `begin` starts it."""
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
        """Begin idle."""
        super().__init__(engine, exchange, dice)
        self._held_s = held_s

    def send(self, size_bytes: float, call: Any, *arguments: Any) -> None:  # noqa: ANN401  (passed on)
        """Make `call(*arguments)` at the other end when `size_bytes` have arrived there."""
        held_s = self._dice.choice(self._held_s)
        self._engine.after(held_s + 2.0 * self._latency_s, super().send, size_bytes, call, *arguments)


def _ratio(elements: int, old: str, new: str) -> float:
    return 1.0 if old == new else Framing(elements, new).size_bytes / Framing(elements, old).size_bytes
