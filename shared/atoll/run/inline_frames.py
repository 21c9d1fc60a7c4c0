"""Which contributions travel inside their manifests.

A frame of a kilobyte costs by what is done with it, not by its bytes: it is stored, read and removed, and each of these is a
request to the broker. Carried in its manifest it needs none of them. JSON makes it a third longer (base64), so a frame of
`INLINE_BYTES_MAX` costs about the bytes that its requests would.

Which frames are inline follows from the run alone, and the longest frame of a fragment counts. A learner whose region adds up
sends none inline: its frames stay in the region.
"""

from __future__ import annotations

from atoll.codec import Framing
from atoll.wire.limits import INLINE_BYTES_MAX
from atoll.wire.messages import RunRecord


def is_inline(run: RunRecord, fragment: int) -> bool:
    """Return whether contributions of a fragment travel inside their manifests."""
    return fits(Framing(run.layout.fragment_sizes()[fragment], run.protocol.of(fragment).codec_up))


def fits(framing: Framing) -> bool:
    """Return whether a manifest has room for any frame of such a vector."""
    return framing.segments == 1 and framing.size_bytes <= INLINE_BYTES_MAX
