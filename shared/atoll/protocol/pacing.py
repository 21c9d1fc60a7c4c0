r"""The rhythm of a fragment: one beat per H median steps, staggered over the fragments of a run.

Beats of one fragment are an interval apart, and those of P fragments interval / P. A call rarely comes on its beat: a timer
is late, a commit or an outage took long, a learner's farewell opens a round before its time. Then the call stands for the
beat that is nearest to it,

.. math::

    beat = due + I \cdot \mathrm{round}\left(\frac{at - due}{I}\right)

and the next one is due an interval after that beat: half an interval to one and a half after the call. Were it due an interval
after the call itself, whatever moves all fragments at once, a leaver or an outage, would end the staggering for good,
and all rounds of the run would fall together from then on.
"""

from __future__ import annotations

EARLIER_SHARE = 0.25
RECALL_STEPS = 2.0
RECALL_S_MIN = 0.5


def beat_s(at_s: float, due_s: float | None, interval_s: float) -> float:
    """Return the beat that a call at `at_s` stands for; the call itself begins a rhythm where there is none."""
    if due_s is None or interval_s <= 0.0:
        return at_s
    return due_s + interval_s * round((at_s - due_s) / interval_s)


def comes_earlier(due_s: float | None, wanted_s: float, interval_s: float) -> bool:
    """Return whether a beat is to be moved up: there is none yet, or steps have become so much shorter that it pays."""
    return due_s is None or due_s - wanted_s > EARLIER_SHARE * interval_s


def recall_s(at_s: float, step_s: float) -> float:
    """Return when a round that was called at `at_s` and is still below its quorum is called again."""
    return at_s + max(RECALL_S_MIN, RECALL_STEPS * step_s)
