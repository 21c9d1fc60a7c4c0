"""The `[sim]` table: how fast learners step, what their links can carry, and which process fails when.

Seconds are virtual and count from the beginning of the run. The names are processes of the run: `learner-2`,
`shard-0`, `standby-0-1`, or `broker`. A learner that has a time in `joins` starts then and not at the beginning.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from atoll.base.errors import SettingsError
from atoll.bus.options import DEFAULTS
from atoll.settings.errors import section_error
from atoll.wire.limits import CHUNK_BYTES
from atoll_simulator.links import LinkShape

Lie = Literal["sign flip", "scaling", "noise", "zeros", "copied"]
"""What a liar sends in place of its pseudo-gradients (`atoll_simulator.learner`)."""
BROKER: Final = "broker"
LONG_S: Final = 1e9
LATENCY_S_MAX: Final = DEFAULTS.try_s / 2.0
"""A request goes there and back within one try of the real bus; links do not resend a message that is merely slow."""
MBIT_S_MIN: Final = 0.001
MTBI_STEPS_MIN: Final = 0.1
"""A learner that fails ten times in the time of a step hardly ever completes one: simulating that is pointless."""
BYTES_PER_MBIT: Final = 125_000.0


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LinkTable(_Table):
    """The link of one process; a link that is too slow for the real bus is refused.

    Attributes:
        latency_s: latency each way, in seconds.
        up_mbit_s: megabits per second up; 0 for no bound.
        down_mbit_s: megabits per second down; 0 for no bound.
        loss: share of the at-most-once messages that it loses.
    """

    latency_s: float = Field(default=0.001, ge=0.0, le=LATENCY_S_MAX)
    up_mbit_s: float = Field(default=0.0, ge=0.0)
    down_mbit_s: float = Field(default=0.0, ge=0.0)
    loss: float = Field(default=0.0, ge=0.0, lt=1.0)

    @field_validator("up_mbit_s", "down_mbit_s")
    @classmethod
    def _carries_something(cls, mbit_s: float) -> float:
        if 0.0 < mbit_s < MBIT_S_MIN:
            raise ValueError(f"should be 0 (without bound) or at least {MBIT_S_MIN:g}")
        return mbit_s

    def shape(self) -> LinkShape:
        """Return the link in bytes per second."""
        return LinkShape(self.latency_s, self.up_mbit_s * BYTES_PER_MBIT, self.down_mbit_s * BYTES_PER_MBIT, self.loss)

    def chunk_s(self) -> float:
        """Return how long the slower direction takes for a full chunk of a tensor, 0 without bound."""
        slower = min((mbit_s for mbit_s in (self.up_mbit_s, self.down_mbit_s) if mbit_s > 0.0), default=0.0)
        return self.latency_s + CHUNK_BYTES / (slower * BYTES_PER_MBIT) if slower else 0.0


class FailureTable(_Table):
    """Learners that die at random.

    Attributes:
        mtbi_s: mean time between two interruptions of a learner, in seconds (exponential); 0 for never.
        return_s: seconds after which it starts again.
    """

    mtbi_s: float = Field(default=0.0, ge=0.0, le=LONG_S)
    return_s: float = Field(default=10.0, ge=0.0, le=LONG_S)


class Kill(_Table):
    """Process `who` is killed at `at_s` and starts again `return_s` later (-1: never). A broker keeps its data."""

    who: str
    at_s: float = Field(ge=0.0, le=LONG_S)
    return_s: float = Field(default=10.0, ge=-1.0, le=LONG_S)


class Partition(_Table):
    """The links of `who` are cut at `at_s` for `for_s`."""

    who: tuple[str, ...]
    at_s: float = Field(ge=0.0, le=LONG_S)
    for_s: float = Field(gt=0.0, le=LONG_S)


class Scenario(_Table):
    """The conditions of a simulated run.

    Attributes:
        step_s: seconds of one inner step of a learner of speed 1 that is not throttled.
        step_cv: standard deviation of a learner's step time, as a share of its mean; each step is drawn anew.
        start_s: seconds from a process's start to its joining: interpreter, data, parameters.
        speed: speed by learner, 1 where none is given.
        compile_s: extra seconds of the first step of a life, by learner.
        link: the link of every process.
        links: other links by process; a whole table replaces `link`.
        failures: deaths of learners at random.
        joins: when a learner starts, if not at the beginning.
        leaves: when a learner is told to leave in good order, for good.
        liars: what a learner sends in place of its pseudo-gradients, a `Lie`.
        kills: deaths at given times.
        partitions: cuts at given times.
        evaluate_tokens: merged tokens between two measurements on held-out text; 0 for a twenty-fifth of the target or,
            in a run without one, for what all learners train in an interval.
        max_s: seconds after which the run is stopped as by a signal; 0 for never.
    """

    step_s: float = Field(default=0.1, gt=0.0, le=3600.0)
    step_cv: float = Field(default=0.0, ge=0.0, le=2.0)
    start_s: float = Field(default=0.0, ge=0.0, le=3600.0)
    speed: dict[str, float] = Field(default_factory=dict)
    compile_s: dict[str, float] = Field(default_factory=dict)
    link: LinkTable = LinkTable()
    links: dict[str, LinkTable] = Field(default_factory=dict)
    failures: FailureTable = FailureTable()
    joins: dict[str, float] = Field(default_factory=dict)
    leaves: dict[str, float] = Field(default_factory=dict)
    liars: dict[str, Lie] = Field(default_factory=dict)
    kills: tuple[Kill, ...] = ()
    partitions: tuple[Partition, ...] = ()
    evaluate_tokens: int = Field(default=0, ge=0)
    max_s: float = Field(default=0.0, ge=0.0, le=LONG_S)

    @field_validator("kills", "partitions", mode="before")
    @classmethod
    def _read(cls, told: object) -> object:
        """Accept a list as in the file, or as JSON from the command line or the environment."""
        if not isinstance(told, str):
            return told
        try:
            return json.loads(told)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"should be tables in a --config file, or JSON here ({error})") from error

    def slow_links(self) -> list[str]:
        """Return warnings about links that take longer over a chunk than the real bus waits for it."""
        tables = {"sim.link": self.link, **{f"sim.links.{who}": link for who, link in self.links.items()}}
        return [
            f"{name} takes {table.chunk_s():,.0f} s for a chunk of {CHUNK_BYTES:,} bytes: the real bus would send it again "
            f"after {DEFAULTS.try_s:g} s, this one does not"
            for name, table in tables.items()
            if table.chunk_s() > DEFAULTS.try_s
        ]

    def link_of(self, who: str) -> LinkShape:
        """Return the link of a process."""
        return self.links.get(who, self.link).shape()


def scenario_of(table: Mapping[str, Any], learners: Collection[str], others: Collection[str]) -> Scenario:
    """Return the scenario in `table` (`[sim]`) for a run of these learners and `others`, shards and standbys.

    Raises:
        SettingsError: a name is unknown, a value is out of range, or the run has no such process.
    """
    try:
        scenario = Scenario(**table)
    except ValidationError as error:
        raise section_error(error, "sim", Scenario) from error
    for where, name, allowed in _named(scenario, learners, others):
        if name not in allowed:
            raise SettingsError(
                f"sim.{where} names nobody of this run", got=name, allowed=", ".join(allowed), todo="see --learners"
            )
    for where, numbers in _by_learner(scenario):
        low = 1e-6 if where == "speed" else 0.0
        for name, number in numbers.items():
            if not low <= number <= LONG_S:
                raise SettingsError(
                    f"sim.{where}.{name} is out of range", got=number, allowed=f"{low:g}..{LONG_S:g}", todo="correct it"
                )
    often_s = scenario.failures.mtbi_s
    if 0.0 < often_s < MTBI_STEPS_MIN * scenario.step_s:
        raise SettingsError(
            "sim.failures.mtbi_s leaves no time for a step",
            got=often_s,
            allowed=f"0 (never), or at least {MTBI_STEPS_MIN:g} of sim.step_s = {scenario.step_s:g}",
            todo="correct one of the two",
        )
    if len(scenario.joins) == len(learners) and min(scenario.joins.values()) > 0:
        raise SettingsError("nobody trains at the beginning", got="sim.joins of every learner", todo="leave one away")
    return scenario


def _by_learner(scenario: Scenario) -> list[tuple[str, dict[str, float]]]:
    return [(name, getattr(scenario, name)) for name in ("speed", "compile_s", "joins", "leaves")]


def _named(
    scenario: Scenario, learners: Collection[str], others: Collection[str]
) -> Iterator[tuple[str, str, list[str]]]:
    everybody = [*learners, *others]
    yield from (("liars", name, list(learners)) for name in scenario.liars)
    for where, names in _by_learner(scenario):
        yield from ((where, name, list(learners)) for name in names)
    yield from (("links", name, everybody) for name in scenario.links)
    yield from (("kills", kill.who, [*everybody, BROKER]) for kill in scenario.kills)
    yield from (("partitions", name, everybody) for cut in scenario.partitions for name in cut.who)
