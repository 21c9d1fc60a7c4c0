"""A run retains its rounds; they are replayed to the same bits, and what somebody changed in them is found and named."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import msgspec
import pytest
from typer.testing import CliRunner

from atoll.archive.checkpoints import founding
from atoll.archive.object_store import FolderArchive
from atoll.archive.replay import ReplayedRound, RunReplay
from atoll.archive.rounds import RetainedFold, RetainedRound, RoundStore, foundings
from atoll.base.errors import CheckpointError
from atoll.cli.main import build
from atoll.protocol.settings import ProtocolSettings
from atoll.run.delta_chain import digest_of_values
from atoll.run.heads import read_heads
from atoll.run.record import read_run
from atoll.settings.sections import ArchiveSettings
from atoll.wire.messages import Head, RunRecord
from atoll.wire.subjects import Subjects
from support.memory_world import MemoryWorld, parameters, settings

Change = Callable[[RoundStore, RetainedRound], None]
FACTS = RoundStore.facts


def heads_of(world: MemoryWorld) -> tuple[RunRecord, dict[int, Head]]:
    async def read() -> tuple[RunRecord, dict[int, Head]]:
        bus = await world.bus()
        record = await read_run(bus, Subjects(world.run))
        assert record is not None
        return record, await read_heads(bus, record)

    return world.home.submit(read()).result(240.0)


def trained(run: str, folder: Path, **changes: object) -> tuple[RunRecord, dict[int, Head]]:
    """Train with four learners and shards that retain their rounds in `folder`.

    Every parameter begins with a value of its own: fragments of equal values would send equal contributions.
    """
    uneven = jax.tree.map(lambda leaf: leaf + jnp.arange(leaf.size).reshape(leaf.shape) / 7, parameters(0.1))
    protocol: ProtocolSettings = settings(**{"tokens_target": 4_000, **changes})
    world = MemoryWorld(run, protocol, archive=ArchiveSettings(url=str(folder), contributions=True))
    world.go(
        lambda: world.train("low", -1.0, params=uneven),
        lambda: world.train("high", 1.0, pace=1.5, params=uneven),
        lambda: world.train("mid", 0.5, params=uneven),
        lambda: world.train("far", 2.0, pace=1.2, params=uneven),
    )
    found = heads_of(world)
    world.home.stop()
    return found


def replayed(rounds: RoundStore) -> Iterator[ReplayedRound]:
    again = RunReplay(rounds)
    for fragment in range(again.run.protocol.fragments):
        yield from again.fragment(fragment)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"merge": "mean", "codec_up": "f32", "codec_down": "f32", "correction": "none"},
        {"robust": "clip", "quorum": 3, "average_versions": 4},
    ],
    ids=["defaults", "exact", "judged and averaged"],
)
def test_every_head_of_a_run_is_made_again_to_the_same_bits(
    run: str, tmp_path: Path, changes: dict[str, object]
) -> None:
    """Values, outer state, ledger, contributions and weights of every version, by the shards' own code."""
    record, heads = trained(run, tmp_path, **changes)
    rounds = RoundStore.of(FolderArchive(tmp_path), record)
    made = list(replayed(rounds))

    assert foundings(FolderArchive(tmp_path), run) == [founding(record)]
    assert [(each.fragment, each.version, each.differences) for each in made if not each.identical] == []
    assert {(each.fragment, each.version) for each in made} == {
        (fragment, version) for fragment, head in heads.items() for version in range(1, head.version + 1)
    }
    assert {each.digest for each in made} >= {head.digest for head in heads.values()}
    anchors = [rounds.round(name).anchor for fragment in heads for name in rounds.rounds(fragment)]
    assert len(anchors) == len(made)
    assert len(anchors) - anchors.count(None) == len(heads), "only the first round of a fragment needs an anchor"
    assert len(made) >= 2 * len(heads)
    assert rounds.size_bytes() > 0


