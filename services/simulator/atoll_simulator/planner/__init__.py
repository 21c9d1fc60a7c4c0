"""The planner: bytes, bandwidth, utilisation, goodput, time and cost of a run that has not started yet.

Pure arithmetic from a `Question` to a `PlanAnswer`; it measures nothing and sends nothing. `timeline` simulates compute
and communication as a graph like that of the literature, `utilisation` has the same in closed form, `traffic` asks the
production codecs for sizes, `failures` is the closed form of goodput, `cautions` says what cannot work.
"""

from __future__ import annotations

from atoll_simulator.planner.answer import PlanAnswer, answer, as_document, text
from atoll_simulator.planner.failures import Failures
from atoll_simulator.planner.question import PlanLinks, Prices, Question

__all__ = ["Failures", "PlanAnswer", "PlanLinks", "Prices", "Question", "answer", "as_document", "text"]
