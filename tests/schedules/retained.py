"""What a schedule has retained of its rounds, replayed: every round that is whole, of every founding, to the same bits."""

from __future__ import annotations

from collections import Counter

from atoll.archive.checkpoints import founding
from atoll.archive.object_store import ArchiveStore
from atoll.archive.replay import RunReplay
from atoll.archive.rounds import RoundStore, foundings
from atoll.protocol.invariants import require
from schedules.safety import Safety

MISSING = ("it was not retained", "it was folded, and is not retained", "so many contributions are retained")
"""What a replay says of a round that lacks something, because the archive was away or a region has added up."""


def check_rounds(store: ArchiveStore, run: str, safety: Safety, tally: Counter[str]) -> None:
    """Replay everything that shards have retained, whoever of them died when."""
    for origin in foundings(store, run):
        rounds = RoundStore(store, run, origin)
        again = RunReplay(rounds)
        for fragment in range(again.run.protocol.fragments):
            whole = {(name.version, name.epoch, name.digest) for name in rounds.rounds(fragment) if name.whole}
            for made in again.fragment(fragment):
                tally["rounds replayed"] += 1
                tally["rounds identical"] += made.identical
                said = [str(difference) for difference in made.differences]
                if (made.version, made.epoch, made.digest) in whole:
                    require(made.identical, "a round that is retained whole is replayed to the same bits", (made, said))
                else:
                    missing = [each for each in said if any(words in each for words in MISSING)]
                    require(missing == said, "a round that lacks something says so, and no more", (made, said))
                head = safety.heads.get(fragment)
                ours = safety.run is not None and origin == founding(safety.run)
                if ours and head is not None and head.version == made.version:
                    tally["last heads replayed"] += made.identical
                    require(made.digest == head.digest, "the last round is the last head", (made, head))
