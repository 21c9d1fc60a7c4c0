"""What `make bench-loops` reads from the examples, and how it is shown."""

from __future__ import annotations

import pytest

from benchmarks.training.loops import LearnerWords, Loop, SceneOutcome, figures, words_of
from outcome import print_losses

LOOP = Loop("mine", 5, (), "atoll synchronizer --run mine-run", ("python mine.py a", "python mine.py b"))


def test_what_a_learner_prints_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    print_losses("a", [4.0, 2.0, 1.0], inside_s=0.006, overhead=0.02)
    said = capsys.readouterr().out + "a: accuracy on held-out digits 0.9722\n"
    words = words_of(said)

    assert words == LearnerWords(first=2.3333, last=2.3333, steps=3, inside_ms=2.0, overhead=0.02, measure="0.9722")
    assert words.step_ms == pytest.approx(100.0)
    print_losses("a", [], inside_s=0.0, overhead=0.0)
    late = words_of(capsys.readouterr().out + "a: loss on held-out pages 2.5, before 3.5\n")
    assert (late.steps, late.measure, late.step_ms) == (0, "2.5", 0.0)
    with pytest.raises(SystemExit, match="no measure"):
        words_of("Traceback")


def test_ends_of_the_losses_are_means_of_a_few(capsys: pytest.CaptureFixture[str]) -> None:
    print_losses("a", [9.0] * 5 + [5.0] + [1.0] * 5, inside_s=0.022, overhead=0.1, steps=22)

    assert capsys.readouterr().out == (
        "a: loss 9.0000 to 1.0000 in 22 steps, 1.000 ms of each in the island, 10.00% of the time\n"
    )


def test_goals_can_be_missed() -> None:
    """A loss that rises, islands that differ, tokens with two fates and a dear step are each found."""
    bad = (LearnerWords(1.0, 2.0, 9, 5.0, 0.02, "0.9"), LearnerWords(1.0, 2.0, 9, 5.0, 0.02, "0.8"))
    good = (LearnerWords(2.0, 0.1, 9, 0.5, 0.004, "0.9"), LearnerWords(2.0, 0.1, 9, 0.5, 0.004, "0.9"))
    kinds = ("undisturbed", "one killed", "all killed")
    missed = list(figures(LOOP, {kind: SceneOutcome(bad, 1.0, 100, 10.0, exact=False) for kind in kinds}))
    held = list(figures(LOOP, {kind: SceneOutcome(good, 1.0, 100, 10.0, exact=True) for kind in kinds}))

    assert [figure.name for figure in missed if figure.holds is False] == [
        "mine: last loss",
        "mine: merged measure",
        "mine: overhead",
        "mine: one killed, tokens lost",
        "mine: one killed, merged measure",
        "mine: all killed, tokens lost",
        "mine: all killed, merged measure",
    ]
    assert not [figure.name for figure in held if figure.holds is False]


def test_short_steps_have_no_bound() -> None:
    """Below 100 ms a step is too short to say what one per cent of it is."""
    words = (LearnerWords(2.0, 0.1, 9, 0.5, 0.2, "0.9"),) * 2
    outcome = SceneOutcome(words, 1.0, 100, 0.0, exact=True)
    found = {
        figure.name: figure
        for figure in figures(LOOP, dict.fromkeys(("undisturbed", "one killed", "all killed"), outcome))
    }

    assert found["mine: overhead"].holds is None
    assert found["mine: step"].value == pytest.approx(2.5)
