"""The monitor's metrics: what each says, what bounds them, and that Prometheus' own checker finds nothing."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from atoll.run.history import OTHER
from atoll.wire.messages import LearnerState
from atoll_monitor.metrics import LEARNERS_MAX, REASONS_MAX, most_frequent, shown_learners
from atoll_monitor.monitored_run import ROUNDS_KEPT, MonitoredRun
from support.events import event
from support.grafana import queries
from support.watched_runs import beat, full, samples, take_round, text_of_metrics, watched_run


def value(watched: MonitoredRun, name: str, **labels: str) -> float | None:
    return samples(watched).get((name, frozenset({"run": "r", **labels}.items())))


def test_a_round_is_counted_in_each_of_its_phases() -> None:
    """Quorum, grace, merge and commit have a histogram; contributions on older versions are counted as late."""
    watched, _ = watched_run()
    take_round(watched, 0, 1, 50.0)
    take_round(watched, 1, 1, 60.0, end="of a kind that is new")

    assert value(watched, "atoll_commits_total") == 2
    assert value(watched, "atoll_last_commit_timestamp_seconds") == 60.0
    assert value(watched, "atoll_round_phase_seconds_sum", phase="quorum_wait") == pytest.approx(0.4)
    assert value(watched, "atoll_round_phase_seconds_sum", phase="grace") == pytest.approx(1.0)
    assert value(watched, "atoll_round_phase_seconds_bucket", phase="commit", le="1.0") == 0
    assert value(watched, "atoll_round_phase_seconds_bucket", phase="commit", le="2.5") == 2
    assert value(watched, "atoll_round_ends_total", reason="grace over") == 1
    assert value(watched, "atoll_round_ends_total", reason=OTHER) == 1
    assert value(watched, "atoll_contributions_merged_total") == 4
    assert value(watched, "atoll_contributions_late_total") == 2
    assert value(watched, "atoll_fragment_commits_total", fragment="1") == 1


def test_a_silent_learner_is_down_and_one_that_left_is_gone() -> None:
    watched, clock = watched_run()
    for learner in ("a", "b", "c"):
        watched.view.on_beat(beat(learner), clock.now_s)
    watched.view.on_beat(beat("c", state="left", step=11), clock.now_s)
    clock.now_s += watched.protocol.silence_s + 1.0
    watched.view.on_beat(beat("a", step=12), clock.now_s)

    assert value(watched, "atoll_learner_up", learner="a", region="") == 1
    assert value(watched, "atoll_learner_up", learner="b", region="") == 0
    assert value(watched, "atoll_learner_up", learner="c", region="") is None
    assert value(watched, "atoll_learners_live") == 1
    assert value(watched, "atoll_learner_loss", learner="a", region="") == 2.5
    assert value(watched, "atoll_learner_loss", learner="b", region="") is None
    assert value(watched, "atoll_learner_steps_total", learner="c", region="") == 11
    assert value(watched, "atoll_learner_wire_bytes_total", learner="b", region="", direction="down") == 30


def test_an_incarnation_is_in_quarantine_and_the_next_one_is_not() -> None:
    watched, clock = watched_run()
    watched.view.on_beat(beat("a"), clock.now_s)
    isolated = {"learner": "a", "incarnation": 1, "offences": 3, "reason": "not_finite"}
    watched.view.on_event(event("quarantined", "shard-0", 1.0, **isolated))
    before = value(watched, "atoll_learner_quarantined", learner="a", region="")
    watched.view.on_beat(beat("a", 2), clock.now_s)

    assert before == 1
    assert value(watched, "atoll_learner_quarantined", learner="a", region="") is None
    assert value(watched, "atoll_quarantines_total") == 1


def test_labels_are_bounded_and_sums_stay_right() -> None:
    """More learners and reasons than the bounds: the live ones have series, and nothing is missing in the sums."""
    watched, clock = watched_run()
    for number in range(LEARNERS_MAX + 40):
        state: LearnerState = "left" if number < 30 else "training"
        watched.view.on_beat(beat(f"l{number:04}", state=state), clock.now_s)
    told = samples(watched)
    counts = {f"reason-{number:03}": number + 1 for number in range(REASONS_MAX + 10)}

    assert len([name for name, _ in told if name == "atoll_learner_steps_total"]) == LEARNERS_MAX
    assert all(one.heard_s is not None for one in shown_learners(watched))
    assert value(watched, "atoll_monitor_left_out") == 40
    assert watched.view.trained_tokens == (LEARNERS_MAX + 40) * 1000
    assert len(most_frequent(counts)) == REASONS_MAX + 1
    assert sum(most_frequent(counts).values()) == sum(counts.values())


def test_rounds_are_forgotten_and_their_sums_are_not() -> None:
    watched, _ = watched_run()
    for version in range(1, ROUNDS_KEPT + 101):
        take_round(watched, 0, version, float(version))

    assert len(watched.view.rounds) == ROUNDS_KEPT
    assert value(watched, "atoll_commits_total") == ROUNDS_KEPT + 100
    assert value(watched, "atoll_round_phase_seconds_count", phase="merge") == ROUNDS_KEPT + 100


def test_another_founding_begins_anew_and_its_rounds_are_measured() -> None:
    watched, _ = watched_run()
    heard: list[str] = []
    watched.view.observers.append(lambda one, _fields: heard.append(one.kind))
    take_round(watched, 0, 1, 1.0)
    watched.forget()
    take_round(watched, 0, 1, 2.0)

    assert heard == ["round", "round"]
    assert value(watched, "atoll_commits_total") == 1
    assert value(watched, "atoll_contributions_merged_total") == 2


def test_every_metric_has_the_run_and_no_label_beyond_the_bounded_ones() -> None:
    """A label with rounds or messages in it would grow without an end."""
    bounded = {"learner", "region", "fragment", "reason", "phase", "direction", "stream", "broker", "path", "address"}
    agreed = {"founder", "fragments", "shards", "interval_steps", "codec_up", "wire"}  # of atoll_run_info, which is one
    told = samples(full())

    assert {name for name, labels in told if "run" not in dict(labels)} == set()
    assert {key for _, labels in told for key, _ in labels} == bounded | {"run", "le"} | agreed


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (apt: prometheus)")
def test_promtool_finds_nothing_to_complain_of() -> None:
    done = subprocess.run(
        ["promtool", "check", "metrics"],  # noqa: S607  (the one on the path)
        input=text_of_metrics(full()),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_queries_ask_for_metrics_that_the_monitor_has_of_the_chosen_run() -> None:
    """Every metric in a query exists, and has the run's label, so that two runs are never added up."""
    known = {name for name, _ in samples(full())}
    asked = [(title, name, rest) for title, query in queries("r", "1m") for name, rest in metrics_of(query)]

    assert asked
    assert [(title, name) for title, name, _ in asked if name not in known] == []
    assert [(title, name) for title, name, rest in asked if not rest.startswith('{run="r"}')] == []


def metrics_of(query: str) -> list[tuple[str, str]]:
    return [(found[0], query[found.end() :]) for found in re.finditer(r"\batoll_\w+", query)]
