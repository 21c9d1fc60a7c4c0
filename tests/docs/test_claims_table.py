"""A claim may cost its claimant alone: every field that travels has a row, and no stranger's lie costs others."""

from __future__ import annotations

from typing import Final

import docs_claims
import msgspec
import pytest
from docs_claims import CLAIMS, ROOTS, Cost, OutsideSchema, S, costs_to_others, fields_without_a_row, row, writers_of

from atoll.wire.messages import Beat, Head


class Boast(msgspec.Struct):
    """A message that nobody has thought about."""

    tokens: int


class Envelope(msgspec.Struct):
    """A message with another one inside."""

    boasts: dict[str, tuple[Boast, ...]]


OF_A_LEARNER: Final = OutsideSchema(Envelope, S.beat("a"), "`hb.<learner>`")


def test_every_field_that_travels_has_a_row() -> None:
    """A field is used for something, verified against something, and its lie costs somebody."""
    assert fields_without_a_row() == []


def test_no_stranger_lies_at_the_cost_of_others() -> None:
    """What may cost the run stands only where no learner, reader, evaluator, region or premerger may write."""
    assert costs_to_others() == []


def test_a_field_without_a_row_is_found_however_deep_it_lies() -> None:
    faults = fields_without_a_row((*ROOTS, OF_A_LEARNER))

    assert faults == ["Boast.tokens has no row", "Envelope.boasts has no row"]


def test_a_row_of_a_field_that_there_is_not_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = dict(CLAIMS)
    rows[Head] = (*rows[Head], row("fame", "", "", Cost.NOBODY))
    monkeypatch.setattr(docs_claims, "CLAIMS", rows)

    assert fields_without_a_row() == ["Head.fame is no field"]


@pytest.mark.parametrize("cost", [Cost.RUN, Cost.OTHERS])
def test_a_lie_of_a_learner_that_costs_others_is_found(monkeypatch: pytest.MonkeyPatch, cost: Cost) -> None:
    rows = dict(CLAIMS)
    rows[Envelope], rows[Boast] = (row("boasts", "", "", Cost.CLAIMANT),), (row("tokens", "", "", cost),)
    monkeypatch.setattr(docs_claims, "CLAIMS", rows)

    assert costs_to_others((*ROOTS, OF_A_LEARNER)) == ["`hb.<learner>`: Boast.tokens"]


def test_writers_follow_from_the_rights_of_identities() -> None:
    """The page says of each subject who else may write it."""
    writers = {root.schema: writers_of(root) for root in ROOTS}

    assert writers[Head] == []
    assert writers[Beat] == ["learner"]