@pytest.mark.parametrize(
    "changes", [{}, {"share_max": 0.9, "merge": "mean", "correction": "none"}], ids=["rda", "mean"]
)
def test_a_round_with_a_clipped_contribution_is_made_again(
    run: str, tmp_path: Path, changes: dict[str, object]
) -> None:
    """The scale is in the command, in the head and in what is retained, and the same facts lead to it."""
    record, heads = trained(run, tmp_path, **{"outlier_ratio": 0.01, "tokens_target": 8_000, **changes})
    rounds = RoundStore.of(FolderArchive(tmp_path), record)
    folds = [(made.head, fold) for made in every_round(rounds) for fold in made.folds if fold.scale < 1.0]

    assert folds
    assert all(any(each.scale == fold.scale for each in head.included) for head, fold in folds)
    made = list(replayed(rounds))
    assert [(each.fragment, each.version, each.differences) for each in made if not each.identical] == []
    assert {each.digest for each in made} >= {head.digest for head in heads.values()}


@pytest.fixture(scope="module")
def retained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunRecord, Path]:
    folder = tmp_path_factory.mktemp("retained")
    return trained("retained", folder)[0], folder


def every_round(rounds: RoundStore) -> list[RetainedRound]:
    return [rounds.round(name) for fragment in range(4) for name in rounds.rounds(fragment)]


def lonely(rounds: RoundStore) -> RetainedRound:
    """Return a round in the middle of a fragment whose first contribution is like no other: small ones may be equal."""
    made = every_round(rounds)
    frames = Counter(fold.frame for each in made for fold in each.folds)
    return next(each for each in made if each.head.version >= 3 and frames[each.folds[0].frame] == 1)


def mixed(rounds: RoundStore) -> RetainedRound:
    """Return a round, not the first of its fragment, of two learners and more that sent different contributions."""
    return next(
        each
        for each in every_round(rounds)
        if each.head.version > 1
        and len({fold.manifest.learner for fold in each.folds}) > 1
        and len({fold.frame for fold in each.folds}) == len(each.folds)
    )


def rewritten(rounds: RoundStore, made: RetainedRound, **changes: object) -> None:
    """Write a round again, with a new digest, as somebody would who knows how."""
    rounds.put_round(msgspec.structs.replace(made, **changes))


def first_fold(made: RetainedRound, **changes: object) -> tuple[RetainedFold, ...]:
    return (msgspec.structs.replace(made.folds[0], **changes), *made.folds[1:])


def flip(rounds: RoundStore, made: RetainedRound) -> None:
    frame = made.folds[0].frame
    assert frame is not None
    data = bytearray(rounds.get_object(frame))
    data[-1] ^= 1
    rounds.object_store.put(rounds.place(frame), bytes(data))


def lose(rounds: RoundStore, made: RetainedRound) -> None:
    frame = made.folds[0].frame
    assert frame is not None
    rounds.object_store.remove([rounds.place(frame)])


def exchange(rounds: RoundStore, made: RetainedRound) -> None:
    """Put a changed contribution in its place, under the digest that it has now."""
    frame = made.folds[0].frame
    assert frame is not None
    data = bytearray(rounds.get_object(frame))
    data[-1] ^= 1
    rewritten(rounds, made, folds=first_fold(made, frame=rounds.put_object(bytes(data))))


def weigh(rounds: RoundStore, made: RetainedRound) -> None:
    rewritten(rounds, made, folds=first_fold(made, weight=2.0 * made.folds[0].weight))


def claim(rounds: RoundStore, made: RetainedRound) -> None:
    manifest = msgspec.structs.replace(made.folds[0].manifest, tokens=made.folds[0].manifest.tokens + 1)
    rewritten(rounds, made, folds=first_fold(made, manifest=manifest))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (flip, "an object of the archive is damaged"),
        (lose, "an object of the archive is missing"),
        (exchange, "its bytes are not those of its manifest"),
        (weigh, "it was folded with other weights than were decided"),
        (claim, "the head lists it otherwise than its manifest"),
    ],
)
def test_a_changed_contribution_is_named(retained: tuple[RunRecord, Path], change: Change, words: str) -> None:
    """By its round, fragment, learner and number; the rounds before it and other fragments stay identical."""
    record, folder = retained
    rounds = RoundStore.of(FolderArchive(folder), record)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    made = lonely(rounds)
    fragment, version, push = made.head.fragment, made.head.version, made.folds[0].manifest
    change(rounds, made)
    try:
        again = list(replayed(rounds))
    finally:
        for file, data in before.items():
            file.write_bytes(data)

    (found,) = [each for each in again if any(difference.push for difference in each.differences)]
    assert (found.fragment, found.version) == (fragment, version)
    named = [difference for difference in found.differences if difference.push is not None]
    assert {each.push for each in named if each.push} == {(push.learner, push.incarnation, fragment, push.push)}
    assert words in " ".join(each.what for each in named)
    assert not found.computed
    assert all(each.identical for each in again if each.fragment != fragment or each.version < version)
    later = [each for each in again if each.fragment == fragment and each.version > version]
    assert all("could not be made again" in str(each.differences[0]) for each in later)


