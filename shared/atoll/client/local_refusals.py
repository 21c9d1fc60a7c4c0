"""Tells of pseudo-gradients that a shard refuses or clips, and of those that are not sent because they are not finite.

A loop that has run into NaN goes on as if nothing were wrong: its steps succeed, and each of its pushes is refused at home. A
NaN does not heal, so a person should hear of it at once, by the name of a leaf. The line is written for the first refused push
and then at most once in `QUIET_S` seconds, with the count of pushes since the last one; that of clipped pushes is, too. Nothing
of this runs in a step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from atoll.base.clock import Clock
from atoll.base.errors import FrameRejected, on_one_line
from atoll.base.logs import get
from atoll.model.layout import Layout
from atoll.protocol.events import Push
from atoll.run.decisions import CLIP_CURE, ISOLATION_CURE, describe_clip, describe_outlier
from atoll.wire.messages import Verdict

log = get(__name__)

QUIET_S: Final = 60.0


def tell_refusal(verdict: Verdict) -> None:
    """Log that a shard has refused a push; one that came too late is part of a normal run, at its beginning above all."""
    facts = {"fragment": verdict.fragment, "push": verdict.push, "reason": verdict.reason}
    if verdict.reason == "stale":
        log.info("push.refused", **facts, why="newer versions were there first; harmless unless it goes on")
    elif verdict.norm_max:
        log.warning("push.refused", **facts, why=describe_outlier(verdict.norm, verdict.norm_max), todo=ISOLATION_CURE)
    else:
        log.warning("push.refused", **facts)


class ClippedPushes:
    """What one incarnation has told of its pushes that shards have clipped."""

    def __init__(self, clock: Clock) -> None:
        """Tell of the first one."""
        self._clock = clock
        self._pushes = 0
        self._told_s: float | None = None

    def tell(self, verdict: Verdict) -> None:
        """Count a clipped push, and warn if it is time."""
        self._pushes += 1
        now_s = self._clock.monotonic()
        if self._told_s is not None and now_s - self._told_s < QUIET_S:
            return
        pushes, self._pushes, self._told_s = self._pushes, 0, now_s
        log.warning(
            "push.clipped",
            fragment=verdict.fragment,
            push=verdict.push,
            pushes=pushes,
            why=describe_clip(verdict.norm, verdict.norm_max),
            todo=CLIP_CURE,
        )


class LocalRefusals:
    """What one incarnation has told of its pushes that were refused at home."""

    def __init__(self, layout: Layout, clock: Clock) -> None:
        """Tell of the first one."""
        self._layout = layout
        self._clock = clock
        self._pushes = 0
        self._told_s: float | None = None

    async def tell(self, action: Push, snapshot: Mapping[str, Any], error: FrameRejected) -> None:
        """Count a refused push of this snapshot, and warn if it is time."""
        self._pushes += 1
        now_s = self._clock.monotonic()
        if self._told_s is not None and now_s - self._told_s < QUIET_S:
            return
        pushes, self._pushes, self._told_s = self._pushes, 0, now_s
        leaf = await asyncio.to_thread(self._leaf, action.fragment, snapshot)
        log.warning(
            "push.refused_local",
            fragment=action.fragment,
            push=action.push,
            pushes=pushes,
            leaf=leaf or "none",
            reason="NaN or an infinity in it" if leaf else on_one_line(str(error)),
            todo="lower the learning rate, or look at loss and data; then begin again from finite values",
        )

    def _leaf(self, fragment: int, snapshot: Mapping[str, Any]) -> str:
        """Return the first leaf with rows in a fragment that is not finite; empty if all are. Runs in a worker thread."""
        for name in dict.fromkeys(part.tensor_name for part in self._layout.slices(fragment)):
            try:
                with np.errstate(over="ignore"):
                    values = np.asarray(snapshot[name]).astype(np.float32)
            except RuntimeError:  # the loop has donated it meanwhile
                continue
            if not np.isfinite(values).all():
                return name
        return ""
