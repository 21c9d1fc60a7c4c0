"""Makes retained rounds once more: the shards' decisions and arithmetic, to the same bits, or where and why they differ.

    facts ──► machine ──► folds, commit ─┐
    manifests, frames ──► validated ─────┼──► RoundMerge ──► GlobalUpdate ──► digests of values and outer state = the head's?
    the version before, or an anchor ────┘

1. A new machine is given the retained facts of a tenure (`atoll.protocol.recorder`). The same code meets the same facts, so it
   commands this commit of these contributions with these weights, and this ledger (`decisions_of`).
2. Each contribution's frame has the bytes that its manifest names, is validated as by the shard, and is what the head lists.
3. The arithmetic (`atoll.merge.round_merge`, the shard's own) gives the digests of the head. Each tenure goes on from what was
   stored, as its owner did.

A round whose inputs are not those of the run is not computed, and what stands on it is not either, until an anchor: a shard
stored values there. The other checks go on, so one damaged contribution hides no second one. One fragment is in memory at a
time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from atoll.archive.rounds import Anchor, RetainedFold, RetainedRound, RoundName, RoundStore
from atoll.base.errors import AtollError, CheckpointError, FrameRejected
from atoll.base.large_arrays import Vector
from atoll.base.parallel import parts
from atoll.codec import KEYFRAME, Encoded, FrameDecoder, PackedArrays, StoredFrame, decode_frame
from atoll.codec.arrays import unpack_arrays
from atoll.merge.fold import l2_norm, validated_norms
from atoll.merge.global_update import GlobalUpdate, state_bytes_max
from atoll.merge.outer import OuterOptimizer, State, make_outer
from atoll.merge.round_merge import RoundMerge, update_of
from atoll.protocol.events import Commit, Fold, PushKey, Unfold
from atoll.protocol.recorder import Replay
from atoll.protocol.settings import NESTEROV
from atoll.run.delta_chain import digest_of_values
from atoll.run.heads import head_nonce
from atoll.wire.blobs import digest_of
from atoll.wire.messages import Included, RunRecord


@dataclass(frozen=True, slots=True)
class ReplayedRound:
    """One round: the contributions that were folded, whether its arithmetic was done, and what differs.

    `digest` is that of the values by its head.
    """

    fragment: int
    version: int
    epoch: int
    pushes: tuple[PushKey, ...]
    computed: bool
    differences: tuple[Difference, ...] = ()
    digest: str = ""

    @property
    def identical(self) -> bool:
        """Return whether the same decision and the same bits came out."""
        return self.computed and not self.differences


@dataclass(slots=True)
class _Standing:
    """The version that a chain has come to, None where it could not be computed; why not is in `lost`."""

    version: int = 0
    epoch: int = 0
    values: Vector | None = None
    state: State = field(default_factory=dict)
    lost: str = ""

    def enter(self, epoch: int, update: GlobalUpdate) -> None:
        """Enter a tenure: its owner has taken the fragment over as it was stored."""
        if self.values is not None and epoch != self.epoch:
            self.state = update.taken_over(self.values, update.stored(self.state))
        self.epoch = epoch


class RunReplay:
    """The retained rounds of one founding, replayed; reads from the archive only."""

    def __init__(self, rounds: RoundStore, own_outer: str = NESTEROV) -> None:
        """Read the run record; raise `CheckpointError` if nothing was retained.

        `own_outer` is the outer optimizer of this process's settings; `SettingsError` if the run's is other code.
        """
        self.rounds = rounds
        self.run: RunRecord = rounds.run()
        protocol = self.run.protocol
        self._outer: OuterOptimizer = make_outer(protocol.outer, protocol.outer_lr, protocol.outer_momentum, own_outer)
        self.tenures: dict[tuple[int, int], TenureDecisions] = {}
        """Decisions by shard and epoch, of the rounds replayed until now."""
        self._read_to_the_end: set[tuple[int, int]] = set()
        self.bytes_read = 0

    def fragment(self, fragment: int, until: int | None = None) -> Iterator[ReplayedRound]:
        """Replay the rounds of a fragment in order, to version `until` at most."""
        standing = _Standing()
        names = [name for name in self.rounds.rounds(fragment) if until is None or name.version <= until]
        for name, made, fault in self._chain(names):
            yield self._replayed(name, made, fault, standing)

    def opened(self, fragment: int, version: int) -> OpenRound:
        """Return the round that made `version`, open on its base; raise `CheckpointError` unless all of it is replayed."""
        standing = _Standing()
        names = [name for name in self.rounds.rounds(fragment) if name.version <= version]
        for name, made, fault in self._chain(names):
            if made is not None:
                standing.enter(made.epoch, self._update(fragment))
            values, state = standing.values, standing.state
            again = self._replayed(name, made, fault, standing)
            if made is None or again.version != version:
                continue
            if not again.identical:
                raise CheckpointError(
                    f"round {fragment}/{version} is not replayed to the same bits", got=str(again.differences[0])
                )
            if made.anchor is not None:
                values, state = self._anchored(fragment, made.anchor)
            if values is not None:
                parts = [OpenContribution(fold, *self._contribution(fold)) for fold in made.folds]
                return OpenRound(self.run, self._outer, made, values, state, parts)
        raise CheckpointError(
            "no such round is retained", got=f"fragment {fragment}, version {version}", todo="`atoll replay` lists them"
        )

    def values(self, fragment: int, until_s: float) -> Vector:
        """Return a fragment's values as the last round stored before wall time `until_s` made them; else `CheckpointError`."""
        standing = _Standing()
        values: Vector | None = None
        for name, made, fault in self._chain(self.rounds.rounds(fragment)):
            later = name.written_at_s > until_s
            if later and values is not None:
                break
            again = self._replayed(name, made, fault, standing)
            if not again.identical or made is None:
                raise CheckpointError(f"fragment {fragment} is not replayed to the same bits", got=again.differences[0])
            values = standing.values
            if later and made.anchor is not None:  # the first round of all came later: its base is what there was
                return self._anchored(fragment, made.anchor)[0]
        if values is None:
            raise CheckpointError("nothing of this fragment is retained", got=fragment)
        return values

    def _update(self, fragment: int) -> GlobalUpdate:
        return update_of(self.run.protocol, fragment, self._outer)

    def _replayed(
        self, name: RoundName, made: RetainedRound | None, fault: Difference, standing: _Standing
    ) -> ReplayedRound:
        if made is not None:
            standing.enter(made.epoch, self._update(name.fragment))
            return self._round(made, standing)
        standing.version, standing.values, standing.state = name.version, None, {}
        standing.lost = f"version {name.version} could not be made again"
        return ReplayedRound(name.fragment, name.version, name.epoch, (), computed=False, differences=(fault,))

    def _chain(self, names: list[RoundName]) -> Iterator[tuple[RoundName, RetainedRound | None, Difference]]:
        """Yield the rounds that led to the newest version, oldest first; None for one that cannot be read, and why."""
        there: dict[int, list[RoundName]] = {}
        for name in names:
            there.setdefault(name.version, []).append(name)
        chain = []
        wanted = ""
        for version in sorted(there, reverse=True):
            name = next((each for each in reversed(there[version]) if each.digest == wanted), there[version][-1])
            made, fault = None, Difference("")
            try:
                made = self.rounds.round(name)
            except AtollError as error:
                fault = Difference(f"{error.what}: {error.got}")
            wanted = "" if made is None else made.base_digest
            chain.append((name, made, fault))
        return iter(reversed(chain))

    def _round(self, made: RetainedRound, standing: _Standing) -> ReplayedRound:
        head = made.head
        decided = self._undecided(made)
        merge = RoundMerge(self.run.protocol, head.fragment, self.run.layout.slices(head.fragment))
        inputs = [*self._stand(made, standing), *unlisted(made)]
        for fold in made.folds:
            try:
                vector, norms = self._contribution(fold)
            except AtollError as error:
                inputs.append(wrong(fold, error))
                continue
            if standing.values is not None and not inputs:
                merge.add(vector, norms, command_of(fold), standing.state)
        if len(made.folds) != len(head.included):
            inputs.append(Difference("so many contributions are retained", None, len(made.folds), len(head.included)))
        computed = standing.values is not None and not inputs
        results = self._computed(made, merge, standing) if computed else []
        if not computed and not inputs:
            inputs.append(Difference(f"it was not computed, because {standing.lost}"))
        if inputs or results:
            standing.values, standing.state = None, {}
            standing.lost = f"version {head.version} could not be made again"
        standing.version = head.version
        return ReplayedRound(
            head.fragment,
            head.version,
            made.epoch,
            tuple(fold.manifest.key for fold in made.folds),
            computed,
            (*decided, *inputs, *results),
            digest=head.digest,
        )

    def _computed(self, made: RetainedRound, merge: RoundMerge, standing: _Standing) -> list[Difference]:
        head, values, found = made.head, standing.values, []
        if values is None:
            return []
        merged = merge.result(standing.state, head.version)
        state = standing.state | (merged.memory or {})
        update = self._update(head.fragment)
        new = update.step(values, merged.pseudo_gradient, state)
        digest = digest_of_values(new.values)
        if digest != head.digest:
            found.append(Difference("it makes other values", None, digest, head.digest))
        if head.state is not None and (not update.derived or head.key_version == head.version):
            packed = digest_of(PackedArrays(update.stored(new.state)), collision_free=head.state.collision_free)
            if packed != head.state.digest:
                found.append(Difference("it makes another outer state", None, packed, head.state.digest))
        standing.values, standing.state = new.values, new.state
        return found

    def _stand(self, made: RetainedRound, standing: _Standing) -> list[Difference]:
        base = made.head.version - 1
        if made.anchor is not None:
            try:
                values, state = self._anchored(made.head.fragment, made.anchor)
            except (AtollError, ValueError) as error:
                standing.values, standing.lost = None, "its anchor cannot be read"
                return [Difference(f"its anchor cannot be read: {error}")]
            standing.values, standing.state = values, state
        elif standing.version != base:
            standing.values, standing.lost = None, f"version {base} is not retained"
        if standing.values is None or (digest := digest_of_values(standing.values)) == made.base_digest:
            return []
        return [Difference("it stands on other values", None, digest, made.base_digest)]

    def _anchored(self, fragment: int, anchor: Anchor) -> tuple[Vector, State]:
        elements = self.run.layout.fragment_sizes()[fragment]
        frame, state = self.rounds.get_object(anchor.frame), self.rounds.get_object(anchor.state)
        self.bytes_read += len(frame) + len(state)
        values = decode_frame(frame, elements_expected=elements, codec=KEYFRAME)
        return values, unpack_arrays(state, state_bytes_max(elements))

    def _contribution(self, fold: RetainedFold) -> tuple[Encoded, list[float]]:
        manifest = fold.manifest
        if fold.frame is None:
            raise FrameRejected("missing", "it was not retained")
        data = self.rounds.get_object(fold.frame)
        self.bytes_read += len(data)
        pieces = StoredFrame(data)
        digest = digest_of(pieces, collision_free=manifest.blob.collision_free)
        if digest != manifest.blob.digest:
            raise FrameRejected(
                "digest", "its bytes are not those of its manifest", got=digest, allowed=manifest.blob.digest
            )
        fragment = manifest.fragment
        slices, protocol = self.run.layout.slices(fragment), self.run.protocol.of(fragment)
        frame = FrameDecoder(self.run.layout.fragment_sizes()[fragment], protocol.codec_up, slices)
        frame.take([(number, pieces.piece(number)) for number in range(len(pieces))])
        return frame.vector, validated_norms(frame.norms(), slices, manifest.norms, protocol.norm_max)

    def _undecided(self, made: RetainedRound) -> list[Difference]:
        tenure, place = (made.shard, made.epoch), (made.head.fragment, made.head.version - 1)
        decisions = self.tenures.get(tenure)
        # The facts of a tenure that goes on are read once more when a round comes that is newer than they are.
        if decisions is None or (tenure not in self._read_to_the_end and decisions.ends_before(*place)):
            former, decisions = decisions, decisions_of(self.rounds, *tenure)
            self.tenures[tenure] = decisions
            if former is not None and former.facts == decisions.facts:
                self._read_to_the_end.add(tenure)
        decision = decisions.made.get(place)
        if decision is None:
            why = decisions.fault or f"its machine, told the same {decisions.facts} facts, makes no such commit"
            return [Difference(why)]
        return otherwise(made, decision)


