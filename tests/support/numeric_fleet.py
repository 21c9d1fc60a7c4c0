"""A fleet that really trains, in virtual time: the machines and the arithmetic of a run around learners in NumPy.

One shard of the production machine, its folds and outer steps (`RoundMerge`, `GlobalUpdate`), and learners around the
production island: each trains a small classifier on its own classes. Messages take no time, steps do. So minutes of a run are
seconds of a test, and the same every time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from atoll.base.large_arrays import Vector
from atoll.codec.encoded import Encoded
from atoll.merge.fold import l2_norm, slice_norms
from atoll.merge.outer import State, make_outer
from atoll.merge.round_merge import RoundMerge, update_of
from atoll.model.layout import Layout, TensorSpec, plan_layout
from atoll.protocol import events
from atoll.protocol.island import Island
from atoll.protocol.settings import ProtocolSettings
from atoll.protocol.shard import Shard

FEATURES: Final = 64
CLASSES: Final = 10
SAMPLES: Final = 1200
BATCH: Final = 32

Array = npt.NDArray[np.float32]
Update = Callable[[Vector], Vector]
"""An inner optimizer: from a gradient to the change of the parameters."""


def samples(seed: int = 0) -> tuple[Array, npt.NDArray[np.int64]]:
    """Return points around ten centres, some of them near another one, and their classes."""
    draw = np.random.default_rng(seed)
    centres = draw.random((CLASSES, FEATURES), dtype=np.float32)
    labels = draw.integers(0, CLASSES, SAMPLES)
    points = centres[labels] + draw.normal(scale=0.35, size=(SAMPLES, FEATURES)).astype(np.float32)
    return points.astype(np.float32), labels


def adam(rate: float = 1e-3) -> Update:
    first: Any = 0.0
    second: Any = 0.0
    count = itertools.count(1)

    def update(gradient: Vector) -> Vector:
        nonlocal first, second
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        step = next(count)
        change: Vector = -rate * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        return change.astype(np.float32)

    return update


def sgd(rate: float = 0.1) -> Update:
    return lambda gradient: np.float32(-rate) * gradient


class SmallClassifier:
    """Two layers of weights in one flat vector: its layout, its values at first, its gradient."""

    def __init__(self, fragments: int, seed: int = 0) -> None:
        self.shapes = ((FEATURES, FEATURES), (FEATURES, CLASSES))
        tensors = [TensorSpec(f"w{number}", shape, "float32") for number, shape in enumerate(self.shapes)]
        self.layout: Layout = plan_layout(tensors, fragments)
        draw = np.random.default_rng(seed)
        self.first = np.concatenate([0.1 * draw.normal(size=a * b) for a, b in self.shapes]).astype(np.float32)
        sizes = self.layout.fragment_sizes()
        ends = np.cumsum(sizes)
        self.bounds = [slice(int(end) - size, int(end)) for end, size in zip(ends, sizes, strict=True)]
        self.points, self.labels = samples()

    def weights(self, values: Vector) -> tuple[Array, Array]:
        """Return the two layers; a fragment is a stretch of both on one line."""
        edge = self.shapes[0][0] * self.shapes[0][1]
        return values[:edge].reshape(self.shapes[0]), values[edge:].reshape(self.shapes[1])

    def gradient(self, values: Vector, chosen: npt.NDArray[np.int64]) -> Vector:
        """Return the gradient of the mean cross-entropy over some samples."""
        inner, outer = self.weights(values)
        points, labels = self.points[chosen], self.labels[chosen]
        hidden = np.maximum(points @ inner, 0.0)
        logits = hidden @ outer
        logits = np.exp(logits - logits.max(axis=1, keepdims=True))
        error = logits / logits.sum(axis=1, keepdims=True)
        error[np.arange(len(labels)), labels] -= 1.0
        error /= len(labels)
        back = (error @ outer.T) * (hidden > 0.0)
        return np.concatenate([(points.T @ back).ravel(), (hidden.T @ error).ravel()]).astype(np.float32)

    def accuracy(self, values: Vector) -> float:
        """Return the share of all samples, of all classes, that are told right."""
        inner, outer = self.weights(values)
        return float(((np.maximum(self.points @ inner, 0.0) @ outer).argmax(axis=1) == self.labels).mean())


@dataclass(frozen=True)
class LearnerPlan:
    """A learner: its classes, when it joins (virtual seconds), a step's time, its batch, its optimizer, and when it leaves.

    It is away, and hears and sends nothing, between the two times of `away_s`; killed and back anew at those of `restarts_s`. A
    liar sends a `lie` in place of what it has learnt; a `flood` is tiny contributions at every step, final ones or not.
    """

    classes: Sequence[int] = range(CLASSES)
    joins_s: float = 0.0
    step_s: float = 0.01
    batch: int = BATCH
    optimizer: Callable[[], Update] = adam
    away_s: tuple[float, float] = (0.0, 0.0)
    restarts_s: tuple[float, float] = (math.inf, math.inf)
    lie: Callable[[Vector], Vector] | None = None
    flood: Literal["", "final", "not final"] = ""


@dataclass
class NumericLearner:
    """One incarnation of a learner: its machine, its values, what it measures its progress from."""

    name: str
    plan: LearnerPlan
    incarnation: int
    island: Island
    values: Vector
    anchors: list[Vector]
    update: Update
    draw: np.random.Generator
    mine: npt.NDArray[np.int64]
    sent: dict[int, Vector] = field(default_factory=dict)
    sent_of: dict[int, int] = field(default_factory=dict)
    ready: dict[int, tuple[int, Vector]] = field(default_factory=dict)
    beat_s: float = -1.0
    over: bool = False


class NumericFleet:
    """A run of learners with plans, for as long as `run` is told."""

    def __init__(self, plans: dict[str, LearnerPlan], **settings: object) -> None:
        agreed = {"fragments": 2, "interval_steps": 50, "shards": 1, "codec_up": "f32", "codec_down": "f32"} | settings
        self.settings = msgspec.convert(agreed, ProtocolSettings).check()
        self.model = SmallClassifier(self.settings.fragments)
        self.shard = Shard(self.settings, 0, dict.fromkeys(range(self.settings.fragments), 0))
        outer = make_outer(self.settings.outer, self.settings.outer_lr, self.settings.outer_momentum)
        self.updates = [update_of(self.settings, p, outer) for p in range(self.settings.fragments)]
        self.heads: list[tuple[int, Vector]] = [(0, self.model.first[part]) for part in self.model.bounds]
        self.states: list[State] = [
            update.init(values) for update, (_, values) in zip(self.updates, self.heads, strict=True)
        ]
        self.merges: dict[int, RoundMerge] = {}
        self.waiting: dict[events.PushKey, tuple[Encoded, list[float]]] = {}
        self.timers: dict[str, float] = {}
        self.lives: dict[str, NumericLearner] = {}
        self.now_s = 0.0
        self.refused: Counter[tuple[str, str]] = Counter()
        self.clipped: dict[str, list[float]] = {}
        self.merged: Counter[str] = Counter()
        self.isolated: list[str] = []
        self._plans = plans
        self._turns: list[tuple[float, int, str, int]] = []
        self._order = itertools.count()
        for name, plan in plans.items():
            self._at(plan.joins_s, name, 1)

    def run(self, until_s: float) -> NumericFleet:
        """Let virtual time pass until a moment."""
        while self._turns and self._turns[0][0] <= until_s:
            at_s, _, name, incarnation = heapq.heappop(self._turns)
            self._fire(at_s)
            self.now_s = at_s
            self._turn(name, incarnation)
        self._fire(until_s)
        return self

    def accuracy(self) -> float:
        """Return the accuracy of the global values."""
        return self.model.accuracy(np.concatenate([values for _, values in self.heads]))

    def _at(self, at_s: float, name: str, incarnation: int) -> None:
        heapq.heappush(self._turns, (at_s, next(self._order), name, incarnation))

    def _fire(self, until_s: float) -> None:
        while self.timers:
            name, due_s = min(self.timers.items(), key=lambda item: (item[1], item[0]))
            if due_s > until_s:
                break
            del self.timers[name]
            self.now_s = max(self.now_s, due_s)
            self._tell_shard(events.TimerFired(at_s=self.now_s, name=name))

    # --- learners -----------------------------------------------------------------------------------------------------

    def _turn(self, name: str, incarnation: int) -> None:
        plan, life = self._plans[name], self.lives.get(name)
        if life is None or life.incarnation < incarnation:
            life = self._join(name, plan, incarnation)
        elif life.incarnation > incarnation:
            return
        if incarnation == 1 and self.now_s >= plan.restarts_s[0]:
            del self.lives[name]
            self._at(plan.restarts_s[1], name, 2)
            return
        here = not plan.away_s[0] <= self.now_s < plan.away_s[1]
        if plan.flood:
            self._flood(life)
        else:
            self._step(life)
        if here:
            for fragment, (version, _) in enumerate(self.heads):  # what was missed while away
                if version > life.island.intervals[fragment].known:
                    self._tell(life, events.HeadHeard(at_s=self.now_s, fragment=fragment, version=version))
            if self.now_s >= life.beat_s + 0.5:
                self._beat(life)
        self._at(self.now_s + plan.step_s, name, incarnation)

    def _join(self, name: str, plan: LearnerPlan, incarnation: int) -> NumericLearner:
        values = np.concatenate([values for _, values in self.heads])
        anchors = [values[part].copy() for part in self.model.bounds]
        island = Island(self.settings, {p: version for p, (version, _) in enumerate(self.heads)})
        draw = np.random.default_rng([*name.encode(), incarnation])
        mine = np.flatnonzero(np.isin(self.model.labels, list(plan.classes)))
        life = self.lives[name] = NumericLearner(
            name, plan, incarnation, island, values, anchors, plan.optimizer(), draw, mine
        )
        return life

    def _step(self, life: NumericLearner) -> None:
        chosen = life.mine[life.draw.integers(0, len(life.mine), life.plan.batch)]
        life.values = life.values + life.update(self.model.gradient(life.values, chosen))
        self._tell(life, events.StepDone(at_s=self.now_s, tokens=life.plan.batch))

    def _flood(self, life: NumericLearner) -> None:
        """Send a contribution of next to nothing to every fragment, on its newest version, said to be of many steps."""
        for fragment, (version, values) in enumerate(self.heads):
            push = life.sent_of[fragment] = life.sent_of.get(fragment, 0) + 1
            vector = (1e-6 * life.draw.normal(size=values.size)).astype(np.float32)
            key = events.PushKey(life.name, life.incarnation, fragment, push)
            final = life.plan.flood == "final"
            self._send(key, vector, base_version=version, tokens=640, steps=20, trained_tokens=1 << 20, final=final)

    def _send(self, key: events.PushKey, vector: Vector, **claims: Any) -> None:  # noqa: ANN401  (numbers of a manifest)
        encoded = Encoded.exact(vector)
        self.waiting[key] = encoded, slice_norms(self.model.layout.slices(key.fragment), encoded)
        self._tell_shard(events.ContributionArrived(at_s=self.now_s, key=key, **claims))

    def _beat(self, life: NumericLearner) -> None:
        life.beat_s = self.now_s
        self._tell_shard(
            events.LearnerBeat(
                at_s=self.now_s,
                learner=life.name,
                incarnation=life.incarnation,
                training=True,
                step_s=life.plan.step_s,
                tokens=life.island.tokens,
                steps=life.island.steps,
                pushed=life.island.pushed,
                superseded=life.island.superseded,
            )
        )

    def _adopt(self, life: NumericLearner, action: events.Adopt) -> None:
        fragment, gone, part = action.fragment, action.overwrite, self.model.bounds[action.fragment]
        version, values = life.ready.pop(fragment)
        now = life.values.copy()
        since = life.sent[fragment] if action.since else life.anchors[fragment]
        carries = self.settings.adoption == "carry" and not gone
        # A push that overwriting would lose is sent first, on its old anchor.
        self._tell(life, events.Adopted(at_s=self.now_s, fragment=fragment, version=version, overwritten=gone))
        progress = now[part] - since if carries else 0.0
        now[part] = values + progress
        life.anchors[fragment], life.values = values.copy(), now
        life.sent.pop(fragment, None)

    def _tell(self, life: NumericLearner, fact: events.Fact) -> None:
        for action in life.island.handle(fact):
            if isinstance(action, events.Push):
                self._push(life, action)
            elif isinstance(action, events.Adopt):
                self._adopt(life, action)
            elif isinstance(action, events.FetchFragment):
                version, values = self.heads[action.fragment]
                life.ready[action.fragment] = version, values
                self._tell(life, events.FragmentFetched(at_s=self.now_s, fragment=action.fragment, version=version))

    def _push(self, life: NumericLearner, action: events.Push) -> None:
        part = self.model.bounds[action.fragment]
        vector = life.anchors[action.fragment] - life.values[part]
        life.sent[action.fragment] = life.values[part].copy()
        if life.plan.lie is not None:
            vector = life.plan.lie(vector)
        key = events.PushKey(life.name, life.incarnation, action.fragment, action.push)
        if action.keep:
            self._tell(life, events.SnapshotKept(at_s=self.now_s, fragment=action.fragment, push=action.push))
        self._tell(life, events.PushSettled(at_s=self.now_s, fragment=action.fragment, push=action.push))
        self._send(
            key,
            vector.astype(np.float32),
            base_version=action.base_version,
            tokens=action.tokens,
            steps=action.steps,
            trained_tokens=action.trained_tokens,
            final=action.final,
        )

    # --- the shard ----------------------------------------------------------------------------------------------------

    def _tell_shard(self, fact: events.Fact) -> None:
        for action in self.shard.handle(fact):
            self._do(action)

    def _do(self, action: events.Command) -> None:
        if isinstance(action, events.ArmTimer):
            self.timers[action.name] = action.due_s
        elif isinstance(action, events.PublishCall):
            self._call(action)
        elif isinstance(action, events.Fetch):
            self._read(action.key)
        elif isinstance(action, events.Fold):
            self._fold(action)
        elif isinstance(action, events.Commit):
            self._commit(action)
        elif isinstance(action, events.Keep):
            self._tell_shard(events.Kept(at_s=self.now_s, fragment=action.fragment))
        elif isinstance(action, events.Refuse):
            self._refuse(action)
        elif isinstance(action, events.Isolate):
            self.isolated.append(action.learner)

    def _call(self, action: events.PublishCall) -> None:
        call = events.CallHeard(
            at_s=self.now_s, fragment=action.fragment, version=action.version, attempt=action.attempt
        )
        for life in self._there():
            self._tell(life, call)

    def _read(self, key: events.PushKey) -> None:
        norm = float(np.hypot.reduce(self.waiting[key][1]))
        base_norm = l2_norm(self.heads[key.fragment][1])
        self._tell_shard(events.ContributionReady(at_s=self.now_s, key=key, norm=norm, base_norm=base_norm))

    def _refuse(self, action: events.Refuse) -> None:
        learner, incarnation, fragment, push = action.key
        self.refused[learner, action.reason] += 1
        self.waiting.pop(action.key, None)
        for life in self._there():
            if (life.name, life.incarnation) == (learner, incarnation):
                self._tell(
                    life, events.PushRefused(at_s=self.now_s, fragment=fragment, push=push, reason=action.reason)
                )

    def _there(self) -> list[NumericLearner]:
        return [life for life in self.lives.values() if not life.plan.away_s[0] <= self.now_s < life.plan.away_s[1]]

    def _fold(self, action: events.Fold) -> None:
        fragment = action.key.fragment
        if fragment not in self.merges:
            self.merges[fragment] = RoundMerge(self.settings, fragment, self.model.layout.slices(fragment))
        vector, norms = self.waiting.pop(action.key)
        self.merges[fragment].add(vector, norms, action, self.states[fragment])
        if action.scale < 1.0:
            self.clipped.setdefault(action.key.learner, []).append(action.scale)

    def _commit(self, action: events.Commit) -> None:
        fragment, version = action.fragment, action.base_version + 1
        result = self.merges.pop(fragment).result(self.states[fragment], version)
        new = self.updates[fragment].step(self.heads[fragment][1], result.pseudo_gradient, self.states[fragment])
        self.heads[fragment], self.states[fragment] = (version, new.values.copy()), new.state
        for share in action.shares:
            self.merged[share.key.learner] += share.tokens
        self._tell_shard(events.Committed(at_s=self.now_s, fragment=fragment, version=version))
