"""Variances that are merged by value never fall below zero, whatever the run's codecs are and whatever a learner pushes."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.codec import FORMATS, Encoded, format_of
from atoll.merge.fold import slice_norms
from atoll.merge.outer import Nesterov
from atoll.merge.round_merge import RoundMerge, update_of
from atoll.merge.values import KEPT_ELEMENTS
from atoll.model.layout import FragmentSlice
from atoll.protocol.events import Fold, PushKey
from atoll.protocol.settings import ProtocolSettings

LEARNERS = ("a", "b", "c", "d")


def merged_rounds(
    run: ProtocolSettings, rounds: list[list[np.ndarray]], slices: tuple[FragmentSlice, ...]
) -> np.ndarray:
    """Return what a reader holds after these rounds of values, one vector for each learner of a round."""
    rules, held = run.of(0), np.zeros(rounds[0][0].size, np.float32)
    update = update_of(run, 0, Nesterov(0.6, 0.9))
    state = update.init(held)
    for version, values in enumerate(rounds, 1):
        merge = RoundMerge(run, 0, slices)
        for learner, mine in zip(LEARNERS, values, strict=False):
            sent = Encoded.of(np.zeros_like(mine) - mine, format_of(rules.codec_up))
            key = PushKey(learner=learner, incarnation=1, fragment=0, push=version)
            command = Fold(key=key, weight=float(1 + len(learner)), staleness_weight=1.0, age=0, cause_id="", norm=0.0)
            merge.add(sent, slice_norms(slices, sent), command, state)
        merged = merge.result(state, version)
        after = update.step(held, merged.pseudo_gradient, merged.memory or state)
        held, state = after.values, after.state
        assert held[slices[0].offset : slices[0].size].min() >= 0.0
    return held


def slices_of(size: int) -> tuple[FragmentSlice, ...]:
    return (
        FragmentSlice("1.running_var", 0, size, 0, size, False),
        FragmentSlice("1.running_mean", 0, size, size, size, False),
    )


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    codec=st.sampled_from(sorted(FORMATS)),
    robust=st.sampled_from(["none", "clip", "gate"]),
)
def test_a_merged_variance_is_a_mean_of_variances(
    seed: int, codec: str, robust: Literal["none", "clip", "gate"]
) -> None:
    """Numbers of every size, many of them tiny or zero: what is merged lies between the learners' smallest and largest."""
    chance, size = np.random.default_rng(seed), 24
    run = ProtocolSettings(
        fragments=1,
        shards=1,
        value_fragments=1,
        codec_up=codec,
        codec_down=codec,
        outer_momentum=0.9,
        robust=robust,
        quorum=3,
    )
    rounds = []
    for _ in range(4):
        variances = (
            chance.exponential(size=(3, size))
            * 10.0 ** chance.uniform(-12, 6, (3, size))
            * (chance.random((3, size)) > 0.2)
        )
        rounds.append([np.concatenate([one, chance.normal(size=size)]).astype(np.float32) for one in variances])
    held = merged_rounds(run, rounds, slices_of(size))
    last = np.stack(rounds[-1])

    assert (held >= last.min(0) * (1 - 1e-6) - 1e-6 * (np.arange(2 * size) >= size)).all()
    assert (held <= last.max(0) + np.abs(last).max(0) * 1e-6).all()


@pytest.mark.parametrize("size", [8, KEPT_ELEMENTS])
def test_a_negative_variance_of_a_learner_counts_as_zero(size: int) -> None:
    """Whether the fragment has a memory or not; its mean, which may be negative, is not touched."""
    run = ProtocolSettings(fragments=1, shards=1, value_fragments=1)
    honest, lie = np.full(2 * size, 2.0, np.float32), np.full(2 * size, -10.0, np.float32)
    held = merged_rounds(run, [[honest, lie]], slices_of(size))

    assert held[size] == -4.0
    assert held[0] == (1.0 if size == 8 else 0.0)  # without a memory, sums are folded before anything can be looked at
