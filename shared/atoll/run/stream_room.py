"""How large the streams of a run may become: the bound that its founder gives those that hold tensors.

A bound stops what would fill a disk without an end; it is no plan of the disk (`atoll plan`). It follows from the model:

* **contributions**: of each fragment what `LEARNERS` learners have waiting, `HELD` each: two in the queue and one on its way;
* **frames**: three keyframes of each fragment, and the deltas between two of them;
* **states**: two outer states of each fragment, in the largest form that an optimizer may have.

The largest of the three is the bound of each, with a third to spare, and never less than `BYTES_MIN`.

One bound for all would be one learner's to fill. So each has a *share* of the chunks, in messages: of each fragment the newest
`SHARE` contributions, twice what an honest one has waiting. The owner of shard 0 removes what is beyond (`ChunkShares`), and
all that lies at fragments which the run does not have.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from atoll.bus.interface import Bus, StoredCounts
from atoll.bus.streams import Places
from atoll.codec import KEYFRAME, Framing, frame_bytes
from atoll.merge.global_update import state_bytes_max
from atoll.merge.partial import partial_codec
from atoll.model.layout import Layout
from atoll.protocol.settings import ProtocolSettings
from atoll.run.delta_chain import DELTAS_BEHIND
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.messages import RunRecord
from atoll.wire.subjects import SUM

LEARNERS: Final = 32
HELD: Final = 3
KEYFRAMES: Final = 3
STATES: Final = 2
SPARE: Final = 4 / 3
BYTES_MIN: Final = 1 << 30
"""A filler stores some 100 MB/s, and what it stored is removed once a second."""
SHARE: Final = 2 * HELD
SHARERS_MIN: Final = 4
"""However small a founder makes the bound, so many learners find room."""


async def provide(bus: Bus, offer: RunRecord, bytes_max: int | None) -> None:
    """Create the streams of a run that is about to be founded or rebuilt; each of tensors has `bytes_max`, if it is given."""
    await bus.provision(bytes_max or stream_bytes_max(offer.layout, offer.protocol), offer.bulk)


def places_of(run: RunRecord) -> Places:
    """Return where a learner of a run may write."""
    layout, protocol = run.layout, run.protocol
    fragments = range(len(layout.fragment_sizes()))
    slices = max(len(layout.slices(fragment)) for fragment in fragments)
    shards = tuple(protocol.shard_of(fragment) for fragment in fragments)
    return Places(shards, slices, keeps_first=True)


@dataclass(frozen=True, slots=True)
class Excess:
    """Messages stored beyond the share of a learner or region: the filter of some of it, how many of the newest may stay."""

    subjects_of: str
    subject_filter: str
    keep: int
    messages: int


class ChunkShares:
    """How many chunks of a run each sender may have stored: a learner, or the synchronizer of a region for its sums."""

    def __init__(self, run: RunRecord) -> None:
        self._prefix = f"{run.subjects.prefix}.up.c."
        layout, protocol = run.layout, run.protocol
        sizes = layout.fragment_sizes()
        self._chunks = {str(p): Framing(size, protocol.of(p).codec_up).segments for p, size in enumerate(sizes)}
        self._of_sum = {str(p): Framing(size, partial_codec(protocol)).segments for p, size in enumerate(sizes)}

    @property
    def subject_filter(self) -> str:
        """Return the filter of all chunks."""
        return f"{self._prefix}>"

    @property
    def least(self) -> int:
        """Return below how many messages of all senders together nobody can be beyond its share."""
        return sum(self._chunks.values())

    def excesses(self, stored: StoredCounts) -> list[Excess]:
        """Return what is beyond the shares, by sender and place; the pushes of a share are fewer where the stream is small."""
        room = stored.bytes_max // (SHARERS_MIN * CHUNK_BYTES * self.least)
        pushes = max(1, min(SHARE, room)) if stored.bytes_max else SHARE
        held: Counter[tuple[str, str, str]] = Counter()
        for subject, messages in stored.by_subject.items():
            levels = subject.removeprefix(self._prefix).split(".")
            if len(levels) < 3:  # below no fragment: none of ours
                held[levels[0], "", ""] += messages
            elif levels[0] == SUM:
                held[SUM, levels[1], levels[2]] += messages
            else:
                held[levels[0], levels[1], ""] += messages
        found = []
        for (sender, fragment, region), messages in sorted(held.items()):
            chunks = (self._of_sum if sender == SUM else self._chunks).get(fragment, 0)
            if messages > pushes * chunks:
                below = f"{SUM}.{fragment}.{region}" if sender == SUM else f"{sender}.{fragment}" if chunks else sender
                keep = pushes * chunks
                found.append(Excess(region or sender, f"{self._prefix}{below}.>", keep, messages - keep))
        return found


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
