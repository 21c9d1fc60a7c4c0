"""The runs that a broker keeps, as their streams say: how large, how old; and how one is removed.

A run is what its streams are named after (`atoll.bus.streams`). One that lacks some of its streams is a run, too: a founder
that died in between left it, and it can be removed like any other.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from atoll.base.errors import PeerMisbehaved
from atoll.bus.nats.jetstream_api import NO_STREAM, ApiRefusal, JetStream
from atoll.bus.streams import live_plan, stream_plan

_NAME: Final = re.compile(r"atoll_([A-Za-z0-9_-]{1,64})_([A-Z]{2,3})")
_KINDS: Final = frozenset(plan.name.rpartition("_")[2] for plan in (*stream_plan("r"), live_plan("r")))


@dataclass(frozen=True, slots=True)
class StoredRun:
    """What a broker keeps of one run: streams, messages, bytes on disk, the sum of the bounds.

    `written_s` is when the newest message was stored, in seconds since the epoch, None if there is none.
    """

    run: str
    streams: int
    messages: int
    size_bytes: int
    bounds_bytes: int
    written_s: float | None

    def beside(self, other: StoredRun) -> StoredRun:
        """Return this run with what another broker keeps of it."""
        written = [at_s for at_s in (self.written_s, other.written_s) if at_s is not None]
        return replace(
            self,
            streams=self.streams + other.streams,
            messages=self.messages + other.messages,
            size_bytes=self.size_bytes + other.size_bytes,
            bounds_bytes=self.bounds_bytes + other.bounds_bytes,
            written_s=max(written, default=None),
        )


async def stored_runs(jetstream: JetStream) -> list[StoredRun]:
    """Return the runs of a broker by name; in the connection's loop."""
    streams: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    offset, total = 0, 1
    while offset < total:
        page = await jetstream.api("STREAM.LIST", {"offset": offset, "subject": "atoll.>"})
        found = page.get("streams") or []
        for stream in found:
            named = _NAME.fullmatch(str(stream.get("config", {}).get("name", "")))
            if named is not None and named[2] in _KINDS:
                streams[named[1]].append(stream)
        offset, total = offset + len(found), int(page.get("total", 0)) if found else 0
    return [_run(name, streams[name]) for name in sorted(streams)]


async def remove_run(jetstream: JetStream, run: str) -> int:
    """Delete all streams of a run and return how many there were; in the connection's loop.

    The stream of records goes first: from then on nobody takes the rest for a run.
    """
    removed = 0
    for plan in sorted((*stream_plan(run), live_plan(run)), key=lambda plan: not plan.name.endswith("_GL")):
        try:
            await jetstream.api(f"STREAM.DELETE.{plan.name}")
        except ApiRefusal as reason:
            if reason.err_code != NO_STREAM:
                raise reason.public(plan.name) from reason
        else:
            removed += 1
    return removed


def _run(name: str, streams: list[Mapping[str, Any]]) -> StoredRun:
    states = [stream.get("state", {}) for stream in streams]
    written = [_at_s(state["last_ts"]) for state in states if state.get("messages") and "last_ts" in state]
    return StoredRun(
        run=name,
        streams=len(streams),
        messages=sum(int(state.get("messages", 0)) for state in states),
        size_bytes=sum(int(state.get("bytes", 0)) for state in states),
        bounds_bytes=sum(max(0, int(stream["config"].get("max_bytes", 0))) for stream in streams),
        written_s=max(written, default=None),
    )


def _at_s(text: str) -> float:
    """Return a broker's time of day."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError as error:
        raise PeerMisbehaved("the broker gave no time", got=text) from error
