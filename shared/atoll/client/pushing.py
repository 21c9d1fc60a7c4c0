"""Sends a pseudo-gradient to the broker: segment by segment while it is encoded, then the manifest that names it.

The pusher retries a push under the same id until it is durable, and sends acknowledged segments once. It may give a push up
only before it first sent the manifest, because after that the manifest may have arrived, and only when nothing got through
for some time. A small frame has no segments: its manifest carries it (`atoll.run.delta_chain`), and such a push is never
given up.

Frames are compressed unless the last one of their fragment has gone up fast (`FAST_BYTES_PER_S`). The host encodes segment
by segment while it sends; a device makes the whole pseudo-gradient first.

With `error_feedback` a learner keeps the rounding residual of its pseudo-gradient and adds it to the fragment's next one.
If a push is given up, the residual that it should have carried stays for the next push. If a shard refuses a push,
everything in it is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from atoll.base import large_arrays, spans
from atoll.base.clock import Clock, Identity, this_process
from atoll.base.errors import AccessDenied, BrokerUnavailable, BusError, StorageFull
from atoll.base.large_arrays import Vector
from atoll.base.retry import patiently
from atoll.bus.interface import Bus
from atoll.codec import Encoded, EncodedFrame, FrameEncoder, Framing, Read
from atoll.protocol.events import Push
from atoll.protocol.pacing import StepTimes
from atoll.run.delta_chain import is_inline
from atoll.wire.blobs import BlobRef, Upload
from atoll.wire.messages import Contribution, Member, PushNotes, RunRecord, encode
from atoll.wire.subjects import PUSH_NONCE_BYTES

PUSH_PATIENCE_S = 60.0
FAST_BYTES_PER_S = 128 << 20
"""zstd takes a seventh off a frame of four bits, at some 1 GB/s of a core here and twice that where it is read. On a link that
is faster than this, that costs more time than it saves."""
AWAY_OR_REFUSED = (BusError, BrokerUnavailable, StorageFull)


@dataclass(frozen=True, slots=True)
class SentFrame:
    """A frame as its manifest has it: its name, the `frame` if it travels inside, and the seconds of waiting for room."""

    blob: BlobRef
    frame: bytes = b""
    full_s: float = 0.0


@dataclass(slots=True)
class RoomWait:
    """The seconds for which something has waited because the broker had no room."""

    full_s: float = 0.0

    def hear(self, error: Exception, seconds: float) -> None:
        """Count an attempt that failed and is repeated."""
        self.full_s += seconds if isinstance(error, StorageFull) else 0.0


class Pusher:
    """Sends the pseudo-gradients of one incarnation."""

    def __init__(
        self,
        bus: Bus,
        run: RunRecord,
        member: Member,
        clock: Clock,
        steps: StepTimes | None = None,
        identity: Identity | None = None,
    ) -> None:
        self._bus = bus
        self._run = run
        self._member = member
        self._clock = clock
        self._subjects = run.subjects
        self._residues: dict[int, Any] = {}
        self._steps = steps
        self._nonce = (identity or this_process()).nonce
        self._began_at_s = clock.wall()
        self._adopted: dict[int, tuple[tuple[int, float], ...]] = {}
        self._sends_inline = not member.region
        self._sent_fast: set[int] = set()
        """Fragments of which the last push went up fast: they may lie on different brokers."""

    @property
    def fragments_fast(self) -> int:
        """Return how many fragments are no longer compressed."""
        return len(self._sent_fast)

    def note_adoption(self, fragment: int, version: int) -> None:
        """Note that the learner has just begun a local interval on this version."""
        # The former version stays known: a push of the values before this adoption may still be on its way.
        spans.instant(f"fragment {fragment} adopted", version=version)
        self._adopted[fragment] = (*self._adopted.get(fragment, ())[-1:], (version, self._clock.wall()))

    async def push(
        self, action: Push, origin: Vector, theta: Read, loss: Callable[[], Coroutine[Any, Any, float | None]]
    ) -> None:
        """Send `origin - theta`, flat float32, until its manifest is durable; `theta` is read while it is sent.

        Raises:
            FrameRejected: it would not arrive finite; nothing of it stays on the broker.
            BusError, BrokerUnavailable, StorageFull: it was given up.
        """
        began_s = self._clock.monotonic()
        fragment, protocol = action.fragment, self._run.protocol.of(action.fragment)
        rest = self._residues.pop(fragment, None)  # a concurrent push must not send it too
        kept = None if rest is None else np.asarray(rest)
        residue = np.empty(origin.size, dtype=np.float32) if protocol.error_feedback else None

        def pseudo_gradient(start: int, stop: int) -> Vector:
            here: Vector = np.subtract(origin[start:stop], theta(start, stop))
            large_arrays.release_pages(origin[start:stop])
            return here if kept is None else np.add(here, kept[start:stop], out=here)

        framing = Framing(origin.size, protocol.codec_up)
        slices, compress = self._run.layout.slices(fragment), fragment not in self._sent_fast
        encoder = FrameEncoder(framing, pseudo_gradient, slices, residue, compress=compress)
        sent = await self._send_frame(action, Upload(encoder), kept)
        await self._queue(action, sent, encoder.norms(), await loss(), began_s)
        self._keep(fragment, residue)

    async def push_made(
        self,
        action: Push,
        make: Callable[[Any], tuple[Encoded, Any]],
        loss: Callable[[], Coroutine[Any, Any, float | None]],
    ) -> None:
        """Send what `make` returns for the residual to add (or None), with the rounding residual, on any device.

        Raises `FrameRejected` and `RuntimeError` as `make` does, in a worker thread; the rest as `push`.
        """
        began_s, fragment = self._clock.monotonic(), action.fragment
        kept = self._residues.pop(fragment, None)
        try:
            vector, residue = await asyncio.to_thread(make, kept)
            codec, slices = self._run.protocol.of(fragment).codec_up, self._run.layout.slices(fragment)
            made = EncodedFrame(codec, vector, slices, compress=fragment not in self._sent_fast)
        except BaseException:
            self._keep(fragment, kept)
            raise
        sent = await self._send_frame(action, Upload(made), kept)
        await self._queue(action, sent, made.norms(), await loss(), began_s)
        self._keep(fragment, residue)

    def _keep(self, fragment: int, residue: Any) -> None:  # noqa: ANN401  (a NumPy or JAX array, or None)
        there = self._residues.get(fragment)
        if residue is not None:
            self._residues[fragment] = residue if there is None else there + residue

    def _notes(self, action: Push, began_s: float, full_s: float) -> PushNotes:
        began_at_s = dict(self._adopted.get(action.fragment, ())).get(action.base_version, self._began_at_s)
        return PushNotes(
            adopted_at_s=round(began_at_s, 3),
            step_s=0.0 if self._steps is None else round(self._steps.mean_s, 5),
            upload_s=self._since_s(began_s),
            full_s=round(full_s, 3),
        )

    def _since_s(self, began_s: float) -> float:
        return round(max(0.0, self._clock.monotonic() - began_s), 4)

    async def _send_frame(self, action: Push, upload: Upload, kept: Any) -> SentFrame:  # noqa: ANN401  (as in `_keep`)
        """Return what the manifest says of a frame: the frame itself, if it carries it, or where it is stored by now."""
        if self._sends_inline and is_inline(self._run, action.fragment):
            upload.collision_free = True  # also where it leaves its manifest: in an archive
            try:
                with spans.span(f"push fragment {action.fragment}", push=action.push, base=action.base_version):
                    frame = bytes(upload.make(0))
            except BaseException:
                self._keep(action.fragment, kept)
                raise
            return SentFrame(upload.ref(self._stem(action)), frame)
        return await self._store(action, upload, kept)

    def _stem(self, action: Push) -> str:
        member, nonce = self._member, self._nonce(PUSH_NONCE_BYTES)  # nobody is to know before where its chunks go
        return self._subjects.contribution_stem(member.learner, action.fragment, member.incarnation, action.push, nonce)

    async def _store(self, action: Push, upload: Upload, kept: Any) -> SentFrame:  # noqa: ANN401  (as in `_keep`)
        """Store the segments while sending may go on.

        If this fails, segments that get no manifest are removed, or age out, and the residual that the push should have
        carried is `kept` for the next one.
        """
        stem, room = self._stem(action), RoomWait()
        self._sent_fast.discard(action.fragment)
        try:
            # Encoding overlaps with sending: each piece is made when it is sent.
            with spans.span(f"push fragment {action.fragment}", push=action.push, base=action.base_version):
                blob = await patiently(
                    lambda: self._bus.put_blob(stem, upload),
                    "a contribution's pieces",
                    on=AWAY_OR_REFUSED,
                    patience_s=PUSH_PATIENCE_S,
                    progress=lambda: len(upload.missing()),
                    now_s=self._clock.monotonic,
                    hindered=room.hear,
                )
        except BaseException:
            self._keep(action.fragment, kept)
            # Behind a locked door a learner may remove nothing; the broker drops chunks that are two hours old.
            with contextlib.suppress(BusError, BrokerUnavailable, StorageFull, AccessDenied):
                await self._bus.purge(f"{stem}.*")
            raise
        if blob.size_bytes > FAST_BYTES_PER_S * upload.busy_s > 0.0:
            self._sent_fast.add(action.fragment)
        return SentFrame(blob, full_s=room.full_s)

    async def _queue(
        self, action: Push, sent: SentFrame, norms: list[float], loss: float | None, began_s: float
    ) -> None:
        self._bus.stats.frame_bytes_up += sent.blob.size_bytes
        self._bus.stats.blob_bytes_up += len(sent.frame)
        member, p = self._member, action.fragment
        manifest = Contribution(
            learner=member.learner,
            incarnation=member.incarnation,
            fragment=p,
            push=action.push,
            base_version=action.base_version,
            tokens=action.tokens,
            steps=action.steps,
            trained_tokens=action.trained_tokens,
            loss=loss,
            norms=tuple(norms),
            layout=self._run.layout.fingerprint,
            run_nonce=self._run.nonce,
            blob=sent.blob,
            frame=sent.frame,
            final=action.final,
            cause_id=action.cause_id,
            sent_at_s=self._clock.wall(),
            notes=self._notes(action, began_s, sent.full_s),
        )
        subject = self._subjects.contribution(self._run.protocol.shard_of(p), p, member.learner)
        # Not the incarnation: a rebuilt run may give it out again, and the queue would then confuse the two pushes.
        msg_id = f"{member.nonce}-{p}-{action.push}"
        info = {
            "incarnation": member.incarnation,
            "fragment": p,
            "push": action.push,
            "base": action.base_version,
            "tokens": action.tokens,
        }
        room = RoomWait()

        def manifest_bytes() -> bytes:
            # Of an inline frame, each attempt is an upload, and tells how long those before it took.
            if not sent.frame:
                return encode(manifest)
            waited_s = round(room.full_s, 3)
            notes = msgspec.structs.replace(manifest.notes, upload_s=self._since_s(began_s), full_s=waited_s)
            return encode(msgspec.structs.replace(manifest, notes=notes))

        with spans.span(f"queue manifest of fragment {p}", push=action.push, base=action.base_version):
            await patiently(
                lambda: self._bus.publish(subject, manifest_bytes(), msg_id=msg_id, info=info),
                "a contribution's manifest",
                on=AWAY_OR_REFUSED,
                hindered=room.hear,
            )
