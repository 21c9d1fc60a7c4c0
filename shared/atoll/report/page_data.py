"""Data of the page, from what is known of a run to JSON values: its state every second, its curves and causes less often.

                         ┌──► state_of  ─┐
    History, PageFacts ──┼──► curves_of ─┼─► JSON ──► every viewer
                         └──► causes_of ─┘

All three are pure, and the same for a live run, one that is over, a saved one, and the page of a report. A view has no clock:
`PageFacts` bring the moment, by two clocks, and what the run agreed on; silence is judged by them, the same for every panel.
Times in the JSON are seconds since the run began (`began_s`, its founding). A list whose length peers decide is cut;
sums go on over everything, and `left_out` says how much is not shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Final

from atoll.protocol.settings import ProtocolSettings
from atoll.report.comparison import ComparedRun
from atoll.run.curves import (
    POINTS_MAX,
    PresentTime,
    learner_curve,
    lines_of,
    rates,
    silence,
    span_of,
    stretches,
    thinned,
)
from atoll.run.decisions import CLIP_CURE, ISOLATION_CURE, describe_clip, describe_isolation, describe_wait
from atoll.run.history import History, RoundLine, TimeMark
from atoll.run.links import as_report, byte_ledger, name_of
from atoll.run.process_views import Hearing, HostView, LearnerLife, LearnerView, Sample
from atoll.run.standing import making_of
from atoll.story.goodput import goodput_of
from atoll.story.slowness import slowness

LEARNERS_MAX: Final = 64
FRAGMENTS_MAX: Final = 64
REASONS_SHOWN: Final = 16
QUARANTINES_SHOWN: Final = 32
LEDGER_ROWS: Final = ("links", "learners", "all", "tokens")
ROUNDS_MAX: Final = 160
ROUNDS_MIN: Final = 40
ROUNDS_PER_FRAGMENT: Final = 6
MARKS_SHOWN: Final = 120
STEPPING: Final = ("training", "draining")
EVIDENCE_SHOWN: Final = 6
OF_BROKER: Final = "atoll doctor"


@dataclass(frozen=True, slots=True)
class NodeSeen:
    """One address of the broker: the name of the server that answered there last, and whether it answers."""

    name: str
    answers: bool


@dataclass(frozen=True, slots=True)
class HoldingAlert:
    """A rule whose condition is so, since `since_s`; it is `pending` until it has been so for as long as the rule waits."""

    name: str
    severity: str
    labels: Mapping[str, str]
    summary: str
    tells_more: str
    since_s: float
    pending: bool

    def as_json(self, began_s: float) -> dict[str, Any]:
        """Return it in plain JSON values, with its time in seconds since `began_s`."""
        since_s = round(self.since_s - began_s, 2)
        return {**asdict(self), "labels": dict(sorted(self.labels.items())), "since_s": since_s}


@dataclass(frozen=True, slots=True)
class PageFacts:
    """Facts of a page beside the view: `now_s` by the clock of the view's arrivals, `wall_s` the same moment by date.

    Attributes:
        agreement: what the run's processes agreed on, None before it is founded and where nobody knows.
        founder, founded_at_s: of the run record; empty and None where there is none.
        answered: whether its broker answers; a saved run needs none.
        saved: whether it is read from its folder: nothing will come any more, and nothing holds now.
        clock: the clock of its times: "wall", or "virtual" for a simulated run.
        listens_since_s: when the monitor began, by the clock of `now_s`.
        fates: whole tokens by fate, None while nobody has read the ledger.
        others: the names of all runs shown.
        nodes: the nodes of its broker by address, if that has several addresses.
        reached_by: the options of a command that is to read this run, such as `--out runs/demo`.
        broker: the address of its broker, without secrets.
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

    def state(self, learner: LearnerView) -> str:
        """Return what a learner does; of a saved run only whether it has left, whatever it said last."""
        if self.saved:
            return "left" if learner.latest is None or learner.has_left else "ended"
        return self.hearing.state(learner)

    def hears(self, host: HostView) -> bool:
        """Return whether a synchronizer process is heard; nobody is in a saved run."""
        return not self.saved and self.hearing.hears_host(host)

    def heard_at_s(self, process: LearnerView | HostView) -> float | None:
        """Return when a process was last heard, in seconds since the epoch; None if it was not, or the run is saved."""
        return None if self.saved or process.heard_s is None else self.wall_s - (self.now_s - process.heard_s)

    def began_s(self, history: History) -> float:
        """Return when the run began, seconds since the epoch."""
        if self.founded_at_s is not None:
            return self.founded_at_s
        return self.wall_s if history.began_s is None else history.began_s


