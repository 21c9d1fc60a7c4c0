"""The marks of a page: faults, recoveries and changes of the event log, and who is silent at this moment."""

from __future__ import annotations

from typing import Any, Final

from atoll.run.timeline import Timeline, TimeMark
from atoll.run.view import RunView
from atoll_monitor.dashboard.page_facts import PageFacts

MARKS_SHOWN: Final = 120


def marks_of(view: RunView, timeline: Timeline, facts: PageFacts) -> list[TimeMark]:
    """Return all marks in order of time, those of processes that are silent at this moment among them."""
    found = list(timeline.marks)
    for one in view.learners.values():
        if facts.hearing.state(one) == "silent" and one.heard_s is not None:
            at_s = facts.wall_s - (facts.now_s - one.heard_s)
            found.append(TimeMark(at_s, "fault", "silent", one.learner, "is silent: its last heartbeat"))
    alive = {
        shard
        for host in view.hosts.values()
        if facts.hearing.hears_host(host) and host.serving
        for shard in host.shards
    }
    for host in view.hosts.values():
        if host.serving and host.heard_s is not None and not facts.hearing.hears_host(host) and not facts.over:
            at_s = facts.wall_s - (facts.now_s - host.heard_s)
            found += [
                TimeMark(at_s, "fault", "silent", f"shard-{shard}", "is silent: the last word of its process")
                for shard in sorted(host.shards - alive)
            ]
    return sorted(found, key=lambda mark: mark.at_s)


def shown_marks(view: RunView, timeline: Timeline, facts: PageFacts) -> list[dict[str, Any]]:
    """Return the newest marks as JSON, with times in seconds since the run began."""
    began_s = facts.began_s(timeline)
    return [
        {
            "at_s": round(mark.at_s - began_s, 2),
            "group": mark.group,
            "kind": mark.kind,
            "who": mark.who,
            "text": mark.text,
        }
        for mark in marks_of(view, timeline, facts)[-MARKS_SHOWN:]
    ]
