"""A *finding*: one cause that stands out in a run, who it is of, from when to when, and which command tells more.

It is a plain struct, so that a terminal, the report and the dashboard show the same. Its causes are a closed list: the table in
`docs/how-to/ask-a-run.md` says of each what it means and what a person does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from atoll.story.run_clock import RunClock

Cause = Literal[
    "disk was full",
    "broker was away",
    "shard without owner",
    "share exceeded",
    "quarantine",
    "refusals",
    "stale refusals",
    "clipped",
    "bad direction",
    "slow link",
    "slow learner",
    "learner was gone",
    "superseded",
    "nothing merged",
]

TELLS_MORE: Final[Mapping[Cause, str]] = {
    "disk was full": "atoll doctor",
    "broker was away": "atoll doctor",
    "shard without owner": "atoll story shard {culprit}",
    "share exceeded": "atoll keys list FOLDER",
    "quarantine": "atoll why refused {culprit}",
    "refusals": "atoll why refused {culprit}",
    "stale refusals": "atoll why behind {culprit}",
    "clipped": "atoll why refused {culprit}",
    "bad direction": "atoll story learner {culprit}",
    "slow link": "atoll why behind {culprit}",
    "slow learner": "atoll why behind {culprit}",
    "learner was gone": "atoll story learner {culprit}",
    "superseded": "atoll fates",
    "nothing merged": "atoll story learner {culprit}",
}
"""The command that tells more of each cause; it takes the run (`--out`) as well."""


@dataclass(frozen=True, slots=True)
class RunFinding:
    """One thing that stands out in a run.

    Attributes:
        cause: what it is, one of `Cause`.
        culprit: the learner or the shard that it is of, or "broker"; of a share that is exceeded, whose share it is.
        from_s, until_s: seconds since the Unix epoch, by the clock of who wrote the event; `until_s` None: it lasts to the end
            of the event log.
        text: a sentence with its figures, without its time.
        command: what a person types to be told more.
        evidence: where its figures are in the event log.
        consequences: findings that this one explains; they have none of their own.
    """

    cause: Cause
    culprit: str
    from_s: float
    until_s: float | None
    text: str
    command: str
    evidence: tuple[str, ...] = ()
    consequences: tuple[RunFinding, ...] = ()

    def lines(self, clock: RunClock) -> list[str]:
        """Return it as lines for a person: the sentence, its time, its evidence, and beneath it what it has led to."""
        told = [f"{self.cause}, {self.culprit}: {self.text}", f"    {clock.span(self.from_s, self.until_s)}"]
        told += [f"    {line}" for line in self.evidence]
        for each in self.consequences:
            head, *rest = each.lines(clock)
            told += [f"    so: {head}", *(f"    {line}" for line in rest)]
        return told


def finding(
    cause: Cause,
    culprit: str,
    text: str,
    *,
    from_s: float,
    until_s: float | None,
    evidence: tuple[str, ...] = (),
) -> RunFinding:
    """Return a finding with the command that tells more of it."""
    command = TELLS_MORE[cause].format(culprit=culprit)
    return RunFinding(cause, culprit, from_s, until_s, text, command, evidence)
