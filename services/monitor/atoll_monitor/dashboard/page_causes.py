"""What stands out in a run and what was slow, for a page: the findings of `atoll why` and the parts of the report's `slow`.

Each comes with the command that tells more, whole, so that a person can copy it: with the options that lead to this very run.
A monitor keeps the newest rounds of a run that goes on, so its causes are of these rounds. Those of a saved run are of all.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from atoll.story.history import History
from atoll.story.slowness import slowness
from atoll_monitor.dashboard.page_facts import PageFacts

EVIDENCE_SHOWN: Final = 6
OF_BROKER: Final = "atoll doctor"


def causes_of(history: History, facts: PageFacts) -> dict[str, Any]:
    """Return what stands out, the gravest first, and the largest shares of time that were lost, in plain JSON values."""
    began_s = facts.began_s(history.timeline)
    told = slowness(history)
    return {
        "run": facts.run,
        "rounds": len(history.rounds),
        "findings": [
            {
                "cause": found.cause,
                "who": found.culprit,
                "text": found.text,
                "evidence": [
                    *(f"so: {each.cause}, {each.culprit}: {each.text}" for each in found.consequences),
                    *found.evidence,
                ][:EVIDENCE_SHOWN],
                "from_s": round(found.from_s - began_s, 2),
                "until_s": None if found.until_s is None else round(found.until_s - began_s, 2),
                "command": whole_command(found.command, facts),
            }
            for found in told.findings
        ],
        "slow": [
            {
                **asdict(part),
                "seconds": round(part.seconds, 3),
                "share": round(part.share, 5),
                "command": whole_command(part.command, facts),
            }
            for part in told.lost
        ],
        "notes": list(told.notes),
    }


def whole_command(command: str, facts: PageFacts) -> str:
    """Return a command with the options that lead to this run; of a saved run no broker can be asked."""
    if command == OF_BROKER:
        return f"{command} --broker {facts.broker}" if facts.broker else f"atoll why {facts.reached_by}"
    return f"{command} {facts.reached_by}".rstrip()
