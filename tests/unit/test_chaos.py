"""What the benches of faults make of a run: storms and figures follow from seeds and extracts, and each figure can fail."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import pytest

from atoll.protocol.ledger import Account, Ledger
from benchmarks.faults import chaos, metrics, takeover
from benchmarks.faults.chaos import courses
from benchmarks.faults.storm import Fault, Planned, forecast, seconds_for, storm
from benchmarks.faults.synchronous import Formed, GroupMessage, Line, WorkerGroup, enter_steps
from benchmarks.faults.takeover import EVERY_S, interval, ratio
from benchmarks.lib import harness
from benchmarks.lib.harness import Figure
from benchmarks.lib.publish import differences, publish

ROOT = Path(__file__).resolve().parents[2]
BEGAN_S = 1_000_000.0
LENGTH_S = 100.0
LEARNERS = ("learner-1", "learner-2")


# --- figures from a small event log ------------------------------------------------------------------------------------------


def life(start_s: float, stop_s: float, step_s: float = 0.5) -> list[metrics.Row]:
    """Return the rows of a life that takes a step every `step_s`, ten tokens each."""
    count = int((stop_s - start_s) / step_s)
    return [(start_s + i * step_s, i, 10 * i, step_s) for i in range(count + 1)]


def calm(name: str = "undisturbed", per_minute: float = 0.0) -> metrics.Extract:
    """Return a run of two learners and two fragments in which nothing happened: a commit of either a second."""
    rounds = [
        metrics.ExtractRound(
            at_s + 0.5 * fragment,
            f"shard-{fragment}",
            fragment,
            at_s,
            [metrics.ExtractShare(n, 1, at_s, 0, 20) for n in LEARNERS],
        )
        for at_s in range(1, int(LENGTH_S) + 1)
        for fragment in (0, 1)
    ]
    settled = {f"{name}/1/{fragment}": [[1, int(LENGTH_S)]] for name in LEARNERS for fragment in (0, 1)}
    trained, pushed = 2000, 4000
    accounts = {f"{n}/1": Account(trained=trained, pushed=pushed, merged=pushed, left=True) for n in LEARNERS}
    curve = [{"tokens_merged": 0, "bits_per_byte": 8.0}, {"tokens_merged": 4000, "bits_per_byte": 2.0}]
    return metrics.Extract(
        course=metrics.Course(name, "atoll", per_minute, 0, LENGTH_S, 0.0, 2),
        sources="a-b",
        machine="a machine",
        commit="c",
        began_s=BEGAN_S,
        fragments=2,
        lives={f"{name}/1": life(0.0, LENGTH_S) for name in LEARNERS},
        rounds=rounds,
        heads={0: int(LENGTH_S), 1: int(LENGTH_S)},
        acknowledged=dict(settled),
        settled=settled,
        stored={key: [(push, 20) for push in range(1, int(LENGTH_S) + 1)] for key in settled},
        booked={key: metrics.Booked(2000, 0, 0) for key in settled},
        merged={0: 4000, 1: 4000},
        ledger=Ledger(accounts=accounts),
        report={
            "tokens_trained": 4000,
            "tokens_by_fate": {"merged": 4000, "merged_late": 0, "lost": 0},
            "fates_exact": True,
            "fates_errors": [],
            "validation": {"final_bits_per_byte": 2.0, "curve": curve},
        },
    )


def verdict(found: list[Figure], name: str) -> Figure:
    return next(figure for figure in found if figure.name.endswith(name))


def test_a_run_in_which_nothing_happened_misses_no_goal() -> None:
    found = metrics.figures([calm()])

    assert [figure.name for figure in found if figure.holds is False] == []
    assert verdict(found, "participation").value == pytest.approx(1.0)
    assert verdict(found, "useful-step share").value == pytest.approx(1.0, abs=0.02)


def test_a_line_that_came_late_is_no_fork() -> None:
    """An owner that was frozen after its commit writes the line when its successor has written more."""
    late = calm()
    late.rounds.insert(14, late.rounds.pop(10))
    found = metrics.figures([late])

    assert [figure.name for figure in found if figure.holds is False] == []
    assert verdict(found, "lines that came late").value == 1.0


def fork(extract: metrics.Extract) -> None:
    extract.rounds.insert(10, msgspec.structs.replace(extract.rounds[9], shares=[]))


def twice(extract: metrics.Extract) -> None:
    extract.rounds[20] = msgspec.structs.replace(extract.rounds[20], shares=extract.rounds[18].shares)


def lose(extract: metrics.Extract) -> None:
    """Let the ledgers know nothing of a contribution that the broker had stored."""
    extract.settled["learner-1/1/0"] = [[1, 49], [51, 100]]


def forget(extract: metrics.Extract) -> None:
    extract.ledger.accounts["learner-1/1"].merged -= 20


def miscount(extract: metrics.Extract) -> None:
    extract.report["tokens_by_fate"]["merged"] -= 1


def isolate(extract: metrics.Extract) -> None:
    extract.report["quarantined"] = [{"learner": "learner-1", "incarnation": 1, "offences": 3, "reason": "outlier"}]


UNPROVED = "tokens with a fate beside those of the pushes with one"
UNLIKE = "tokens merged by heads, ledgers and contributions"


def overfill(extract: metrics.Extract) -> None:
    """Let the shards settle more than a learner that left has pushed."""
    extract.ledger.accounts["learner-1/1"].merged += 20


def fork_by_head(extract: metrics.Extract) -> None:
    """Let two frames have been the newest under one version, of which the event log tells once."""
    extract.made = [metrics.Made(0, 6, digest, extract.rounds[10].shares) for digest in ("one", "other")]


def go_back(extract: metrics.Extract) -> None:
    lines = [extract.rounds[index] for index in (10, 12, 10)]
    extract.made = [metrics.Made(line.fragment, line.version, f"{line.version}", line.shares) for line in lines]


def merge_again_unseen(extract: metrics.Extract) -> None:
    """Merge a push of a dead incarnation in a commit without a line, and again in its successor's."""
    extract.ledger.accounts["learner-1/1"].left = False
    extract.ledger.accounts["learner-1/1"].merged += 20
    extract.booked["learner-1/1/0"] = metrics.Booked(2020, 0, 0)
    extract.merged[0] += 20
    del extract.rounds[98]


