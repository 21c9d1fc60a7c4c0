"""A view of a run that has its history as well: who has followed a run to its end reads the event log no second time."""

from __future__ import annotations

from dataclasses import dataclass, field

from atoll.run.view import RunView
from atoll.story.history import History
from atoll.wire.messages import Event


@dataclass(slots=True)
class HistoryView(RunView):
    """A view with the history of the same run, fed by the same events."""

    history: History = field(default_factory=History)

    def on_event(self, event: Event) -> None:
        """Let both take an entry of the event log; a round, of which both keep very many, they share."""
        commits = self.commits
        RunView.on_event(self, event)
        self.history.on_event(event, self.rounds[-1] if self.commits > commits else None)
