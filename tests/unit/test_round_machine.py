"""One fragment's round by itself: what it refuses from its own driver, and the yardstick for what is too long."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

import msgspec
import pytest

import atoll.protocol.round
from atoll.base.errors import ProtocolMisuse
from atoll.protocol.events import GraceWindow, PushKey
from atoll.protocol.round import TRANSITIONS, FragmentRound, Offer, Phase
from atoll.protocol.settings import ProtocolSettings

ROOT = Path(__file__).parents[2]


def begun(**changes: object) -> FragmentRound:
    asked = {"fragments": 1, "shards": 1, "interval_steps": 8, "age_max": 2} | changes
    return FragmentRound(0, 5, msgspec.convert(asked, ProtocolSettings).check())


def called(now: FragmentRound, at_s: float) -> int:
    return now.call(at_s, {"a", "b"}, "due", None, 1.0, "c")


def granted(now: FragmentRound, at_s: float, for_s: float) -> float:
    return now.open_grace(at_s, GraceWindow(for_s, "slack", 1.0, 0.0, 0.0, 2.0, 2.0, 1.0), "c")


def offer(learner: str = "a", base: int = 5, *, tokens: int = 8, steps: int = 4, final: bool = False) -> Offer:
    return Offer(PushKey(learner, 1, 0, 1), base, tokens, steps, final)


def test_a_round_is_called_until_its_quorum_and_then_no_more() -> None:
    now = begun()
    assert [called(now, 3.0), called(now, 4.0)] == [1, 2]
    assert (now.phase, now.called_s) == (Phase.COLLECTING, 3.0)
    assert granted(now, 5.0, 2.0) == 7.0
    for misused in (lambda: called(now, 6.0), lambda: granted(now, 6.0, 1.0)):
        with pytest.raises(ProtocolMisuse):
            misused()
    with pytest.raises(ProtocolMisuse, match="quorum"):
        granted(begun(), 1.0, 1.0)


def diagram() -> str:
    """Return the table of transitions as text, an arrow a line."""
    rows = [(row.phase.name, f"--{row.fact}-->", row.following.name, row.when) for row in TRANSITIONS]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    padded = ([*(word.ljust(width) for word, width in zip(row, widths, strict=False)), row[3]] for row in rows)
    return "\n".join("  ".join(row) for row in padded)


def test_a_life_of_a_round_is_its_table() -> None:
    """A phase has one arrow for a fact, every phase is reached and left, and the documents show the table."""
    arrows = {(row.phase, row.fact) for row in TRANSITIONS}
    shown = inspect.cleandoc(atoll.protocol.round.__doc__ or "")
    page = (ROOT / "docs/explanation/protocol.md").read_text(encoding="utf-8")

    assert len(arrows) == len(TRANSITIONS)
    assert {row.phase for row in TRANSITIONS} == {row.following for row in TRANSITIONS} == set(Phase)
    assert textwrap.indent(diagram(), "    ") in shown
    assert diagram() in page


def test_a_round_makes_the_next_version_and_no_other() -> None:
    """Only once it is committing, and only the version behind its own."""
    now = begun()
    with pytest.raises(ProtocolMisuse, match="durable"):
        now.succeed(6, 1.0)
    now.commit(1.0, "all answered", set(), "c")
    with pytest.raises(ProtocolMisuse, match="version"):
        now.succeed(7, 2.0)
    following = now.succeed(6, 2.0)
    assert (following.version, following.phase, following.began_s) == (6, Phase.RESTING, 2.0)


def test_a_round_folds_what_fits_and_nothing_while_it_commits() -> None:
    now = begun()
    now.loading.add(offer().key)
    fold = now.fold(offer(), "c")
    assert (fold.weight, fold.age, fold.staleness_weight) == (16.0, 0, 1.0)
    assert now.loading == set()
    for unfit in (offer(base=2), offer(base=6), offer(tokens=0), offer(steps=0)):
        assert now.refusal(unfit)
        with pytest.raises(ProtocolMisuse, match="cannot fold"):
            now.fold(unfit, "c")
    now.commit(1.0, "all answered", set(), "c")
    assert not now.refusal(offer("b"))
    with pytest.raises(ProtocolMisuse, match="cannot fold"):
        now.fold(offer("b"), "c")


def test_a_round_is_idle_while_nothing_is_about_to_make_a_version() -> None:
    """Folded, on its way, or being committed: then a final contribution on the next version waits for it."""
    last = offer(base=6, final=True)
    now = begun(ending="together")
    assert now.idle
    assert not now.parks(last)
    now.loading.add(offer().key)
    assert not now.idle
    assert now.parks(last)
    assert not now.parks(offer())
    now.fold(offer(), "c")
    assert not now.idle
    assert now.parks(last)
    now.commit(1.0, "nobody left", set(), "c")
    assert not now.idle
    assert now.parks(offer())
    assert not begun().ahead(last)


def test_a_commit_says_when_its_round_was_called_and_met_its_quorum() -> None:
    """A round that was never called, or never met it, says so by its own moment."""
    uncalled, late, met = begun(), begun(), begun()
    called(late, 0.0)
    called(met, 0.0)
    granted(met, 2.0, 1.5)
    made = [now.commit(9.0, "nobody left", set(), "c") for now in (uncalled, late, met)]
    assert [(one.called_s, one.quorum_s, one.grace_s) for one in made] == [
        (9.0, 9.0, 0.0),
        (0.0, 0.0, 0.0),
        (0.0, 2.0, 1.5),
    ]
