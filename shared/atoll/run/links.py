"""The byte ledger of a run: the traffic of every link, sums, and what data-parallel training would have moved.

A learner's links are those of all its incarnations. A synchronizer process is named by the shards it has owned;
processes that owned the same ones, one after the other, are one row. Learners' links are the wide area, so bytes per token are
given over these and over all links, both ways. Data-parallel's ring is counted the same way, over the links of its M sites: the
learners that trained, with the mean number of tokens of their steps.

Only incarnations with known bytes count, in bytes and in tokens alike. An unknown number is None, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

from atoll.run.history import History
from atoll.run.process_views import HostView
from atoll.wire.traffic import NOTHING, LinkTraffic, bits_per_parameter, data_parallel_bytes

Role = Literal["learner", "synchronizer"]
STANDBY = "standby"


@dataclass(frozen=True, slots=True)
class LedgerLink:
    """The traffic of the links of one name: those of `processes` incarnations or processes."""

    name: str
    role: Role
    processes: int
    moved: LinkTraffic


@dataclass(frozen=True, slots=True)
class ByteLedger:
    """The links of a run, and the figures that they are compared with.

    Attributes:
        links: learners by name, then synchronizers.
        tokens: what the learners trained in the incarnations whose bytes are known.
        data_parallel: bytes per token that data-parallel training would have moved; None when unknown.
        bits_up, bits_down, bits_published: bits per parameter on the way: of contributions that were merged; of versions
            as learners fetched them, with each life's first reading of the whole model; of versions as published, keyframes
            included.
    """

    links: tuple[LedgerLink, ...]
    tokens: int
    data_parallel: float | None
    bits_up: float | None
    bits_down: float | None
    bits_published: float | None

    def sum(self, role: Role | None = None) -> LinkTraffic:
        """Return the traffic of all links of a role, or of all links."""
        return total(link.moved for link in self.links if role in (None, link.role))

    def per_token(self, role: Role | None = None) -> float | None:
        """Return the bytes on the wire, both ways, per trained token."""
        wire = self.sum(role).wire
        return wire / self.tokens if self.tokens and wire else None

    def times_less(self, role: Role | None = None) -> float | None:
        """Return how many times more data-parallel training would have moved."""
        ours = self.per_token(role)
        return self.data_parallel / ours if ours and self.data_parallel else None


def byte_ledger(view: History, fragments: int) -> ByteLedger:
    """Return the byte ledger of a run of so many fragments, as far as heard."""
    learners = [learner for learner in view.learners.values() if learner.tokens]
    lives = [life for learner in learners for life in learner.lives.values()]
    counted = [life for life in lives if life.steps]
    steps = sum(life.steps for life in counted)
    fetched = total(life.meter.moved for life in lives)
    whole = len(view.fragments) == fragments and all(known.parameters for known in view.fragments.values())
    data_parallel = None
    if whole and steps and len(learners) > 1:
        parameters = sum(known.parameters for known in view.fragments.values())
        data_parallel = data_parallel_bytes(len(learners), parameters, sum(life.tokens for life in counted) / steps)
    return ByteLedger(
        links=(*_learner_links(view), *_host_links(view)),
        tokens=sum(life.tokens for life in lives if life.meter.moved != NOTHING),
        data_parallel=data_parallel,
        bits_up=bits_per_parameter(view.bytes_merged, view.parameters_merged),
        bits_down=bits_per_parameter(fetched.frames_down, fetched.parameters_down),
        bits_published=bits_per_parameter(view.bytes_published, view.parameters_published),
    )


def as_report(ledger: ByteLedger) -> dict[str, Any]:
    """Return the ledger in plain JSON values; see docs/reference/report.md."""
    return {
        "links": [
            {"link": link.name, "role": link.role, "processes": link.processes, **_sums(link.moved)}
            for link in ledger.links
        ],
        "learners": _sums(ledger.sum("learner")),
        "all": _sums(ledger.sum()),
        "tokens": ledger.tokens,
        "bytes_per_token": _rounded(ledger.per_token("learner")),
        "bytes_per_token_all_links": _rounded(ledger.per_token()),
        "data_parallel_bytes_per_token": _rounded(ledger.data_parallel),
        "times_less": _rounded(ledger.times_less("learner")),
        "times_less_all_links": _rounded(ledger.times_less()),
        "bits_per_parameter_up": _rounded(ledger.bits_up),
        "bits_per_parameter_down": _rounded(ledger.bits_down),
        "bits_per_parameter_published": _rounded(ledger.bits_published),
    }


def total(moved: Iterable[LinkTraffic]) -> LinkTraffic:
    """Return the sum of several links' traffic."""
    return reduce(LinkTraffic.plus, moved, NOTHING)


def name_of(host: HostView) -> str:
    """Return the name of a synchronizer process: its shards, since its own name means nothing to a reader."""
    return ", ".join(f"shard-{shard}" for shard in sorted(host.shards)) or STANDBY


def _learner_links(view: History) -> list[LedgerLink]:
    links = []
    for name, learner in sorted(view.learners.items()):
        moved = [life.meter.moved for life in learner.lives.values()]
        links.append(LedgerLink(name, "learner", len(moved), total(moved)))
    return links


def _host_links(view: History) -> list[LedgerLink]:
    named: dict[str, list[LinkTraffic]] = {}
    for host in view.hosts.values():
        named.setdefault(name_of(host), []).append(host.meter.moved)
    return [LedgerLink(name, "synchronizer", len(moved), total(moved)) for name, moved in sorted(named.items())]


def _sums(moved: LinkTraffic) -> dict[str, int]:
    counters = moved.counters
    del counters["parameters_down"]
    return counters | {"overhead": moved.overhead}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
