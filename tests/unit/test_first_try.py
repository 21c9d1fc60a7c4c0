"""The race of a first model: who runs when, and how figures come of seeds that not all systems have."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.lib.kept_parts import KeptParts
from benchmarks.training.first_try import Found, Try, figures_of

SHORT, LONG = 614_400, 2_457_600


def tries(**of: tuple[float, ...]) -> Found:
    """Return tries with seeds from 0 on: each number is the wall clock and a hundredth of it the loss."""
    names = {"atoll": "Atoll", "dp": "data-parallel, Muon", "jax": "JAX apart, Muon", "torch": "torch apart, Muon"}
    return {
        names[name]: {seed: Try(wall_s, 2.0 * wall_s, wall_s / 100.0) for seed, wall_s in enumerate(values)}
        for name, values in of.items()
    }


def test_a_ratio_is_of_the_seeds_that_both_have() -> None:
    """One that ran once is compared with the first seed alone; frameworks apart adjust the clock."""
    found = tries(atoll=(120.0, 180.0), dp=(100.0, 100.0), jax=(110.0,), torch=(100.0,))
    shown = {figure.name.removeprefix("2.5M tokens: "): figure for figure in figures_of(LONG, 2, found)}

    assert shown["Atoll, wall clock"].value == pytest.approx(150.0)
    assert shown["Atoll, wall clock"].how == "mean of 2 seeds, 120.0 to 180.0 s"
    assert shown["JAX apart, Muon, wall clock"].how == "one seed"
    clock = shown["Atoll's wall clock over that of data-parallel, Muon, adjusted by those apart"]
    assert clock.value == pytest.approx(1.5 / 1.1)
    assert clock.holds is False
    loss = shown["Atoll's loss over that of data-parallel, Muon"]
    assert loss.value == pytest.approx(1.5)
    assert (loss.holds, loss.how) == (False, "by seed 1.200, 1.800")

    once = {name: {0: of[0]} for name, of in found.items()}
    shown = {figure.name: figure for figure in figures_of(SHORT, 4, once)}
    loss = shown["0.6M tokens, 4 learners: Atoll's loss over that of data-parallel, Muon"]
    assert loss.value == pytest.approx(1.2)
    assert (loss.goal, loss.how) == ("", "one seed")
    assert shown[clock.name.replace("2.5M tokens", "0.6M tokens, 4 learners")].holds is True


def test_what_was_measured_with_these_sources_is_not_measured_again(tmp_path: Path) -> None:
    """Nor does an error keep anything; other files beside or `again` begin anew."""
    beside = tmp_path / "requirements.txt"
    beside.write_text("torch==1", encoding="utf-8")
    asked: list[int] = []

    def part(*, again: bool = False) -> dict[str, float]:
        def measure() -> dict[str, float]:
            asked.append(len(asked))
            if not asked[-1]:
                raise ValueError("the first time it fails")
            return {"wall_s": float(asked[-1])}

        kept = KeptParts(tmp_path / "kept", ["benchmarks.lib.kept_parts"], [beside], again=again)
        return dict(kept.part("a-part", measure))

    with pytest.raises(ValueError, match="fails"):
        part()
    assert part() == part() == {"wall_s": 1.0}
    assert part(again=True) == {"wall_s": 2.0}
    beside.write_text("torch==2", encoding="utf-8")
    assert part() == {"wall_s": 3.0}
    assert part() == {"wall_s": 3.0}