def merge_again_in_heads(extract: metrics.Extract) -> None:
    """The same, when somebody read the head of the commit without a line."""
    again = extract.rounds[96].shares[0]
    extract.made = [metrics.Made(0, 50, "digest", [*extract.rounds[98].shares, again])]
    merge_again_unseen(extract)


def forget_the_books(extract: metrics.Extract) -> None:
    """Merge a push again under ledgers that know of one of the two only."""
    extract.merged[0] += 20


@pytest.mark.parametrize(
    ("forge", "names"),
    [
        (isolate, {"honest learners isolated"}),
        (fork, {"versions made twice or out of order"}),
        (fork_by_head, {"versions made twice or out of order"}),
        (go_back, {"versions made twice or out of order"}),
        (twice, {"contributions merged twice", UNLIKE}),
        (merge_again_unseen, {UNPROVED}),
        (merge_again_in_heads, {"contributions merged twice", UNPROVED, UNLIKE}),
        (forget_the_books, {UNLIKE}),
        (lose, {"acknowledged and without a fate", UNPROVED}),
        (forget, {"pushed and without a fate"}),
        (overfill, {"pushed and without a fate"}),
        (miscount, {"every token has one fate"}),
    ],
)
def test_a_forged_run_is_flagged(forge: Callable[[metrics.Extract], None], names: set[str]) -> None:
    """Each guarantee has a figure that misses its goal when the guarantee is broken, and no other does."""
    extract = calm()
    forge(extract)

    assert {figure.name for figure in metrics.safety(extract) if figure.holds is False} == names


