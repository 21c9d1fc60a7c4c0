"""How large the streams of a run may become: the bound that its founder gives those that hold tensors.

A bound stops what would fill a disk without an end; it is no plan of the disk (`atoll plan`). It follows from the model:

* **contributions**: of each fragment what `LEARNERS` learners have waiting, `HELD` each: two in the queue and one on its way;
* **frames**: three keyframes of each fragment, and the deltas between two of them;
* **states**: two outer states of each fragment, in the largest form that an optimizer may have.

The largest of the three is the bound of each, with a third to spare, and never less than `BYTES_MIN`.
"""

from __future__ import annotations

from typing import Final

from atoll.bus.interface import Bus
from atoll.codec import KEYFRAME, frame_bytes
from atoll.merge.global_update import state_bytes_max
from atoll.model.layout import Layout
from atoll.protocol.settings import ProtocolSettings
from atoll.run.delta_chain import DELTAS_BEHIND
from atoll.wire.messages import RunRecord

LEARNERS: Final = 32
HELD: Final = 3
KEYFRAMES: Final = 3
STATES: Final = 2
SPARE: Final = 4 / 3
BYTES_MIN: Final = 256 << 20


async def provide(bus: Bus, offer: RunRecord, bytes_max: int | None) -> None:
    """Create the streams of a run that is about to be founded or rebuilt; each of tensors has `bytes_max`, if it is given."""
    await bus.provision(bytes_max or stream_bytes_max(offer.layout, offer.protocol), offer.bulk)


def stream_bytes_max(layout: Layout, protocol: ProtocolSettings) -> int:
    """Return the bound of each stream of tensors, in bytes, for a run of this model and these settings."""
    sizes = layout.fragment_sizes()
    contributions = LEARNERS * HELD * sum(frame_bytes(size, protocol.of(p).codec_up) for p, size in enumerate(sizes))
    frames = KEYFRAMES * sum(frame_bytes(size, KEYFRAME) for size in sizes)
    if protocol.codec_down != KEYFRAME:
        deltas = protocol.keyframe_versions + DELTAS_BEHIND
        frames += deltas * sum(frame_bytes(size, protocol.codec_down) for size in sizes)
    states = STATES * sum(state_bytes_max(size) for size in sizes)
    return max(BYTES_MIN, round(SPARE * max(contributions, frames, states)))