Piece = tuple[int, int, int, list[bytes]]


def rewrite_facts(rounds: RoundStore, folder: Path, change: Callable[[Piece], Piece]) -> None:
    """Change every piece of the facts (shard, epoch, number, lines), and store it with its digest."""
    pieces = []
    for facts in folder.rglob("facts-*/*.jsonl"):
        _, _, text = facts.read_bytes().partition(b"\n")
        epoch, number = (int(part) for part in facts.name.split(".")[:2])
        pieces.append((int(facts.parent.name.removeprefix("facts-")), epoch, number, text.splitlines()))
    for piece in pieces:
        rounds.put_facts(*change(piece))


def inflated(piece: Piece) -> Piece:
    return *piece[:3], [line.replace(b'"tokens":', b'"tokens":1') for line in piece[3]]


def exchanged(piece: Piece) -> Piece:
    """Return a piece under the number of the other shard, unless its machine begins with it."""
    shard, epoch, number, lines = piece
    return (1 - shard if number else shard), epoch, number, lines


def test_a_changed_version_and_a_changed_decision_are_found(retained: tuple[RunRecord, Path]) -> None:
    """A head whose values are others is no result of its contributions, and facts that are others lead elsewhere."""
    record, folder = retained
    rounds = RoundStore.of(FolderArchive(folder), record)
    name = next(each for each in rounds.rounds(1) if each.version == 2)
    made = rounds.round(name)
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    rounds.object_store.remove([name.path])
    rewritten(rounds, made, head=msgspec.structs.replace(made.head, digest="0" * 32))
    try:
        forged = list(RunReplay(rounds).fragment(1, until=2))
        facts = [file for file in before if file.suffix == ".jsonl"]
        rewrite_facts(rounds, folder, inflated)
        undecided = list(RunReplay(rounds).fragment(0))
        for file in facts:
            file.write_bytes(before[file])
        rewrite_facts(rounds, folder, exchanged)
        broken = list(RunReplay(rounds).fragment(0))
    finally:
        for file in [file for file in folder.rglob("*") if file.is_file() and file not in before]:
            file.unlink()
        for file, data in before.items():
            file.write_bytes(data)

    assert [str(difference.what) for difference in forged[1].differences] == ["it makes other values"]
    assert undecided[0].computed
    assert not undecided[0].identical
    assert "break its machine" in str(broken[-1].differences)