def shown_learners(view: History) -> list[LearnerView]:
    """Return the learners that are shown one by one: those that are heard first, then by name."""
    order = sorted(view.learners.values(), key=lambda one: (one.heard_s is None, one.learner))[:LEARNERS_MAX]
    return sorted(order, key=lambda one: one.learner)


def is_over(view: History, facts: PageFacts) -> bool:
    """Return whether the run has reached its end, or all its learners have left."""
    states = [facts.state(one) for one in view.learners.values()]
    return bool(states) and (facts.over or all(state == "left" for state in states))


def shown_hosts(view: History, facts: PageFacts) -> list[HostView]:
    """Return the synchronizer processes that are heard, and silent ones whose shards nobody serves.

    A process that has finished its shards in a run that is over is left out, as on a page that is opened afterwards.
    """
    over = is_over(view, facts)
    heard = [host for host in view.hosts.values() if facts.hears(host)]
    served = {shard for host in heard if host.serving for shard in host.shards}
    silent = [
        host
        for host in view.hosts.values()
        if host.heard_s is not None and host not in heard and host.serving
        if not host.shards <= served and not (over and all(f"shard-{shard}" in view.ledgers for shard in host.shards))
    ]
    return sorted([*heard, *silent], key=name_of)


def state_of(view: History, facts: PageFacts) -> dict[str, Any]:
    """Return everything on the page but its curves and causes, in plain JSON values."""
    began_s = facts.began_s(view)
    shown = shown_learners(view)
    fragments = sorted(view.fragments)[:FRAGMENTS_MAX]
    rounds = list(view.rounds)[-min(ROUNDS_MAX, max(ROUNDS_MIN, ROUNDS_PER_FRAGMENT * len(fragments))) :]
    fragment_count = facts.protocol.fragments if facts.agreement is not None else len(view.fragments)
    traffic = as_report(byte_ledger(view, fragment_count))
    measured = view.validations[-1].fields if view.validations else None
    return {
        "run": facts.run,
        "runs": list(facts.others),
        "status": _status(view, facts),
        "saved": facts.saved,
        "clock": facts.clock,
        "founder": facts.founder,
        "began_s": round(began_s, 3),
        "at_s": round(facts.wall_s - began_s, 3),
        "newest_s": round(view.newest_s - began_s, 3) if view.began_s is not None else None,
        "tokens": view.run_tokens,
        "target": facts.protocol.tokens_target,
        "tokens_per_s": round(view.tokens_per_s(facts.now_s, facts.protocol.silence_s), 3),
        "quorum": facts.protocol.quorum,
        "waits_for": _waits_for(view, facts),
        "interval_steps": facts.protocol.interval_steps,
        "commits": view.commits,
        "faults": view.faults,
        "bits_per_byte": None if measured is None else measured.bits_per_byte,
        "learners": [_learner(view, one, facts, began_s) for one in shown],
        "hosts": [_host(one, facts) for one in shown_hosts(view, facts)],
        "nodes": _nodes(facts),
        "alerts": [alert.as_json(began_s) for alert in facts.alerts],
        "map": fragment_map(view, [one.learner for one in shown], fragments, began_s),
        "rounds": [round_row(line, began_s) for line in rounds],
        "fragments": fragment_count,
        "links": links_of(view, traffic, facts),
        "traffic": {name: value for name, value in traffic.items() if name not in LEDGER_ROWS},
        "fates": None if facts.fates is None else {name: count for name, count in facts.fates.items() if count},
        "quarantined": _quarantined(view),
        "clipped": _clipped(view),
        "refused": dict(view.refused_by_reason.most_common(REASONS_SHOWN)),
        "junk": dict(view.junk.most_common(REASONS_SHOWN)),
        "marks": shown_marks(view, facts),
        "left_out": {
            "learners": len(view.learners) - len(shown),
            "fragments": len(view.fragments) - len(fragments),
            "rounds": view.commits - len(rounds),
        },
    }


