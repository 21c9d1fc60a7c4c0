"""Which roll a broker follows: when it was changed last, and a digest of what it says.

A roll is copied to the machine of every node, and a copy may be forgotten. So each server wears the stamp of its roll, and the
version of Atoll that has started it, as tags. The roll with the later change is the newer one. A digest tells two rolls apart
that were changed at one time.

The stamp follows from the entries, so rolls that older versions have written have one, too.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from atoll.keys.roll import Roll

_DIGITS: Final = 8
_ROLL: Final = re.compile(r"roll:(\d{1,12})-([0-9a-f]{8})")
_SOFTWARE: Final = re.compile(r"atoll:([0-9a-z.+-]{1,64})")


@dataclass(frozen=True, slots=True, order=True)
class RollStamp:
    """When a roll was changed last, in whole seconds since the epoch (0 for an empty one), and a digest of its entries."""

    changed_s: int
    digest: str


def stamp_of(roll: Roll) -> RollStamp:
    """Return the stamp of a roll."""
    times = [max(entry.revoked_at_s, entry.moved_at_s) for entry in roll.entries]
    times += [key.made_at_s for entry in roll.entries for key in entry.keys]
    said = "\n".join(
        repr(
            (
                one.run,
                one.name,
                one.kind,
                one.founds,
                one.revoked_at_s,
                one.region,
                *((key.public, key.until_s) for key in one.keys),
            )
        )
        for one in roll.entries
    )
    return RollStamp(int(max(times, default=0.0)), hashlib.sha256(said.encode()).hexdigest()[:_DIGITS])


def tags(stamp: RollStamp, software: str) -> str:
    """Return the line of nats-server's configuration that has it wear the stamp and a version of Atoll."""
    return f'server_tags: ["roll:{stamp.changed_s}-{stamp.digest}", "atoll:{software.lower()}"]\n'


def worn(found: Iterable[str]) -> tuple[RollStamp | None, str]:
    """Return the stamp and the version that a server's tags tell: None and "" where they do not."""
    stamp, software = None, ""
    for tag in found:
        if (roll := _ROLL.fullmatch(tag)) is not None:
            stamp = RollStamp(int(roll[1]), roll[2])
        elif (version := _SOFTWARE.fullmatch(tag)) is not None:
            software = version[1]
    return stamp, software
