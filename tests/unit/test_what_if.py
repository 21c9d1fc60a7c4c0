"""A told recording, fitted, simulated as it was, and as it would be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.base.errors import SettingsError
from atoll.protocol.settings import ProtocolSettings
from atoll.run.history import History
from atoll.story.goodput import RunGoodput, goodput_of
from atoll_simulator.what_if import replay
from atoll_simulator.what_if.comparison import FigureChange, change_lines, compare
from atoll_simulator.what_if.recording import (
    MadeCommit,
    RecordedLink,
    Recording,
    TrainingTotals,
    fit_recording,
    outcome,
)
from atoll_simulator.what_if.replay import AS_IT_WAS, Change, parse_change, simulate_change
from support.command_line import invoked

SETTINGS = ProtocolSettings(fragments=2, shards=1, interval_steps=8, quorum=3, silence_s=2.0)
SLOW_STEPS = msgspec.structs.replace(SETTINGS, quorum=2)
STEPS_S = {"a": 0.1, "b": 0.1, "slow": 0.4}
ELEMENTS, BYTES = 10_000, 20_000
BEGAN_S, LASTS_S = 1000.0, 60.0
ROUND_S = 1.2
"""Eight steps of the many, and a step of the slow one that a call just misses."""


def events(lasts_s: float = LASTS_S, steps_s: Mapping[str, float] = STEPS_S) -> list[dict[str, Any]]:
    """Return the event log of a run of two learners and a slow one, whose rounds wait for all three."""
    told = [event("serving", "shard-0", 0.0, epoch=1, versions={"0": 0, "1": 0})]
    round_s = ROUND_S if steps_s is STEPS_S else SLOW_STEPS.interval_steps * max(steps_s.values())
    for name, step_s in steps_s.items():
        told.append(event("joined", name, 0.0, incarnation=1))
        for second in range(1, int(lasts_s)):
            step = int(second / step_s)
            told.append(event("sample", name, second, incarnation=1, step=step, tokens=100 * step, step_s=step_s))
        told.append(event("left", name, lasts_s, incarnation=1, tokens=0, steps=round(lasts_s / step_s)))
    for version in range(1, int(lasts_s / round_s)):
        told += [made(fragment, version, round_s * version, steps_s, round_s) for fragment in (0, 1)]
    return [*told, event("ledger", "shard-0", lasts_s + 0.1, ledger={})]


def event(kind: str, who: str, at_s: float, **fields: object) -> dict[str, Any]:
    return {"kind": kind, "who": who, "at_s": BEGAN_S + at_s, "fields": fields}


def made(fragment: int, version: int, at_s: float, steps_s: Mapping[str, float], round_s: float) -> dict[str, Any]:
    """Return a round of all learners, whose uploads took 20 ms of line and two delays of 5 ms."""
    contributors = [
        {
            "learner": name,
            "incarnation": 1,
            "age": 0,
            "tokens": round(100 * round_s / step_s),
            "weight": 1.0,
            "push": version,
            "cause_id": f"call/{fragment}/{version - 1}/1",
            "steps": round(round_s / step_s),
            "arrived_s": 0.04,
            "upload_s": 0.03,
            "read_s": 0.001,
            "bytes": BYTES,
            "step_s": step_s,
        }
        for name, step_s in steps_s.items()
    ]
    fields = {"fragment": fragment, "version": version, "contributors": contributors, "bytes_down": 2 * BYTES}
    times = {"quorum_wait_s": 0.05, "waited_s": 0.05, "commit_s": 0.004, "parameters": ELEMENTS}
    return event("round", "shard-0", at_s, **fields, **times)


def history_of(told: Sequence[dict[str, Any]]) -> History:
    history = History()
    for each in told:
        history.take(f"ev.{each['kind']}.{each['who']}", msgspec.json.encode(each))
    assert history.unreadable == 0
    return history


@pytest.fixture(scope="module")
def recording() -> Recording:
    return fit_recording(history_of(events()), SETTINGS)


def figure(changes: Sequence[FigureChange], name: str) -> FigureChange:
    return next(each for each in changes if each.name == name)


def test_a_fit_finds_what_was_told(recording: Recording) -> None:
    for learner in recording.learners:
        steps = sum(each.steps for each in learner.stretches)
        pace_s = sum(each.steps * each.step_s for each in learner.stretches) / steps
        assert learner.sampled
        assert pace_s == pytest.approx(STEPS_S[learner.name], rel=0.02)
        assert learner.step_tokens == 100
        assert learner.link.latency_s == pytest.approx(0.005)
        assert learner.link.bytes_s == pytest.approx(BYTES / 0.02)
        assert learner.lives[0].ended_s == pytest.approx(LASTS_S, abs=1.5)
    assert recording.over
    assert recording.fragments[1].up_bytes == BYTES


def test_a_learner_that_was_killed_and_came_back_has_two_lives() -> None:
    told = [each for each in events() if each["who"] != "b" or each["at_s"] < BEGAN_S + 20.0]
    for each in told:
        if each["kind"] == "round" and each["at_s"] > BEGAN_S + 20.0:
            each["fields"]["contributors"] = [c for c in each["fields"]["contributors"] if c["learner"] != "b"]
    told.append(event("joined", "b", 40.0, incarnation=2))
    told += [event("sample", "b", 40.0 + s, incarnation=2, step=10 * s, tokens=1000 * s) for s in range(1, 20)]
    learner = next(each for each in fit_recording(history_of(told), SETTINGS).learners if each.name == "b")

    first, second = learner.lives
    assert (first.in_order, second.in_order) == (False, True)
    assert first.ended_s == pytest.approx(20.0, abs=1.0)
    assert second.joined_s == 40.0


def test_too_short_a_recording_is_refused() -> None:
    with pytest.raises(SettingsError, match="too little for a what-if"):
        fit_recording(history_of([each for each in events(2.0) if each["kind"] != "sample"][:8]), SETTINGS)


def test_one_seed_gives_one_outcome(recording: Recording) -> None:
    once = simulate_change(recording, AS_IT_WAS, 3)
    assert once == simulate_change(recording, AS_IT_WAS, 3)
    assert once.trained_tokens_s == pytest.approx(recording.outcome.trained_tokens_s, rel=0.05)
    assert once.commits == pytest.approx(recording.outcome.commits, rel=0.05)


def test_without_waiting_for_a_slow_link_there_are_more_commits(recording: Recording) -> None:
    """A quorum of all waits for the learner whose uploads take long; a smaller one does not."""
    slow = RecordedLink(0.005, BYTES / 2.0)  # two seconds for each contribution, two of them in an interval
    waits = compare(recording, Change({"quorum": 3}, {"slow": slow}), 6, 100.0).changes
    goes_on = compare(recording, Change({"quorum": 2}, {"slow": slow}), 6, 100.0).changes
    assert figure(goes_on, "commits").would_be.mean > 1.5 * figure(waits, "commits").would_be.mean


def test_a_slower_link_lowers_the_commits_and_promises_no_interval(recording: Recording) -> None:
    """No recording bounds what joining and resends cost over another link, so words stand in place of an interval."""
    change = parse_change(recording, (), ["slow=80kbit/s,80ms"])
    found = compare(recording, change, 6, 100.0)
    commits = figure(found.changes, "commits")
    told = "\n".join(change_lines(found, change))

    assert commits.change.mean < -50.0
    assert (commits.half, commits.significant) == (None, False)
    assert "±" not in told
    assert "no interval is given" in told


def test_a_learner_that_is_still_joining_over_a_narrow_link_trains_nothing(recording: Recording) -> None:
    """80 kB of values take 8 s over 80 kbit/s, and as much again a peer's state; at 8 kbit/s the run is over before."""
    slow, never = (
        simulate_change(recording, Change({"quorum": 2}, {"a": RecordedLink(0.005, bytes_s)}), 0)
        for bytes_s in (10_000.0, 1_000.0)
    )
    whole, others = recording.outcome.trained_tokens_s, 100 / STEPS_S["b"] + 100 / STEPS_S["slow"]

    assert slow.trained_tokens_s == pytest.approx(whole - 16.0 / LASTS_S * 1000.0, rel=0.05)
    assert never.trained_tokens_s == pytest.approx(others, rel=0.02)
    assert never.goodput <= 1.0