def _nodes(facts: PageFacts) -> list[dict[str, Any]]:
    return [
        {"address": address, "name": node.name, "state": "answers" if node.answers else "away"}
        for address, node in facts.nodes.items()
    ]


def _quarantined(view: History) -> list[dict[str, Any]]:
    return [
        {
            "learner": q.learner,
            "incarnation": q.incarnation,
            "offences": q.offences,
            "reason": q.reason,
            "why": f"{describe_isolation(q.offences, q.reason)}; {ISOLATION_CURE}",
        }
        for q in view.isolations[-QUARANTINES_SHOWN:]
    ]


def _clipped(view: History) -> list[dict[str, Any]]:
    return [
        {
            "learner": name,
            "count": clips.count,
            "why": f"the last {describe_clip(clips.norm, clips.norm_max)}; {CLIP_CURE}",
        }
        for name, clips in sorted(view.sums.clipped.items(), key=lambda each: -each[1].count)[:QUARANTINES_SHOWN]
    ]


def _status(view: History, facts: PageFacts) -> str:
    """Return "away" (the broker), "awaited" (the run), "live", "over", or "still": no learner is heard."""
    if facts.saved:
        return "over"
    if not facts.answered:
        return "away"
    if facts.agreement is None:
        return "awaited"
    states = [facts.state(one) for one in view.learners.values()]
    if any(state in ("joining", "training", "draining") for state in states):
        return "live"
    return "over" if is_over(view, facts) else "still"


def _waits_for(view: History, facts: PageFacts) -> str:
    training = {name for name, one in view.learners.items() if facts.state(one) == "training"}
    making = making_of(view, facts.protocol, training)
    return making.sentence if making.stands_still and not facts.saved and not is_over(view, facts) else ""


def _learner(view: History, learner: LearnerView, facts: PageFacts, began_s: float) -> dict[str, Any]:
    state, life = facts.state(learner), learner.latest
    beat = learner.report
    heard_at_s = facts.heard_at_s(learner)
    isolated = [q for q in view.isolations if q.learner == learner.learner and _is_of(life, q.incarnation)]
    return {
        "learner": learner.learner,
        "region": facts.region_of(learner.learner),
        "state": state,
        "life": 0 if life is None else life.incarnation,
        "tokens": learner.tokens,
        "step": 0 if beat is None else beat.step,
        "step_s": None if beat is None else round(beat.step_s, 5),
        "loss": None if beat is None or beat.loss is None else round(beat.loss, 5),
        "tokens_per_s": None if beat is None else round(beat.tokens_per_s, 2),
        "overhead": None if beat is None else round(beat.overhead, 6),
        "lag": None if beat is None else beat.lag_versions,
        "heard_s": None if heard_at_s is None else round(heard_at_s - began_s, 2),
        "quarantine": isolated[-1].reason if isolated else "",
    }


def _is_of(life: LearnerLife | None, incarnation: int) -> bool:
    return life is not None and life.incarnation == incarnation


def _host(host: HostView, facts: PageFacts) -> dict[str, Any]:
    state = ("serving" if host.serving else "standby") if facts.hears(host) else "silent"
    return {"name": name_of(host), "state": state}


def fragment_map(view: History, learners: list[str], fragments: list[int], began_s: float) -> dict[str, Any]:
    """Return, for each fragment and learner, the version that the learner's last contribution was made on, and when."""
    rows = []
    for fragment in fragments:
        newest = view.fragments[fragment]
        cells: list[dict[str, Any] | None] = []
        for learner in learners:
            last = view.last_contributions.get((fragment, learner))
            cells.append(
                None
                if last is None
                else {
                    "base": last.base,
                    "lag": max(0, newest.version - last.version),
                    "age": last.age,
                    "tokens": last.tokens,
                    "weight": round(last.weight, 4),
                    "at_s": round(last.at_s - began_s, 2),
                }
            )
        rows.append({"fragment": fragment, "version": newest.version, "parameters": newest.parameters, "cells": cells})
    return {"learners": learners, "rows": rows}


