"""The questions about grace and about a learner behind, for a loop that is fast."""

from __future__ import annotations

import pytest

from atoll.story.questions import behind, grace
from support.told_runs import SteppedRun


def fast(delays_s: list[float], quorum: int = 1, **sent: object) -> SteppedRun:
    """Return a run whose rounds grant no grace; contributions of `a` arrive so long after the quorum that they missed.

    `sent` is noted with every contribution.
    """
    run = SteppedRun()
    why = {"version": 0, "calls": 1, "quorum": quorum, "met_by": "push/b/1/0/1", "end": "grace over"}
    run.round(1, why=why)
    for version, delay_s in enumerate(delays_s, 2):
        share = {
            "incarnation": 1,
            "tokens": 10,
            "weight": 1.0,
            "push": version,
            "steps": 10,
            "step_s": 1.0,
            "upload_s": 0.1,
            **sent,
        }
        # A round is called 2 s before its event and meets its quorum 1 s before it; the next is called 10 s later.
        late = {**share, "learner": "a", "age": 1, "arrived_s": delay_s - 9.0}
        fields = {"fragment": 0, "version": version, "contributors": [late, {**share, "learner": "b", "age": 0}]}
        phases = {"quorum_wait_s": 1.0, "waited_s": 1.5, "queued_s": 0.0, "merge_s": 0.1, "commit_s": 0.4}
        run.log("round", "shard-0", 10.0 + 10.0 * version, **fields, **phases, why=why)
    return run


def rows(lines: list[str]) -> list[list[str]]:
    return [line.split() for line in lines if line.startswith("  ") and " s" in line and line.split()[1] == "s"]


def test_the_rows_of_graces_are_those_that_contributions_needed_where_the_usual_one_is_zero() -> None:
    """Ten contributions were 0.5 ms to 10 s late; the extra waiting is the mean of their rounds."""
    answer = grace(fast([0.0005, 0.0015, 0.0025, 0.0035, 0.0095, 0.02, 0.1, 1.0, 2.0, 10.0]).history, None)

    assert "median grace of 0 s" in answer[0]
    assert [(row[0], row[2]) for row in rows(answer)] == [
        ("0", "0"),
        ("0.003", "3"),
        ("0.01", "5"),
        ("1", "8"),
        ("2", "9"),
        ("10", "10"),
    ]
    assert [float(row[3]) for row in rows(answer)][-1] == pytest.approx(1.31, abs=0.01)


def test_a_learner_like_the_others_is_behind_because_rounds_do_not_wait_for_it() -> None:
    answer = "\n".join(behind(fast([0.1] * 8).history, "a"))

    assert (
        "rounds end without waiting for it: 8 of the 8 rounds that it missed needed a quorum of 1 of 3 learners"
        in answer
    )
    assert "explain it" not in answer
    assert "`atoll what-if` with `--set protocol.quorum=3`" in answer
