"""From what is known of a run to the page's JSON: `state_of` is everything that is small, every second.

    RunView, Timeline, PageFacts ──► state_of    page_state, with page_marks, page_merging, page_links
    RunView, History, PageFacts  ──► curves_of   page_curves            ──► JSON ──► every viewer
             History, PageFacts  ──► causes_of   page_causes

All three are pure, and the same for a live run, for one that is over, and for a saved one. Times in the JSON are seconds since
the run began (`began_s`, its founding), so that runs can be laid over each other. Whatever has a length that peers decide is
cut: `LEARNERS_MAX`, `FRAGMENTS_MAX`, `ROUNDS_MAX`. Sums go on over everything, and `left_out` says how much is not shown.
"""

from __future__ import annotations

from typing import Any, Final

from atoll.run.decisions import CLIP_CURE, ISOLATION_CURE, describe_clip, describe_isolation
from atoll.run.links import as_report, byte_ledger, name_of
from atoll.run.process_views import HostView, LearnerLife, LearnerView
from atoll.run.standing import making_of
from atoll.run.timeline import Timeline
from atoll.run.view import RunView
from atoll_monitor.dashboard.page_facts import (
    FRAGMENTS_MAX,
    PageFacts,
    is_over,
    shown_hosts,
    shown_learners,
)
from atoll_monitor.dashboard.page_links import links_of
from atoll_monitor.dashboard.page_marks import shown_marks
from atoll_monitor.dashboard.page_merging import fragment_map, round_row, shown_rounds

REASONS_SHOWN: Final = 16
QUARANTINES_SHOWN: Final = 32


def state_of(view: RunView, timeline: Timeline, facts: PageFacts) -> dict[str, Any]:
    """Return everything on the page but its curves and causes, in plain JSON values."""
    began_s = facts.began_s(timeline)
    shown = shown_learners(view)
    fragments = sorted(view.fragments)[:FRAGMENTS_MAX]
    rounds = shown_rounds(view, len(fragments))
    ledger = byte_ledger(view, facts.protocol.fragments if facts.agreement is not None else len(view.fragments))
    told = as_report(ledger)
    measured = timeline.validated[-1] if timeline.validated else None
    return {
        "run": facts.run,
        "runs": list(facts.others),
        "status": _status(view, facts),
        "saved": facts.saved,
        "clock": facts.clock,
        "founder": facts.founder,
        "began_s": round(began_s, 3),
        "at_s": round(facts.wall_s - began_s, 3),
        "newest_s": round(timeline.newest_s - began_s, 3) if timeline.began_s is not None else None,
        "tokens": view.run_tokens,
        "target": facts.protocol.tokens_target,
        "tokens_per_s": round(view.tokens_per_s(facts.now_s, facts.protocol.silence_s), 3),
        "quorum": facts.protocol.quorum,
        "waits_for": _waits_for(view, facts),
        "interval_steps": facts.protocol.interval_steps,
        "commits": view.commits,
        "faults": timeline.faults,
        "bits_per_byte": None if measured is None else measured[1].bits_per_byte,
        "learners": [_learner(view, one, facts, began_s) for one in shown],
        "hosts": [_host(one, facts) for one in shown_hosts(view, facts)],
        "nodes": [
            {"address": address, "name": node.name, "state": "answers" if node.answers else "away"}
            for address, node in facts.nodes.items()
        ],
        "alerts": [alert.as_json(began_s) for alert in facts.alerts],
        "map": fragment_map(view, timeline, [one.learner for one in shown], fragments, began_s),
        "rounds": [round_row(line, began_s) for line in rounds],
        "fragments": facts.protocol.fragments if facts.agreement is not None else len(view.fragments),
        "links": links_of(view, told, facts),
        "traffic": {name: value for name, value in told.items() if name not in ("links", "learners", "all", "tokens")},
        "fates": None if facts.fates is None else {name: count for name, count in facts.fates.items() if count},
        "quarantined": [
            {
                "learner": q.learner,
                "incarnation": q.incarnation,
                "offences": q.offences,
                "reason": q.reason,
                "why": f"{describe_isolation(q.offences, q.reason)}; {ISOLATION_CURE}",
            }
            for q in view.quarantined[-QUARANTINES_SHOWN:]
        ],
        "clipped": [
            {
                "learner": name,
                "count": clips.count,
                "why": f"the last {describe_clip(clips.norm, clips.norm_max)}; {CLIP_CURE}",
            }
            for name, clips in sorted(view.sums.clipped.items(), key=lambda each: -each[1].count)[:QUARANTINES_SHOWN]
        ],
        "refused": dict(view.refused.most_common(REASONS_SHOWN)),
        "junk": dict(view.junk.most_common(REASONS_SHOWN)),
        "marks": shown_marks(view, timeline, facts),
        "left_out": {
            "learners": len(view.learners) - len(shown),
            "fragments": len(view.fragments) - len(fragments),
            "rounds": view.commits - len(rounds),
        },
    }


def _status(view: RunView, facts: PageFacts) -> str:
    """Return "away" (the broker), "awaited" (the run), "live", "over", or "still": no learner is heard."""
    if facts.saved:
        return "over"
    if not facts.answered:
        return "away"
    if facts.agreement is None:
        return "awaited"
    states = [facts.hearing.state(one) for one in view.learners.values()]
    if any(state in ("joining", "training", "draining") for state in states):
        return "live"
    return "over" if is_over(view, facts) else "still"


def _waits_for(view: RunView, facts: PageFacts) -> str:
    """Return why a run with a quorum makes no version, in words; empty while it makes some."""
    training = {name for name, one in view.learners.items() if facts.hearing.state(one) == "training"}
    making = making_of(view, facts.protocol, training)
    return making.told if making.stands_still and not facts.saved and not is_over(view, facts) else ""


def _learner(view: RunView, learner: LearnerView, facts: PageFacts, began_s: float) -> dict[str, Any]:
    state, life = facts.hearing.state(learner), learner.latest
    told = learner.told
    heard_s = None if learner.heard_s is None else facts.wall_s - (facts.now_s - learner.heard_s) - began_s
    isolated = [q for q in view.quarantined if q.learner == learner.learner and _is_of(life, q.incarnation)]
    return {
        "learner": learner.learner,
        "region": facts.region_of(learner.learner),
        "state": state,
        "life": 0 if life is None else life.incarnation,
        "tokens": learner.tokens,
        "step": 0 if told is None else told.step,
        "step_s": None if told is None else round(told.step_s, 5),
        "loss": None if told is None or told.loss is None else round(told.loss, 5),
        "tokens_per_s": None if told is None else round(told.tokens_per_s, 2),
        "overhead": None if told is None else round(told.overhead, 6),
        "lag": None if told is None else told.lag_versions,
        "heard_s": None if heard_s is None else round(heard_s, 2),
        "quarantine": isolated[-1].reason if isolated else "",
    }


def _is_of(life: LearnerLife | None, incarnation: int) -> bool:
    return life is not None and life.incarnation == incarnation


def _host(host: HostView, facts: PageFacts) -> dict[str, Any]:
    state = ("serving" if host.serving else "standby") if facts.hearing.hears_host(host) else "silent"
    return {"name": name_of(host), "state": state}
