"""A learner of an older release meets today's broker and shard: it joins, its contributions are merged, it leaves."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

import msgspec
import pytest

from support.islands import IslandProcess, end

pytestmark = pytest.mark.second_tier
ROOT = Path(__file__).parents[2]
OLDER = "2a7b8f5d399ef0d0a8863e3ae6e2ac4be814abd4"
"""The oldest commit that today's wire version allows; a tag takes its place once there is one."""


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("older")
    packed = folder / "older.tar"
    command = ["git", "archive", "--output", str(packed), OLDER, "shared", "services"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this clone has no commit {OLDER[:7]}: {done.stderr.strip()}")
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    return ":".join(str(folder / part) for part in ("shared", "services/learner", "services/synchronizer"))


async def test_an_older_learner_trains_with_todays_shard(island: IslandProcess, older: str) -> None:
    """It founds the run; a learner of today joins it; both are merged, and every token has one fate."""
    island.start("shard", "synchronizer")
    island.start("old", "learner", "--id", "old", PYTHONPATH=older)
    island.wait_for("old", "learner.first_step")
    island.start("new", "learner", "--id", "new")
    island.wait_for("new", "learner.first_step")
    island.wait_for("shard", "round.committed", 16)
    await end(island, ["old", "new"])
    island.process("shard").terminate()
    assert island.process("shard").wait(240) == 0
    merged = {
        share["learner"]
        for event in await island.events("round")
        for share in msgspec.json.decode(event.fields["contributors"])
    }
    assert merged == {"old", "new"}
    settled = await island.settlement()
    assert settled.exact, settled.errors
    assert settled.fates["lost"] == 0


def test_it_is_the_older_one(older: str) -> None:
    """Otherwise the test above would prove nothing."""
    assert (Path(older.split(":", maxsplit=1)[0]) / "atoll/codec/kernels/later.py").exists()
