"""The error tree: what a message says, what a command line leaves with, and that the docstring shows the tree."""

from __future__ import annotations

import inspect

import pytest

from atoll.base import errors
from atoll.base.errors import AtollError, BusError, EnvironmentFault, ProtocolMisuse, UserError

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, AtollError)]


def test_message_has_one_line_per_known_part() -> None:
    error = AtollError("quorum is out of range", got=3, allowed="1..2", todo="lower it")

    assert str(error).splitlines() == [
        "quorum is out of range",
        "  got:     3",
        "  allowed: 1..2",
        "  to do:   lower it",
    ]


@pytest.mark.parametrize("got", [0, "", False, 0.0])
def test_falsy_values_are_shown(got: object) -> None:
    assert f"got:     {got}" in str(AtollError("wrong", got=got))


def test_exit_codes_tell_person_machine_and_bug_apart() -> None:
    """2 for what the person can change, 3 for the machine or network, 1 for the rest; inherited by every kind."""
    expected = {
        kind: 2 if issubclass(kind, UserError) else 3 if issubclass(kind, EnvironmentFault) else 1 for kind in ALL
    }

    assert {kind: kind.exit_code for kind in ALL} == expected


def test_branches_do_not_overlap() -> None:
    """Catching what the bus answers never swallows a bug of ours or a user's mistake."""
    for kind in (UserError, EnvironmentFault, ProtocolMisuse):
        assert not issubclass(kind, BusError)
        assert not issubclass(BusError, kind)
