"""The processes of `ends`: a shard and learners as they are, which also move bare bytes when they are told to.

Each process is a real one: the shard serves its run, a learner joins it and steps, with a pause for a step. What they do is
noted by wrapping methods of theirs (`SHARD`, `LEARNER`): a stage, the version it belongs to where that is known, when it
began and when it ended, by a clock that all processes of a machine share. Notes go to the conductor as they come.

The bare parts are done in the same processes, over a bus of another run on the same broker, in the pause between two
rounds. An order is a name and what it needs; the answer is when its work began and when it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import msgspec
import numpy as np

from atoll.base.buffer_pool import Vector
from atoll.base.loop_thread import LoopThread
from atoll.bus.interface import Bus
from atoll.bus.nats.bus import JetStreamBus
from atoll.bus.streams import GIB, Places
from atoll.client import driver, step_hook
from atoll.client.join import join
from atoll.client.pushing import Pusher
from atoll.codec import KEYFRAME, Encoded, format_of, frame_bytes
from atoll.merge.correction import MomentumReference, correction_of
from atoll.merge.fold import FragmentFold
from atoll.merge.global_update import GlobalUpdate
from atoll.merge.norms import slice_norms, validated_norms
from atoll.merge.outer import MOMENTUM, make_outer
from atoll.model.layout import TensorSpec, plan_layout
from atoll.protocol.settings import ProtocolSettings
from atoll.wire.blobs import BlobRef, Download
from atoll.wire.subjects import Subjects
from atoll_synchronizer.aggregator import Aggregator
from atoll_synchronizer.garbage_collector import GarbageCollector
from atoll_synchronizer.intake import PendingAcknowledgements
from atoll_synchronizer.process import serve_run
from atoll_synchronizer.service import ShardService
from atoll_synchronizer.store import CommitAttempt, ShardStore
from benchmarks.lib.compiled import compile_kernels

TENSORS, ROWS, COLUMNS = 5, 5120, 1024
ELEMENTS = TENSORS * ROWS * COLUMNS
STEP_S = 0.02
LENGTH = 1e-3
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class EndsScene:
    """What all processes of one run are told: where the broker is, what the run agrees on, how many learners, a seed."""

    url: str
    run: str
    protocol: ProtocolSettings
    learners: int
    seed: int

    @property
    def bare(self) -> str:
        """Return the run whose streams the bare parts use."""
        return f"{self.run}-bare"


@dataclass(frozen=True, slots=True)
class RoleNote:
    """That somebody did something from `began_s` to `ended_s`; `version` is -1 where it does not say."""

    stage: str
    version: int
    began_s: float
    ended_s: float


class TimedStage(NamedTuple):
    """Method or function `name` of `owner` is a stage of a round; `version` finds its version in its result and arguments."""

    owner: Any
    name: str
    stage: str
    version: Callable[..., int] = lambda *_: -1


SHARD = (
    TimedStage(ShardService, "_call", "call", lambda _, __, action: action.version),
    TimedStage(Aggregator, "fetch", "fetch and check", lambda _, __, ___, manifest: manifest.base_version),
    TimedStage(Aggregator, "fold", "fold"),
    TimedStage(Aggregator, "merged", "merged"),
    TimedStage(GlobalUpdate, "step", "outer step"),
    TimedStage(CommitAttempt, "stored", "store"),
    TimedStage(GarbageCollector, "remove", "purge"),
    TimedStage(PendingAcknowledgements, "acknowledge", "acknowledge"),
    TimedStage(ShardStore, "_write", "head", lambda _, __, head, *___: head.version - 1),
)
LEARNER = (
    TimedStage(driver, "gather", "gather"),
    TimedStage(Pusher, "_store", "encode and push", lambda _, __, action, *___: action.base_version),
    TimedStage(Pusher, "_queue", "manifest", lambda _, __, action, *___: action.base_version),
    TimedStage(driver, "fetch_newest", "read", lambda frame, *_: frame.version - 1 if frame else -1),
    TimedStage(step_hook, "adopt", "adopt", lambda _, __, ___, ____, ready: ready[0].frame.version - 1),
)


def noted(watched: TimedStage, notes: Connection) -> None:
    """Have a stage say when it began and ended."""
    original = getattr(watched.owner, watched.name)

    def say(began_s: float, done: Any, arguments: tuple[Any, ...]) -> None:  # noqa: ANN401
        ended_s = time.monotonic()
        with _LOCK:
            notes.send(RoleNote(watched.stage, watched.version(done, *arguments), began_s, ended_s))

    @functools.wraps(original)
    async def later(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        began_s = time.monotonic()
        done = await original(*arguments, **named)
        say(began_s, done, arguments)
        return done

    @functools.wraps(original)
    def at_once(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401
        began_s = time.monotonic()
        done = original(*arguments, **named)
        say(began_s, done, arguments)
        return done

    setattr(watched.owner, watched.name, later if asyncio.iscoroutinefunction(original) else at_once)


def obey(
    scene: EndsScene, wire: Connection, verbs: Mapping[str, Callable[[Bus, Any], Coroutine[Any, Any, Any]]]
) -> None:
    """Do what is ordered, one after the other, until told to stop; answers go back by the same wire."""

    async def orders() -> None:
        bus = await JetStreamBus.open(scene.url, scene.bare, name="bare")
        await bus.provision(8 * GIB)
        await bus.fit(Places((0,), 1, keeps_first=False))  # each round writes the same stems again
        wire.send("ready")
        while True:
            order = await asyncio.to_thread(wire.recv)
            if order is None:
                break
            verb, what = order
            began_s = time.monotonic()
            answer = await verbs[verb](bus, what)
            wire.send((began_s, time.monotonic(), answer))
        await bus.close()

    asyncio.run(orders())


async def put(bus: Bus, what: list[tuple[str, int]]) -> list[BlobRef]:
    """Store blobs of so many random bytes under these stems, side by side."""
    return list(await asyncio.gather(*(bus.put_blob(stem, _bytes(size)) for stem, size in what)))


async def get(bus: Bus, what: list[BlobRef]) -> None:
    """Read blobs, side by side, and keep each until it is whole."""

    async def one(ref: BlobRef) -> None:
        async with contextlib.aclosing(bus.pieces(Download(ref, ref.size_bytes))) as pieces:
            kept = [portion async for portion in pieces]
        del kept

    await asyncio.gather(*(one(ref) for ref in what))


@functools.cache
def _bytes(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


# -- the shard --------------------------------------------------------------------------------------------------------


def be_shard(scene: EndsScene, wire: Connection, notes: Connection) -> None:
    """Serve the run's one shard until told to stop."""
    for watched in SHARD:
        noted(watched, notes)
    compile_kernels(codecs_of(scene))

    async def opener() -> JetStreamBus:
        return await JetStreamBus.open(scene.url, scene.run, name="shard")

    home = LoopThread("shard")
    home.submit(serve_run(opener, scene.run, shard=0))
    work = Arithmetic(scene)

    async def merge(bus: Bus, what: None) -> None:
        del bus, what
        await asyncio.to_thread(work.merge)

    async def sizes(bus: Bus, what: None) -> dict[str, int]:
        del bus, what
        return work.sizes()

    obey(scene, wire, {"put": put, "get": get, "merge": merge, "sizes": sizes})


