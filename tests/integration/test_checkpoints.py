"""A learner's checkpoints on disk: whole or not at all, ours or refused. Orbax for real, and a real SIGKILL in a save."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
import structlog

from atoll.client.checkpoints import KEPT, CheckpointNote, Checkpoints, DataPlace
from atoll.client.optimizer_state import host_copy

DEADLINE_S = 240.0
LIFE = CheckpointNote(
    run="run",
    nonce="nonce",
    model="model",
    layout="layout",
    learner="a",
    incarnation=1,
    anchors=(4, 5),
    steps=1,
    tokens=10,
    run_tokens=20,
    saved_at_s=1.0,
    cursor=(DataPlace((0, 0, 4), 3, 8),),
)
ENDLESS_SAVES = """
import sys
from pathlib import Path
import msgspec, numpy as np
from atoll.client.checkpoints import Checkpoints
from test_checkpoints import LIFE
checkpoints = Checkpoints(Path(sys.argv[1]), LIFE)
for step in range(1, 10_000):
    arrays = {f"array-{i}": np.full(1 << 20, step, np.float32) for i in range(8)}
    checkpoints.save(arrays, msgspec.structs.replace(LIFE, steps=step))
    checkpoints.finish(60.0)
    print(step, flush=True)
"""


def tree(value: float) -> dict[str, Any]:
    return {"mu": jnp.full((64, 3), value), "count": jnp.asarray(int(value))}


def save(checkpoints: Checkpoints, value: int, **note: Any) -> None:  # noqa: ANN401
    checkpoints.save(host_copy(tree(value)), msgspec.structs.replace(LIFE, steps=value, **note))
    assert checkpoints.finish(DEADLINE_S)


def value_of(checkpoints: Checkpoints) -> tuple[int, int] | None:
    """Return the value of the checkpoint that would be adopted, and its step."""
    loaded = checkpoints.load(tree(0))
    return None if loaded is None else (int(loaded.state["count"]), loaded.note.steps)


def test_the_newest_comes_back_and_a_later_life_is_newer(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, LIFE)
    assert checkpoints.load(tree(0)) is None
    for value in (3, 700, 900):
        save(checkpoints, value)
    save(Checkpoints(tmp_path, LIFE), 5, incarnation=2)
    loaded = checkpoints.load(tree(0))

    assert loaded is not None
    np.testing.assert_array_equal(np.asarray(loaded.state["mu"]), np.full((64, 3), 5.0))
    assert (loaded.note.incarnation, loaded.note.anchors) == (2, (4, 5))
    assert loaded.note.progress == {(0, 0, 4): (3, 8)}
    assert len([path for path in checkpoints.folder.iterdir() if path.name.isdigit()]) == KEPT


# A read that fails leaves other reads of Orbax's to end after its event loop; TensorStore tells nobody of it, loudly.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("what", ["flipped", "truncated", "gone", "note"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path, what: str) -> None:
    """A flipped bit in the values too, which Orbax would not notice."""
    checkpoints = Checkpoints(tmp_path, LIFE)
    save(checkpoints, 1)
    save(checkpoints, 2)
    newest = max(
        (path for path in checkpoints.folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name)
    )
    if what == "note":
        (newest / "note" / "metadata").write_text('{"run": ')
    else:
        damage(newest / "state", what)
    with structlog.testing.capture_logs() as said:
        found = value_of(checkpoints)

    assert found == (1, 1)
    assert [line["event"] for line in said] == ["checkpoint.damaged"]


def damage(folder: Path, what: str) -> None:
    files = [path for path in folder.rglob("d/*") if path.is_file()]
    assert files
    for path in files:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x10
        if what == "gone":
            path.unlink()
        else:
            path.write_bytes(data if what == "flipped" else data[: len(data) // 2])


@pytest.mark.parametrize("name", ["run", "nonce", "model", "layout", "learner"])
def test_a_checkpoint_of_something_else_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """It lies where ours would lie and is not ours: the warning says what differs, the file stays."""
    save(Checkpoints(tmp_path, LIFE), 1, **{name: "theirs"})
    checkpoints = Checkpoints(tmp_path, LIFE)
    with structlog.testing.capture_logs() as said:
        found = value_of(checkpoints)

    assert found is None
    assert said[0]["event"] == "checkpoint.refused"
    assert said[0]["reason"] == f"its {name} is 'theirs' and not {getattr(LIFE, name)!r}"
    assert any(path.name.isdigit() for path in checkpoints.folder.iterdir())


def test_checkpoints_of_other_runs_are_neither_read_nor_removed(tmp_path: Path) -> None:
    """A run of the same name that was founded anew has another nonce, and so another folder."""
    save(Checkpoints(tmp_path, LIFE), 1)
    anew = msgspec.structs.replace(LIFE, nonce="anew")
    with structlog.testing.capture_logs() as said:
        found = value_of(Checkpoints(tmp_path, anew))
    save(Checkpoints(tmp_path, anew), 2, nonce="anew")

    assert found is None
    assert (said[0]["event"], said[0]["found"]) == ("checkpoint.other_runs", ["run.nonce"])
    assert value_of(Checkpoints(tmp_path, LIFE)) == (1, 1)


def test_a_run_that_was_rebuilt_accepts_those_of_the_founding_it_came_from(tmp_path: Path) -> None:
    """Its own come first once there is one; those of before stay where they are, and other foundings stay foreign."""
    save(Checkpoints(tmp_path, LIFE), 1)
    save(Checkpoints(tmp_path, LIFE), 2)
    anew = msgspec.structs.replace(LIFE, nonce="anew", incarnation=2)
    rebuilt = Checkpoints(tmp_path, anew, "nonce")
    found = rebuilt.load(tree(0))
    save(rebuilt, 1, nonce="anew", incarnation=2)
    own = rebuilt.load(tree(0))

    assert found is not None
    assert own is not None
    assert (found.note.steps, found.note.nonce, found.rebuilt_since) == (2, "nonce", True)
    assert (own.note.steps, own.note.nonce, own.rebuilt_since) == (1, "anew", False)
    assert value_of(Checkpoints(tmp_path, LIFE)) == (2, 2)
    assert value_of(Checkpoints(tmp_path, msgspec.structs.replace(anew, nonce="third"), "fourth")) is None


def test_another_optimizer_is_another_tree(tmp_path: Path) -> None:
    """What does not fit the state that would be trained is refused whole."""
    checkpoints = Checkpoints(tmp_path, LIFE)
    save(checkpoints, 1)

    assert checkpoints.load({**tree(0), "nu": jnp.zeros(3)}) is None
    assert checkpoints.place() == {(0, 0, 4): (3, 8)}, "the data that was read was read"
    assert Checkpoints(tmp_path, msgspec.structs.replace(LIFE, model="another")).place() == {}


def test_a_place_that_cannot_be_written_costs_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "run.nonce").write_text("in the way")
    checkpoints = Checkpoints(tmp_path, LIFE)
    with structlog.testing.capture_logs() as said:
        save(checkpoints, 1)

    assert [line["event"] for line in said] == ["checkpoint.failed"]
    assert checkpoints.load(tree(0)) is None


@pytest.mark.parametrize(
    ("field", "value"), [("plain", {"read": 4}), ("run_tokens", 21), ("anchors", [4, 6]), ("cursor", [])]
)
def test_a_note_that_was_changed_is_no_note(tmp_path: Path, field: str, value: Any) -> None:  # noqa: ANN401
    checkpoints = Checkpoints(tmp_path, LIFE)
    save(checkpoints, 1, plain={"read": 3, "rate": 0.1, "seed": 1 << 100, "name": "\ud800"})
    assert value_of(checkpoints) == (1, 1)
    [file] = checkpoints.folder.glob("*/note/metadata")
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with structlog.testing.capture_logs() as said:
        assert value_of(checkpoints) is None

    assert [line["event"] for line in said] == ["checkpoint.damaged"]
    assert "the note" in said[0]["reason"]


def test_a_full_disk_costs_the_checkpoint_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, LIFE)
    save(checkpoints, 1)
    with structlog.testing.capture_logs() as said, monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=99))
        save(checkpoints, 2)

    (failed,) = said
    assert (failed["event"], failed["step"]) == ("checkpoint.failed", 2)
    assert failed["reason"] == "StorageFull: 99 bytes are free for a checkpoint of 772"
    assert value_of(checkpoints) == (1, 1)
    save(checkpoints, 3)
    assert value_of(checkpoints) == (3, 3)


def test_a_disk_that_fails_in_the_middle_is_told_in_one_line_too(tmp_path: Path) -> None:
    """Files may not grow beyond a bound here; Orbax logged its traceback beside the error that it raised."""
    bound = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
    saves = ENDLESS_SAVES.replace("10_000", "2")
    program = bound + saves.replace("np.full(1 << 20, step, np.float32)", "np.random.default_rng(i).random(1 << 20)")
    done = subprocess.run(
        # Without bytecode: Python would cut that of a large module at the bound, and no process could load the module again.
        [sys.executable, "-B", "-c", program, tmp_path],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("checkpoint.failed") == 1
    assert "_SignalingThread" not in done.stderr


@pytest.mark.parametrize("asked", ["run.nonce/a", "root"])
def test_a_place_that_cannot_be_searched_is_no_checkpoint_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """`Path.is_dir` raises then, on some versions of Python; stood in for, since root may search everything."""
    root = tmp_path / "root"
    (root / "other.run").mkdir(parents=True)
    honest = Path.is_dir

    def is_dir(path: Path) -> bool:
        if str(path).endswith(asked):
            raise PermissionError(13, "Permission denied", str(path))
        return honest(path)

    monkeypatch.setattr(Path, "is_dir", is_dir)
    with structlog.testing.capture_logs() as said:
        found = Checkpoints(root, LIFE).load(tree(0))

    assert found is None
    assert [(line["event"], line["path"]) for line in said] == [("checkpoint.unreadable", str(root))]
    assert "Permission denied" in said[0]["reason"]
    assert "learner.checkpoint_dir" in said[0]["todo"]


@pytest.mark.second_tier
def test_a_kill_in_the_middle_of_a_save_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    """SIGKILL while the temporary folder is there, again and again: what is found afterwards is whole, and not older."""
    like = {f"array-{i}": np.zeros(1 << 20, np.float32) for i in range(8)}
    interrupted = 0
    for attempt in range(12):
        folder = tmp_path / str(attempt)
        command = [sys.executable, "-c", ENDLESS_SAVES, str(folder)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=Path(__file__).parent
        )
        try:
            assert process.stdout is not None
            saved = int(process.stdout.readline())
            wait_for_a_save(folder / "run.nonce" / "a")
        finally:
            process.send_signal(signal.SIGKILL)
            rest, _ = process.communicate(timeout=DEADLINE_S)
        saved = max([saved, *(int(line) for line in rest.split())])
        interrupted += bool(unfinished(folder / "run.nonce" / "a"))
        loaded = Checkpoints(folder, LIFE).load(like)

        assert loaded is not None
        assert saved <= loaded.note.steps <= saved + 1
        assert all((array == loaded.note.steps).all() for array in loaded.state.values())
        if interrupted >= 3:
            break

    assert interrupted >= 3, "no kill met a save under way"


def unfinished(folder: Path) -> list[Path]:
    """Return the temporary folders of saves that were not finished."""
    return [path for path in folder.iterdir() if "tmp" in path.name]


def wait_for_a_save(folder: Path) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        if unfinished(folder):
            return
    raise AssertionError("no save began")
