"""TOML that Python, or whoever walks its tables, could not hold is refused in words."""

from __future__ import annotations

import pytest

from atoll.base.parsing import DEPTH_MAX, parsed_toml


@pytest.mark.parametrize(
    "text",
    [
        "a = ",
        f"a = {'9' * 5000}",
        f"a = {'[' * 5000}{']' * 5000}",
        f"{'a.' * 1500}a = 1",
        f"{'a.' * DEPTH_MAX}a = 1",
        f"a = {'[' * DEPTH_MAX}{']' * DEPTH_MAX}",
    ],
    ids=["no TOML", "digits", "lists", "dotted keys", "one table too many", "one list too many"],
)
def test_what_cannot_be_held_is_a_value_error(text: str) -> None:
    """A recursion without end would be a traceback for a slip of the pen."""
    with pytest.raises(ValueError, match=r"."):
        parsed_toml(text)


def test_what_people_write_is_read() -> None:
    assert parsed_toml("[[a.b]]\nc = [1, [2]]\n") == {"a": {"b": [{"c": [1, [2]]}]}}
    assert parsed_toml(f"{'a.' * (DEPTH_MAX - 1)}a = 1")