def test_facts_that_came_after_the_first_look_are_read(
    retained: tuple[RunRecord, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on retains facts and rounds during its replay; what never comes is looked for once more, not for ever."""
    record, folder = retained
    rounds = RoundStore.of(FolderArchive(folder), record)
    looks: list[int] = []

    def growing(store: RoundStore, shard: int, epoch: int) -> tuple[list[bytes], str]:
        lines, fault = FACTS(store, shard, epoch)
        looks.append(shard)
        return (lines[: len(lines) // 2], fault) if looks.count(shard) <= short else (lines, fault)

    monkeypatch.setattr(RoundStore, "facts", growing)
    short = 1
    assert all(made.identical for made in RunReplay(rounds).fragment(0))
    assert looks == [looks[0]] * 2

    looks.clear()
    short = 1000
    made = list(RunReplay(rounds).fragment(0))
    assert made[0].identical
    assert not made[-1].identical
    assert looks == [looks[0]] * 2


def test_a_round_is_opened_and_merged_without_a_learner(retained: tuple[RunRecord, Path]) -> None:
    """With all, it is what it was; without one, what the others alone make; without the only one, nothing moves."""
    record, folder = retained
    rounds = RoundStore.of(FolderArchive(folder), record)
    again = RunReplay(rounds)
    made = mixed(rounds)
    opened = again.opened(made.head.fragment, made.head.version)
    parts = opened.parts()

    assert digest_of_values(opened.merged()[1]) == made.head.digest
    assert digest_of_values(opened.values) == made.base_digest
    assert [part.learner for part in parts] == opened.learners
    assert sum(part.weight_share for part in parts) == pytest.approx(1.0)
    assert sum(part.tokens for part in parts) == sum(share.tokens for share in made.head.included)
    assert all(part.aligned is None or -1.0 <= part.aligned <= 1.0 for part in parts)
    for learner in opened.learners:
        alone = replace(opened, contributions=[each for each in opened.contributions if each.learner != learner])
        direction, values = opened.merged(learner)
        assert [each.tobytes() for each in (direction, values)] == [each.tobytes() for each in alone.merged()]
        # What a version adds is rounded to four bits, so two directions may make the same values.
        assert direction.tobytes() != opened.merged()[0].tobytes()
    nobody = replace(opened, contributions=opened.contributions[:1])
    assert nobody.merged(nobody.learners[0])[1].tobytes() == opened.values.tobytes()
    # Rounds of a test follow each other within what a file system tells apart.
    for name in rounds.rounds(made.head.fragment):
        os.utime(folder / name.path, (1e9 + name.version, 1e9 + name.version))
    assert digest_of_values(again.values(made.head.fragment, 1e9 + made.head.version)) == made.head.digest
    first = rounds.round(rounds.rounds(made.head.fragment)[0])
    assert digest_of_values(again.values(made.head.fragment, 0.0)) == first.base_digest
    with pytest.raises(CheckpointError, match="no such round is retained"):
        again.opened(0, 4000)


def test_learners_parts_are_told_in_a_table(retained: tuple[RunRecord, Path]) -> None:
    told = CliRunner().invoke(
        build(), ["attribute", "retained", "--archive", str(retained[1]), "--fragment", "1", "--round", "2"]
    )

    assert told.exit_code == 0
    assert told.output.startswith("round 1/2 by shard-1 in epoch 1: ")
    assert "step without" in told.output
    assert "loss without" not in told.output


def asked(*words: str) -> tuple[int, str]:
    """Return the exit code and the words of `atoll replay`."""
    told = CliRunner().invoke(build(), ["replay", *words])
    return told.exit_code, told.output if told.exception is None else f"{told.output}{told.exception}"


def test_the_command_replays_a_run_or_one_round(retained: tuple[RunRecord, Path]) -> None:
    """It says how many rounds are identical, and leaves with 1 when one is not."""
    record, folder = retained
    code, told = asked("retained", "--archive", str(folder))
    assert code == 0
    assert told.count("all identical") == 4
    code, one = asked("retained", "--archive", str(folder), "--fragment", "2", "--round", "2")
    assert code == 0
    assert "round 2/2, epoch 1" in one
    assert "1 round replayed, 1 identical" in one
    rounds = RoundStore.of(FolderArchive(folder), record)
    made = lonely(rounds)
    frame = made.folds[0].frame
    assert frame is not None
    place = folder / rounds.place(frame)
    before = place.read_bytes()
    flip(rounds, made)
    try:
        code, told = asked("retained", "--archive", str(folder))
    finally:
        place.write_bytes(before)

    push = made.folds[0].manifest
    assert code == 1
    assert f"push {push.push} of {push.learner}/1: an object of the archive is damaged" in told
    assert f"round {made.head.fragment}/{made.head.version}" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("retained", "--round", "3"), "a round of which fragment?"),
        (("retained",), "neither a dump nor the folder of a run"),
        (("retained", "--archive", "FOLDER", "--fragment", "4"), "the run has no such fragment"),
        (("retained", "--archive", "FOLDER", "--fragment", "0", "--round", "4000"), "no such round is retained"),
        (("retained", "--archive", "FOLDER", "--founding", "0-0-x"), "no such founding is retained"),
        (("another", "--archive", "FOLDER"), "no rounds of this run are retained here"),
        (("retained", "--archive", "FOLDER", "--last", "3"), "only a dump has last lines"),
        (("facts-1.jsonl", "--fragment", "3"), "a dump is of one machine"),
    ],
)
def test_a_mistake_is_told(retained: tuple[RunRecord, Path], words: tuple[str, ...], said: str) -> None:
    code, told = asked(*(str(retained[1]) if word == "FOLDER" else word for word in words))

    assert code != 0
    assert said in told
