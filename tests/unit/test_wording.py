"""Numbers with their nouns, and lists cut short: one is one, and what is left out is counted."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from atoll.base.wording import counted, few
from atoll.protocol.waits import NAMED_MAX, Names
from atoll.run.decisions import list_names


@pytest.mark.parametrize(
    ("number", "told"), [(0, "0 rounds"), (1, "1 round"), (2, "2 rounds"), (1_234_567, "1,234,567 rounds")]
)
def test_only_one_is_one(number: int, told: str) -> None:
    assert counted(number, "round") == told


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b"], "a, b"),
        (["a", "b", "c"], "a, b and 1 more"),
        (map(str, range(2000)), "0, 1 and 1,998 more"),
    ],
)
def test_a_long_list_is_cut_and_what_is_left_out_is_counted(names: Iterable[str], told: str) -> None:
    assert few(names, 2) == told


def test_a_list_that_was_cut_before_says_how_many_there_were() -> None:
    assert few(["a", "b"], 2, of=7) == "a, b and 5 more"
    assert few(["a", "b"], 2, of=2) == "a, b"
    assert list_names(Names.of(map(str, range(NAMED_MAX + 3)))).endswith(" and 3 more")
    assert not list_names(Names.of([]))
