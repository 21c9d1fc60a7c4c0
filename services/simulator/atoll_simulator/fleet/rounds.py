"""The protocol layer: production machines training on a fleet, for a window of steps; every token's fate at the end.

The layers are joined at one point. The chips (`atoll_simulator.fleet.chips`) report for each learner when it stops,
when it goes on and with how many slices. The protocol reports nothing back, so the chips behave exactly as without it:
the same failures at the same moments for the same seed (every purpose has a random stream of its own). A long table of
goodput and a short window of rounds are therefore statements about one and the same fleet.

    window:  learners step, stall, answer calls, adopt            `steps` nominal steps long; figures are of this part
    drain:   all learners leave after their step or stall, shards finish, the ledgers are settled

A driver's two halves are `FleetLearner` and `Hub`. Waiting is measured, not assumed: the time a learner was there, less
its stalls and less the planned time of each of its steps. A step that begins or ends late shows as waiting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from atoll.base.errors import AtollError
from atoll.base.units import within
from atoll.protocol.events import Commit, PublishCall, Refuse
from atoll.protocol.ledger import Ledger, Settlement, settle
from atoll.protocol.settings import ProtocolSettings
from atoll_simulator.engine import Engine
from atoll_simulator.fleet.cells import affordable
from atoll_simulator.fleet.chance import slowest_mean, speeds, stream
from atoll_simulator.fleet.chips import Chips, Lived
from atoll_simulator.fleet.hub import Hub
from atoll_simulator.fleet.links import BITS_PER_GBIT
from atoll_simulator.fleet.parameters import Exchange, FleetParameters, split
from atoll_simulator.fleet.trainer import FleetLearner

REST_STEPS = 1000.0
STEPS_MAX = 1_000_000
TRAINERS_MAX = 256
FAILURES_MAX = 2_000_000


class NeverAtRest(AtollError):
    """All learners were asked to leave, and one never did: a bug."""


@dataclass(frozen=True, slots=True)
class StepWindow:
    """The simulated part: `learners` learners on `chips` chips for `steps` nominal steps."""

    chips: int
    learners: int
    steps: int


@dataclass(frozen=True, slots=True)
class RoundsReport:
    """The results of a window; times in seconds, tokens of the whole run (window and drain), shares of 1."""

    steps: int
    used_chips: int
    chips: Lived
    window_s: float
    participation: float
    stepped: float
    waited_s: float
    commits: int
    rounds: int
    called_again: int
    contributors: dict[int, int]
    fates: dict[str, int]
    trained: int
    exact: bool
    up_gbit_s: float
    events: int

    @property
    def contributors_mean(self) -> float:
        """Return the mean number of learners in a commit."""
        return sum(n * count for n, count in self.contributors.items()) / max(1, sum(self.contributors.values()))

    def share(self, *fates: str) -> float:
        """Return the share of all token-fragments that met one of `fates`; a fate ending in ':' stands for all its reasons."""
        found = sum(
            count
            for fate, count in self.fates.items()
            if any(fate == each or (each.endswith(":") and fate.startswith(each)) for each in fates)
        )
        return found / max(1, self.trained)


class Rounds:
    """Trainers and shards on one engine."""

    def __init__(
        self,
        fleet: FleetParameters,
        exchange: Exchange,
        seed: int,
        *,
        settings: ProtocolSettings | None = None,
        watched: bool = False,
    ) -> None:
        """Found a run without learners, with the agreement of `exchange` or, where given, with `settings`.

        `watched` checks every invariant after every fact, at three times the cost.
        """
        self.fleet = fleet.check()
        self.exchange = exchange.check()
        self.seed = seed
        self.watched = watched
        self.engine = Engine()
        self.settings = (
            settings
            or ProtocolSettings(
                fragments=exchange.fragments,
                interval_steps=exchange.interval_steps,
                overlap_steps=exchange.overlap_steps,
                quorum=exchange.quorum,
                shards=min(exchange.shards, exchange.fragments),
            ).check()
        )
        self.hubs = [Hub(self, shard, watched=watched) for shard in range(self.settings.shards)]
        self.trainers: list[FleetLearner] = []
        self.on_tokens: Callable[[int], None] | None = None
        self.on_commit: Callable[[Commit], None] | None = None
        self.tokens = 0
        self._lent = 0

    # --- who is there -----------------------------------------------------------------------------------------------------

    def add(self, name: str, speed: float, slices: int) -> FleetLearner:
        """Return a new learner; it does nothing until it is begun."""
        trainer = FleetLearner(self, name, speed, slices, watched=self.watched)
        self.trainers.append(trainer)
        return trainer

    def versions(self) -> dict[int, int]:
        """Return the visible version of every fragment."""
        return {p: v for hub in self.hubs for p, v in hub.versions.items()}

    def hub_of(self, fragment: int) -> Hub:
        """Return the hub that owns a fragment."""
        return self.hubs[self.settings.shard_of(fragment)]

    def lender(self) -> FleetLearner | None:
        """Return the learner that lends its state to the next newcomer, in turns; None if none trains."""
        able = [trainer for trainer in self.trainers if trainer.trains and not trainer.leave_wanted]
        self._lent += 1
        return able[self._lent % len(able)] if able else None

    # --- what things take -------------------------------------------------------------------------------------------------

    def up_bytes(self, fragment: int) -> float:  # noqa: ARG002  (all fragments are equal here)
        """Return the size of a contribution to a fragment."""
        return self.exchange.fragment_bytes

    def down_bytes(self, fragment: int) -> float:  # noqa: ARG002
        """Return the size of a version of a fragment."""
        return self.exchange.fragment_bytes

    def fetch_s(self) -> float:
        """Return how long a shard takes to read a contribution."""
        return 8.0 * self.exchange.fragment_bytes / (self.exchange.hub_gbit_s * BITS_PER_GBIT)

    def commit_s(self) -> float:
        """Return how long it takes from the decision to commit until the version is visible."""
        return self.fetch_s()

    # --- what is said -----------------------------------------------------------------------------------------------------

    def announce_call(self, call: PublishCall) -> None:
        """Send a call to every learner, as core messages."""
        for trainer in self.trainers:
            if trainer.trains:
                trainer.down.core_message(trainer.hear_call, call)

    def announce_head(self, fragment: int, version: int) -> None:
        """Tell every learner, by core message, that a version is visible."""
        for trainer in self.trainers:
            if trainer.trains:
                trainer.down.core_message(trainer.hear_head, fragment, version)

    def tell_refused(self, refusal: Refuse) -> None:
        """Send a refusal to its learner, as a core message."""
        for trainer in self.trainers:
            if trainer.name == refusal.key.learner:
                trainer.down.core_message(trainer.hear_refused, refusal.key, refusal.reason)

    def trained(self, tokens: int) -> None:
        """Count the tokens of a step, and call the registered observer."""
        self.tokens += tokens
        if self.on_tokens is not None:
            self.on_tokens(self.tokens)

    # --- the end ------------------------------------------------------------------------------------------------------------

    def settle(self) -> Settlement:
        """Ask all learners to leave, wait until all is at rest, and return the fates; raise `NeverAtRest`."""
        for trainer in self.trainers:
            trainer.leave()
        until_s = self.engine.now_s + self._rest_s()
        if not self.engine.run(until_s, lambda: all(trainer.state == "left" for trainer in self.trainers)):
            raise NeverAtRest("a learner that is told to leave leaves", got=[(t.name, t.state) for t in self.trainers])
        for hub in self.hubs:
            hub.drain()
        if not self.engine.run(until_s + REST_STEPS, lambda: all(hub.finished for hub in self.hubs)):
            raise NeverAtRest("a shard without learners finishes", got=[hub.machine.shard for hub in self.hubs])
        fragment_ledger = Ledger()
        for hub in self.hubs:
            fragment_ledger.absorb(hub.machine.ledger)
        return settle(fragment_ledger, self.settings.fragments)

    def _rest_s(self) -> float:
        """Return a time in which all learners can leave: some steps, the longest stalls and the longest lines."""
        fleet, exchange = self.fleet, self.exchange
        line_s = 8.0 * exchange.fragment_bytes / (exchange.gbit_s * BITS_PER_GBIT)
        sent_s = (line_s + exchange.latency_s + exchange.retry_s) / (1.0 - exchange.loss)
        stalled_s = fleet.downscale_s + fleet.upscale_s + fleet.admission_s + fleet.return_s
        return REST_STEPS * fleet.step_s + 10.0 * (stalled_s + exchange.fragments * sent_s)


def rounds(
    fleet: FleetParameters, exchange: Exchange, window: StepWindow, seed: int, *, watched: bool = False
) -> RoundsReport:
    """Train on a fleet for a window, and return what happened."""
    chips, learners, steps = window.chips, window.learners, window.steps
    within("--learners", learners, 1, TRAINERS_MAX)
    within("--steps", steps, 1, STEPS_MAX)
    whole = split(chips, learners, fleet.check().slice_chips)
    affordable(
        chips, steps * fleet.step_s, fleet, FAILURES_MAX, "take fewer --steps or --chips, or a longer --mtbi-days"
    )
    world = Rounds(fleet, exchange, seed, watched=watched)
    world.settings.check(learners)
    for number, speed in enumerate(speeds(learners, fleet.learner_cv, stream(seed, "speeds"))):
        world.add(f"learner-{number}", speed, whole).begin()

    def hear(number: int) -> None:
        one = chips_layer.learners[number]
        if one.stepping:
            world.trainers[number].go_on(one.active)
        else:
            world.trainers[number].stall()

    chips_layer = Chips(world.engine, fleet, chips, learners, seed, hear)
    window_s = steps * fleet.step_s
    world.engine.run(window_s)
    lived = chips_layer.lived()
    tally: Counter[str] = Counter()
    contributors: Counter[int] = Counter()
    for hub in world.hubs:
        tally.update(hub.tally)
        contributors.update(hub.contributors)
    stepped_s, waited_s, capacity = _times(world, window_s)
    bits = 8.0 * sum(trainer.up.sent_bytes() for trainer in world.trainers)
    taken = sum(trainer.island.steps for trainer in world.trainers)
    settlement = world.settle()
    return RoundsReport(
        steps=taken,
        used_chips=learners * whole * fleet.slice_chips,
        chips=lived,
        window_s=window_s,
        participation=stepped_s / (learners * window_s),
        stepped=capacity,
        waited_s=waited_s,
        commits=tally["commits"],
        rounds=tally["rounds"],
        called_again=tally["calls again"],
        contributors=dict(sorted(contributors.items())),
        fates=settlement.fates,
        trained=settlement.trained,
        exact=settlement.exact,
        up_gbit_s=bits / learners / window_s / 1e9,
        events=world.engine.events,
    )


def _times(world: Rounds, window_s: float) -> tuple[float, float, float]:
    """Return learner-seconds of finished steps, learner-seconds of waiting, and the trained share of the capacity.

    Capacity is what every learner would have trained at its own mean speed with all its slices. A step under way when
    the window ends is neither a finished step nor waiting.
    """
    stepped_s = waited_s = capacity = 0.0
    for trainer in world.trainers:
        known_s = trainer.stepped_s + trainer.cut_s + trainer.stalled_s + trainer.under_way_s()
        waited_s += window_s - trainer.joined_s - known_s
        stepped_s += trainer.stepped_s
        mean_s = trainer.step_s * (1.0 + world.fleet.slice_cv * slowest_mean(trainer.slices))
        whole = trainer.slices * world.fleet.slice_chips
        capacity += trainer.island.tokens * mean_s / (whole * window_s)
    return stepped_s, waited_s, capacity / len(world.trainers)
