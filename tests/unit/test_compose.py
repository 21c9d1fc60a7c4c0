"""`docker-compose.yml` tells its services only what they understand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from atoll.settings import load

COMPOSE: dict[str, Any] = yaml.safe_load((Path(__file__).parents[2] / "docker-compose.yml").read_text(encoding="utf-8"))
OURS = [name for name, service in COMPOSE["services"].items() if "ATOLL_RUN" in service.get("environment", {})]


def environment(service: str) -> dict[str, str]:
    """Return what a service is told, as text."""
    return {name: str(value) for name, value in COMPOSE["services"][service]["environment"].items()}


@pytest.mark.parametrize("service", OURS)
def test_every_variable_is_a_setting(service: str) -> None:
    """An unknown or impossible setting would keep the container from starting."""
    loaded = load(None, (), environment(service))

    assert set(loaded.origins) >= {"run", "broker.url"}


def test_synchronizers_share_all_shards_and_learners_have_ids_of_their_own() -> None:
    """Two candidates for every shard, three learners with different ids."""
    settings = {name: load(None, (), environment(name)).settings for name in OURS}
    wanted = [s.synchronizer.shard for name, s in settings.items() if name.startswith("synchronizer")]
    learners = [s.learner.id for name, s in settings.items() if name.startswith("learner")]

    assert wanted == [None, None]
    assert len(set(learners)) == len(learners) == 3


def test_learners_share_no_network() -> None:
    """Islands meet on the broker only."""
    networks = [set(COMPOSE["services"][f"learner-{name}"]["networks"]) for name in "abc"]

    assert all(not a & b for a in networks for b in networks if a is not b)
    assert set().union(*networks) <= set(COMPOSE["services"]["nats"]["networks"])
