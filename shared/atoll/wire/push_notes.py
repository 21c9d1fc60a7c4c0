"""What a learner notes about a push, for people: how long things took on its side. No rule of the protocol reads it.

The shard copies the notes into the `round` event (`atoll.run.event_fields`), and `atoll story` puts them into words. They
are claims of the learner. Durations are by its own monotonic clock, so no difference between two clocks is in them.
"""

from __future__ import annotations

import msgspec

from atoll.base.quantities import Moment, Seconds


class PushNotes(msgspec.Struct, frozen=True, omit_defaults=True):
    """The notes of one push. A learner of an earlier release has none, and zeros stand for "not noted".

    Attributes:
        adopted_at_s: when the learner began its local interval on the base version, in seconds since the Unix epoch.
        step_s: the mean time of its recent inner steps.
        upload_s: from the beginning of the encoding until the last segment was stored at the broker, or until the attempt that
            sends a manifest with its frame.
        full_s: the part of that in which it waited because the broker had no room.
    """

    adopted_at_s: Moment = 0.0
    step_s: Seconds = 0.0
    upload_s: Seconds = 0.0
    full_s: Seconds = 0.0


NO_NOTES = PushNotes()