def round_row(line: RoundLine, began_s: float) -> dict[str, Any]:
    """Return a round with the lengths of its phases, in their order, before the moment when it became visible."""
    made = line.round
    why = "" if made.why is None else "; ".join(describe_wait(made.why).values())
    return {
        "fragment": made.fragment,
        "version": made.version,
        "at_s": round(line.at_s - began_s, 3),
        "phases": [round(seconds, 4) for seconds in made.phases],
        "granted_s": round(made.grace_s, 4),
        "shard": line.shard,
        "contributors": [[share.learner, share.age, share.tokens] for share in made.contributors[:LEARNERS_MAX]],
        "live": made.live,
        "end": made.end,
        "why": why,
    }


def links_of(view: History, ledger: Mapping[str, Any], facts: PageFacts) -> list[dict[str, Any]]:
    """Return the traffic of each link in the ledger `ledger`, with its pace in bytes/s where its process is heard."""
    learners = {one.learner for one in shown_learners(view)}
    paces: dict[str, tuple[float, float]] = {}
    for name, one in view.learners.items():
        if one.latest is not None and facts.state(one) in ("joining", "training", "draining"):
            paces[name] = one.latest.meter.pace()
    for host in view.hosts.values():
        if facts.hears(host):
            former, pace = paces.get(name_of(host), (0.0, 0.0)), host.meter.pace()
            paces[name_of(host)] = former[0] + pace[0], former[1] + pace[1]
    unknown = {"up_per_s": None, "down_per_s": None}
    shown = {name: {"up_per_s": round(up), "down_per_s": round(down)} for name, (up, down) in paces.items()}
    return [
        link | shown.get(link["link"], unknown)
        for link in ledger["links"]
        if link["role"] != "learner" or link["link"] in learners
    ]


def marks_of(view: History, facts: PageFacts) -> list[TimeMark]:
    """Return all marks in order of time, those of processes that are silent at this moment among them."""
    found = list(view.marks)
    for one in view.learners.values():
        at_s = facts.heard_at_s(one)
        if facts.state(one) == "silent" and at_s is not None:
            found.append(TimeMark(at_s, "fault", "silent", one.learner, "is silent: its last heartbeat"))
    alive = {shard for host in view.hosts.values() if facts.hears(host) and host.serving for shard in host.shards}
    for host in view.hosts.values():
        at_s = facts.heard_at_s(host)
        if host.serving and at_s is not None and not facts.hears(host) and not facts.over:
            found += [
                TimeMark(at_s, "fault", "silent", f"shard-{shard}", "is silent: the last word of its process")
                for shard in sorted(host.shards - alive)
            ]
    return sorted(found, key=lambda mark: mark.at_s)


def shown_marks(view: History, facts: PageFacts) -> list[dict[str, Any]]:
    """Return the newest marks as JSON, with times in seconds since the run began."""
    began_s = facts.began_s(view)
    return [
        {
            "at_s": round(mark.at_s - began_s, 2),
            "group": mark.group,
            "kind": mark.kind,
            "who": mark.who,
            "text": mark.text,
        }
        for mark in marks_of(view, facts)[-MARKS_SHOWN:]
    ]


def curves_of(view: History, facts: PageFacts) -> dict[str, Any]:
    """Return the curves: loss of the merged model; what each learner said of itself; tokens/s and goodput of all; rounds."""
    began_s = facts.began_s(view)
    lines = {name: lines_of(one, view.recent.get(name, ())) for name, one in view.learners.items()}
    own = {name: list(stretches(one, lines[name])) for name, one in view.learners.items()}
    parts = [*chain.from_iterable(own.values()), *_silences(view, lines, facts)]
    made = rates(parts, now_s=None if facts.saved else facts.wall_s)
    span = span_of(parts) if parts else None
    goodput = goodput_of(view).share
    validated = thinned(list(view.validations), POINTS_MAX)
    losses, lags, speeds = [], [], []
    for one in shown_learners(view):
        measured = [line for line in lines[one.learner] if line.fields.loss is not None]
        known = learner_curve(one.learner, measured, began_s)
        losses.append({name: known[name] for name in ("learner", "at_s", "loss")})
        whole = learner_curve(one.learner, lines[one.learner], began_s)
        lags.append({name: whole[name] for name in ("learner", "at_s", "lag", "overhead")})
        speeds.append({"learner": one.learner, "tokens_per_s": rates(own[one.learner], span).tokens_per_s})
    return {
        "run": facts.run,
        "merged": {
            "at_s": [round(note.at_s - began_s, 2) for note in validated],
            "tokens": [note.fields.run_tokens for note in validated],
            "bits_per_byte": [round(note.fields.bits_per_byte, 5) for note in validated],
            "average": [None if note.fields.average is None else round(note.fields.average, 5) for note in validated],
        },
        "losses": losses,
        "lags": lags,
        "speeds": speeds,
        "rounds": _rounds_over_time(view, began_s),
        "rates": made.as_json(began_s),
        "goodput": {"now": made.now, "whole": None if goodput is None else round(goodput, 4)},
    }


