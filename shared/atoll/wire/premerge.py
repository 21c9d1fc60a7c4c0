"""Questions of a shard to a region, and their answers: the messages of pre-merge (`atoll.merge.partial`).

    read   a manifest   ─►  its norm, or why it cannot be used      the region reads the chunks from its own broker
    fold   keys, weights ─► where their sum is, and its lengths     the one vector that leaves the region
    drop   keys                                                     they are settled: nobody will read them again (no answer)

A region with a leaf also has a keeper, which holds the chunks. Shards tell it in a word to `send` those of a stem to the hub,
and it answers `+` and how many there are, or `SENDING` after a second; or to `drop` them.

The first two are asked again until they are `done`: a region that is still at work says so after a second, so a slow one and a
dead one look different. They give the same answer each time, and a region keeps nothing that it could not read again.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

import msgspec

from atoll.base.errors import PeerMisbehaved
from atoll.base.quantities import (
    LEARNERS_MAX,
    Count,
    FragmentNumber,
    Incarnation,
    PeerId,
    PushNumber,
    Version,
    Word,
)
from atoll.wire.blobs import BlobRef
from atoll.wire.messages import NORMS_MAX, Contribution
from atoll.wire.version import SCHEMA

CHUNKS_GONE: Final = "chunks_gone"
"""The reason of who does not find the chunks of a contribution where it looks."""
SENDING: Final = b"-sending"
NOTHING_KEPT: Final = b"+0"
KeeperVerb = Literal["send", "drop"]


class WeighedPush(msgspec.Struct, frozen=True, array_like=True):
    """One contribution of a sum, and its token weight (`atoll.protocol.round.token_weight`)."""

    learner: PeerId
    incarnation: Incarnation
    push: PushNumber
    weight: float


Pushes = Annotated[tuple[WeighedPush, ...], msgspec.Meta(max_length=LEARNERS_MAX)]
Lengths = Annotated[tuple[tuple[float, float, float], ...], msgspec.Meta(max_length=NORMS_MAX)]
Places = Annotated[tuple[Count, ...], msgspec.Meta(max_length=LEARNERS_MAX)]


class RegionAsk(msgspec.Struct, frozen=True, kw_only=True):
    """A shard's request: to `read` a manifest's contribution, to `fold` `pushes` of one fragment and base, or to `drop` some.

    `version` is the version that they are merged into, and `state` its outer state, where the run corrects by its momentum.
    Where the run derives its state from the values (`atoll.merge.outer.derivable`), the region follows the fragment itself.
    """

    verb: Literal["read", "fold", "drop"]
    run_nonce: PeerId
    manifest: Contribution | None = None
    fragment: FragmentNumber = 0
    base_version: Version = 0
    pushes: Pushes = ()
    state: BlobRef | None = None
    version: Version = 0
    schema: int = SCHEMA


class RegionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A region's answer; one that is not `done` is at work.

    A contribution that was read has a `norm`, or a `reason` why it cannot be used. A sum is the frame at `blob`, with the unit,
    mean length and share of directions of each slice (`atoll.merge.fold.SliceLength`). `missing` are the places of pushes that
    the region has not read, or has read too long ago.
    """

    done: bool
    reason: Word = ""
    norm: float = 0.0
    missing: Places = ()
    blob: BlobRef | None = None
    lengths: Lengths = ()
    schema: int = SCHEMA


def keeper_word(verb: KeeperVerb, stem: str) -> bytes:
    """Return what a shard tells a region's keeper of the chunks of a contribution."""
    return f"{verb} {stem}".encode()


def heard_by_keeper(word: bytes) -> tuple[KeeperVerb, str]:
    """Return the verb and the stem of a shard's word; raise `PeerMisbehaved` for anything else."""
    verb, _, stem = word.decode("ascii", "replace").partition(" ")
    for known in get_args(KeeperVerb):
        if verb == known:
            return known, stem
    raise PeerMisbehaved("no word for a keeper", got=word[:80], allowed="send STEM, or drop STEM")
