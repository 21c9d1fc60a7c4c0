"""When a learner writes a heartbeat down as a `sample` of the event log, so that a run that is over still has its curves.

Heartbeats are at most once and leave nothing behind. A sample is the part of one that a curve needs (`SampleEvent`), stored.
The event log is bounded, so samples must stay few beside its rounds, yet a run of a minute should have a curve as well. So
pauses grow with an incarnation's age, up to `sample_s`:

    pause = min(sample_s, max(SAMPLE_S_MIN, age / SAMPLES_PER_AGE))

At the default of 30 s that is 30 samples in the first half minute, about 100 more until the age of a quarter of an hour, and
then two a minute. A sample takes at most 0.8 KB of the stream (with its subject, headers and `info`). A day of one learner is
about 2,970 samples or 2.4 MB, a day of 64 learners 153 MB of the event log's 1 GiB; their rounds (24 fragments, one round of
each in 24 s, 64 contributors of 0.1 KB) take about five times as much.
"""

from __future__ import annotations

from typing import Any, Final

from atoll.base.errors import SettingsError
from atoll.base.units import DAY_S
from atoll.wire.messages import Beat

SAMPLE_S: Final = 30.0
SAMPLE_S_MIN: Final = 1.0
SAMPLE_S_MAX: Final = DAY_S
SAMPLES_PER_AGE: Final = 30.0


def checked_pause(sample_s: float) -> float:
    """Return the longest pause between two samples; raise `SettingsError` if it is out of its bounds."""
    if not SAMPLE_S_MIN <= sample_s <= SAMPLE_S_MAX:
        raise SettingsError(
            "no such pause between samples",
            got=f"sample_s={sample_s}",
            allowed=f"{SAMPLE_S_MIN:g} to {SAMPLE_S_MAX:g} s",
        )
    return sample_s


def pause_of(age_s: float, sample_s: float) -> float:
    """Return how long the next sample of an incarnation of that age waits, seconds."""
    return min(sample_s, max(SAMPLE_S_MIN, age_s / SAMPLES_PER_AGE))


def sample_of(beat: Beat) -> dict[str, Any]:
    """Return the fields of the `sample` event of a heartbeat; floats keep as many digits as a curve shows."""
    return {
        "incarnation": beat.incarnation,
        "state": beat.state,
        "step": beat.step,
        "step_s": round(beat.step_s, 6),
        "tokens": beat.tokens,
        "tokens_per_s": round(beat.tokens_per_s, 3),
        "loss": None if beat.loss is None else round(beat.loss, 6),
        "overhead": round(beat.overhead, 6),
        "lag_versions": beat.lag_versions,
        "superseded": beat.superseded,
        "moved": beat.moved,
    }