def _rounds_over_time(view: History, began_s: float) -> dict[str, list[float]]:
    # What the view no longer keeps lies before the first of them.
    up = view.bytes_merged - sum(line.round.bytes_up for line in view.rounds)
    down = view.bytes_published - sum(line.round.bytes_down for line in view.rounds)
    points = []
    for line in view.rounds:
        up, down = up + line.round.bytes_up, down + line.round.bytes_down
        points.append((round(line.at_s - began_s, 2), len(line.round.contributors), line.round.live, up, down))
    names = ("at_s", "contributors", "live", "merged", "published")
    return {name: [point[place] for point in thinned(points, POINTS_MAX)] for place, name in enumerate(names)}


def _silences(view: History, lines: Mapping[str, Sequence[Sample]], facts: PageFacts) -> Iterator[PresentTime]:
    """Yield the time that learners have been silent, of a run that goes on and whose broker answers: else nobody is heard.

    It ends where the samples of those that train end, for a step may last minutes: what they do since is not known yet, and a
    curve must not fall for want of a sample. Where nobody trains it ends now.
    """
    if facts.saved or facts.over or not facts.answered:
        return
    states = {name: facts.state(one) for name, one in view.learners.items()}
    known_s = [lines[name][-1].at_s for name, state in states.items() if state in STEPPING and lines[name]]
    until_s = min(facts.wall_s, max(known_s, default=facts.wall_s))
    for name, state in states.items():
        if state == "silent":
            yield from silence(lines[name], until_s)


def comparison_rows(runs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows of runs, from the states and curves of each: those of `atoll report compare`, and curves beside them."""
    return [
        {
            **asdict(
                ComparedRun(
                    path="",
                    run=state["run"],
                    ended=state["status"],
                    clock=state["clock"],
                    tokens=state["tokens"],
                    wall_s=state["newest_s"],
                    bits_per_byte=state["bits_per_byte"],
                    goodput=curves["goodput"]["whole"],
                    bytes_per_token=state["traffic"]["bytes_per_token"],
                    commits=state["commits"],
                    learners=len(state["learners"]) + state["left_out"]["learners"],
                    faults=state["faults"],
                )
            ),
            "merged": curves["merged"],
            "rates": curves["rates"],
        }
        for state, curves in runs
    ]


def causes_of(history: History, facts: PageFacts) -> dict[str, Any]:
    """Return what stands out, the gravest first, and the largest shares of time that were lost, in plain JSON values."""
    began_s = facts.began_s(history)
    slow = slowness(history)
    return {
        "run": facts.run,
        "rounds": len(history.rounds),
        "findings": [
            {
                "cause": found.cause,
                "who": found.culprit,
                "text": found.text,
                "evidence": [
                    *(f"so: {each.cause}, {each.culprit}: {each.text}" for each in found.consequences),
                    *found.evidence,
                ][:EVIDENCE_SHOWN],
                "from_s": round(found.from_s - began_s, 2),
                "until_s": None if found.until_s is None else round(found.until_s - began_s, 2),
                "command": whole_command(found.command, facts),
            }
            for found in slow.findings
        ],
        "slow": [part.as_json() | {"command": whole_command(part.command, facts)} for part in slow.lost],
        "notes": list(slow.notes),
    }


def whole_command(command: str, facts: PageFacts) -> str:
    """Return a command with the options that lead to this run; of a saved run no broker can be asked."""
    if command == OF_BROKER:
        return f"{command} --broker {facts.broker}" if facts.broker else f"atoll why {facts.reached_by}"
    return f"{command} {facts.reached_by}".rstrip()
