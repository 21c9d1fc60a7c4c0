"""What `join` is given in a wrong type is refused by name, before anything is opened; an island that has left says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atoll
from atoll.base.background_tasks import LoopThread
from atoll.base.errors import BrokerUnavailable, SettingsError
from atoll.bus.interface import Bus
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.checkpoints import fresh_recovery
from atoll.keys.roll import KeyFolder
from atoll.protocol.settings import ProtocolSettings

PARAMS = {"w": np.zeros((4, 2), np.float32)}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"broker": None}, "broker"),
        ({"run": 7}, "run"),
        ({"run": Path("r")}, "run"),
        ({"learner": 3}, "learner"),
        ({"protocol": {"fragments": 2}}, "protocol"),
        ({"options": {"donated": True}}, "options"),
        ({"options": atoll.JoinOptions(donated="yes")}, "options.donated"),  # type: ignore[arg-type]
        ({"options": atoll.JoinOptions(seed=True)}, "options.seed"),
        ({"options": atoll.JoinOptions(merge="w")}, "options.merge"),  # type: ignore[arg-type]
        ({"options": atoll.JoinOptions(merge={1: "mean"})}, "options.merge"),  # type: ignore[dict-item]
        ({"options": atoll.JoinOptions(patience_s="3")}, "options.patience_s"),  # type: ignore[arg-type]
        ({"options": atoll.JoinOptions(health_file="x")}, "options.health_file"),  # type: ignore[arg-type]
        ({"options": atoll.JoinOptions(bulk="nats://b")}, "options.bulk"),
        ({"options": atoll.JoinOptions(bulk=[4222])}, "options.bulk"),  # type: ignore[list-item]
        ({"options": atoll.JoinOptions(replicas="3")}, "options.replicas"),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_a_wrong_type_is_refused_by_its_name(changes: dict[str, Any], named: str) -> None:
    given = {"broker": "nats://127.0.0.1:1", "run": "r", "learner": "a", "params": PARAMS} | changes
    broker = given.pop("broker")
    with pytest.raises(SettingsError) as refused:
        atoll.join(broker, **given)

    assert refused.value.what in {f"{named} has a wrong type", f"{named} is wrong"}
    assert refused.value.parts().keys() == {"what", "got", "allowed", "todo"}


def test_a_loop_takes_its_identity_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As every verb does; what the caller names goes before it, and an empty variable names none."""
    keys = KeyFolder(tmp_path / "keys")
    keys.create(["127.0.0.1"], 0.0)
    monkeypatch.setenv("ATOLL_BROKER__IDENTITY", str(keys.add("other", "learner", "r", 0.0)))
    with pytest.raises(SettingsError, match="the identity of another: learner 'other'"):
        atoll.join("nats://127.0.0.1:1", run="r", learner="a", params=PARAMS)
    options = atoll.JoinOptions(identity=keys.add("third", "learner", "r", 0.0))
    with pytest.raises(SettingsError, match="the identity of another: learner 'third'"):
        atoll.join("nats://127.0.0.1:1", run="r", learner="a", params=PARAMS, options=options)
    with pytest.raises(SettingsError, match="of another run: learner 'other'"):
        atoll.read_model("nats://127.0.0.1:1", run="elsewhere")
    monkeypatch.setenv("ATOLL_BROKER__IDENTITY", "")
    with pytest.raises(BrokerUnavailable):
        atoll.read_model("nats://127.0.0.1:1", run="r", patience_s=0.1)


def test_further_brokers_may_be_any_sequence() -> None:
    """A list, too, as every example writes one; what is refused here is only the address, which nobody answers."""
    options = atoll.JoinOptions(bulk=["nats://127.0.0.1:2"], patience_s=0.1)
    with pytest.raises(BrokerUnavailable):
        atoll.join("nats://127.0.0.1:1", run="r", learner="a", params=PARAMS, options=options)


@pytest.mark.parametrize(
    ("changes", "named", "allowed"),
    [
        ({"fragments": "4"}, "fragments", "int"),
        ({"interval_steps": 2.5}, "interval_steps", "int"),
        ({"merge": "median"}, "merge", "mean, rda"),
        ({"error_feedback": 1}, "error_feedback", "bool"),
        ({"outer": None}, "outer", "str"),
    ],
)
def test_a_setting_of_a_run_of_a_wrong_type_is_refused(changes: dict[str, Any], named: str, allowed: str) -> None:
    with pytest.raises(SettingsError) as refused:
        atoll.join("nats://127.0.0.1:1", run="r", learner="a", params=PARAMS, protocol=ProtocolSettings(**changes))

    assert refused.value.what == f"{named} cannot have such a value"
    assert refused.value.allowed == allowed


@pytest.mark.parametrize("changes", [{"run": 3}, {"broker": 3}])
def test_a_reader_is_told_likewise(changes: dict[str, Any]) -> None:
    """`read_model` takes the same two."""
    given = {"broker": "nats://127.0.0.1:1", "run": "r"} | changes

    with pytest.raises(SettingsError, match="has a wrong type"):
        atoll.read_model(given.pop("broker"), **given)


def test_an_island_that_has_left_takes_no_step_and_still_shows_its_model(home: LoopThread) -> None:
    """It once handed the step to a loop that had ended."""
    broker = MemoryBroker()

    async def opened() -> Bus:
        return MemoryBus("r", broker)

    options = atoll.JoinOptions(home=home)
    island = atoll.join(opened, run="r", learner="a", params=PARAMS, options=options)
    params = island.step(island.params, tokens=1)
    island.close()
    island.close()
    for use in (
        lambda: island.step(params, tokens=1),
        lambda: island.recovered_state({"m": np.zeros(2)}),
        lambda: island.note_recovery(fresh_recovery(1)),
    ):
        with pytest.raises(SettingsError, match="has left its run") as refused:
            use()
        assert "with" in str(refused.value.todo)
    assert island.params["w"].shape == island.merged().params["w"].shape
