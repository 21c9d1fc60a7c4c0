"""What a shard's machine decided in a tenure, found out once more: a new machine is told the retained facts.

The same code meets the same facts, so it gives the same commands (`atoll.protocol.recorder`). Of these a replay needs the
commits, and what was folded into each.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from atoll.archive.rounds import RoundStore
from atoll.base.errors import AtollError
from atoll.protocol.events import Commit, Fold, Unfold
from atoll.protocol.recorder import Replay


@dataclass(frozen=True, slots=True)
class Decision:
    """A commit that the machine commanded, after these folds."""

    commit: Commit
    folds: tuple[Fold, ...]


@dataclass(frozen=True, slots=True)
class TenureDecisions:
    """The decisions of one tenure by fragment and base version; `fault` says why there are no more, or is empty."""

    made: dict[tuple[int, int], Decision]
    facts: int
    fault: str = ""

    def ends_before(self, fragment: int, base_version: int) -> bool:
        """Return whether no commit of a fragment on this version or a later one is among them."""
        return max((base for number, base in self.made if number == fragment), default=-1) < base_version


def decisions_of(rounds: RoundStore, shard: int, epoch: int) -> TenureDecisions:
    """Tell a new machine what shard `shard` was told in `epoch`, and return what it decides."""
    lines, fault = rounds.facts(shard, epoch)
    if not lines:
        return TenureDecisions({}, 0, fault or f"no facts of shard {shard} in epoch {epoch} are retained")
    made: dict[tuple[int, int], Decision] = {}
    folds: defaultdict[int, list[Fold]] = defaultdict(list)
    told = 0
    try:
        for _, commands in Replay(lines).play():
            told += 1
            for command in commands:
                if isinstance(command, Fold):
                    folds[command.key.fragment].append(command)
                elif isinstance(command, Unfold):
                    folds.pop(command.fragment, None)
                elif isinstance(command, Commit):
                    entered = tuple(folds.pop(command.fragment, ()))
                    made[command.fragment, command.base_version] = Decision(command, entered)
    except Exception as error:  # noqa: BLE001  (facts that somebody has edited or changed over break a machine anywhere)
        why = str(error) if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
        fault = f"the facts of shard {shard} in epoch {epoch} break its machine after {told}: {why}"
    return TenureDecisions(made, told, fault)
