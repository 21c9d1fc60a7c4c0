"""`atoll what-if` beside runs in virtual time, whose truth is known: pace, goodput, and another link."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.cli.reading import recording_of
from atoll.story.goodput import goodput_of
from atoll_simulator.what_if.comparison import FigureChange, compare
from atoll_simulator.what_if.recording import RecordedLink, Recording, fit_recording
from atoll_simulator.what_if.replay import Change
from support.simulated_runs import Simulate

pytestmark = pytest.mark.second_tier
SEEDS = 4
NARROW = RecordedLink(0.04, 5_000.0)


def recorded(out: Path) -> tuple[Recording, float]:
    history, settings = recording_of("what-if", out, None, None)
    share = goodput_of(history).share
    assert share is not None
    return fit_recording(history, settings), share


@pytest.fixture(scope="module")
def plain(simulate: Simulate, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose steps take 2.3 s, longer than the time between two samples."""
    out = tmp_path_factory.mktemp("plain") / "run"
    simulate(out=out, sim__step_s=2.3, protocol__tokens_target=60_000)
    return out


def test_steps_longer_than_the_time_between_samples_are_read_as_they_were(plain: Path) -> None:
    """And the goodput of the recording is the run's, that of its simulation is within two points of it."""
    recording, goodput = recorded(plain)
    found = compare(recording, None, SEEDS, 0.05)

    assert found.believed, found.misses
    for learner in recording.learners:
        steps = sum(each.steps for each in learner.stretches)
        assert sum(each.steps * each.step_s for each in learner.stretches) / steps == pytest.approx(2.3, rel=0.02)
    check = {miss.name: miss for miss in found.misses}
    assert check["goodput"].recording == goodput <= 1.0
    assert goodput - 0.03 <= check["goodput"].simulated <= 1.0


def test_over_a_narrow_link_a_run_loses_what_joining_takes(simulate: Simulate, plain: Path, tmp_path: Path) -> None:
    """The same run is trained over that link; the estimate is within a tenth of it, and claims no interval."""
    mbit_s = 8.0 * NARROW.bytes_s / 1e6
    config = f"[sim.links.learner-3]\nlatency_s = {NARROW.latency_s}\nup_mbit_s = {mbit_s}\ndown_mbit_s = {mbit_s}\n"
    simulate(out=tmp_path / "run", config=config, sim__step_s=2.3, protocol__tokens_target=60_000)
    truth, recording = recorded(tmp_path / "run")[0], recorded(plain)[0]
    changes: dict[str, FigureChange] = {
        each.name: each for each in compare(recording, Change({}, {"learner-3": NARROW}), SEEDS, 0.1).changes
    }

    assert truth.outcome.trained_tokens_s < 0.97 * recording.outcome.trained_tokens_s
    assert changes["trained_tokens_s"].would_be.mean == pytest.approx(truth.outcome.trained_tokens_s, rel=0.1)
    assert changes["trained_tokens_s"].half is None
