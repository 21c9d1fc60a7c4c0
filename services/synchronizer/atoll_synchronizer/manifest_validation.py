"""Between messages and facts: what a shard accepts from its queue.

A shard believes a manifest only if it came on the subject of the learner and fragment that it names, carries the run's
layout, and points at that learner's own chunks. A broker can protect subjects, so everything else must agree with them.
"""

from __future__ import annotations

from atoll.base.errors import PeerMisbehaved
from atoll.bus.interface import Delivery
from atoll.protocol.events import ContributionArrived, LearnerBeat, PushKey
from atoll.wire.messages import Beat, Contribution, RunRecord, decode
from atoll.wire.subjects import Subjects


def read_manifest(delivery: Delivery, subjects: Subjects, run: RunRecord, shard: int) -> Contribution:
    """Return the queued manifest; raise `PeerMisbehaved` unless it fits its subject and this run."""
    manifest = decode(Contribution, delivery.data)
    ours = subjects.contribution(shard, manifest.fragment, manifest.learner)
    if delivery.subject != ours or manifest.fragment not in run.protocol.fragments_of(shard):
        raise PeerMisbehaved("a manifest on a foreign subject", got=delivery.subject, allowed=ours)
    if manifest.run_nonce != run.nonce:
        raise PeerMisbehaved("a manifest of another founding of the run", got=manifest.run_nonce, allowed=run.nonce)
    if manifest.layout != run.layout.fingerprint:
        raise PeerMisbehaved("another layout", got=manifest.layout, allowed=run.layout.fingerprint)
    stem = subjects.contribution_stem(manifest.learner, manifest.fragment, manifest.incarnation, manifest.push)
    if manifest.blob.stem != stem:
        raise PeerMisbehaved("a manifest that names foreign chunks", got=manifest.blob.stem, allowed=stem)
    return manifest


def arrival(manifest: Contribution, at_s: float) -> ContributionArrived:
    """Return the fact that the shard has `manifest`."""
    return ContributionArrived(
        at_s=at_s,
        key=PushKey(manifest.learner, manifest.incarnation, manifest.fragment, manifest.push),
        base_version=manifest.base_version,
        tokens=manifest.tokens,
        steps=manifest.steps,
        trained_tokens=manifest.trained_tokens,
        final=manifest.final,
        cause_id=manifest.cause_id,
    )


def read_beat(data: bytes, run: RunRecord) -> Beat:
    """Return a heartbeat or farewell; raise `PeerMisbehaved` when its learner joined another founding of the run."""
    beat = decode(Beat, data)
    if beat.run_nonce != run.nonce:
        raise PeerMisbehaved("a learner of another founding of the run", got=beat.run_nonce, allowed=run.nonce)
    return beat


def beat_fact(beat: Beat, at_s: float) -> LearnerBeat:
    """Return the fact that a learner reported."""
    return LearnerBeat(
        at_s=at_s,
        learner=beat.learner,
        incarnation=beat.incarnation,
        training=beat.state == "training",
        step_s=beat.step_s,
        tokens=beat.tokens,
        pushed=beat.pushed,
        superseded=beat.superseded,
        refused_local=beat.refused_local,
        run_tokens=beat.run_tokens,
    )
