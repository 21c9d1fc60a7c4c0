"""The fuzzer itself: it finds what is there, keeps it, and what it once found is refused as it should be."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from atoll.base.errors import PeerMisbehaved
from fuzzing import campaign
from fuzzing.campaign import CORPUS, Found, corpus, file_name, play
from fuzzing.targets import Scene, Target, decoders, handlers

INPUTS = 60


async def test_nothing_that_is_fed_breaks_anything() -> None:
    """Honest inputs, those that broke something once, and a few wrong ones, for every decoder and every handler."""
    scene, chance, found = await Scene.opened(), random.Random(1), Found()
    targets = decoders(scene.run) | handlers(scene)
    for name, target in targets.items():
        seeds = (*target.seeds, *corpus(name))
        for data in seeds:
            play(name, target, data, found)
        for _ in range(INPUTS):
            play(name, target, target.mutate(chance.choice(seeds), chance), found)
        await scene.rest()
    await scene.close()

    assert found.finds == []
    assert all(found.taken[name] for name in targets), "an honest input of each target is taken"
    known = {file_name(name) for name in targets}
    assert {folder.name for folder in CORPUS.iterdir()} <= known


def test_what_breaks_is_kept_once_with_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "FINDS", tmp_path)

    def take(data: bytes) -> None:
        if data == b"refused":
            raise PeerMisbehaved("as it should be")
        raise KeyError(data)

    found, target = Found(), Target(take, (b"x",))
    for data in (b"refused", b"one", b"two"):
        play("a target", target, data, found)

    assert found.inputs["a target"] == 3
    (find,) = found.finds
    assert "KeyError" in find
    assert sorted(file.read_bytes() for file in tmp_path.iterdir() if not file.suffix) == [b"one"]
