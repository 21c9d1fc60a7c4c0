"""`atoll up` locks its own broker, which lets in only who has an identity of the run's folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from support import caches
from support.whole_runs import DEADLINE_S, SMALL, UNHURRIED, finish, report_of, start, wait_for_line

pytestmark = pytest.mark.second_tier


def asked(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "atoll.cli", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_a_locked_run_trains_and_nobody_else_gets_in(run_dir: Path, corpus: Path) -> None:
    """Strangers are told; a guest with an identity trains; verbs with --out need nothing more; the run goes on, locked.

    Its broker's store is lost meanwhile: its archive is signed, and it is rebuilt from it. An archive that somebody has changed
    is not believed, though its digests fit.
    """
    archived = ("--set", "archive.every_s=2")
    process = start(run_dir, corpus, "--learners", "1", *UNHURRIED, "--tokens", "0", "--set", "run=locked", *archived)
    wait_for_line(run_dir / "logs" / "shard-0.jsonl", "archive.checkpointed", 2)
    wait_for_line(run_dir / "logs" / "shard-0.jsonl", "round.committed", 2)
    url = (run_dir / "nats" / "url").read_text(encoding="utf-8")
    assert url.startswith("tls://")
    assert stat.S_IMODE((run_dir / "keys").stat().st_mode) == 0o700
    stranger = asked("top", "--once", "--run", "locked", "--broker", url)
    assert stranger.returncode != 0
    assert "broker.identity" in stranger.stderr
    assert "--out" in stranger.stderr
    assert "Traceback" not in stranger.stderr

    added = asked("keys", "add", str(run_dir / "keys"), "guest", "--run", "locked")
    assert added.returncode == 0, added.stderr
    told = {"data.dir": run_dir / "data", "learner.compile_cache": caches.PROGRAMS, "log.format": "json"}
    settings = [word for name, value in told.items() for word in ("--set", f"{name}={value}")]
    settings += [word for setting in SMALL for word in ("--set", setting)]
    words = ["learner", "--id", "guest", "--run", "locked", "--broker", url, *settings, *UNHURRIED]
    identity = {"ATOLL_BROKER__IDENTITY": str(run_dir / "keys" / "identities" / "locked" / "guest.toml")}
    with (run_dir / "guest.log").open("wb") as log:
        guest = subprocess.Popen(
            [sys.executable, "-m", "atoll.cli", *words], env={**os.environ, **identity}, stdout=log, stderr=log
        )
    wait_for_line(run_dir / "guest.log", "learner.first_step")
    table = asked("top", "--once", "--out", str(run_dir))
    assert table.returncode == 0, table.stderr
    assert asked("keys", "add", str(run_dir / "keys"), "eye", "--kind", "reader", "--run", "locked").returncode == 0
    eye = {"ATOLL_BROKER__IDENTITY": str(run_dir / "keys" / "identities" / "locked" / "eye.toml")}
    seen = asked("top", "--once", "--run", "locked", "--broker", url, **eye)
    assert "training" in seen.stdout, seen.stderr
    process.send_signal(signal.SIGINT)
    said = finish(process)
    assert guest.wait(DEADLINE_S) == 0
    report = report_of(run_dir)
    assert report["fates_exact"] is True, report["fates_errors"]
    assert isinstance(report["learners"], list)
    assert {learner["learner"] for learner in report["learners"]} == {"guest", "learner-1"}
    assert f"tap --out {run_dir}" in said
    for written in (run_dir / "logs").glob("*.jsonl"):
        assert "undecodable" not in written.read_text(encoding="utf-8"), written  # every record is of this founding
    assert {line.split()[0] for line in table.stdout.splitlines() if line.strip()} >= {"guest", "learner-1"}

    fates = asked("fates", "--out", str(run_dir))
    assert fates.returncode == 0, fates.stderr

    rebuild_from_what_is_signed(run_dir, corpus)


def rebuild_from_what_is_signed(run_dir: Path, corpus: Path) -> None:
    """Lose the store: a changed archive is refused by its signature, and the honest one brings the run back."""
    shutil.rmtree(run_dir / "nats")
    shutil.copytree(run_dir / "archive", run_dir / "kept")
    changed = [
        change(path) for path in (run_dir / "archive").rglob("*") if path.is_file() and "checkpoints" in path.parts
    ]
    assert any(changed)
    refused = start(run_dir, corpus, *UNHURRIED, "--tokens", "0", "--set", "run=locked", "--resume")
    said, _ = refused.communicate(timeout=DEADLINE_S)
    assert refused.returncode != 0
    assert "the signature does not fit" in (run_dir / "logs" / "up.jsonl").read_text(encoding="utf-8")
    assert "no complete checkpoint" in said

    shutil.rmtree(run_dir / "archive")
    (run_dir / "kept").rename(run_dir / "archive")
    served = (run_dir / "logs" / "shard-0.jsonl").read_text(encoding="utf-8").count('"event": "round.committed"')
    again = start(run_dir, corpus, *UNHURRIED, "--tokens", "0", "--set", "run=locked", "--resume")
    wait_for_line(run_dir / "logs" / "shard-0.jsonl", "round.committed", served + 2)
    again.send_signal(signal.SIGINT)
    assert "rebuilt" in finish(again)
    assert report_of(run_dir)["fates_exact"] is True


def change(path: Path) -> bool:
    """Change a number in a manifest and give it the digest that fits; return whether there was one."""
    _, line, text = path.read_bytes().partition(b"\n")
    other = text.replace(b'"tokens_merged":', b'"tokens_merged":1', 1)
    path.write_bytes(hashlib.blake2b(other, digest_size=32).hexdigest().encode() + line + other if line else text)
    return other != text


def test_secrets_stay_in_the_folder_of_keys(run_dir: Path, corpus: Path) -> None:
    process = start(run_dir, corpus, "--learners", "1", *UNHURRIED, "--tokens", "0", "--set", "run=quiet")
    wait_for_line(run_dir / "logs" / "shard-0.jsonl", "round.committed", 1)
    seeds = [
        line.split('"')[1]
        for path in (run_dir / "keys").rglob("*.toml")
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("seed")
    ]
    assert len(seeds) == 5
    commands = b"".join((Path("/proc") / str(pid) / "cmdline").read_bytes() for pid in children_of(process.pid))
    environments = b"".join((Path("/proc") / str(pid) / "environ").read_bytes() for pid in children_of(process.pid))
    process.send_signal(signal.SIGINT)
    said = finish(process)
    elsewhere = [path for path in run_dir.rglob("*") if path.is_file() and "keys" not in path.parts]
    written = b"".join(path.read_bytes() for path in elsewhere)
    for seed in seeds:
        assert seed.encode() not in commands + environments + written + said.encode()


def children_of(pid: int) -> list[int]:
    told = (Path("/proc") / str(pid) / "task" / str(pid) / "children").read_text(encoding="ascii").split()
    return [pid, *(below for child in told for below in children_of(int(child)))]
