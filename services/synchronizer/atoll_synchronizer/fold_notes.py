"""What a shard notes about each contribution while it folds it: how much it counted, its correction, how well it agrees.

A fold frees a contribution's memory, so a note keeps only numbers and a small sample of it (`atoll.merge.alignment`). With the
merge of the round the samples become cosines. The `round` event carries them; they decide nothing.

A contribution that its region has folded is in a sum here, so the shard never sees its direction: it has no note.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.base.buffer_pool import Vector
from atoll.codec.encoded import Encoded
from atoll.merge.alignment import Alignment, alignments, sample_of
from atoll.merge.fold import Corrections
from atoll.protocol.events import Fold, PushKey
from atoll_synchronizer.contributions import PendingContribution


@dataclass(frozen=True, slots=True)
class FoldNote:
    """One contribution as it was folded.

    `staleness_weight` is what it kept of its weight (0..1), `norm` its L2 norm as it came, `corrected_slices` the number of
    its slices that the correction changed, and `corrected_norm` its length after that. `sample` is a part of it.
    """

    staleness_weight: float
    norm: float
    corrected_slices: int
    corrected_norm: float
    sample: Vector

    @classmethod
    def of(cls, waiting: PendingContribution, command: Fold, corrections: Corrections | None) -> FoldNote:
        """Return the note of a contribution that is about to be folded."""
        changes = [None] * len(waiting.norms) if corrections is None else corrections.by_slice
        after = [norm if change is None else change.norm for norm, change in zip(waiting.norms, changes, strict=True)]
        changed = sum(change is not None for change in changes)
        sample = sample_of(waiting.pseudo_gradient)
        return cls(command.staleness_weight, waiting.norm, changed, math.hypot(*after), sample)


@dataclass(frozen=True, slots=True)
class FoldEffect:
    """A note, and how well the contribution agrees with its round."""

    note: FoldNote
    alignment: Alignment


def effects(notes: Mapping[PushKey, FoldNote], merged: Vector) -> dict[PushKey, FoldEffect]:
    """Return what became of the noted contributions of a round whose merge is `merged`, flat float32."""
    samples, learners = [note.sample for note in notes.values()], [key.learner for key in notes]
    found = alignments(samples, learners, sample_of(Encoded.exact(merged)))
    return {key: FoldEffect(note, one) for (key, note), one in zip(notes.items(), found, strict=True)}
