"""HeLoCo and the average on a shard's own aggregator and store: the same bits whoever owns it, and for readers."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from atoll.base.errors import BlobCorrupt
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client.membership import publish_origin
from atoll.codec import Encoded, encode_frame
from atoll.merge.correction import MomentumReference, correction_of
from atoll.merge.fold import FragmentFold, Method, slice_norms
from atoll.merge.global_update import AVERAGE
from atoll.merge.outer import MOMENTUM, make_outer
from atoll.model.layout import TensorSpec, plan_layout
from atoll.protocol.events import Fold, PushKey
from atoll.protocol.settings import ProtocolSettings
from atoll.run.delta_chain import fitting
from atoll.run.merged_model import read_merged
from atoll.wire.blobs import BlobRef
from atoll.wire.messages import Contribution, RunRecord, encode
from atoll.wire.subjects import Subjects
from atoll_synchronizer.aggregator import Aggregator
from atoll_synchronizer.store import ShardStore
from support.links import unique_run
from support.protocol_world import one_commit

Vector = npt.NDArray[np.float32]
SHAPE = (12, 5)
VERSIONS = 7
LAYOUT = plan_layout([TensorSpec("embed", SHAPE, "float32"), TensorSpec("w", SHAPE, "float32")], 1, direct=("embed",))
SIZE = LAYOUT.fragment_sizes()[0]


def pseudo_gradients(version: int) -> list[Vector]:
    """Return what two learners say of a version: now with the last one's momentum, now against it."""
    random = np.random.default_rng(version)
    return [random.normal(size=SIZE).astype(np.float32) * (-1) ** version for _ in range(2)]


class LeveredShard:
    """One tenure: a store and a aggregator on a broker of their own choice."""

    def __init__(self, desk: LeverDesk) -> None:
        protocol = desk.run.protocol
        self.desk = desk
        self.bus = MemoryBus(desk.run.run, desk.broker)
        self.store = ShardStore(
            self.bus, desk.run, 0, make_outer("nesterov", protocol.outer_lr, protocol.outer_momentum)
        )
        self.bench = Aggregator(self.bus, desk.run)

    async def advance(self) -> None:
        """Fetch and fold both learners' pseudo-gradients of the next version, the second one late, and commit."""
        version = self.store.holdings[0].head.version
        for number, pseudo_gradient in enumerate(pseudo_gradients(version)):
            key = PushKey(f"l{number}", 1, 0, version + 1)
            stem = self.desk.subjects.contribution_stem(key.learner, 0, 1, key.push, "0" * 16)
            manifest = Contribution(
                learner=key.learner,
                incarnation=1,
                fragment=0,
                push=key.push,
                base_version=version,
                tokens=8,
                steps=4,
                trained_tokens=8,
                loss=None,
                norms=tuple(slice_norms(LAYOUT.slices(0), Encoded.exact(pseudo_gradient))),
                layout=LAYOUT.fingerprint,
                run_nonce=self.desk.run.nonce,
                blob=await self.bus.put_blob(stem, encode_frame(pseudo_gradient, "f32")),
            )
            reason, _ = await self.bench.fetch(key, manifest)
            assert not reason
            fold = Fold(key=key, weight=16.0, staleness_weight=1.0 - 0.5 * number, age=number)
            await self.bench.fold(fold, self.store.holdings[0].state)
        merged = await self.bench.merged(0, self.store.holdings[0].state, version + 1)
        await self.store.commit(one_commit(version), merged.pseudo_gradient)


class LeverDesk:
    """A founded run of one fragment with all of it switched on."""

    def __init__(self, merge: Method) -> None:
        name = unique_run()
        asked = {
            "fragments": 1,
            "interval_steps": 4,
            "shards": 1,
            "merge": merge,
            "codec_up": "f32",
            "codec_down": "f32",
            "outer_lr": 0.7,
            "outer_momentum": 0.9,
            "correction": "heloco",
            "average_versions": 3,
        }
        self.subjects = Subjects(name)
        self.broker = MemoryBroker()
        self.run = RunRecord(
            run=name,
            founder="a",
            nonce="0" * 16,
            founded_at_s=0.0,
            layout=LAYOUT,
            protocol=msgspec.convert(asked, ProtocolSettings).check(),
        )

    async def found(self) -> LeverDesk:
        bus = MemoryBus(self.run.run, self.broker)
        await bus.put_record(self.subjects.run_record, encode(self.run), expected=0)
        await publish_origin(bus, self.run, {0: np.ones(SIZE, dtype=np.float32)})
        return self

    async def owner(self, epoch: int) -> LeveredShard:
        owner = LeveredShard(self)
        await owner.store.open(epoch)
        return owner


@pytest.fixture(params=["mean", "rda"])
async def desk(request: pytest.FixtureRequest) -> LeverDesk:
    return await LeverDesk(request.param).found()


