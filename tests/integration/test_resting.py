"""Services whose run is over stay, for engines that start again whatever ends; and what ends before it knows its settings."""

from __future__ import annotations

import json
import signal

import pytest

from support.islands import DEADLINE_S, IslandProcess


@pytest.mark.second_tier
@pytest.mark.connected
def test_after_the_run_services_rest_also_those_that_are_started_again(island: IslandProcess) -> None:
    """They are healthy, as after a reboot of their host, and leave with 0 when they are told to."""
    health = {name: island.folder / f"{name}.health" for name in ("shard", "learner")}
    island.environment |= {"ATOLL_STAY": "true", "ATOLL_PROTOCOL__TOKENS_TARGET": "4000"}
    services = {"shard": ("synchronizer",), "learner": ("learner", "--id", "a")}
    for _ in range(2):
        for name, words in services.items():
            health[name].unlink(missing_ok=True)
            island.start(name, *words, ATOLL_HEALTH_FILE=str(health[name]))
        for name in services:
            island.wait_for(name, "process.resting")
            island.answer("health", "--file", str(health[name]))
            assert island.process(name).poll() is None
        for name in services:
            island.process(name).send_signal(signal.SIGTERM)
            assert island.process(name).wait(DEADLINE_S) == 0


def test_a_wrong_setting_ends_a_container_in_json(island: IslandProcess) -> None:
    process = island.start("learner", "learner", "--set", "nonsense=1")
    assert process.wait(DEADLINE_S) == 2
    (line,) = island.log("learner").read_text(encoding="utf-8").splitlines()
    told = json.loads(line)
    assert (told["event"], told["what"], told["exit_code"]) == ("process.failed", "unknown setting nonsense", 2)
