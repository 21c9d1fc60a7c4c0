"""Text mixed by weight: shares come out as asked, nothing is read twice before its time, and every learner sees the same."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.base.errors import DataError, SettingsError
from atoll_learner import commands
from atoll_learner.data.mixture import apportioned, mix, weights_of
from atoll_learner.data.prepare import prepare
from atoll_learner.data.shards import TokenShards
from atoll_learner.feed import BatchReader

BLOCK = 256


def prepared(path: Path, letter: str, documents: int, block_tokens: int = BLOCK, vocabulary: int = 0) -> Path:
    """Prepare documents of one letter, and numbers that tell them apart; return their folder."""
    files = []
    for number in range(documents):
        files.append(path / f"{letter}-{number}.txt")
        files[-1].write_text(f"{letter * 9} {number} " * 40, encoding="utf-8")
    prepare(files, path / letter, block_tokens=block_tokens, validation=0.2, vocabulary=vocabulary)
    return path / letter


@pytest.fixture
def mixture(tmp_path: Path) -> TokenShards:
    parts = [f"{prepared(tmp_path, 'a', 40)}=3", f"{prepared(tmp_path, 'b', 90)}=1"]
    commands.mix(parts, tmp_path / "mixed")
    return TokenShards(tmp_path / "mixed")


def letter(tokens: np.ndarray) -> str:
    return max("ab", key=lambda each: int((tokens == ord(each)).sum()))


def test_an_epoch_has_the_shares_that_were_asked_for(mixture: TokenShards) -> None:
    order = mixture.blocks_at(7, 0, np.arange(mixture.blocks))
    read = [letter(mixture.window(int(block), 0, BLOCK)) for block in order]
    counts = Counter(read)

    assert abs(counts["a"] - 0.75 * mixture.blocks) <= 1
    assert counts["a"] + counts["b"] == mixture.blocks == sum(part.blocks for part in mixture.meta.parts)
    half = Counter(read[: mixture.blocks // 2])
    assert 0.6 < half["a"] / half.total() < 0.9


def test_a_part_is_read_whole_before_any_of_it_is_read_again(mixture: TokenShards) -> None:
    """Over several epochs of the mixture no block of a part is ever two readings ahead of another."""
    seen: Counter[int] = Counter()
    small, large = mixture.meta.parts
    for epoch in range(5):
        seen.update(mixture.blocks_at(3, epoch, np.arange(mixture.blocks)).tolist())

    for blocks, part in ((range(small.blocks), small), (range(small.blocks, small.blocks + large.blocks), large)):
        times = [seen[block] for block in blocks]
        assert sum(times) == 5 * part.positions
        assert max(times) - min(times) <= 1


def test_every_window_of_every_place_of_an_epoch_is_read_once(
    mixture: TokenShards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a part is read one and a half times in it: each window as often as its block has places."""
    read: Counter[tuple[int, int]] = Counter()

    def window(_shards: TokenShards, block: int, at: int, tokens: int) -> np.ndarray:
        read[block, at] += 1
        return np.zeros(tokens, np.int32)

    monkeypatch.setattr(TokenShards, "window", window)
    reader = BatchReader(mixture, 64, 1, seed=7)
    for start in range(0, mixture.blocks, 10):
        reader.grant(2, start, min(start + 10, mixture.blocks))
    while reader.ready():
        reader.next()

    places = Counter(mixture.blocks_at(7, 2, np.arange(mixture.blocks)).tolist())
    assert max(places.values()) > 1
    assert read == {(block, at): times for block, times in places.items() for at in range(0, BLOCK, 64)}


def test_every_release_has_the_same_order_of_a_mixture(mixture: TokenShards) -> None:
    assert mixture.blocks_at(7, 2, np.arange(8)).tolist() == [0, 9, 34, 166, 164, 31, 79, 41]


