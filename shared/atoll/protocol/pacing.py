r"""The rhythm of a fragment: one beat per H median steps, staggered over the fragments of a run.

Beats of one fragment are an interval apart, and those of P fragments interval / P. A call rarely comes on its beat: a timer
is late, a commit or an outage took long, a learner's farewell opens a round before its time. Such a call counts for the
nearest beat,

.. math::

    beat = due + I \cdot \mathrm{round}\left(\frac{at - due}{I}\right)

and the next call is due one interval after that beat, which is half an interval to one and a half after the call. If it
were due one interval after the call itself, an event that moves all fragments at once (a leaver, an outage) would end the
staggering for good: all rounds of the run would coincide from then on.
"""

from __future__ import annotations

EARLIER_SHARE = 0.25
RECALL_STEPS = 2.0
RECALL_S_MIN = 0.5


def beat_s(at_s: float, due_s: float | None, interval_s: float) -> float:
    """Return the beat that a call at `at_s` counts for; the first call begins the rhythm."""
    if due_s is None or interval_s <= 0.0:
        return at_s
    return due_s + interval_s * round((at_s - due_s) / interval_s)


def comes_earlier(due_s: float | None, wanted_s: float, interval_s: float) -> bool:
    """Return whether to move a beat up: there is none yet, or steps have become much shorter."""
    return due_s is None or due_s - wanted_s > EARLIER_SHARE * interval_s


def recall_s(at_s: float, step_s: float) -> float:
    """Return when a round that was called at `at_s` and is still below its quorum is called again."""
    return at_s + max(RECALL_S_MIN, RECALL_STEPS * step_s)
