"""A scene of a run that is watched: nodes of its broker that come and go, alerts that hold, causes of its newest rounds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from atoll.bus.server import EmbeddedBroker
from atoll.report.page_data import NodeSeen
from atoll_monitor import polling
from atoll_monitor.dashboard import JUDGED_S, RunScene
from atoll_monitor.monitored_run import ROUNDS_KEPT
from support.deployments import free_port
from support.events import event
from support.watched_runs import full, take_round, watched_run

DEADLINE_S = 60.0


def marks(scene: RunScene) -> list[tuple[str, str]]:
    return [(mark["group"], mark["who"]) for mark in scene.state()["marks"] if mark["who"].startswith("broker")]


def test_a_node_that_no_longer_answers_is_marked_until_it_does() -> None:
    """One that never answered is away and was not lost."""
    watched, _ = watched_run()
    scene = RunScene(watched, "r")
    watched.nodes = {"h:1": NodeSeen("n1", answers=True), "h:2": NodeSeen("", answers=False)}
    scene.tick()
    before = marks(scene)
    watched.nodes["h:1"] = NodeSeen("n1", answers=False)
    scene.tick()
    scene.tick()
    lost, state = marks(scene), scene.state()
    watched.nodes["h:1"] = NodeSeen("n1", answers=True)
    scene.tick()

    assert (before, lost) == ([], [("fault", "broker node n1")])
    assert [(node["name"], node["state"]) for node in state["nodes"]] == [("n1", "away"), ("", "away")]
    assert marks(scene) == [("fault", "broker node n1"), ("recovery", "broker node n1")]


@pytest.mark.connected
async def test_every_address_is_asked_by_itself(broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server says its name; an address where nobody listens is away. Of a single address nothing is asked."""
    monkeypatch.setattr(polling, "NODES_S", 0.01)
    watched, _ = watched_run()
    nobody = f"nats://127.0.0.1:{free_port()}"
    await asyncio.wait_for(polling.poll_nodes(watched, [broker.url]), DEADLINE_S)
    alone = dict(watched.nodes)
    asking = asyncio.create_task(polling.poll_nodes(watched, [f"{broker.url},{nobody}", nobody]))
    async with asyncio.timeout(DEADLINE_S):
        while len(watched.nodes) < 2:  # noqa: ASYNC110  (the poll tells nobody)
            await asyncio.sleep(0.01)
    asking.cancel()
    seen = {address: (bool(node.name), node.answers) for address, node in watched.nodes.items()}

    assert alone == {}
    assert seen == {broker.url.rpartition("//")[2]: (True, True), nobody.rpartition("//")[2]: (False, False)}


def test_alerts_that_hold_are_on_the_page() -> None:
    """They are judged every few seconds, by the monitor's own metrics; what has only just begun is pending."""
    watched = full()
    scene = RunScene(watched, "r")
    scene.tick()
    first: dict[str, dict[str, Any]] = {alert["name"]: alert for alert in scene.state()["alerts"]}
    watched.clock.now_s += JUDGED_S  # type: ignore[attr-defined]
    watched.brokers = {}
    scene.tick()
    later = {alert["name"] for alert in scene.state()["alerts"]}

    assert first["AtollLearnerQuarantined"]["summary"] == "Learner a of run r is in quarantine"
    assert first["AtollLearnerQuarantined"]["labels"] == {"learner": "a", "region": "", "run": "r"}
    assert not first["AtollLearnerQuarantined"]["pending"]
    assert first["AtollBrokerDown"]["pending"]
    assert "AtollLearnerQuarantined" in later
    assert "AtollBrokerDown" not in later


def test_causes_of_a_run_that_goes_on_are_those_of_its_newest_rounds() -> None:
    """However long it lasts, a monitor keeps so many rounds; a command names this very run, and no secret."""
    watched, _ = watched_run()
    scene = RunScene(watched, "r", reached_by="--run r --broker nats://h:1", broker="nats://me:secret@h:1")
    for version in range(1, ROUNDS_KEPT + 20):
        take_round(watched, 0, version, 100.0 + version, hindered={"full": 1.5})
    causes = scene.causes()
    [found] = [each for each in causes["findings"] if each["cause"] == "disk was full"]

    assert causes["rounds"] == ROUNDS_KEPT
    assert found["command"] == "atoll doctor --broker nats://***@h:1"
    assert all(
        part["command"].endswith("--run r --broker nats://h:1") for part in causes["slow"] if part["what"] != "broker"
    )


def test_a_run_that_is_founded_anew_has_no_causes_of_the_former_one() -> None:
    watched, _ = watched_run()
    scene = RunScene(watched, "r")
    take_round(watched, 0, 1, 50.0)
    before = scene.causes()["rounds"]
    watched.forget()
    watched.view.on_event(event("joined", "a", 60.0, incarnation=1))

    assert (before, scene.causes()["rounds"]) == (1, 0)