def test_what_the_recorder_did_not_hear_is_counted() -> None:
    """A push with a fate that no tap told of, and a number that nobody knows anything of."""
    extract = calm()
    extract.acknowledged["learner-1/1/0"] = [[1, 49], [51, 100]]
    extract.settled["learner-2/1/1"] = extract.acknowledged["learner-2/1/1"] = [[1, 9], [11, 100]]
    found = metrics.safety(extract)

    assert verdict(found, "stored and not heard of").value == 1.0
    assert verdict(found, "push numbers without a sound or a fate").value == 1.0


def test_a_push_whose_size_nobody_heard_is_said_and_still_has_tokens() -> None:
    """Without its size the two sides cannot be equal; the ledgers must have something for it all the same."""
    extract = calm()
    extract.stored["learner-1/1/0"] = [pair for pair in extract.stored["learner-1/1/0"] if pair[0] != 50]
    del extract.rounds[98]
    known = verdict(metrics.safety(extract), UNPROVED)
    extract.booked["learner-1/1/0"] = metrics.Booked(1980, 0, 0)

    assert known.holds
    assert known.how.endswith("of 1 nobody heard it")
    assert verdict(metrics.safety(extract), UNPROVED).holds is False


def test_a_commit_without_a_line_in_the_event_log_is_counted() -> None:
    extract = calm()
    del extract.rounds[50]

    assert verdict(metrics.safety(extract), "commits without a line on the event log").value == 1.0
    assert all(figure.holds is not False for figure in metrics.safety(extract))


def stormy() -> metrics.Extract:
    """Return a run in which shard 0 rested for 4 s after a kill, the broker was away, and learner-2 was cut off for 30 s."""
    extract = calm("storm-1", 1.0)
    extract.faults = [
        Fault(BEGAN_S + 10.25, "kill", "owner", "shard-0", 0),
        Fault(BEGAN_S + 30.25, "kill", "broker", "broker", over_at_s=BEGAN_S + 31.25),
        Fault(BEGAN_S + 50.25, "partition", "learner", "learner-2", over_at_s=BEGAN_S + 80.25),
        Fault(BEGAN_S + 90.25, "kill", "learner", "learner-1"),
    ]
    away = [(10.25, 14.25, {"shard-0"}), (30.25, 33.25, {"shard-0", "shard-1"})]
    extract.rounds = [
        msgspec.structs.replace(
            made, shares=[s for s in made.shares if s.learner == "learner-1" or not 50.0 < made.at_s < 82.0]
        )
        for made in extract.rounds
        if not any(start < made.at_s < stop and made.shard in shards for start, stop, shards in away)
    ]
    return extract


def test_waits_are_counted_from_the_fault_to_the_next_commit() -> None:
    """Of the shard for its owner, of anybody for the broker, of the others in rounds for a learner."""
    found = metrics.recovery(stormy())

    assert verdict(found, "after its owner was killed").value == pytest.approx(4.75)
    assert verdict(found, "after the broker was up again").value == pytest.approx(2.25)
    assert verdict(found, "after a learner was killed").value == pytest.approx(0.25)
    assert verdict(metrics.takeovers([stormy()]), "pace during a takeover").value == pytest.approx(1.0)


def test_learners_that_rest_during_a_takeover_miss_its_goal() -> None:
    extract = stormy()
    extract.lives["learner-1/1"] = [row for row in life(0.0, LENGTH_S) if not 10.5 < row[0] < 15.0]
    extract.lives["learner-1/1"] = [
        (at_s, steps - 9 * (at_s >= 15.0), tokens, step_s)
        for at_s, steps, tokens, step_s in extract.lives["learner-1/1"]
    ]
    pace = verdict(metrics.takeovers([extract]), "pace during a takeover")

    assert pace.value < 0.7
    assert pace.holds is False


def test_a_takeover_beside_another_fault_says_nothing() -> None:
    extract = stormy()
    extract.faults.append(Fault(BEGAN_S + 5.0, "kill", "learner", "learner-2"))

    assert metrics.takeovers([extract]) == []


