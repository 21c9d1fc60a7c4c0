"""The planner: bytes, bandwidth, utilisation, goodput, time and cost of a run that nobody has started yet.

Pure arithmetic from a `Question` to an `Answer`; nothing is measured, nothing is sent. `timeline` simulates compute and
communication as a graph like the one the literature used, `utilisation` says the same in closed form, `traffic` asks
the production codecs for sizes, `failures` is the closed form of goodput, `cautions` says what cannot work.
"""

from __future__ import annotations

from atoll.plan.answer import Answer, answer, as_document
from atoll.plan.failures import Failures
from atoll.plan.question import Links, Prices, Question
from atoll.plan.text import text

__all__ = ["Answer", "Failures", "Links", "Prices", "Question", "answer", "as_document", "text"]
