"""A queued message without a queue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class QueuedBytes:
    """A message in a shard's hands."""

    subject: str
    data: bytes
    redelivered: bool = False

    async def ack(self) -> None:
        """Settle it."""

    async def drop(self) -> None:
        """Settle it without a word."""

    async def hold(self) -> None:
        """Keep it."""

    async def release(self) -> None:
        """Give it back."""
