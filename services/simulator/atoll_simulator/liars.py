"""Learners that lie: they train like the others, and send something else than what they have learnt.

A liar is a member in good standing. It keeps to the protocol: its frames are whole, its norms are those of what it sends, its
books are right. So nothing but the merge itself can bound what it does (`atoll.merge.robust`).

    sign flip   the pseudo-gradient, backwards
    scaling     `SCALE` times the pseudo-gradient
    noise       random numbers, as long as the pseudo-gradient
    zeros       nothing
    copied      the pseudo-gradient of the liar's first push of the fragment, over and over
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final, Literal

import numpy as np

from atoll.base.buffer_pool import Vector
from atoll.client.pushing import Pusher
from atoll.codec import Read
from atoll.protocol.events import Push

Lie = Literal["sign flip", "scaling", "noise", "zeros", "copied"]
SCALE: Final = 10.0


class Liar:
    """One learner's vectors in place of its pseudo-gradients."""

    def __init__(self, lie: Lie, seed: str) -> None:
        """Know no pseudo-gradient yet."""
        self._lie = lie
        self._dice = np.random.default_rng(list(seed.encode()))
        self._first: dict[int, Vector] = {}

    def instead(self, fragment: int, truth: Vector) -> Vector:
        """Return what is sent in place of `truth`, flat float32."""
        if self._lie == "sign flip":
            return -truth
        if self._lie == "scaling":
            return np.float32(SCALE) * truth
        if self._lie == "zeros":
            return np.zeros_like(truth)
        if self._lie == "copied":
            return self._first.setdefault(fragment, truth.copy())
        drawn = self._dice.standard_normal(truth.size, dtype=np.float32)
        length = np.float32(np.linalg.norm(truth) / max(1e-20, float(np.linalg.norm(drawn))))
        return drawn * length


def corrupt(pusher: Pusher, liar: Liar) -> None:
    """Have a pusher send the liar's vectors from now on."""
    honest = pusher.push

    async def push(
        action: Push, origin: Vector, theta: Read, loss: Callable[[], Coroutine[Any, Any, float | None]]
    ) -> None:
        sent = origin - liar.instead(action.fragment, origin - theta(0, origin.size))
        await honest(action, origin, lambda start, stop: sent[start:stop], loss)

    pusher.push = push  # type: ignore[method-assign]  # the class is production's, the lie is ours
