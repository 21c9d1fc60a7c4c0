"""The table of fates, as it is printed."""

from __future__ import annotations

import pytest

from atoll.cli.fates import show, show_data
from atoll.protocol.data import DataLedger
from atoll.protocol.ledger import Account
from atoll.run.ledger import IncarnationAccount


def test_no_digit_is_cut_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe counts as 80 columns: an account in which digits are missing is none."""
    monkeypatch.setenv("COLUMNS", "40")
    account = Account(trained=123_456_789, merged=123_450_000, merged_late=6_000, refused={"stale": 700, "outlier": 89})
    show([IncarnationAccount(f"learner-{number}/1", account, "left") for number in (1, 2)], 1)
    show_data(DataLedger(blocks=1_234_567))
    said = capsys.readouterr().out

    assert "…" not in said
    assert said.count("123,450,000") == 2
    assert "246,913,578" in said
    assert "refused:outlier" in said
    assert "1,234,567" in said
