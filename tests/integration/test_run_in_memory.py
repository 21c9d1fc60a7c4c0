"""Two islands and a shard on the in-memory bus: the whole protocol, with the ledgers checked at the end."""

from __future__ import annotations

import threading
import time
from functools import partial

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from structlog.testing import capture_logs

from atoll.base.background_tasks import LoopThread
from atoll.base.errors import LayoutMismatch, Quarantined, SettingsError
from atoll.bus.interface import Bus
from atoll.bus.memory import MemoryBroker, MemoryBus
from atoll.client import driver
from atoll.client.join import IslandHandle, join
from atoll.client.model_reader import place_like, read_model
from atoll.client.options import Encode, JoinOptions
from atoll.protocol.ledger import settle
from atoll.run.heads import read_heads
from atoll.wire.messages import Head, RunRecord, decode, encode
from atoll.wire.subjects import Subjects
from atoll_synchronizer import intake
from support.links import unique_run
from support.memory_world import MEAN, STEP_S, MemoryWorld, parameters, settings

OVER_S = 10.0
"""A learner that has not stepped for so long has left."""


def test_two_islands_meet_and_every_token_has_one_fate(run: str) -> None:
    """Two learners that pull apart end close together in the middle, and the ledgers of both sides agree."""
    protocol = settings()
    world = MemoryWorld(run, protocol)

    world.go(lambda: world.train("low", -1.0), lambda: world.train("high", 1.0))
    ledger = world.ledger()
    world.home.stop()

    settled = settle(ledger, protocol.fragments)
    assert settled.exact, settled.errors
    assert settled.fates["lost"] == 0
    assert settled.fates["merged"] > 0
    assert ledger.run_tokens >= protocol.tokens_target


@pytest.mark.parametrize(
    ("adoption", "encode"),
    [("overwrite", "host"), ("overwrite", "device"), ("blend", "host"), ("blend", "device"), ("carry", "host")],
)
def test_every_adoption_keeps_the_books(run: str, adoption: str, encode: Encode) -> None:
    """Whatever a learner does with its own progress at adoption, every token-fragment is counted once."""
    protocol = settings(adoption=adoption, tokens_target=3_000)
    world = MemoryWorld(run, protocol, encode)

    world.go(lambda: world.train("a", 1.0), lambda: world.train("b", 1.0))
    ledger = world.ledger()
    world.home.stop()

    settled = settle(ledger, protocol.fragments)
    assert settled.exact, settled.errors
    if adoption != "carry":
        assert settled.fates["superseded"] > 0


def test_a_fragment_without_elements_is_merged_like_any_other(run: str) -> None:
    world = MemoryWorld(run, settings(fragments=2, shards=1, tokens_target=6_000))
    model = {"w": jnp.zeros(64), "running_mean": jnp.zeros(0)}

    def train() -> None:
        with world.join("a", model) as island:
            params = island.params
            while not island.done:
                time.sleep(STEP_S)
                params = island.step({name: leaf + 0.01 for name, leaf in params.items()}, tokens=10)

    world.go(train)
    settled, versions = settle(world.ledger(), 2), world.versions()
    world.home.stop()

    assert settled.exact, settled.errors
    assert min(versions.values()) > 0, "both fragments were merged"
    assert set(versions) == {0, 1}