def test_the_last_window_of_a_part_ends_with_its_own_text(mixture: TokenShards) -> None:
    small = mixture.meta.parts[0]
    text = np.fromfile(mixture.folder / "train-0.bin", dtype=mixture.meta.dtype)
    ring = np.concatenate([text, text])

    last = mixture.window(small.blocks - 1, BLOCK - 64, 65)

    np.testing.assert_array_equal(last, ring[small.blocks * BLOCK - 64 :][:65])


def test_every_learner_reads_the_same_and_goes_on_in_the_middle(mixture: TokenShards, tmp_path: Path) -> None:
    """The order is a function of seed, epoch and position, so a unit's windows are the same after a restart."""
    mix(weights_of([f"{tmp_path / 'a'}=0.75", f"{tmp_path / 'b'}=0.25"]), tmp_path / "again")
    again = TokenShards(tmp_path / "again")

    def batches(shards: TokenShards, read: int, count: int) -> list[np.ndarray]:
        reader = BatchReader(shards, 64, 3, seed=5)
        reader.grant(1, 4, 12, read=read, of=32 if read else 0)
        return [reader.next() for _ in range(count)]

    assert again.meta == mixture.meta
    np.testing.assert_array_equal(batches(mixture, 0, 8)[4:], batches(again, 12, 4))


def test_a_mixture_replaces_a_mixture_and_nothing_else(mixture: TokenShards, tmp_path: Path) -> None:
    weights = {tmp_path / "a": 1.0, tmp_path / "b": 1.0}
    mix(weights, tmp_path / "mixed")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine", encoding="utf-8")

    with pytest.raises(SettingsError, match="holds something else"):
        mix(weights, tmp_path / "full")
    with pytest.raises(DataError, match="no part of another"):
        mix({tmp_path / "mixed": 1.0, tmp_path / "a": 1.0}, tmp_path / "twice")
    with pytest.raises(SettingsError, match="cannot replace one of its parts"):
        mix(weights, tmp_path / "b")
    with pytest.raises(SettingsError, match="no sum"):
        mix(dict.fromkeys(weights, 1e308), tmp_path / "huge")
    assert (tmp_path / "b" / "meta.json").exists()
    assert mixture.blocks > 0


def test_parts_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    first = prepared(tmp_path, "a", 40)
    for number, (other, said) in enumerate(
        [
            (prepared(tmp_path, "c", 40, block_tokens=512), "block_tokens = 512"),
            (prepared(tmp_path, "d", 40, vocabulary=300), "vocab = "),
            (tmp_path / "nowhere", "no token shards here"),
        ]
    ):
        with pytest.raises(DataError, match=said):
            mix({first: 1.0, other: 1.0}, tmp_path / f"out-{number}")


@pytest.mark.parametrize(
    "texts", [["a=1"], ["a=1", "b"], ["a=1", "b=0"], ["a=1", "b=-2"], ["a=1", "b=x"], ["a=1", "a=2"]]
)
def test_what_is_no_mixture_is_refused(texts: list[str]) -> None:
    with pytest.raises(SettingsError):
        weights_of(texts)


@given(st.integers(10, 5000), st.lists(st.floats(0.01, 100.0), min_size=2, max_size=8))
def test_seats_are_all_given_and_fairly(seats: int, weights: list[float]) -> None:
    shares = [weight / sum(weights) for weight in weights]

    found = apportioned(seats, shares)

    assert sum(found) == seats
    assert all(each >= 1 for each in found)
    assert all(abs(each - share * seats) <= len(weights) for each, share in zip(found, shares, strict=True))


@pytest.mark.parametrize("wrong", [{"blocks": 5000}, {"held_out": 10**9}, {"positions": 1}, {"held_out": 1}])
def test_a_mixture_whose_parts_are_no_whole_is_refused(mixture: TokenShards, wrong: dict[str, int]) -> None:
    """It would be read beyond its end, or measured on other text."""
    file = mixture.folder / "meta.json"
    meta = json.loads(file.read_text())
    meta["parts"][0] |= wrong
    file.write_text(json.dumps(meta))

    with pytest.raises(DataError, match=r"meta\.json is damaged"):
        TokenShards(mixture.folder)
