"""The rounds of a run, made once more from its archive, in words: what is identical, and what differs, where and why."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from atoll.base.wording import counted
from atoll.cli.look import say

if TYPE_CHECKING:
    from atoll.archive.replay import ReplayedRound, RunReplay
    from atoll.archive.rounds import RoundStore

PROGRESS_S: Final = 5.0
TOLD_PER_FRAGMENT: Final = 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which rounds: None stands for all fragments, all versions, the newest founding."""

    fragment: int | None = None
    version: int | None = None
    founding: str | None = None


def replay_run(what: str, archive: str | None, identity: Path | None, wanted: Wanted, own_outer: str) -> bool:
    """Replay rounds and say what came out; return whether all of them are identical.

    Raises:
        SettingsError: there is no such run here, or no such fragment; or its outer optimizer is code, and not `own_outer`.
        CheckpointError: nothing of it was retained, or no such round.
    """
    from atoll.archive.replay import RunReplay  # noqa: PLC0415  (a verb loads what it needs when it runs)
    from atoll.base.errors import CheckpointError, SettingsError  # noqa: PLC0415

    began_s = time.monotonic()
    rounds = rounds_of(what, archive, identity, wanted.founding)
    again = RunReplay(rounds, own_outer)
    there = again.run.protocol.fragments
    if wanted.fragment is not None and wanted.fragment >= there:
        raise SettingsError("the run has no such fragment", got=wanted.fragment, allowed=f"0 to {there - 1}")
    say(f"run {again.run.run}, founding {rounds.origin}: {rounds.size_bytes():,} bytes retained")
    made: list[ReplayedRound] = []
    for fragment in range(there) if wanted.fragment is None else (wanted.fragment,):
        found = _fragment(again, fragment, wanted.version)
        made += found
        if wanted.version is None:
            _say_fragment(fragment, found)
    if not made:
        raise CheckpointError(
            "no such round is retained",
            got=f"fragment {wanted.fragment}, version {wanted.version}" if wanted.version else again.run.run,
            todo="was the run trained with archive.contributions=true? `atoll replay` without --round lists what is there",
        )
    if wanted.version is not None:
        _say_round(made[-1])
    same = sum(each.identical for each in made)
    took_s = time.monotonic() - began_s
    facts = sum(tenure.facts for tenure in again.tenures.values())
    contributions = counted(sum(len(each.pushes) for each in made), "contribution")
    say(
        f"{counted(len(made), 'round')} replayed, {same} identical, in {took_s:.1f} s: {contributions}, "
        f"{counted(facts, 'fact')} of {counted(len(again.tenures), 'tenure')}, {again.bytes_read:,} bytes read"
    )
    return same == len(made)


def rounds_of(what: str, archive: str | None, identity: Path | None, origin: str | None) -> RoundStore:
    """Return the store of retained rounds that is meant."""
    from atoll.archive.object_store import open_archive  # noqa: PLC0415
    from atoll.archive.rounds import RoundStore, foundings  # noqa: PLC0415
    from atoll.base.errors import CheckpointError, SettingsError  # noqa: PLC0415
    from atoll.keys.identity import read_identity  # noqa: PLC0415
    from atoll.local.run_keys import RunKeys, keys_of  # noqa: PLC0415
    from atoll.run.folder import read_run_file  # noqa: PLC0415
    from atoll.wire.subjects import is_token  # noqa: PLC0415

    folder = Path(what)
    file = read_run_file(folder) if folder.is_dir() else None
    if file is not None:
        run, keys = file.run, keys_of(folder)
        archive = archive or str(file.settings.get("archive.url") or folder / "archive")
        identity = identity or (None if keys is None else Path(RunKeys(keys, file.run).operator))
    elif archive is None or not is_token(what):
        raise SettingsError(
            "neither a dump nor the folder of a run",
            got=what,
            allowed="facts-….jsonl, the --out of an `atoll up`, or a run id with --archive",
        )
    else:
        run = what
    store = open_archive(archive)
    signatures = None if identity is None else read_identity(identity).signatures()
    there = foundings(store, run)
    if not there or (origin is not None and origin not in there):
        raise CheckpointError(
            "no rounds of this run are retained here" if not there else "no such founding is retained",
            got=f"{run} in {archive}" if not there else origin,
            allowed=", ".join(there) or None,
            todo=None if there else "train it with archive.contributions=true",
        )
    return RoundStore(store, run, origin or there[-1], signatures)


def _fragment(again: RunReplay, fragment: int, version: int | None) -> list[ReplayedRound]:
    """Replay a fragment, and say now and then how far; with a version, return that round alone."""
    found: list[ReplayedRound] = []
    said_s = time.monotonic()
    for made in again.fragment(fragment, version):
        found.append(made)
        if time.monotonic() - said_s > PROGRESS_S:
            said_s = time.monotonic()
            say(f"fragment {fragment}: version {made.version} …")
    return found if version is None else [made for made in found if made.version == version]


def _say_fragment(fragment: int, found: list[ReplayedRound]) -> None:
    if not found:
        say(f"fragment {fragment}: no round is retained")
        return
    contributions = counted(sum(len(made.pushes) for made in found), "contribution")
    differing = [made for made in found if not made.identical]
    how = "all identical" if not differing else f"{len(found) - len(differing)} identical"
    versions = f"versions {found[0].version} to {found[-1].version}"
    say(f"fragment {fragment}: {counted(len(found), 'round')}, {versions}, {contributions}: {how}")
    for made in differing[:TOLD_PER_FRAGMENT]:
        _say_round(made)
    if (left_out := len(differing) - TOLD_PER_FRAGMENT) > 0:
        say(f"  and {counted(left_out, 'more round differs', 'more rounds differ')}")


def _say_round(made: ReplayedRound) -> None:
    how = "identical" if made.identical else "differs"
    contributions = counted(len(made.pushes), "contribution")
    say(f"  round {made.fragment}/{made.version}, epoch {made.epoch}, {contributions}: {how}")
    for difference in made.differences:
        say("    " + "".join(c if c.isprintable() else "?" for c in str(difference)))
    if made.identical:
        say(f"    values {made.digest}")