def test_the_lives_of_a_learner_that_is_started_again_end_in_one_account(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two shards fold them whenever they can, and what they close with is exact all the same."""
    monkeypatch.setattr("atoll.protocol.ledger.KEPT_LIVES", 0)
    monkeypatch.setattr(intake, "QUEUE_ASK_S", 0.02)
    protocol = settings(tokens_target=8_000)
    world = MemoryWorld(run, protocol)

    def again() -> None:
        for _ in range(6):
            world.train("again", 1.0, steps_max=60)

    world.go(lambda: world.train("steady", 1.0, pace=3.0), again)
    ledger = world.ledger()
    world.home.stop()

    settled = settle(ledger, protocol.fragments)
    assert settled.exact, settled.errors
    assert settled.fates["lost"] == 0
    assert ledger.former.covers("again/2")
    assert not ledger.former.wrong


@pytest.mark.parametrize("ends", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_island_pushes_what_it_has_and_leaves(run: str, ends: type[BaseException]) -> None:
    """All its steps are merged, although no shard had called for them, and the exception goes on."""
    protocol = settings(ending="together")
    world = MemoryWorld(run, protocol)

    def loop() -> None:
        with world.join("stopped") as island:
            island.step(island.params, tokens=10)
            raise ends

    with pytest.raises(ends):
        loop()
    world.go(lambda: world.train("other", 1.0))
    ledger = world.ledger()
    world.home.stop()

    account = ledger.accounts["stopped/1"]
    assert account.trained == 10
    assert account.merged + account.merged_late == 10 * protocol.fragments


@pytest.mark.parametrize("told", ["", "learner.unpushed"], ids=["again", "too long"])
def test_leaving_after_an_interrupt_has_an_end(run: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C ends it at once, and time does; the first exception is what the caller sees, and the island has left."""
    world = MemoryWorld(run, settings())

    async def drains(within_s: float) -> None:
        raise TimeoutError(f"not within {within_s:g} s")

    def interrupted(within_s: float) -> None:
        raise KeyboardInterrupt(f"again, within {within_s:g} s")

    island = world.join("stopped")
    monkeypatch.setattr(island.session, "drain", drains if told else interrupted)

    def loop() -> None:
        with island:
            raise KeyboardInterrupt

    with capture_logs() as lines, pytest.raises(KeyboardInterrupt):
        loop()

    world.home.stop()
    assert [line["event"] for line in lines if line["log_level"] == "warning"] == ([told] if told else [])
    with pytest.raises(SettingsError, match="has left its run"):
        island.step(island.params, tokens=1)


def test_a_run_that_ends_together_holds_every_step_of_its_learner(run: str) -> None:
    """One learner, carrying, merged undamped: the run's last values are the learner's own, its last steps included."""
    protocol = settings(
        **MEAN,
        adoption="carry",
        ending="together",
        codec_up="f32",
        codec_down="f32",
        age_damping=1.0,
        tokens_target=1_000,
    )
    world = MemoryWorld(run, protocol)

    world.go(lambda: world.train("a", 1.0))
    ledger = world.ledger()

    merged = world.merged()
    world.home.stop()

    settled = settle(ledger, protocol.fragments)
    assert settled.exact, settled.errors
    assert settled.fates["superseded"] == 0
    for name, leaf in world.final["a"].items():
        np.testing.assert_allclose(np.asarray(merged.params[name]), np.asarray(leaf), rtol=0, atol=1e-5)


def test_after_the_end_all_islands_hold_the_same_merged_model(run: str) -> None:
    """Whatever each trained, what they read is the run's, in the structure, kinds and dtypes of their own parameters."""
    protocol = settings(adoption="overwrite", tokens_target=600)
    world = MemoryWorld(run, protocol)
    islands: dict[str, IslandHandle] = {}

    def train(name: str, towards: float) -> None:
        with world.join(name) as island:
            islands[name] = island
            params = island.params
            while not island.done:
                params = jax.tree.map(lambda leaf: leaf + 0.05 * (towards - leaf), params)
                time.sleep(STEP_S)
                params = island.step(params, tokens=10, loss=1.0)

    world.go(partial(train, "a", 1.0), partial(train, "b", -1.0))
    read = {name: island.merged(settle_s=60.0) for name, island in islands.items()}
    plain = read_model(world.bus, run=run, home=world.home)
    with pytest.raises(LayoutMismatch, match="in the run"):
        read_model(world.bus, run=run, like={"another": np.zeros((3, 2), np.float32)}, home=world.home)
    world.home.stop()

    assert all(model.settled for model in read.values())
    for name, leaf in plain.params.items():
        assert isinstance(leaf, np.ndarray)
        for model in read.values():
            assert isinstance(model.params[name], jax.Array)
            np.testing.assert_array_equal(np.asarray(model.params[name]), leaf)


def test_what_is_not_floating_stays_as_it_is() -> None:
    like = {"w": np.zeros((2, 2), np.float16), "count": np.int32(7), "j": jnp.ones(3, jnp.bfloat16)}
    values = {"w": np.ones((2, 2), np.float32), "count": np.zeros((), np.int32), "j": np.full(3, 0.5, np.float32)}

    found = place_like(values, like)

    assert (found["count"], found["w"].dtype, found["j"].dtype) == (7, np.float16, jnp.bfloat16)
    assert isinstance(found["w"], np.ndarray)
    assert float(found["j"][0]) == 0.5


def test_learners_end_together_with_everything_switched_on(run: str) -> None:
    """HeLoCo, an average, RDA, the gate, four bits both ways: every token has one fate, the average is there."""
    protocol = settings(
        adoption="overwrite",
        ending="together",
        merge="rda",
        outer_lr=0.7,
        outer_momentum=0.5,
        correction="heloco",
        age_law="gate",
        average_versions=4,
        codec_up="int4",
        error_feedback=True,
        codec_down="int4",
        keyframe_versions=3,
    )
    world = MemoryWorld(run, protocol)

    world.go(*(partial(world.train, name, 1.0) for name in ("a", "b", "c", "d")))
    ledger = world.ledger()

    merged = world.merged()
    world.home.stop()

    settled = settle(ledger, protocol.fragments)
    assert settled.exact, settled.errors
    assert merged.average is not None
    for values in (merged.params, merged.average):
        # Towards 1, with an outer momentum: on a busy machine it overshoots further.
        assert all(-0.5 < float(np.min(np.asarray(leaf))) < 2.5 for leaf in values.values())


def test_a_learner_that_spoils_the_run_is_isolated_and_nobody_else_notices(run: str) -> None:
    """Finite nonsense is refused as an outlier, told, counted; its learner ends; the others reach what they aim at."""
    # Steps without noise and an outer momentum pass through what they aim at: lengths go to nothing and come back, and what
    # comes back is out of all proportion. The run is long enough that the one that spoils it hears of its end before the run's.
    protocol = settings(**MEAN, adoption="overwrite", tokens_target=30_000, outlier_ratio=10.0, protect="isolate")
    world = MemoryWorld(run, protocol)
    stopped: list[Quarantined] = []

    def spoil() -> None:
        try:
            with world.join("mad") as island:
                usual = False
                while not island.done:
                    # Behaves until the shards know what is usual here, then its values leap.
                    params = jax.tree.map(lambda leaf: leaf + 0.05 * (1.0 - leaf), island.params)
                    usual = usual or world.usual()
                    if usual:
                        params = jax.tree.map(lambda leaf: leaf + 100.0, params)
                    time.sleep(STEP_S)
                    island.step(params, tokens=10, loss=1.0)
        except Quarantined as error:
            stopped.append(error)

    world.go(*(partial(world.train, name, 1.0) for name in ("a", "b", "c")), spoil)
    ledger = world.ledger()
    world.home.stop()

    settled = settle(ledger, protocol.fragments)
    refused = ledger.accounts["mad/1"].refused
    assert len(stopped) == 1
    assert refused["outlier"] > 0
    assert settled.exact, settled.errors
    others = [account for key, account in ledger.accounts.items() if not key.startswith("mad")]
    # Of the others a busy machine makes some late, and their way back as long as a leap; nobody of them is isolated.
    assert all("quarantined" not in account.refused for account in others)
    assert all(account.merged + account.merged_late > 0 for account in others)
    assert all(float(np.abs(np.asarray(leaf)).max()) < 2.0 for leaf in jax.tree.leaves(world.final["a"]))


def test_nobody_waits_for_a_slow_learner_and_its_tokens_are_merged(run: str) -> None:
    """A learner that steps once in ten steps of another slows nobody down, and what it trains is merged."""
    protocol = settings()
    world = MemoryWorld(run, protocol)
    stepped = threading.Semaphore(0)

    def ten_steps_of_another() -> None:
        while_it_trains = (stepped.acquire(timeout=OVER_S) for _ in range(10))
        all(while_it_trains)

    world.go(
        lambda: world.train("fast-1", 1.0, at_each_step=stepped.release),
        lambda: world.train("fast-2", 1.0),
        lambda: world.train("slow", 1.0, at_each_step=ten_steps_of_another),
    )
    ledger = world.ledger()
    world.home.stop()

    accounts = {key.split("/")[0]: account for key, account in ledger.accounts.items()}
    assert settle(ledger, protocol.fragments).exact
    assert accounts["slow"].merged + accounts["slow"].merged_late > 0
    assert accounts["fast-1"].trained > 2 * accounts["slow"].trained


@pytest.mark.parametrize("adoption", ["overwrite", "blend", "carry"])
def test_a_joiner_adopts_the_run_and_not_its_own_values(run: str, adoption: str) -> None:
    """A fresh learner never overwrites trained state: it starts from the run's parameters, whatever it does later."""
    world = MemoryWorld(run, settings(adoption=adoption))
    with world.join("founder", parameters(7.0)), world.join("joiner", parameters(-3.0)) as joiner:
        adopted = {name: np.asarray(leaf) for name, leaf in joiner.params.items()}
    world.home.stop()

    assert all((leaf == 7.0).all() for leaf in adopted.values())


def test_who_comes_after_the_end_does_not_train_unheard(run: str) -> None:
    """The shards have closed their ledgers: a late joiner is done at once, with the run's values and the run's tokens."""
    world = MemoryWorld(run, settings(tokens_target=600))
    world.go(lambda: world.train("early", 1.0))
    with world.join("late", parameters(-3.0)) as late:
        assert late.done
        assert late.run_tokens > 300
        assert all((np.asarray(leaf) > 0.0).all() for leaf in late.params.values())
    world.home.stop()


def test_a_learner_passes_over_heads_that_no_shard_wrote(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage, a fragment that is none, another layout: the learner goes on training and adopts what is real."""
    seen: list[set[int]] = []

    async def read_and_count(bus: Bus, run: RunRecord) -> dict[int, Head]:
        heads = await read_heads(bus, run)
        seen.append(set(heads))
        return heads

    monkeypatch.setattr(driver, "RESYNC_S", 0.02)
    monkeypatch.setattr(driver, "read_heads", read_and_count)
    world = MemoryWorld(run, settings())
    subjects = Subjects(run)

    async def forge() -> None:
        bus = await world.bus()
        record = await bus.get_record(subjects.head(0))
        assert record is not None
        real = decode(Head, record.data)
        foreign = msgspec.structs.replace(real, fragment=98, version=7)
        other = msgspec.structs.replace(real, fragment=1, layout="0" * len(real.layout))
        forged = {
            subjects.head(1): encode(other),
            subjects.head(2): b"no head at all",
            subjects.head(3): record.data,
            subjects.head(99): encode(foreign),
            subjects.head(98): encode(foreign),
        }
        for subject, data in forged.items():
            await bus.put_record(subject, data, expected=None)
        await bus.close()

    with world.join("honest") as island:
        params = island.params
        world.home.submit(forge()).result(240.0)
        seen.clear()
        deadline_s = time.monotonic() + 240.0
        while (len(seen) < 4 or {0} not in seen) and time.monotonic() < deadline_s:
            time.sleep(STEP_S)
            params = island.step(params, tokens=10, loss=1.0)
    world.home.stop()

    assert {0} in seen  # a shard that is elected again mends its own head


def test_another_layout_is_refused_with_the_first_difference(run: str) -> None:
    """A learner with another model is told what differs and never touches the run."""
    world = MemoryWorld(run, settings())
    with world.join("founder"), pytest.raises(LayoutMismatch, match=r"'a' has shape \[7, 3\] here and \[6, 3\]"):
        world.join("stranger", parameters(width=7))
    world.home.stop()


def test_an_island_leaves_although_nobody_has_read_its_former_farewells(home: LoopThread) -> None:
    """Shards that are away read no farewell, and the broker keeps two of a learner; its silence tells them the rest."""
    broker = MemoryBroker()
    run, protocol = unique_run(), settings(tokens_target=0)

    async def opened() -> Bus:
        return MemoryBus(run, broker)

    with capture_logs() as said:
        for _ in range(4):
            with join(
                opened, run=run, learner="a", params=parameters(), protocol=protocol, options=JoinOptions(home=home)
            ):
                pass

    assert [line["event"] for line in said].count("learner.left") == 4
    assert "farewell.not_stored" in [line["event"] for line in said]
