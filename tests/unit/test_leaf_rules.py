"""A rule for each leaf: what decides, what is refused, and how the rules cut a model."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from atoll.base.errors import LayoutMismatch, SettingsError
from atoll.client.parameters import LeafRules, digest_of, frozen_leaves, rules_of
from atoll.model.layout import Layout, Slice, TensorSpec
from atoll.protocol.settings import BY_VALUE, ProtocolSettings
from atoll.run.record import check_frozen
from atoll.wire.messages import RunRecord, decode, encode

FLOAT = "float32"
LEAVES = (
    TensorSpec("backbone/w", (40, 4), FLOAT),
    TensorSpec("batch_stats/norm/mean", (8,), FLOAT),
    TensorSpec("head/w", (4, 10), "bfloat16"),
    TensorSpec("norm/moving_variance", (8,), FLOAT),
    TensorSpec("seen", (), "int32"),
    TensorSpec("token_embedder/table", (30, 4), FLOAT),
    TensorSpec("zkey", (), "key<fry>"),
)


def test_a_leaf_without_a_pattern_decides_itself() -> None:
    """Statistics are averaged by value, embeddings directly, what is not floating stays; the rest is trained."""
    assert rules_of(LEAVES, {}).by_name == {
        "backbone/w": "pseudo_gradient",
        "batch_stats/norm/mean": "mean",
        "head/w": "pseudo_gradient",
        "norm/moving_variance": "mean",
        "seen": "local",
        "token_embedder/table": "direct",
        "zkey": "local",
    }


def test_the_first_pattern_that_fits_decides() -> None:
    rules = rules_of(LEAVES, {"backbone/*": "frozen", "*/w": "direct", "*norm*": "local"})

    assert rules.names_with("frozen") == ("backbone/w",)
    assert rules.names_with("direct") == ("head/w", "token_embedder/table")
    assert rules.merged == ("head/w", "token_embedder/table")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"*": "average"}, "there is no such rule for a leaf, got average"),
        ({"seen": "mean"}, "the leaf 'seen' cannot be averaged, got int32, and merge['seen'] = 'mean'"),
        ({"zkey": "pseudo_gradient"}, "the leaf 'zkey' cannot be averaged"),
        ({"typo/*": "local"}, "a pattern of `merge` decides about no leaf, got typo/*"),
        ({"*": "local", "head/*": "mean"}, "decides about no leaf, got head/*"),
        ({"*": "local"}, "there is nothing to merge"),
    ],
)
def test_a_wrong_rule_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError) as refused:
        rules_of(LEAVES, given)

    assert said in f"{refused.value.what}, got {refused.value.got}"


@pytest.mark.parametrize("fragments", [2, 3, 5, 24, 90])
def test_leaves_merged_by_value_have_the_last_fragments(fragments: int) -> None:
    """The division is one that a reader accepts, without local and frozen leaves, and its fragments are of one kind."""
    layout = rules_of(LEAVES, {}).layout(LEAVES, fragments)

    assert layout.fault() == ""
    assert len(layout.fragments) == fragments
    assert [tensor.name for tensor in layout.tensors] == [
        tensor.name for tensor in LEAVES if tensor.name not in {"seen", "zkey"}
    ]
    last = fragments - layout.value_fragments
    for fragment in range(fragments):
        names = {each.tensor_name for each in layout.slices(fragment)}
        assert names
        assert (names <= set(layout.by_value)) == (fragment >= last)
    assert 1 <= layout.value_fragments < fragments


def test_a_model_of_statistics_alone_is_merged_by_value() -> None:
    """Then all fragments are of that kind; with one fragment there is no room for both kinds."""
    assert rules_of(LEAVES, {"[hbstz]*e*": "local", "*": "mean"}).layout(LEAVES, 2).value_fragments == 2
    with pytest.raises(SettingsError, match=r"raise protocol\.fragments"):
        rules_of(LEAVES, {}).layout(LEAVES, 1)


def test_a_record_whose_rules_contradict_its_layout_is_refused() -> None:
    """A reader must not take numbers of one kind for those of the other."""
    layout = rules_of(LEAVES, {}).layout(LEAVES, 4)
    protocol = ProtocolSettings(fragments=4, shards=1, value_fragments=layout.value_fragments)
    record = RunRecord(run="r", founder="a", nonce="n", founded_at_s=0.0, layout=layout, protocol=protocol)

    assert decode(RunRecord, encode(record)) == record
    assert "by value" in msgspec.structs.replace(record, protocol=ProtocolSettings(fragments=4)).fault()
    mixed = Layout(
        tensors=(TensorSpec("a", (2,), FLOAT), TensorSpec("b", (2,), FLOAT)),
        fragments=((Slice(0, 0, 1),), (Slice(0, 1, 2), Slice(1, 0, 2))),
        by_value=("b",),
    )
    assert "merged by value and others" in mixed.fault()
    swapped = Layout(tensors=mixed.tensors, fragments=((Slice(1, 0, 2),), (Slice(0, 0, 2),)), by_value=("b",))
    assert "a slice of tensor 1, where row 0 of tensor 0 is due" in swapped.fault()
    assert "not floating" in Layout(tensors=(TensorSpec("n", (1,), "int32"),), fragments=((Slice(0, 0, 1),),)).fault()


def test_other_settings_hold_for_fragments_merged_by_value() -> None:
    """They are the plain mean, taken in full and sent as it is, whatever the run has for the others."""
    ours = ProtocolSettings(fragments=4, value_fragments=1, codec_up="int4", adoption="carry", robust="clip", quorum=3)

    assert all(ours.of(fragment) is ours for fragment in range(3))
    assert all(getattr(ours.of(3), name) == value for name, value in BY_VALUE.items())
    assert (ours.of(3).robust, ours.of(3).quorum) == ("clip", 3)
    assert (ours.of(3).merge, ours.of(3).age_damping, ours.of(3).codec_up) == ("mean", 1.0, "f32")


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_frozen_leaves_are_known_by_their_values(kind: Any) -> None:  # noqa: ANN401  (NumPy or JAX)
    """Another value, shape or dtype makes another digest; NumPy's and JAX's arrays make the same."""
    leaf = np.arange(6, dtype=np.float32).reshape(2, 3)
    rules = LeafRules({"base": "frozen", "w": "pseudo_gradient"})

    [known] = frozen_leaves({"base": kind(leaf), "w": leaf}, rules)
    assert (known.name, known.digest) == ("base", digest_of("base", leaf))
    assert digest_of("s", kind(np.float32(1.0))) != digest_of("s", kind(np.ones(1, np.float32)))
    others = [leaf + 1e-7, leaf.reshape(3, 2), leaf.astype(np.float16), leaf.T]
    assert known.digest not in {digest_of("base", kind(other)) for other in others}


def test_an_island_with_another_base_is_refused() -> None:
    """Frozen leaves must be frozen on all islands, with the founder's values."""
    layout = rules_of(LEAVES, {"backbone/w": "frozen"}).layout(LEAVES, 4)
    base = frozen_leaves({"backbone/w": np.zeros((40, 4), np.float32)}, LeafRules({"backbone/w": "frozen"}))
    other = frozen_leaves({"backbone/w": np.ones((40, 4), np.float32)}, LeafRules({"backbone/w": "frozen"}))
    protocol = ProtocolSettings(fragments=4, value_fragments=layout.value_fragments)
    run = RunRecord(run="r", founder="a", nonce="n", founded_at_s=0.0, layout=layout, protocol=protocol, frozen=base)

    check_frozen(run, base)
    for ours, said in ((other, "other values here"), ((), "not frozen here")):
        with pytest.raises(LayoutMismatch, match=f"(?s)the leaf 'backbone/w' .*{said}"):
            check_frozen(run, ours)
    with pytest.raises(LayoutMismatch, match="frozen here"):
        check_frozen(msgspec.structs.replace(run, frozen=()), base)
