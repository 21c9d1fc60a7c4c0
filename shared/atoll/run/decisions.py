"""Decisions of a shard in words: why a round waited, and what protection did, with its figures, setting and cure.

Logs, `atoll why`, `atoll status`, the page and the metrics of a run say it in these words. The rules are in
`atoll.protocol.round`, `atoll.protocol.events` and `atoll.protocol.quarantine`.
"""

from __future__ import annotations

from typing import Final

from atoll.base.wording import counted, few
from atoll.protocol.events import NAMED_MAX, GraceWindow, Names, Opening, RoundNeeds, RoundReasons

ON_TIME_SHARE: Final = 0.02
"""A call is in time that is so much of an interval late."""
ON_TIME_S: Final = 0.01

CLIP_CURE: Final = (
    "harmless for an island with other data, and for one that has just begun; if it goes on: lower its learning rate, look at "
    "its data, or found the run with protocol.outlier_ratio=0, which lets any length count"
)
ISOLATION_CURE: Final = (
    "look at its machine, data and learning rate, then start it again: the next incarnation begins with a clean record; a run "
    "without strangers is founded with protocol.protect=clip, which isolates nobody"
)


def describe_clip(norm: float, norm_max: float) -> str:
    """Return why a contribution of length `norm` (L2) was folded at the length `norm_max`."""
    return (
        f"clipped: it is {norm:.3g} long (L2) and counts as {norm_max:.3g}, the longest that protocol.outlier_ratio allows "
        "beside the other learners and the parameters"
    )


def describe_outlier(norm: float, norm_max: float) -> str:
    """Return why a contribution of length `norm` (L2) was refused, where `norm_max` was allowed."""
    return (
        f"its length (L2) is {norm:.3g}, and {norm_max:.3g} was allowed by protocol.outlier_ratio; "
        "protocol.protect = isolate refuses what is longer"
    )


def describe_isolation(offences: int, reason: str = "") -> str:
    """Return why an incarnation is in quarantine: its offences, the last of them where it is known, and the settings."""
    last = f", the last {reason!r}" if reason else ""
    return f"{counted(offences, 'offence')}{last}, which is protocol.offences_max, and protocol.protect = isolate"


# --- why a round waited -----------------------------------------------------------------------------------------------


def list_names(names: Names) -> str:
    """Return `a, b and 3 more`."""
    return few(names.names, NAMED_MAX, of=names.count)


def describe_wait(why: RoundReasons) -> dict[str, str]:
    """Return why a round waited, by the place where it did: "rest", "quorum", "grace", "end"."""
    found = {"rest": describe_opening(why.opening, why.version)}
    if why.calls:
        found["quorum"] = _describe_quorum(why)
    if why.together:
        found["grace"] = (
            "no grace window bounded it: the run ends together, and waits for every learner that is present"
        )
    elif why.grace is not None:
        found["grace"] = describe_grace(why.grace)
    return {**found, "end": _describe_end(why)}


def describe_opening(opening: Opening, version: int) -> str:
    """Return why a round was called when it was; `version` is the one that it began with."""
    if opening.opened == "never":
        return "it was never called, because no live learner was left to ask"
    rested = f"{opening.rested_s:.3g} s after version {version} was visible"
    if opening.opened == "last_push":
        return f"the last push of a learner that leaves opened it before its beat, {rested}"
    pace = f"{opening.interval_steps} steps of {opening.step_s:.3g} s"
    if opening.late_s <= max(ON_TIME_SHARE * opening.interval_steps * opening.step_s, ON_TIME_S):
        if opening.opened == "first":
            return f"it rested until its first beat, within {pace} of the first step time that was heard, {rested}"
        return f"it rested until its beat ({pace}), {rested}"
    cause = (
        f"version {version} was visible only then" if opening.behind_commit else "the shard was busy or its timer late"
    )
    return f"it was called {opening.late_s:.3g} s after its beat ({pace}), because {cause}"


def describe_grace(grace: GraceWindow) -> str:
    """Return why a grace window is as long as it is."""
    busy = f"{grace.quorum_s:.3g} s to the quorum and {grace.sync_s:.3g} s to commit, on average"
    if grace.bound == "none" and grace.slack_s > 0.0:
        return "no grace: the run grants none (protocol.grace_gamma = 0)"
    if grace.bound == "none":
        return f"no grace: the overlap of {grace.overlap_s:.3g} s is used up by {busy}"
    if grace.bound == "cap":
        return f"grace of {grace.granted_s:.3g} s, the cap; the overlap of {grace.overlap_s:.3g} s less {busy}, allows more"
    return (
        f"grace of {grace.granted_s:.3g} s, a share of the slack of {grace.slack_s:.3g} s: the overlap of "
        f"{grace.overlap_s:.3g} s less {busy}"
    )


def describe_needs(attempt: int, needs: RoundNeeds) -> str:
    """Return why a round is called again: the sentence of a round that has not ended yet."""
    unanswered = needs.unanswered
    missing = f"not yet {list_names(unanswered)}" if unanswered.count else "none of them has an answer due"
    return (
        f"call {attempt}: it needs {needs.quorum} of {needs.live} live learners, and has {needs.contributed}; {missing}"
    )


def _describe_quorum(why: RoundReasons) -> str:
    again = ""
    if why.calls > 1:
        again = f"; it was called {why.calls} times"
        again += f", and the last time {list_names(why.unanswered)} had not answered" if why.unanswered.count else ""
    if not why.met_by:
        needed = ", and needed no more because the run ends together" if why.together else ""
        return f"the quorum of {why.quorum} was never met{needed}{again}"
    by = f"by {why.met_by}" if why.met_by.startswith("push/") else "by contributions that were there already"
    return f"the quorum of {why.quorum} was met {why.quorum_wait_s:.3g} s after the call, {by}{again}"


def _describe_end(why: RoundReasons) -> str:
    waited = f"it ended {why.grace_waited_s:.3g} s after the quorum" if why.met_by else "it ended"
    late = f"{list_names(why.missing)} had not answered" if why.missing.count else ""
    reading = counted(why.reading, "contribution was", "contributions were")
    read = f"{reading} still being read" if why.reading else ""
    left = " and ".join(part for part in (late, read) if part)
    if why.end == "all answered":
        return f"{waited}, because every live learner had answered"
    if why.end == "grace over":
        none = why.grace is not None and why.grace.granted_s == 0.0
        over = "there was no grace to wait for" if none else "the grace window was over"
        return f"{waited}, because {over}" + (f"; {left}" if left else "")
    if why.end == "nobody left":
        return f"{waited}, because no live learner was left to wait for"
    return f"{waited}: {why.end}"