def test_the_interval_of_a_change_holds_what_the_simulation_is_off(recording: Recording) -> None:
    """By the check; an interval of chance alone would promise what the simulation cannot know."""
    found = compare(recording, parse_change(recording, ["quorum=2"], []), 6, 100.0)

    for miss, each in zip(found.misses, found.changes, strict=True):
        assert each.half is not None
        assert each.half >= abs(miss.simulated - miss.recording)


@pytest.mark.parametrize("step_s", [0.3, 0.9, 1.0, 1.1, 2.3, 4.0])
def test_a_step_may_be_as_long_as_the_time_between_samples(step_s: float) -> None:
    """The truth is known: all step all the time, so pace, tokens and goodput are those of the clock."""
    recording = fit_recording(history_of(events(240.0, {"a": step_s, "b": step_s})), SLOW_STEPS)
    once = simulate_change(recording, AS_IT_WAS, 0)
    truth = 2 * 100 / step_s

    for learner in recording.learners:
        steps = sum(each.steps for each in learner.stretches)
        assert sum(each.steps * each.step_s for each in learner.stretches) / steps == pytest.approx(step_s, rel=0.03)
    assert once.trained_tokens_s == pytest.approx(truth, rel=0.05)
    assert 0.95 <= once.goodput <= 1.0
    assert recording.outcome.goodput <= 1.0


