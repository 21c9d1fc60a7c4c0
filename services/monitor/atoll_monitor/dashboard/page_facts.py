"""What a page needs beside the view of a run, and what follows from it: which learners and synchronizers are heard *now*.

A view knows what was heard and when; it has no clock. `PageFacts` bring the moment, by two clocks, and what the run's processes
agreed on. The functions here judge silence by them, the same for every panel of the page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from atoll.protocol.settings import ProtocolSettings
from atoll.run.hearing import Hearing
from atoll.run.links import name_of
from atoll.run.process_views import HostView, LearnerView
from atoll.run.timeline import Timeline
from atoll.run.view import RunView
from atoll_monitor.alerts import HoldingAlert
from atoll_monitor.watched import NodeSeen

LEARNERS_MAX: Final = 64
FRAGMENTS_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class PageFacts:
    """What a page needs beside the view: `now_s` by the clock of the view's arrivals, `wall_s` the same moment by date.

    Attributes:
        agreement: what the run's processes agreed on, None before it is founded and where nobody knows.
        founder, founded_at_s: of the run record; empty and None where there is none.
        answered: whether its broker answers; a saved run needs none.
        over: whether the run has reached its end.
        saved: whether it is read from its folder: nothing will come any more, and nothing holds now.
        clock: the clock of its times: "wall", or "virtual" for a simulated run.
        listens_since_s: when the monitor began, by the clock of `now_s`.
        fates: whole tokens by fate, None while nobody has read the ledger.
        others: the names of all runs shown.
        nodes: the nodes of its broker by address, if that has several addresses.
        alerts: the alerts that hold.
        reached_by: the options of a command that is to read this run, such as `--out runs/demo`.
        broker: the address of its broker, without secrets; empty for a saved run.
    """

    run: str
    now_s: float
    wall_s: float
    agreement: ProtocolSettings | None = None
    founder: str = ""
    founded_at_s: float | None = None
    answered: bool = False
    over: bool = False
    saved: bool = False
    clock: str = "wall"
    listens_since_s: float = 0.0
    fates: Mapping[str, int] | None = None
    others: tuple[str, ...] = ()
    region_of: Callable[[str], str] = field(default=lambda _: "")
    nodes: Mapping[str, NodeSeen] = field(default_factory=dict)
    alerts: tuple[HoldingAlert, ...] = ()
    reached_by: str = ""
    broker: str = ""

    @property
    def protocol(self) -> ProtocolSettings:
        """Return what the run agreed on; the defaults where that is not known."""
        return ProtocolSettings() if self.agreement is None else self.agreement

    @property
    def hearing(self) -> Hearing:
        """Return what judges who is heard."""
        return Hearing(self.protocol, self.now_s, self.wall_s, self.listens_since_s, self.over or self.saved)

    def began_s(self, timeline: Timeline) -> float:
        """Return when the run began, seconds since the epoch."""
        if self.founded_at_s is not None:
            return self.founded_at_s
        return self.wall_s if timeline.began_s is None else timeline.began_s


def shown_learners(view: RunView) -> list[LearnerView]:
    """Return the learners that are shown one by one: those that are heard first, then by name."""
    order = sorted(view.learners.values(), key=lambda one: (one.heard_s is None, one.learner))[:LEARNERS_MAX]
    return sorted(order, key=lambda one: one.learner)


def is_over(view: RunView, facts: PageFacts) -> bool:
    """Return whether the run has reached its end, or all its learners have left."""
    states = [facts.hearing.state(one) for one in view.learners.values()]
    return bool(states) and (facts.over or all(state == "left" for state in states))


def has_finished(host: HostView, view: RunView, facts: PageFacts) -> bool:
    """Return whether the run is over and all shards of this process have closed their ledgers."""
    return is_over(view, facts) and all(f"shard-{shard}" in view.closed for shard in host.shards)


def shown_hosts(view: RunView, facts: PageFacts) -> list[HostView]:
    """Return the synchronizer processes that are heard, and silent ones whose shards nobody serves.

    A process that has finished its shards in a run that is over is left out, as on a page that is opened afterwards.
    """
    heard = [host for host in view.hosts.values() if facts.hearing.hears_host(host)]
    served = {shard for host in heard if host.serving for shard in host.shards}
    silent = [
        host
        for host in view.hosts.values()
        if host.heard_s is not None and host not in heard and host.serving
        if not host.shards <= served and not has_finished(host, view, facts)
    ]
    return sorted([*heard, *silent], key=name_of)