async def test_owners_that_change_at_every_version_come_to_the_same_bits(desk: LeverDesk) -> None:
    """What a head names is all there is: an heir corrects and averages as its former owner would have."""
    stayed, moving = await desk.owner(1), await LeverDesk(desk.run.protocol.merge).found()
    heir = await moving.owner(1)
    for version in range(VERSIONS):
        await stayed.advance()
        await heir.advance()
        heir = await moving.owner(version + 2)

        ours, theirs = stayed.store.holdings[0], heir.store.holdings[0]
        assert ours.values.tobytes() == theirs.values.tobytes()
        assert {name: leaf.tobytes() for name, leaf in ours.state.items()} == {
            name: leaf.tobytes() for name, leaf in theirs.state.items()
        }
        assert ours.state[MOMENTUM].any()


async def test_what_is_folded_is_corrected_first_and_weighed_by_its_age(desk: LeverDesk) -> None:
    """The merge of the aggregator is that of corrected pseudo-gradients, in its order, and not that of the raw ones."""
    owner, protocol = await desk.owner(1), desk.run.protocol
    correction, slices = correction_of(protocol), LAYOUT.slices(0)
    assert correction is not None
    changed = 0
    for version in range(VERSIONS):
        held = owner.store.holdings[0]
        fold, raw = FragmentFold(slices, protocol.merge), FragmentFold(slices, protocol.merge)
        for number, pseudo_gradient in enumerate(pseudo_gradients(version)):
            sent = Encoded.exact(pseudo_gradient)
            norms = slice_norms(slices, sent)
            corrections = correction.corrections(
                sent, norms, MomentumReference.of(held.state[MOMENTUM], slices), slices
            )
            fold.add(sent, norms, 16.0, 1.0 - 0.5 * number, corrections)
            raw.add(sent, norms, 16.0, 1.0 - 0.5 * number)
        await owner.advance()
        wanted = fold.result().pseudo_gradient
        changed += not np.array_equal(wanted, raw.result().pseudo_gradient)
        merged = make_outer("nesterov", 0.7, 0.9).update(held.values, wanted, held.state)[0]
        assert owner.store.holdings[0].values.tobytes() == merged.tobytes()
    assert changed >= VERSIONS - 2


async def test_anybody_may_read_the_average_beside_the_values(desk: LeverDesk) -> None:
    """At version 0 both are the same; later the average is what the shard holds, by name and in shape."""
    owner = await desk.owner(1)
    reader = MemoryBus(desk.run.run, desk.broker)
    before = await read_merged(reader, desk.run)
    for _ in range(3):
        await owner.advance()
    after = await read_merged(reader, desk.run)

    assert before.average is not None
    assert after.average is not None
    assert (before.versions_max, after.versions_min) == (0, 3)
    for merged, held in ((after.params, owner.store.holdings[0].values), (after.average, _average(owner))):
        flat = np.concatenate([np.asarray(merged[name]).reshape(-1) for name in ("embed", "w")])
        np.testing.assert_array_equal(flat, held)
    assert not np.array_equal(after.params["w"], after.average["w"])
    np.testing.assert_array_equal(before.params["w"], before.average["w"])


async def test_a_reader_whose_state_is_superseded_begins_again(desk: LeverDesk) -> None:
    owner = await desk.owner(1)
    await owner.advance()
    reader = OvertakenBus(desk.run.run, desk.broker)
    reader.owner = owner

    merged = await read_merged(reader, desk.run)

    assert reader.owner is None
    assert merged.average is not None
    np.testing.assert_array_equal(np.asarray(merged.average["w"]).reshape(-1), _average(owner)[-SIZE // 2 :])


class OvertakenBus(MemoryBus):
    """A reader's bus that is so slow that before its first look at a state another commit has removed it."""

    owner: LeveredShard | None = None

    async def get_blob(self, ref: BlobRef, size_bytes_max: int) -> bytes:
        """Let the owner commit before a state is read for the first time."""
        if ".st." in ref.stem and self.owner is not None:
            owner, self.owner = self.owner, None
            await owner.advance()
            await owner.store.garbage_collector.sweep()
        return await super().get_blob(ref, size_bytes_max)


def _average(owner: LeveredShard) -> Vector:
    return owner.store.holdings[0].state[AVERAGE].astype(np.float32, copy=False)


async def test_an_outer_state_of_another_shape_is_not_taken(desk: LeverDesk) -> None:
    """Compiled arithmetic would read past its end; a state is taken with the shapes and dtypes that the run's rules give."""
    owner = await desk.owner(1)
    await owner.advance()
    state = owner.store.holdings[0].state
    assert fitting(state, owner.store.update_of(0).init(np.ones(SIZE, np.float32))) is state
    for wrong in (state[MOMENTUM][:-1], state[MOMENTUM].astype(np.float64)):
        with pytest.raises(BlobCorrupt, match="outer state"):
            fitting(state | {MOMENTUM: wrong}, state)
    with pytest.raises(BlobCorrupt, match="outer state"):
        fitting({}, state)
