"""A run as its event log tells it, written by hand: learners, rounds, owners of shards, refusals, in any order of time."""

from __future__ import annotations

from collections import deque
from typing import Any

from atoll.run.history import History, notes
from atoll.wire.messages import encode
from support.events import event


class SteppedRun:
    """A run of three learners as its event log tells it: steps of 1 s, rounds of 2 s every ten."""

    def __init__(
        self, *, rounds_kept: int | None = None, samples_kept: int | None = None, notes_kept: int | None = None
    ) -> None:
        self.history, self.steps = History(), {"a": 1.0, "b": 1.0, "c": 1.0}
        if rounds_kept is not None:
            self.history.rounds = deque(maxlen=rounds_kept)
        if samples_kept is not None:
            self.history.samples = notes(samples_kept)
        if notes_kept is not None:
            self.history.joined, self.history.left = notes(notes_kept), notes(notes_kept)
            self.history.samples = notes(notes_kept)

    def log(self, kind: str, who: str, at_s: float, **fields: Any) -> None:  # noqa: ANN401
        self.history.take(f"ev.{kind}.{who}", encode(event(kind, who, at_s, **fields)))

    def join(
        self, who: str, at_s: float = 10.0, *, incarnation: int = 1, took_s: float = 10.0, start_s: float = 0.0
    ) -> None:
        self.log("joined", who, at_s, incarnation=incarnation, took_s=took_s, start_s=start_s)

    def round(
        self,
        version: int,
        *,
        fragment: int = 0,
        shard: str = "shard-0",
        at_s: float | None = None,
        quorum_s: float = 1.0,
        hindered: float = 0.0,
        away_s: float = 0.0,
        commit_s: float = 0.4,
        why: dict[str, Any] | None = None,
        **share: float,
    ) -> None:
        """Let a round end at ten times its version, with ten seconds' steps of all learners in it."""
        shares = [
            {
                "learner": who,
                "incarnation": 1,
                "age": 0,
                "tokens": 10,
                "weight": 1.0,
                "push": version,
                "steps": round(10 / step_s),
                "step_s": step_s,
                **share,
            }
            for who, step_s in self.steps.items()
        ]
        phases = {"quorum_wait_s": quorum_s, "waited_s": 1.5, "queued_s": 0.0, "merge_s": 0.1, "commit_s": commit_s}
        phases["away_s"] = away_s
        held = {"hindered": {"away": hindered}} if hindered else {}
        fields = {"fragment": fragment, "version": version, "contributors": shares, **phases, **held}
        fields |= {} if why is None else {"why": why}
        self.log("round", shard, 10.0 + 10.0 * version if at_s is None else at_s, **fields)

    def serve(self, shard: str, at_s: float, *, epoch: int = 1, fragments: tuple[int, ...] = (0,)) -> None:
        """Let a process become the owner of a shard."""
        versions = dict.fromkeys(map(str, fragments), 0)
        self.log("serving", shard, at_s, epoch=epoch, versions=versions, host="h", pid=epoch)

    def refuse(self, learner: str, at_s: float, reason: str, *, shard: str = "shard-0", **fields: float) -> None:
        """Let a shard refuse contribution 1 of a learner."""
        one = {"reason": reason, "learner": learner, "incarnation": 1, "fragment": 0, "push": 1, **fields}
        self.log("refused", shard, at_s, refusals=[one])

    def isolate(self, learner: str, at_s: float, *, shard: str = "shard-0") -> None:
        """Let a shard put incarnation 1 of a learner into quarantine."""
        self.log("quarantined", shard, at_s, learner=learner, incarnation=1, offences=3, reason="outlier")
