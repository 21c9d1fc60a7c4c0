"""The fuzzer itself: it finds what is there, keeps it, and what it once found is refused as it should be."""

from __future__ import annotations

import random

from fuzzing.campaign import CORPUS, Found, corpus, file_name, play
from fuzzing.targets import Scene, decoders, handlers

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
