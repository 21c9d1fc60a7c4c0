"""How an incarnation ends: return the data, push the last pseudo-gradients, say goodbye, write a checkpoint, within a bound.

The order follows what each step is worth to others. Data that is not returned waits until its lease expires. A
pseudo-gradient that is not pushed is lost to the model. A checkpoint that is not written costs only this learner the steps
since the one before. A checkpoint may be slow (a large state, a network disk), and one is often under way when the signal
comes, so nothing that others need waits for it. It gets the rest of the bound, and a share of its own in any case.
"""

from __future__ import annotations

import time
from typing import Any, Final

from atoll.client.join import IslandHandle
from atoll_learner.data.token_source import SourceFeed
from atoll_learner.feed import LeasedFeed
from atoll_learner.keeper import Keeper

RETURN_SHARE: Final = 4.0
"""Of the bound for leaving, this part at most goes into returning the data: pushes matter more."""
KEEP_SHARE: Final = 8.0
"""Of the bound, this part is left to the checkpoint even if the broker never answers."""
PUSH_S_MIN: Final = 0.1


def leave(island: IslandHandle, feed: LeasedFeed | SourceFeed, keeper: Keeper, state: Any, bound_s: float) -> None:  # noqa: ANN401
    """Leave in good order within `bound_s`, or as far as that allows; `state` is None when no checkpoint is wanted.

    Raises:
        AtollError: the island failed, or its last pushes are not durable; the message names them.
    """
    if (failure := island.session.driver.failure) is not None:
        raise failure
    deadline_s = time.monotonic() + bound_s
    returned = feed.close(bound_s / RETURN_SHARE)
    cursor = {} if returned else feed.cursor
    reserved_s = bound_s / KEEP_SHARE if keeper.checkpoints is not None else 0.0
    try:
        island.close(max(PUSH_S_MIN, deadline_s - reserved_s - time.monotonic()))
    finally:
        deadline_s = max(deadline_s, time.monotonic() + reserved_s)
        if state is not None:
            keeper.keep_last(state, cursor, deadline_s)
        keeper.finish(deadline_s)
