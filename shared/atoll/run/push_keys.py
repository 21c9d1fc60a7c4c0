"""The key of a contribution, as its manifest says it: shards, regions and replays know a contribution by nothing else."""

from __future__ import annotations

from atoll.protocol.events import PushKey
from atoll.wire.messages import Contribution


def key_of(manifest: Contribution) -> PushKey:
    """Return the key of a manifest's contribution."""
    return PushKey(manifest.learner, manifest.incarnation, manifest.fragment, manifest.push)