@dataclass(frozen=True, slots=True)
class Decision:
    """A commit that the machine commanded, after these folds."""

    commit: Commit
    folds: tuple[Fold, ...]


@dataclass(frozen=True, slots=True)
class TenureDecisions:
    """The decisions of one tenure by fragment and base version; `fault` says why there are no more, or is empty."""

    made: dict[tuple[int, int], Decision]
    facts: int
    fault: str = ""

    def ends_before(self, fragment: int, base_version: int) -> bool:
        """Return whether no commit of a fragment on this version or a later one is among them."""
        return max((base for number, base in self.made if number == fragment), default=-1) < base_version


def decisions_of(rounds: RoundStore, shard: int, epoch: int) -> TenureDecisions:
    """Tell a new machine what shard `shard` was told in `epoch`, and return what it decides."""
    lines, fault = rounds.facts(shard, epoch)
    if not lines:
        return TenureDecisions({}, 0, fault or f"no facts of shard {shard} in epoch {epoch} are retained")
    made: dict[tuple[int, int], Decision] = {}
    folds: defaultdict[int, list[Fold]] = defaultdict(list)
    told = 0
    try:
        for _, commands in Replay(lines).play():
            told += 1
            for command in commands:
                if isinstance(command, Fold):
                    folds[command.key.fragment].append(command)
                elif isinstance(command, Unfold):
                    folds.pop(command.fragment, None)
                elif isinstance(command, Commit):
                    entered = tuple(folds.pop(command.fragment, ()))
                    made[command.fragment, command.base_version] = Decision(command, entered)
    except Exception as error:  # noqa: BLE001  (facts that somebody has edited or changed over break a machine anywhere)
        why = str(error) if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
        fault = f"the facts of shard {shard} in epoch {epoch} break its machine after {told}: {why}"
    return TenureDecisions(made, told, fault)


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not as it was: what, of which contribution (None: of the round), what was found and what was due."""

    what: str
    push: PushKey | None = None
    got: object = None
    due: object = None

    def __str__(self) -> str:
        whose = "" if self.push is None else f"push {self.push.push} of {self.push.learner}/{self.push.incarnation}: "
        values = [f"{word} {value}" for word, value in (("got", self.got), ("due", self.due)) if value is not None]
        return f"{whose}{self.what} ({', '.join(values)})" if values else f"{whose}{self.what}"


def otherwise(made: RetainedRound, decision: Decision) -> list[Difference]:
    """Return in what a round is not as it was decided."""
    folded, due = [fold.manifest.key for fold in made.folds], [fold.key for fold in decision.folds]
    found = [Difference("it was folded, and is not retained", key) for key in due if key not in folded]
    found += [Difference("it is retained, and was not folded", key) for key in folded if key not in due]
    if not found and folded != due:
        found += [
            Difference("it was folded in another order", key, f"place {place}", f"place {due.index(key)}")
            for place, key in enumerate(folded)
            if due.index(key) != place
        ]
    decided = {fold.key: (fold.weight, fold.staleness_weight, fold.age, fold.scale) for fold in decision.folds}
    for key, fold in zip(folded, made.folds, strict=True):
        counted = fold.weight, fold.staleness_weight, fold.age, fold.scale
        if key in decided and counted != decided[key]:
            found.append(Difference("it was folded with other weights than were decided", key, counted, decided[key]))
    due_nonce = head_nonce(made.epoch, decision.commit.fragment_ledger)
    if made.head.nonce != due_nonce:
        found.append(Difference("the fragment's ledger is another one", None, made.head.nonce, due_nonce))
    return found


def unlisted(made: RetainedRound) -> list[Difference]:
    """Return in what the head lists other contributions than were folded."""
    listed = {(each.learner, each.incarnation, each.push): each for each in made.head.included}
    found = []
    for fold in made.folds:
        manifest = fold.manifest
        ours = Included(
            manifest.learner,
            manifest.incarnation,
            manifest.push,
            manifest.base_version,
            manifest.tokens,
            manifest.steps,
            fold.weight,
            fold.age,
            fold.scale,
        )
        there = listed.get((manifest.learner, manifest.incarnation, manifest.push))
        if there is None:
            found.append(Difference("the head does not list it", manifest.key))
        elif ours != there:
            names = [name for name in Included.__struct_fields__ if getattr(ours, name) != getattr(there, name)]
            got, due = (", ".join(f"{name}={getattr(each, name)}" for name in names) for each in (ours, there))
            found.append(Difference("the head lists it otherwise than its manifest", manifest.key, got, due))
    return found


def wrong(fold: RetainedFold, error: AtollError) -> Difference:
    """Return what is wrong with a contribution."""
    return Difference(error.what, fold.manifest.key, error.got, error.allowed)


# A retained round, opened: what each learner's part of it was, and what it would have made without one of them. The parts are
# exact, because all of each contribution is there; the cosines in the event log are of samples (`atoll.merge.robust`).
# Without a learner the round is merged anew by the same rules: shares of weight grow for the others, lengths and judgements are
# taken anew. It tells nothing of later rounds: learners would have gone on from other values.


@dataclass(frozen=True, slots=True)
class OpenContribution:
    """A contribution as it was folded, decoded and validated, with its L2 norms per slice."""

    fold: RetainedFold
    vector: Encoded
    norms: Sequence[float]

    @property
    def learner(self) -> str:
        """Return whose it is."""
        return self.fold.manifest.learner

    @property
    def weight(self) -> float:
        """Return the weight with which it counted."""
        return self.fold.weight * self.fold.staleness_weight


@dataclass(frozen=True, slots=True)
class RoundPart:
    """One learner's part of a round.

    Attributes:
        weight_share: its share of all weight, 0..1, after the staleness weight.
        aligned: the cosine with the merge of what it sent, of several contributions the mean; None where one has no direction.
        step_without: how long the fragment's step would be without it, over how long it was; None where there was no step.
        turned_without: the cosine between these two steps; None where one of the two has no length.
    """

    learner: str
    contributions: int
    tokens: int
    weight_share: float
    aligned: float | None
    step_without: float | None
    turned_without: float | None


@dataclass(frozen=True, slots=True)
class OpenRound:
    """A round on its base: `values` and `state` before it, and its contributions in order."""

    run: RunRecord
    outer: OuterOptimizer
    made: RetainedRound
    values: Vector
    state: State
    contributions: Sequence[OpenContribution]

    @property
    def learners(self) -> list[str]:
        """Return who is in it, by name."""
        return sorted({each.learner for each in self.contributions})

    def merged(self, without: str = "") -> tuple[Vector, Vector]:
        """Return the merged pseudo-gradient and the next values, of all contributions or of those of the others.

        Without any contribution nothing moves.
        """
        fragment = self.made.head.fragment
        merge = RoundMerge(self.run.protocol, fragment, self.run.layout.slices(fragment))
        counted = [each for each in self.contributions if each.learner != without]
        if not counted:
            return np.zeros_like(self.values), self.values
        for each in counted:
            merge.add(each.vector, each.norms, command_of(each.fold), self.state)
        result = merge.result(self.state, self.made.head.version)
        state = self.state | (result.memory or {})
        direction = result.pseudo_gradient.copy()
        return direction, update_of(self.run.protocol, fragment, self.outer).step(self.values, direction, state).values

    def parts(self) -> list[RoundPart]:
        """Return every learner's part, by name."""
        direction, values = self.merged()
        step = values - self.values
        total = sum(each.weight for each in self.contributions)
        found = []
        for learner in self.learners:
            own = [each for each in self.contributions if each.learner == learner]
            sent: Vector = sum((each.vector.expanded() for each in own[1:]), own[0].vector.expanded()) / np.float32(
                len(own)
            )
            other = self.merged(learner)[1] - self.values
            length = l2_norm(step)
            found.append(
                RoundPart(
                    learner,
                    len(own),
                    sum(each.fold.manifest.tokens for each in own),
                    sum(each.weight for each in own) / total if total else 0.0,
                    cosine(sent, direction),
                    l2_norm(other) / length if length else None,
                    cosine(other, step),
                )
            )
        return found


def cosine(one: Vector, other: Vector) -> float | None:
    """Return the cosine between two vectors, None where one has no length; sums are in float64, part by part."""
    product = squares = others = 0.0
    for start, stop in parts(0, one.size):
        here, there = one[start:stop].astype(np.float64), other[start:stop].astype(np.float64)
        product += float(here @ there)
        squares += float(here @ here)
        others += float(there @ there)
    lengths = math.sqrt(squares) * math.sqrt(others)
    return max(-1.0, min(1.0, float(product / lengths))) if lengths else None  # rounding may pass the ends by a little


def command_of(fold: RetainedFold) -> Fold:
    """Return the command by which a contribution was folded."""
    key = fold.manifest.key
    return Fold(key=key, weight=fold.weight, staleness_weight=fold.staleness_weight, age=fold.age, scale=fold.scale)
