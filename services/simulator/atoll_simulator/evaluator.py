"""Evaluates the merged model on held-out text at fixed distances in merged tokens, whatever the clock says.

The evaluator stands beside the broker and takes no virtual time, so that measuring changes nothing. It measures at the
round of the event log that crosses the next distance. So it sees the model of that moment, at the same merged tokens in
every run, counted as the report counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from atoll.base.clock import Clock
from atoll.base.errors import PeerMisbehaved
from atoll.base.logs import get
from atoll.bus.interface import Bus, CoreMessage
from atoll.run.event_fields import RoundView, fields_of
from atoll.run.merged_model import read_merged
from atoll.run.record import read_run
from atoll.run.view import RunView
from atoll.wire.event_log import EVALUATOR, event_of
from atoll.wire.messages import encode, event
from atoll.wire.subjects import Subjects
from atoll_learner.evaluations import measured
from atoll_learner.model import Params

log = get(__name__)

NEWS_WAITING_MAX: Final = 1 << 16
Measure = Callable[[Params], float]


class SimulatedEvaluator:
    """Measures a run of `fragments` into its event log: at its beginning, then every `every_tokens` merged tokens."""

    def __init__(  # noqa: PLR0913  (the one place that puts it together)
        self, bus: Bus, run: str, fragments: int, every_tokens: int, *, view: RunView, clock: Clock, measure: Measure
    ) -> None:
        """Measure nothing yet; `bus` has no link, so that reading takes no time."""
        self._bus = bus
        self._subjects = Subjects(run)
        self._fragments = fragments
        self._every_tokens = max(1, every_tokens)
        self._view = view
        self._clock = clock
        self._measure = measure
        self._token_fragments = 0
        self._next_tokens = 0
        self._measured = 0

    async def follow(self) -> None:
        """Measure at every distance until cancelled."""
        news = await self._bus.listen(self._subjects.tap("ev.*.*"), len_max=NEWS_WAITING_MAX)
        async for core_message in news:
            if await self._crosses(core_message):
                await self.evaluate()

    async def _crosses(self, core_message: CoreMessage) -> bool:
        """Count a round and return whether it crosses the next distance; the first learner to join finds the origin."""
        kind = core_message.subject.split(".")[-2]
        if kind == "round":
            after = int(core_message.headers["Nats-Sequence"]) - 1
            entry = (await self._bus.replay(self._subjects.event(kind, "*"), after=after, limit=1))[0]
            try:
                self._token_fragments += fields_of(event_of(entry.subject, entry.data), RoundView).tokens
            except PeerMisbehaved as error:
                log.warning("round.refused", subject=entry.subject, reason=str(error))
                return False
        elif kind != "joined":
            return False
        merged_tokens = self._token_fragments // self._fragments
        if merged_tokens < self._next_tokens:
            return False
        self._next_tokens = (merged_tokens // self._every_tokens + 1) * self._every_tokens
        return True

    async def evaluate(self) -> None:
        """Measure the present model, and write the result to the event log."""
        run = await read_run(self._bus, self._subjects)
        if run is None:
            return
        fields = measured(await read_merged(self._bus, run), self._measure, self._view.run_tokens) | {"took_s": 0.0}
        self._measured += 1
        line = encode(event("validation", EVALUATOR, self._clock.wall(), **fields))
        msg_id, info = f"validation-{self._measured}", {"bpb": fields["bits_per_byte"]}
        await self._bus.publish(self._subjects.event("validation", EVALUATOR), line, msg_id=msg_id, info=info)
        log.info("model.evaluated", **fields)
