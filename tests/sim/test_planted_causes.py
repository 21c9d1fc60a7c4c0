"""A cause is planted in a run, and `atoll why` names it, from the event log that the run has left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cli.main import build
from atoll.run.history import History
from atoll.story.findings import RunFinding, findings
from support.planted_runs import BY_KIND, TOKENS, WIDE, planted
from support.simulated_runs import Simulate

pytestmark = [pytest.mark.second_tier]


def history_of(out: Path) -> History:
    history = History()
    history.read_file(out / "events.jsonl")
    assert history.unreadable == 0
    return history


def found(out: Path) -> set[tuple[str, str]]:
    """Return what stands out in a run: kinds, and of whom."""
    return {(each.cause, each.culprit) for each in findings(history_of(out))}


def asked(out: Path, *words: str) -> str:
    told = CliRunner().invoke(build(), [*words, "--out", str(out)])
    assert told.exit_code == 0, told.output
    return told.output


def test_nothing_stands_out_in_a_run_that_goes_as_it_should(simulate: Simulate) -> None:
    out = simulate(protocol__tokens_target=TOKENS).out

    assert findings(history_of(out)) == []
    assert "goodput by the event log: 9" in asked(out, "why", "goodput")
    assert "no learner is behind" in asked(out, "why", "behind")
    assert "no contribution was refused" in asked(out, "why", "refused")
    assert "0 of " in asked(out, "why", "grace")
    assert " is long (from the call of a round" in asked(out, "why")
    assert "is its last: shard-" in asked(out, "why", "fragment", "0")
    assert asked(out, "status").startswith("sim: over")
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    fates = json.loads(asked(out, "fates", "--json"))
    assert fates["trained"] == report["tokens_trained"]
    assert {fate: count for fate, count in fates["fates"].items() if count} == {
        fate: count for fate, count in report["token_fragments_by_fate"].items() if count
    }
    contribution = history_of(out).contributions("learner-2")[-1]
    push = f"learner-2/1/{contribution[0].round.fragment}/{contribution[1].push}"
    told = asked(out, "why", "contribution", push)
    assert "was carried by its manifest (" in told
    assert f"became part of version {contribution[0].round.version}" in told
    assert "the event log does not tell" not in told


def test_a_slow_link_is_named(simulate: Simulate) -> None:
    """The third learner's line up is thin: its uploads take longer than its steps, so it is late."""
    out = planted(simulate, BY_KIND["slow link"])

    (link,) = findings(history_of(out))
    assert (link.cause, link.culprit) == ("slow link", "learner-3")
    assert {"stale refusals"} <= {each.cause for each in link.consequences} <= {"stale refusals", "nothing merged"}
    assert "slow link, learner-3: an upload of" in asked(out, "why", "behind", "learner-3")


def test_a_learner_of_which_nothing_arrives_is_named(simulate: Simulate) -> None:
    dead = """[sim.links.learner-3]\nlatency_s = 0.001\nup_mbit_s = 0.04\n"""
    out = simulate(config=dead, protocol__tokens_target=TOKENS, **WIDE).out

    assert found(out) == {("nothing merged", "learner-3")}
    assert "no contribution of it was merged" in asked(out, "why", "learner", "learner-3")


def test_a_slow_learner_is_named(simulate: Simulate) -> None:
    out = planted(simulate, BY_KIND["slow learner"])

    assert found(out) == {("slow learner", "learner-2")}
    assert "its inner step takes 0.2 s, 4 times the others' 0.05 s" in asked(out, "why")
    goodput = asked(out, "why", "goodput")
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert f"goodput by the event log: {report['goodput']:.1%}" in goodput
    assert "learner-2 stepped in 0.2 s, while the median of the others is 0.05 s" in goodput


def test_a_quarantined_learner_is_named_with_its_offences(simulate: Simulate) -> None:
    out = planted(simulate, BY_KIND["quarantine"])

    assert ("quarantine", "learner-4") in found(out)
    told = asked(out, "why", "refused", "learner-4")
    assert "'outlier' (an offence)" in told
    assert "was allowed" in told
    assert "is in quarantine at shard-" in told
    assert "put incarnation 1 into quarantine" in asked(out, "why", "learner", "learner-4")
    (isolated,) = [each for each in findings(history_of(out)) if each.cause == "quarantine"]
    assert "(fragments " in isolated.text
    assert {each.cause for each in isolated.consequences} <= {"refusals", "nothing merged"}


def test_a_dead_shard_is_named_when_another_process_takes_it_over(simulate: Simulate) -> None:
    """It dies for good; its standby serves after the lease has run out, and says so in the event log."""
    out = planted(simulate, BY_KIND["shard without owner"])

    history = history_of(out)
    (dead,) = findings(history)
    assert (dead.cause, dead.culprit) == ("shard without owner", "shard-0")
    assert "took it over" in dead.text
    assert any(line.startswith("commit/") for line in dead.evidence)
    assert dead.until_s is not None
    # Its last sign was a moment before it was killed, in second 3 of the simulation.
    assert history.clock.began_s + 2.0 < dead.from_s < history.clock.began_s + 3.0 < dead.until_s
    first = next(line.round for line in history.rounds if line.shard == "shard-0" and line.at_s > dead.until_s)
    told = asked(out, "why", "round", f"{first.fragment}/{first.version}")
    assert "shard-0 had no owner from" in told
    assert "because no live learner was left to ask" not in told
    assert "s without an owner: fragment" in asked(out, "why")
    assert ": a takeover" in asked(out, "why", "shard", "0")
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["faults"] == 1


def test_a_full_disk_is_named(simulate: Simulate) -> None:
    """The broker has no room for tensors from second 3 to 7: commits and uploads wait, and the event log says for what."""
    out = planted(simulate, BY_KIND["disk was full"])

    (full,) = findings(history_of(out))
    assert (full.cause, full.culprit) == ("disk was full", "broker")
    assert "because it had no room" in asked(out, "why")


@pytest.mark.parametrize(("lie", "how"), [("noise", "nowhere, like noise"), ("sign flip", "against the others")])
def test_a_bad_island_is_named_by_its_direction_and_is_not_in_quarantine(
    simulate: Simulate, lie: str, how: str
) -> None:
    """What it sends is as long as an honest pseudo-gradient, so no shard refuses it: only its direction gives it away."""
    out = simulate(learners=4, protocol__tokens_target=TOKENS, **{"sim.liars.learner-4": lie}).out
    history = history_of(out)
    bad: list[RunFinding] = [each for each in findings(history) if each.cause == "bad direction"]

    assert [each.culprit for each in bad] == ["learner-4"]
    assert how in bad[0].text
    assert not history.quarantined
    assert "it points elsewhere than the others" in asked(out, "why", "learner", "learner-4")
