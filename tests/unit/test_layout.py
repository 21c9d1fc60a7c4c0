"""The division of a model into fragments: balance, cover, determinism, and what a mismatch says."""

from __future__ import annotations

import pytest

from atoll.base.errors import SettingsError
from atoll.model.layout import TensorSpec, first_difference, plan_layout


def llama(vocabulary: int, width: int, layers: int) -> list[TensorSpec]:
    hidden = width * 8 // 3
    tensors = [TensorSpec("embed", (vocabulary, width), "float32")]
    for number in range(layers):
        shapes = {
            "attention_norm": (width,),
            "q": (width, width),
            "k": (width, width // 2),
            "v": (width, width // 2),
            "o": (width, width),
            "mlp_norm": (width,),
            "gate": (width, hidden),
            "up": (width, hidden),
            "down": (hidden, width),
        }
        tensors += [TensorSpec(f"layer{number}/{name}", shape, "float32") for name, shape in shapes.items()]
    return [*tensors, TensorSpec("norm", (width,), "float32")]


@pytest.mark.parametrize("fragments", [1, 2, 4, 8, 24])
@pytest.mark.parametrize(
    ("vocabulary", "width", "layers"), [(256, 64, 2), (256, 128, 4), (8192, 256, 4), (32000, 512, 8)]
)
def test_fragments_are_balanced(vocabulary: int, width: int, layers: int, fragments: int) -> None:
    """No fragment is more than 5 % larger than the mean, however large the embedding is."""
    sizes = plan_layout(llama(vocabulary, width, layers), fragments).fragment_sizes()
    assert len(sizes) == fragments
    assert max(sizes) * len(sizes) / sum(sizes) <= 1.05


def test_spans_tile_the_flat_vector() -> None:
    """The spans of a fragment follow each other without gap or overlap and know what is direct."""
    tensors = [*llama(256, 64, 1), TensorSpec("scale", (), "float32")]
    layout = plan_layout(tensors, 3, direct=["embed"])
    for fragment, size in enumerate(layout.fragment_sizes()):
        at = 0
        for tensor_slice in layout.slices(fragment):
            assert tensor_slice.offset == at
            assert tensor_slice.direct == (tensor_slice.tensor_name == "embed")
            at += tensor_slice.size
        assert at == size


def test_the_layout_is_deterministic() -> None:
    """Two processes with the same tensors compute the same layout and fingerprint; any change gives another one."""
    layout = plan_layout(llama(256, 64, 2), 4)
    again = plan_layout(llama(256, 64, 2), 4)
    assert layout == again
    assert layout.fingerprint == again.fingerprint
    assert len(layout.fingerprint) == 16
    others = [
        plan_layout(llama(256, 64, 2), 5),
        plan_layout(llama(257, 64, 2), 4),
        plan_layout(llama(256, 64, 2), 4, direct=["embed"]),
    ]
    assert len({layout.fingerprint, *(other.fingerprint for other in others)}) == 4


@pytest.mark.parametrize("fragments", [0, -1, 5])
def test_too_many_or_no_fragments_are_refused(fragments: int) -> None:
    """A model of four rows cannot fill five fragments, and no model fills none."""
    with pytest.raises(SettingsError, match="cannot be divided") as caught:
        plan_layout([TensorSpec("w", (3, 2), "float32"), TensorSpec("b", (), "float32")], fragments)
    assert caught.value.got == fragments
    assert "1..4" in str(caught.value.allowed)


def test_equal_names_are_refused() -> None:
    """Two tensors of one name cannot be told apart on the wire."""
    with pytest.raises(SettingsError, match="same name") as caught:
        plan_layout([TensorSpec("w", (2,), "float32")] * 2, 1)
    assert caught.value.got == ["w"]


def test_an_unknown_direct_name_is_refused() -> None:
    """A name in `direct` that no tensor has is a spelling mistake."""
    with pytest.raises(SettingsError, match="no such tensor") as caught:
        plan_layout(llama(256, 64, 1), 2, direct=["embedding"])
    assert caught.value.got == ["embedding"]


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_what_cannot_be_averaged_is_in_no_layout(dtype: str) -> None:
    """A counter or a mask would be a wrong number after its first merge."""
    with pytest.raises(SettingsError, match="only floating tensors") as caught:
        plan_layout([TensorSpec("w", (3,), "float32"), TensorSpec("n", (3,), dtype)], 1)
    assert caught.value.got == ["n"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (TensorSpec("x", (4, 2), "float32"), "tensor 0 is 'w' here and 'x' in the run"),
        (TensorSpec("w", (4, 3), "float32"), "'w' has shape [4, 2] here and [4, 3] in the run"),
        (TensorSpec("w", (4, 2), "bfloat16"), "'w' is float32 here and bfloat16 in the run"),
    ],
)
def test_the_first_difference_names_the_tensor(changed: TensorSpec, said: str) -> None:
    rest = TensorSpec("b", (4,), "float32")
    ours = plan_layout([TensorSpec("w", (4, 2), "float32"), rest], 2)
    assert first_difference(ours, plan_layout([changed, rest], 2)) == said


@pytest.mark.parametrize("fragments", [8, 24, 64])
def test_a_model_is_cut_no_more_than_it_must_be(fragments: int) -> None:
    """P fragments need at most P - 1 cuts, so at most T + P - 1 slices, each fragment a stretch of the model."""
    layout = plan_layout(llama(256, 128, 4), fragments)
    slices = [piece for inside in layout.fragments for piece in inside]

    assert len(slices) <= len(layout.tensors) + fragments - 1
    assert slices == sorted(slices, key=lambda piece: (piece.tensor, piece.start))


def test_no_fragment_holds_a_sliver_of_a_matrix() -> None:
    tensors = [TensorSpec("a", (1000, 8), "float32"), TensorSpec("b", (1004, 8), "float32")]
    layout = plan_layout(tensors, 2)

    assert [len(inside) for inside in layout.fragments] == [1, 1]