class Arithmetic:
    """A round's arithmetic on vectors that are in memory: norms, correction, folds, result, outer step."""

    def __init__(self, scene: EndsScene) -> None:
        """Make contributions of as many learners, values and a state."""
        protocol, dice = scene.protocol, np.random.default_rng(scene.seed)
        self._protocol = protocol
        self._layout = plan_layout([TensorSpec(f"w{n}", (ROWS, COLUMNS), "float32") for n in range(TENSORS)], 1)
        self._slices = self._layout.slices(0)
        form = format_of(protocol.codec_up)

        def draw(length: float) -> Vector:
            return np.multiply(dice.standard_normal(ELEMENTS, np.float32), np.float32(length))

        self._sent = [Encoded.of(draw(LENGTH), form) for _ in range(scene.learners)]
        self._norms = [slice_norms(self._slices, one) for one in self._sent]
        self._values = draw(1.0)
        self._advance = GlobalUpdate(make_outer(protocol.outer, protocol.outer_lr, protocol.outer_momentum), protocol)
        self._state = self._advance.init(self._values)
        if MOMENTUM in self._state:
            self._state |= {MOMENTUM: draw(LENGTH)}

    def merge(self) -> None:
        """Do it; nothing of ours changes."""
        fold, correction = FragmentFold(self._slices, self._protocol.merge), correction_of(self._protocol)
        momentum_reference = None if correction is None else MomentumReference.of(self._state[MOMENTUM], self._slices)
        for sent, claimed in zip(self._sent, self._norms, strict=True):
            norms = validated_norms(slice_norms(self._slices, sent), self._slices, claimed, self._protocol.norm_max)
            corrections = None
            if correction is not None and momentum_reference is not None:
                corrections = correction.corrections(sent, norms, momentum_reference, self._slices)
            fold.add(sent, norms, 1.0, 1.0, corrections)
        self._advance.step(self._values, fold.result().pseudo_gradient, self._state)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of a contribution, of a frame and of the state."""
        up, down = (frame_bytes(ELEMENTS, codec) for codec in (self._protocol.codec_up, self._protocol.codec_down))
        return {"contribution": up, "frame": down, "state": sum(array.nbytes for array in self._state.values())}


# -- a learner --------------------------------------------------------------------------------------------------------


def be_learner(scene: EndsScene, wire: Connection, notes: Connection, number: int) -> None:
    """Join and step until told to stop: a step is a pause, and the first after an adoption moves every parameter."""
    for watched in LEARNER:
        noted(watched, notes)
    compile_kernels(codecs_of(scene))
    stopped = threading.Event()
    training = threading.Thread(target=train, args=(scene, number, stopped))
    training.start()
    obey(scene, wire, {"put": put, "get": get})
    stopped.set()
    training.join()


def train(scene: EndsScene, number: int, stopped: threading.Event) -> None:
    """Be the training thread; nobody may write to its arrays, as to JAX's, so that no copy of them is needed."""
    dice = np.random.default_rng((scene.seed, number))
    shapes = {f"w{n}": (ROWS, COLUMNS) for n in range(TENSORS)}
    moves = {name: np.float32(LENGTH) * dice.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    origin = fixed({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    island = join(scene.url, run=scene.run, learner=f"l{number}", params=origin, protocol=scene.protocol)
    params, before = island.params, None
    while not stopped.is_set():
        if params is not before:
            params = fixed({name: values + moves[name] for name, values in params.items()})
        time.sleep(STEP_S)
        before = params
        params = island.step(params, tokens=10, loss=1.0)
    with contextlib.suppress(Exception):
        island.close(drain_s=1.0)


def fixed(arrays: dict[str, Vector]) -> dict[str, Vector]:
    """Make arrays that nobody may write to."""
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


def settings(learners: int, codecs: tuple[str, str], interval_steps: int) -> ProtocolSettings:
    """Return the agreement of a run: one fragment, whose rounds wait for everybody; all else as by default."""
    asked: dict[str, object] = {"fragments": 1, "shards": 1, "quorum": learners, "interval_steps": interval_steps}
    asked |= {"codec_up": codecs[0], "codec_down": codecs[1]}
    return msgspec.convert(asked, ProtocolSettings).check(learners)


def codecs_of(scene: EndsScene) -> set[str]:
    """Return the formats of this scene's frames: contributions, deltas, keyframes."""
    return {scene.protocol.codec_up, scene.protocol.codec_down, KEYFRAME}


def stem(scene: EndsScene, what: str, number: int) -> str:
    """Return where a bare blob lies: contributions and all else are streams of their own, as in a run."""
    subjects = Subjects(scene.bare)
    if what == "contribution":
        return subjects.contribution_stem(f"l{number}", 0, 1, 1, "0" * 16)
    return subjects.global_stem(0, 1, f"{what}{number}")
