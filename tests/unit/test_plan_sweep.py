"""The sweep of a plan: its prices are those of the published experiments, and it follows the plan's own figures."""

from __future__ import annotations

import json
import math
import re
from itertools import product
from pathlib import Path

import pytest
import zstandard

from atoll_simulator.planner.answer import answer
from atoll_simulator.planner.question import PlanLinks, Question
from atoll_simulator.planner.systems import CODECS, GAPS, PAGE, TOKENS_EXPONENT, best, tokens_for

ROOT = Path(__file__).resolve().parents[2]
PARITY = ROOT / "docs" / "results" / "raw" / "experiment-parity.json.zst"


def question(mbit_s: float) -> Question:
    link = (mbit_s * 1e6,)
    return Question(1_000_000_000, 10.0, PlanLinks(link, link))


def test_prices_are_those_of_the_published_table() -> None:
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| 3 \| [^|]+ \| ([+-][0-9.]+) ±", page, re.MULTILINE)

    assert {(int(interval), sent): float(gap) for interval, sent, gap in rows} == {
        pair: pytest.approx(100.0 * gap) for pair, gap in GAPS.items()
    }
    assert set(GAPS) == set(product({interval for interval, _ in GAPS}, CODECS))


def test_tokens_cost_what_data_parallel_training_says() -> None:
    """At its better rate, the mean of three seeds at a quarter and at the whole of the largest budget."""
    kept = json.loads(zstandard.ZstdDecompressor().stream_reader(PARITY.read_bytes()).read())
    finals: dict[int, list[float]] = {}
    for record in kept["records"].values():
        cell = record["cell"]
        if (cell["method"], cell["learners"], cell["settings"]["train.rate"]) == ("data-parallel", 4, 8e-3):
            finals.setdefault(cell["tokens"], []).append(record["final"])
    (small, before), (large, after) = ((tokens, sum(finals[tokens]) / 3) for tokens in sorted(finals)[-2:])

    assert large == 4 * small
    assert pytest.approx(math.log(before / after) / math.log(4), abs=5e-5) == TOKENS_EXPONENT
    assert tokens_for(before / after - 1.0) == pytest.approx(4.0, rel=0.01)
    assert tokens_for(0.0) == 1.0


def test_a_row_is_the_plan_of_its_settings() -> None:
    asked = question(100.0)
    rows = answer(asked, sweeps=True).sweep
    own = next(row for row in rows if (row.interval_steps, row.sent) == (24, "int4 both ways"))
    plain = answer(asked)

    assert own.tokens_per_s == pytest.approx(plain.systems[0].tokens_per_s)
    assert own.busy == pytest.approx(plain.regions[0].busy)
    assert own.worth == pytest.approx(own.tokens_per_s / 1.0746 ** (1.0 / TOKENS_EXPONENT))
    assert plain.sweep == ()


def test_a_narrow_link_wants_a_longer_interval_than_a_wide_one() -> None:
    """Where the link carries it meeting often is worth most; where it does not, rows that keep up are."""
    wide, narrow = (best(answer(question(mbit_s), sweeps=True).sweep) for mbit_s in (10_000.0, 9.0))

    assert wide.interval_steps < narrow.interval_steps
    assert narrow.sent == "int4 both ways"
    assert narrow.busy <= 1.0
