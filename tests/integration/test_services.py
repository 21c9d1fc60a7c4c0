"""Services started one by one against somebody's broker, and what each says to a mistake: real processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from support.islands import DEADLINE_S, IslandProcess

pytestmark = pytest.mark.second_tier


def test_a_second_learner_of_one_id_is_refused_and_the_first_trains_on(island: IslandProcess) -> None:
    """Exit code 2, the id, the host and process that hold it; the first leaves in good order later."""
    island.start("shard", "synchronizer", "--shard", "0")
    first = island.start("first", "learner", "--id", "a", ATOLL_HEALTH_FILE=str(island.folder / "alive"))
    island.wait_for("first", "learner.first_step")
    second = island.start("second", "learner", "--id", "a")
    said = island.refused(second, "second", 2)

    assert "'a'" in said
    assert str(first.pid) in said
    assert first.poll() is None
    assert (island.folder / "alive").exists()
    first.terminate()
    assert first.wait(DEADLINE_S) == 0, island.log("first").read_text(encoding="utf-8")[-2000:]
    island.wait_for("first", "learner.left")


def test_another_model_and_other_data_are_refused_by_name(island: IslandProcess, data: Path, tmp_path: Path) -> None:
    """A learner that would corrupt the run does not join it: exit code 2 and the first difference."""
    island.start("shard", "synchronizer", "--shard", "0")
    island.start("first", "learner", "--id", "a")
    island.wait_for("first", "learner.joined")
    wider = island.start("wider", "learner", "--id", "b", ATOLL_MODEL__WIDTH="48")
    other = tmp_path / "other"
    texts = [str(path) for path in sorted(Path(os.__file__).parent.glob("*.py"))[10:60]]
    prepared = island.start("prepare", "data", "prepare", *texts, "--out", str(other))
    assert prepared.wait(DEADLINE_S) == 0
    stranger = island.start("stranger", "learner", "--id", "c", ATOLL_DATA__DIR=str(other))

    said = island.refused(wider, "wider", 2)
    assert "32" in said
    assert "48" in said
    ours = json.loads((data / "meta.json").read_text(encoding="utf-8"))["fingerprint"]
    assert ours in island.refused(stranger, "stranger", 2)


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ({"ATOLL_BROKER__URL": "nats://127.0.0.1:9", "ATOLL_BROKER__PATIENCE_S": "1"}, 3, "127.0.0.1:9"),
        ({"ATOLL_BROKER__URL": "http://127.0.0.1:9"}, 2, "nats://"),
        ({"ATOLL_LEARNER__ID": "a.b"}, 2, "a.b"),
        ({"ATOLL_PROTOCOL__QUORUM": "0"}, 2, "quorum"),
        ({"ATOLL_MODEL__LAYERS": "none"}, 2, "layers"),
        ({"ATOLL_COLOUR": "blue"}, 2, "colour"),
    ],
)
def test_a_learner_that_cannot_start_says_why(
    island: IslandProcess, settings: dict[str, str], code: int, said: str
) -> None:
    process = island.start("learner", "learner", **settings)

    assert said in island.refused(process, "learner", code)


def test_a_truncated_model_file_is_refused_before_anything_is_founded(island: IslandProcess, tmp_path: Path) -> None:
    """`learner.initial_model` must be whole."""
    half = tmp_path / "half.safetensors"
    half.write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{}")
    process = island.start("learner", "learner", "--id", "a", ATOLL_LEARNER__INITIAL_MODEL=str(half))

    assert str(half) in island.refused(process, "learner", 2)
    assert "learner.joined" not in island.log("learner").read_text(encoding="utf-8")