def test_what_a_partitioned_learner_had_in_hand_is_followed_to_its_fate() -> None:
    """Per fragment the first fate after healing counts, merged or refused; none at all misses the goal."""
    extract = stormy()
    extract.refusals = [
        metrics.Refusal(81.0, "learner-2", 1, 1, 51, "stale"),
        metrics.Refusal(81.0, "learner-2", 2, 0, 1, "stale"),
    ]
    first, last = metrics.partition(extract)
    extract.rounds, extract.refusals = [made for made in extract.rounds if made.at_s < 80.0], []
    none = metrics.partition(extract)

    assert first.value == pytest.approx(0.75)
    assert last.value == pytest.approx(1.75)
    assert last.how == "2 of 2 fragments: merged 1, refused stale 1"
    assert [figure.holds for figure in none] == [False]


def test_a_dead_learner_counts_as_present() -> None:
    """One of two learners that is away for half of the time takes a quarter of the participation and of the tokens."""
    extract = calm("storm-1", 1.0)
    extract.lives["learner-2/1"] = life(0.0, 25.0)
    extract.lives["learner-2/2"] = life(75.0, LENGTH_S)
    extract.rounds = [
        msgspec.structs.replace(m, shares=m.shares[:1] if 25.0 < m.at_s <= 75.0 else m.shares) for m in extract.rounds
    ]

    assert metrics.participation(extract) == pytest.approx(0.75)
    assert metrics.useful_share(extract, calm()) == pytest.approx(0.75, abs=0.02)


def test_a_gauntlet_is_asked_for_safety_and_kills_only() -> None:
    """It has a length of its own: no share of time, no recovery, no plot; too few kills miss its goal."""
    extract = stormy()
    extract.course = msgspec.structs.replace(extract.course, name="gauntlet", per_minute=32.0, kills_min=3)
    found = [figure for figure in metrics.figures([calm(), extract]) if figure.name.startswith("gauntlet: ")]
    killed, loss = verdict(found, "gauntlet: kills"), verdict(found, "gauntlet: held-out loss")
    extract.course = msgspec.structs.replace(extract.course, kills_min=4)

    assert {figure.name.removeprefix("gauntlet: ") for figure in found} == {
        "kills",
        "faults",
        "held-out loss",
        *(figure.name for figure in metrics.safety(extract)),
    }
    assert (killed.value, killed.holds, loss.holds) == (3.0, True, True)
    assert verdict(metrics.figures([extract]), "gauntlet: kills").holds is False
    assert metrics.plots([calm(), extract]) == metrics.plots([calm()])


