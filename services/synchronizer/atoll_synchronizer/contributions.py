"""One contribution on its way into a sum: read and *validated*, then weighed, corrected and folded.

A shard does this, and so does the synchronizer of a region for those of its learners. Validated means: right layout, right
size, finite, its norms as claimed and within bounds. Each segment is checked and measured as it arrives. A contribution stays
encoded as it came.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from functools import partial
from typing import Final

from atoll.base.errors import BlobCorrupt, BlobGone, FrameRejected, PeerMisbehaved
from atoll.base.parallel import off_loop
from atoll.base.retry import patiently
from atoll.bus.interface import Bus
from atoll.codec import Encoded
from atoll.merge.correction import MomentumReference, correction_of
from atoll.merge.fold import Corrections
from atoll.merge.norms import validated_norms
from atoll.run.delta_chain import FrameReader
from atoll.run.inline_frames import is_inline
from atoll.wire.messages import Contribution, RunRecord
from atoll.wire.premerge import CHUNKS_GONE
from atoll.wire.subjects import is_push_nonce

REPLACED: Final = "replaced"
"""The bytes under a contribution's name are not those that its manifest names."""


@dataclass(frozen=True, slots=True)
class PendingContribution:
    """A validated contribution, encoded as it came, its L2 norms per slice, and whether its sender had it compressed."""

    pseudo_gradient: Encoded
    norms: list[float]
    compressed: bool = True

    @property
    def norm(self) -> float:
        """Return its L2 norm."""
        return math.hypot(*self.norms)


def check_manifest(manifest: Contribution, run: RunRecord) -> None:
    """Raise `PeerMisbehaved` unless a manifest is of this founding and layout, names its own chunks, and may have its frame."""
    if manifest.run_nonce != run.nonce:
        raise PeerMisbehaved("a manifest of another founding of the run", got=manifest.run_nonce, allowed=run.nonce)
    if manifest.layout != run.layout.fingerprint:
        raise PeerMisbehaved("another layout", got=manifest.layout, allowed=run.layout.fingerprint)
    own = run.subjects.contribution_stem(manifest.learner, manifest.fragment, manifest.incarnation, manifest.push)
    named, allowed = manifest.blob.stem, f"{own}-<nonce>" if run.first_writer_wins else own
    if not (is_push_nonce(named.removeprefix(f"{own}-")) if run.first_writer_wins else named == own):
        raise PeerMisbehaved("a manifest that names foreign chunks", got=named, allowed=allowed)
    if manifest.frame and not is_inline(run, manifest.fragment):
        raise PeerMisbehaved(
            "a manifest that carries a frame", got=len(manifest.frame), allowed="chunks, in this fragment"
        )


async def read_contribution(
    bus: Bus, run: RunRecord, manifest: Contribution, keep: dict[int, bytes] | None = None
) -> PendingContribution | str:
    """Return the validated contribution of a manifest, or why it cannot be used; while the broker is away, wait for chunks.

    `keep` receives its pieces as they came.
    """
    fragment = manifest.fragment
    elements, slices = run.layout.fragment_sizes()[fragment], run.layout.slices(fragment)
    protocol = run.protocol.of(fragment)
    arrival: FrameReader | None = None
    try:
        begun = partial(off_loop, elements, FrameReader.of, manifest.blob, elements, protocol.codec_up, slices)
        arrival = await patiently(begun, "a contribution")
        if manifest.frame:
            arrival.take_whole(bus, manifest.frame, keep)
        else:
            await patiently(partial(arrival.receive, bus, keep), "a contribution")
    except FrameRejected as error:  # also a manifest whose blob is larger than any honest frame
        return error.reason if arrival is None or await _is_as_signed(bus, manifest) else REPLACED
    except BlobGone:
        return CHUNKS_GONE
    except BlobCorrupt:
        return "corrupt" if manifest.frame else REPLACED
    except PeerMisbehaved:
        return "corrupt"
    try:
        norms = validated_norms(arrival.frame.norms(), slices, manifest.norms, protocol.norm_max)
    except FrameRejected as error:
        return error.reason
    return PendingContribution(arrival.frame.vector, norms, arrival.frame.compressed)


async def _is_as_signed(bus: Bus, manifest: Contribution) -> bool:
    """Return whether the bytes of a contribution are those that its manifest names; nobody is to blame for others.

    The broker's operator can write others, and in runs below wire version 6 also that of a region's.
    Bytes that end in the middle of a frame were never compared.
    """
    if not manifest.frame:
        with contextlib.suppress(BlobGone, PeerMisbehaved):
            try:
                await patiently(lambda: bus.get_blob(manifest.blob, manifest.blob.size_bytes), "a contribution")
            except BlobCorrupt:
                return False
    return True


def corrections_of(
    run: RunRecord, fragment: int, waiting: PendingContribution, reference: MomentumReference | None
) -> Corrections | None:
    """Return how the run corrects a contribution by the outer momentum, None where it corrects none."""
    correction = correction_of(run.protocol.of(fragment))
    if correction is None or reference is None:
        return None
    return correction.corrections(waiting.pseudo_gradient, waiting.norms, reference, run.layout.slices(fragment))
