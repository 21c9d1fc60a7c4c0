"""What protection did to a contribution or to a learner, in words: the figures, the setting that decided it, and the cure.

Logs, `atoll why`, `atoll status`, the page and the metrics of a run say it in these words. The rule is in
`atoll.protocol.quarantine`.
"""

from __future__ import annotations

from typing import Final

from atoll.base.wording import counted

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