def test_an_extract_that_lacks_what_is_asked_now_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its figures would be of empty ledgers."""
    monkeypatch.setattr(chaos, "sources", lambda: "a-b")
    extract, path = calm(), tmp_path / "old.json.zst"
    metrics.save(extract, path)
    old = chaos.kept(extract.course, path)
    extract.schema = metrics.SCHEMA
    metrics.save(extract, path)

    assert old is None
    assert chaos.kept(extract.course, path) is not None


def test_sources_are_those_of_services_and_shared_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)

    def commit(folder: str, text: str) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "file").write_text(text, encoding="utf-8")
        who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
        for words in (("add", "."), (*who, "commit", "-qm", folder)):
            subprocess.run(["git", *words], check=True)  # noqa: S607
        return harness.sources()

    subprocess.run(["git", "init", "-q"], check=True)  # noqa: S607
    commit("services", "one")
    first = commit("shared", "one")

    assert first != "changed"
    assert {commit(folder, "more") for folder in ("docs", "benchmarks", "tests")} == {first}
    assert commit("shared", "two") not in (first, "changed")
    (tmp_path / "services" / "file").write_text("two", encoding="utf-8")
    assert harness.sources() == "changed"


def test_a_learner_that_never_came_back_counts_as_present() -> None:
    extract = calm("storm-1", 1.0)
    del extract.lives["learner-2/1"]

    assert metrics.participation(extract) == pytest.approx(0.5)


def test_late_contributions_count_whole_and_beside_it_damped() -> None:
    extract = calm("storm-1", 1.0)
    extract.age_damping = 0.5
    late = [m.shares[1] for m in extract.rounds]
    extract.rounds = [
        msgspec.structs.replace(m, shares=[m.shares[0], msgspec.structs.replace(share, age=1)])
        for m, share in zip(extract.rounds, late, strict=True)
    ]
    found = metrics.figures([calm(), extract])

    assert verdict(found, "storm-1: useful-step share").value == pytest.approx(1.0, abs=0.02)
    assert verdict(found, "storm-1: useful-step share, damped").value == pytest.approx(0.75, abs=0.02)


def test_steps_that_were_rolled_back_are_stepping_but_not_useful() -> None:
    """The synchronous group is at step 30 when it breaks, goes back to 20, and ends at 40: 50 taken, 40 kept."""
    lines = [Line(BEGAN_S, "formed", 1, 0)]
    lines += [Line(BEGAN_S + i, "step", 1, i, 1.0) for i in range(1, 31)]
    lines += [Line(BEGAN_S + 40, "formed", 2, 20)]
    lines += [Line(BEGAN_S + 40 + i, "step", 2, 20 + i, 1.0) for i in range(1, 21)]
    plain = [Line(BEGAN_S, "formed", 1, 0), *(Line(BEGAN_S + i, "step", 1, i, 1.0) for i in range(1, 61))]
    broken, whole = (
        msgspec.structs.replace(
            calm(name, rate), course=metrics.Course(name, "synchronous", rate, 0, 60.0, 0.0, 3), step_tokens=8
        )
        for name, rate in (("sync-1", 1.0), ("sync-undisturbed", 0.0))
    )
    for extract, taken in ((broken, lines), (whole, plain)):
        enter_steps(extract, "\n".join(msgspec.json.encode(line).decode() for line in taken) + "\n" + '{"cut off')

    assert broken.report["tokens_by_fate"] == {"merged": 320, "merged_late": 0, "lost": 80}
    assert metrics.participation(broken) == pytest.approx(50 / 60)
    assert metrics.useful_share(broken, whole) == pytest.approx(40 / 60)


def test_gaps_are_what_lies_between() -> None:
    assert metrics.gaps([(10.0, 20.0), (15.0, 30.0), (31.0, 40.0)], 0.0, 50.0, 3.0) == [(0.0, 10.0), (40.0, 50.0)]


# --- keeping and publishing ---------------------------------------------------------------------------------------------


def test_ranges_keep_numbers() -> None:
    """Back and forth without a loss."""
    assert metrics.ranges([5, 1, 2, 3, 9, 5]) == [[1, 3], [5, 5], [9, 9]]
    assert metrics.numbers([[1, 3], [5, 5]]) == {1, 2, 3, 5}


def test_the_published_table_can_be_computed_again_from_its_raw_files(tmp_path: Path) -> None:
    runs, docs = [calm(), stormy()], tmp_path / "docs"
    paths = [tmp_path / f"{run.course.name}.json.zst" for run in runs]
    for run, path in zip(runs, paths, strict=True):
        metrics.save(run, path)
    document = {"machine": "m", "commit": "c" * 40, "seed": 0, "raw": [str(path) for path in paths]}
    document["figures"] = [asdict(figure) for figure in metrics.figures([metrics.load(path) for path in paths])]
    publish("chaos", json.loads(json.dumps(document)), docs)
    page = docs / "chaos.md"

    assert differences("chaos", docs) == []
    assert {path.name for path in docs.glob("*.svg")} == {
        "chaos-useful.svg",
        "chaos-participation.svg",
        "chaos-loss.svg",
    }
    assert all(name.name in page.read_text(encoding="utf-8") for name in docs.glob("*.svg"))

    page.write_text(page.read_text(encoding="utf-8").replace("| 0 versions |", "| 1 versions |", 1), encoding="utf-8")
    assert len(differences("chaos", docs)) > 0


def test_what_the_repository_publishes_follows_from_its_raw_files() -> None:
    """The committed page of the chaos harness, if there is one, and the committed extracts agree."""
    assert differences("chaos", ROOT / "docs" / "results") == []


# --- the faults ---------------------------------------------------------------------------------------------------------


def test_a_forecast_is_its_seed_and_its_rate() -> None:
    first = list(islice(forecast(7, 16.0), 50))

    assert first == list(islice(forecast(7, 16.0), 50))
    assert first != list(islice(forecast(8, 16.0), 50))
    assert [f.at_s for f in first] == sorted(f.at_s for f in first)
    assert 1000 / 16.0 * 0.9 < list(islice(forecast(7, 16.0), 1000))[-1].at_s / 60.0 < 1000 / 16.0 * 1.1


def test_both_systems_get_the_same_storm() -> None:
    """Every run of Atoll has a run of the baseline with the same seed, rate, length and partition, so the same faults.

    Only the gauntlet, from which nothing is compared, has none.
    """
    *every, _ = courses(3, rates=[1.0, 16.0], kills=20)
    ours, theirs = ([c for c in every if c.system == system] for system in ("atoll", "synchronous"))

    def faults(course: metrics.Course) -> list[Planned]:
        return storm(course.seed, course.per_minute, course.seconds, course.partition_s)

    assert [faults(c) for c in ours] == [faults(c) for c in theirs]
    assert [len(faults(c)) > 0 for c in ours] == [False, True, True]
    assert len({c.name for c in every}) == 6


def test_a_storm_is_long_enough_for_its_kills_and_has_one_partition() -> None:
    seconds = seconds_for(0, 16.0, 200)
    planned = storm(0, 16.0, seconds, 60.0)
    partitions = [fault for fault in planned if fault.act == "partition"]

    assert sum(fault.act == "kill" for fault in planned) >= 200
    assert [(fault.role, fault.over_s) for fault in partitions] == [("learner", 60.0)]
    assert partitions[0].at_s + 60.0 < seconds
    assert storm(0, 0.0, seconds, 60.0) == []


# --- the synchronous group ----------------------------------------------------------------------------------------------


def gradient(worker: int, generation: int, value: float) -> GroupMessage:
    return GroupMessage(worker, generation, 5, 0.1, np.full(2, value, np.float32).tobytes())


def formed(size: int = 2) -> WorkerGroup:
    """Return a group all of whose workers know that it stands, since second 8."""
    group = WorkerGroup(size)
    for at_s, worker in enumerate((*range(1, size + 1), *range(1, size)), start=1):
        group.on_join(GroupMessage(worker, 0, 0), "reply", 8.0 - size + at_s * 0.1)
    assert group.told == set(range(1, size + 1))
    return group


def test_a_group_forms_when_all_ask_at_once() -> None:
    """Nobody is told before the last has come, and who asked long ago does not count: it may be dead."""
    group = WorkerGroup(2)

    assert group.on_join(GroupMessage(1, 0, 0), "a", 1.0) == [("a", b"")]
    assert group.on_join(GroupMessage(2, 0, 0), "b", 9.0) == [("b", b"")]
    told = group.on_join(GroupMessage(1, 0, 0), "a", 9.5)
    assert [(reply, msgspec.msgpack.decode(data, type=Formed).generation) for reply, data in told] == [("a", 9500)]
    assert group.on_join(GroupMessage(2, 0, 0), "b", 9.7)[0][1] == told[0][1]


def test_a_group_steps_when_all_have_come_and_not_before() -> None:
    """The mean goes to everybody at once."""
    group = formed()
    assert group.on_reduce(gradient(1, group.generation, 1.0), "a") == []
    answers = dict(group.on_reduce(gradient(2, group.generation, 2.0), "b"))

    assert {reply: np.frombuffer(data, np.float32).tolist() for reply, data in answers.items()} == {
        "a": [1.5, 1.5],
        "b": [1.5, 1.5],
    }


def test_a_worker_that_joins_again_breaks_the_group() -> None:
    """Those that wait are told to join again, and so is who comes later with a gradient of the old generation."""
    group = formed()
    former = group.generation
    group.on_reduce(gradient(1, former, 1.0), "a")

    assert group.on_join(GroupMessage(2, 0, 0), "b", 20.0) == [("a", b""), ("b", b"")]
    assert group.on_reduce(gradient(1, former, 1.0), "a") == [("a", b"")]
    assert len(group.on_join(GroupMessage(1, 0, 0), "a", 20.5)[0][1]) > 0
    assert group.generation == 20500


def test_a_worker_that_died_before_it_was_told_is_told_in_its_next_life() -> None:
    group = WorkerGroup(2)
    group.on_join(GroupMessage(1, 0, 0), "a", 1.0)
    group.on_join(GroupMessage(2, 0, 0), "b", 1.5)
    group.on_reduce(gradient(2, group.generation, 1.0), "b")
    answers = group.on_join(GroupMessage(1, 0, 0), "a", 9.0)

    assert [(reply, len(data) > 0) for reply, data in answers] == [("a", True)]
    assert list(group.reducing) == [2]


SECONDS = 60.0
REPORT = {"learners": [{"incarnations": [{"overhead": 0.004}, {"overhead": None}, {"overhead": 0.006}]}]}


@pytest.mark.parametrize(("rate", "holds"), [(10.0, True), (9.0, False)])
def test_pace_is_that_of_the_same_learner_in_quiet_time(rate: float, holds: bool) -> None:  # noqa: FBT001
    """Steps at 10 a second, and at `rate` from each kill to the commit three seconds later."""
    found = {figure.name: figure for figure in takeover.figures(run(rate), REPORT, 0)}
    assert found["next commit of the shard"].value == pytest.approx(3.0)
    assert found["pace during a takeover"].value == pytest.approx(rate / 10.0, abs=0.005)
    assert found["pace during a takeover"].holds is holds
    assert found["share of their time inside island.step"].value == 0.006
    assert found["owners killed"].value == 2


def test_the_interval_holds_the_ratio_and_narrows_with_windows() -> None:
    pairs = [(9.0, 10.0), (10.0, 10.0), (11.0, 10.0)]
    low, high = interval(pairs, 0)
    closer, above = interval(pairs * 30, 0)
    assert low < closer < ratio(pairs) < above < high


def run(rate: float) -> metrics.Extract:
    """Return a run of two takeovers of one shard each, with a learner that is heard ten times a second."""
    faults = [Fault(1000.0 + 13.0, "kill", "owner", "shard-0", 0), Fault(1000.0 + 40.0, "kill", "owner", "shard-1", 1)]
    slow = [(13.0, 16.0), (40.0, 43.0)]
    rows: list[metrics.Row] = []
    steps = 0.0
    for tick in range(int(SECONDS * 10) + 1):
        at_s = tick / 10.0
        rows.append((at_s, round(steps), 0, 0.1))
        steps += 0.1 * (rate if any(a <= at_s < b for a, b in slow) else 10.0)
    rounds = [
        metrics.ExtractRound(
            at_s, f"shard-{shard}", shard, number, [metrics.ExtractShare("learner-1", 0, number, 0, 1)]
        )
        for shard, times in ((0, (5.0, 16.0, 30.0)), (1, (5.0, 30.0, 43.0)))
        for number, at_s in enumerate(times)
    ]
    course = metrics.Course("takeovers", "atoll", 60.0 / EVERY_S, 0, SECONDS, 0.0, 1)
    return metrics.Extract(
        course=course,
        sources="",
        machine="",
        commit="",
        began_s=1000.0,
        faults=faults,
        lives={"learner-1/0": rows},
        rounds=rounds,
    )
