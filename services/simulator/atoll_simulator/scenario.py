"""The `[sim]` table: how fast learners step, what their links can do, and what befalls whom and when.

Seconds are virtual and count from the beginning of the run. Who is named is a process of the run: `learner-2`,
`shard-0`, `standby-0-1`, or `broker`. A learner that has a time in `joins` starts then and not at the beginning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll.errors import SettingsError
from atoll.settings import refusal
from atoll_simulator.links import LinkShape

BROKER: Final = "broker"
LONG_S: Final = 1e9


class _Table(BaseModel):
    """A table of the scenario: frozen, and closed to names it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LinkTable(_Table):
    """A link: latency each way, megabits per second each way (0: without bound), and the share of whispers it loses."""

    latency_s: float = Field(default=0.001, ge=0.0, le=3600.0)
    up_mbit_s: float = Field(default=0.0, ge=0.0)
    down_mbit_s: float = Field(default=0.0, ge=0.0)
    loss: float = Field(default=0.0, ge=0.0, lt=1.0)

    def shape(self) -> LinkShape:
        """Return it in bytes per second."""
        return LinkShape(self.latency_s, self.up_mbit_s * 125_000.0, self.down_mbit_s * 125_000.0, self.loss)


class FailureTable(_Table):
    """Learners die at random: on average every `mtbi_s` of a learner's time (0: never), to start again after `return_s`."""

    mtbi_s: float = Field(default=0.0, ge=0.0, le=LONG_S)
    return_s: float = Field(default=10.0, ge=0.0, le=LONG_S)


class Kill(_Table):
    """`who` is killed at `at_s` and starts again `return_s` later; -1 for never. A broker keeps what it had stored."""

    who: str
    at_s: float = Field(ge=0.0, le=LONG_S)
    return_s: float = Field(default=10.0, ge=-1.0, le=LONG_S)


class Partition(_Table):
    """The links of `who` are cut at `at_s` for `for_s`."""

    who: tuple[str, ...]
    at_s: float = Field(ge=0.0, le=LONG_S)
    for_s: float = Field(gt=0.0, le=LONG_S)


class Scenario(_Table):
    """What a simulated run meets.

    Attributes:
        step_s: seconds of one inner step of a learner of speed 1 that is not throttled.
        step_cv: standard deviation of a learner's step time, as a share of its mean; each step is drawn anew.
        start_s: seconds from a process's start to its joining: interpreter, data, parameters.
        speed: speed by learner, 1 where none is given.
        compile_s: seconds by learner that the first step of a life takes longer than others.
        link: everybody's link.
        links: the links of those named, whole tables in its place.
        failures: deaths of learners at random.
        joins: when a learner starts, if not at the beginning.
        leaves: when a learner is told to leave in good order, for good.
        kills: deaths at given times.
        partitions: cuts at given times.
        evaluate_tokens: merged tokens between two measurements on held-out text; 0 for a twenty-fifth of the target.
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
    kills: tuple[Kill, ...] = ()
    partitions: tuple[Partition, ...] = ()
    evaluate_tokens: int = Field(default=0, ge=0)
    max_s: float = Field(default=0.0, ge=0.0, le=LONG_S)

    def link_of(self, who: str) -> LinkShape:
        """Return the link of a process."""
        return self.links.get(who, self.link).shape()


def scenario_of(table: Mapping[str, Any], learners: Collection[str], others: Collection[str]) -> Scenario:
    """Return what `table` (the `[sim]` section) asks for in a run of these learners and `others`, shards and standbys.

    Raises:
        SettingsError: a name is unknown, a value out of range, or somebody is named who is not there.
    """
    try:
        scenario = Scenario(**table)
    except ValidationError as error:
        raise refusal(error, "sim", list(Scenario.model_fields)) from error
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
    if len(scenario.joins) == len(learners) and min(scenario.joins.values()) > 0:
        raise SettingsError("nobody trains at the beginning", got="sim.joins of every learner", todo="leave one away")
    return scenario


def _by_learner(scenario: Scenario) -> list[tuple[str, dict[str, float]]]:
    return [(name, getattr(scenario, name)) for name in ("speed", "compile_s", "joins", "leaves")]


def _named(
    scenario: Scenario, learners: Collection[str], others: Collection[str]
) -> Iterator[tuple[str, str, list[str]]]:
    """Yield where somebody is named, the name, and who may be."""
    everybody = [*learners, *others]
    for where, names in _by_learner(scenario):
        yield from ((where, name, list(learners)) for name in names)
    yield from (("links", name, everybody) for name in scenario.links)
    yield from (("kills", kill.who, [*everybody, BROKER]) for kill in scenario.kills)
    yield from (("partitions", name, everybody) for cut in scenario.partitions for name in cut.who)