@pytest.mark.parametrize("noted", [0.5, 2.0, 5.0])
def test_goodput_is_never_above_one_and_is_that_of_the_run(noted: float) -> None:
    """Whatever step times learners note: the figure of `atoll why goodput`, the report and the page."""
    told = events()
    for each in told:
        for share in each["fields"].get("contributors", ()):
            share["step_s"] *= noted
    history = history_of(told)
    recording = fit_recording(history, SETTINGS)

    assert recording.outcome.goodput == goodput_of(history).share
    assert recording.outcome.goodput <= 1.0
    assert simulate_change(recording, AS_IT_WAS, 0).goodput <= 1.0


def test_nothing_is_promised_where_the_simulation_misses(recording: Recording) -> None:
    """A recording whose figures the simulator cannot meet gives no change."""
    other = outcome(
        [MadeCommit(0, 0.1, 0.1, ((0, 10),))] * 900, TrainingTotals(1000, RunGoodput(2.0, 1.0)), recording.time_s, 2
    )
    off = Recording(**{name: getattr(recording, name) for name in Recording.__slots__} | {"outcome": other})
    found = compare(off, parse_change(off, ["quorum=2"], []), 2, 0.15)
    assert not found.believed
    assert found.changes == ()


@pytest.mark.parametrize(
    ("settings", "links", "said"),
    [
        (["protocol.outer_lr=1"], [], "no what-if that a recording can answer"),
        (["protocol.quorum"], [], "no what-if that a recording can answer"),
        (["protocol.quorom=2"], [], r"unknown setting protocol\.quorom\n.*\n.*did you mean protocol\.quorum\?"),
        (["quorom=2"], [], r"did you mean protocol\.quorum\?"),
        (["model.quorum=2"], [], "no what-if that a recording can answer"),
        (["protocol.quorum=many"], [], "cannot have such a value"),
        (["protocol.quorum=4"], [], "quorum is out of range"),
        (["protocol.codec_up=tin"], [], "tin"),
        ([], ["nobody=10Mbit/s,80ms"], "no learner of the recording"),
        ([], ["slow=10Mbit/s"], "--link is not understood"),
        ([], ["slow=10Mbit/s,80"], "--link is not understood"),
        ([], ["slow=ten,80ms"], "--link is not understood"),
    ],
)
def test_mistakes_are_named(recording: Recording, settings: list[str], links: list[str], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        parse_change(recording, settings, links)


def save(folder: Path, agreed: ProtocolSettings) -> None:
    fields = msgspec.to_builtins(agreed)
    settings = {f"protocol.{name}": value for name, value in fields.items()}
    run = {"run": "told", "learners": 3, "settings": settings, "broker": "simulated"}
    (folder / "run.json").write_text(json.dumps(run), encoding="utf-8")
    subjects = [f"atoll.told.ev.{each['kind']}.{each['who']}" for each in events()]
    stored = enumerate(zip(subjects, events(), strict=True), 1)
    lines = [json.dumps({"sequence": n, "subject": subject, "event": each}) for n, (subject, each) in stored]
    (folder / "events.jsonl").write_text("\n".join(lines), encoding="utf-8")


def test_code_that_a_run_names_is_a_word_to_a_what_if(
    tmp_path: Path, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It steps nothing: no code of a folder runs, and another optimizer is no change that it can answer."""
    module = f"named_{run.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text("open('ran', 'w').close()\nouter = None\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    save(tmp_path, msgspec.structs.replace(SETTINGS, outer=f"{module}:outer", correction="none"))
    words = ["what-if", str(tmp_path), "--seeds", "2", "--miss-max", "10"]

    said = invoked([*words, "--set", "protocol.quorum=1"])
    other = invoked([*words, "--set", f"protocol.outer={module}:outer"])

    assert said.exit_code == 0, said.output
    assert "no what-if that a recording can answer" in str(other.exception)
    assert not (tmp_path / "ran").exists()


def test_the_verb_reads_a_folder(tmp_path: Path) -> None:
    save(tmp_path, SETTINGS)
    words = ["what-if", str(tmp_path), "--set", "protocol.quorum=1", "--seeds", "2", "--miss-max", "10"]

    said = invoked(words)
    assert said.exit_code == 0, said.output
    assert "what if protocol.quorum=1" in said.output
    told = json.loads(invoked([*words, "--json"]).stdout)
    assert told["believed"]
    assert {each["name"] for each in told["what_if"]} >= {"commits", "goodput"}
    assert invoked([*words[:-1], "0"]).exit_code == 1
    assert invoked(["what-if", "--out", *words[1:]]).output == said.output
    twice = invoked([*words, "--out", str(tmp_path)])
    assert "one run at a time" in str(twice.exception)


def test_a_recording_without_an_end_is_told_of(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "REST_S", 0.0)

    with pytest.raises(SettingsError, match="cannot be simulated to its end"):
        compare(recording, None, 2, 0.15)
