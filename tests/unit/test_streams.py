"""Streams as data, and as JetStream writes them."""

from __future__ import annotations

import pytest

from atoll.base.errors import ProtocolMisuse
from atoll.bus.nats.provision import differences, stream_config
from atoll.bus.streams import StreamPlan, live_plan, stream_of, stream_plan
from atoll.wire.subjects import Subjects, matches


def configs() -> dict[str, dict[str, object]]:
    """Return every stream of run `r` as JetStream writes it, by the last part of its name."""
    return {
        plan.name.rsplit("_", 1)[1]: stream_config(plan, Subjects("r").prefix) for plan in stream_plan("r", 1 << 20)
    }


def test_only_the_event_log_forgets_and_only_it_is_append_only() -> None:
    """Streams whose loss would lose work refuse when full; events push out the oldest but cannot be deleted."""
    assert {"EV"} == {name for name, config in configs().items() if config["discard"] == "old"}
    assert {"EV"} == {name for name, config in configs().items() if config["deny_delete"] and config["deny_purge"]}


def test_what_learners_send_is_refused_per_subject_and_records_replace() -> None:
    """Two unread manifests per subject are a bound, a chunk is written once; one record per subject is a last value."""
    queue, chunks, heads = configs()["UPM"], configs()["UPC"], configs()["GL"]

    assert (
        queue["retention"],
        queue["max_msgs_per_subject"],
        queue["discard_new_per_subject"],
    ) == ("workqueue", 2, True)
    assert (chunks["discard"], chunks["max_msgs_per_subject"], chunks["discard_new_per_subject"]) == ("new", 1, True)
    assert (heads["retention"], heads["max_msgs_per_subject"], heads["discard_new_per_subject"]) == ("limits", 1, False)


def test_bounds_are_in_the_units_of_the_broker() -> None:
    """Seconds become nanoseconds; the dedup window never exceeds the age."""
    for plan in (*stream_plan("r"), live_plan("r")):
        config = stream_config(plan, "atoll.r")
        assert config["max_age"] == plan.age_max_s * 1e9
        assert config["duplicate_window"] == plan.dedup_s * 1e9
        assert not plan.age_max_s or plan.dedup_s <= plan.age_max_s
        assert config["max_bytes"] > 0


EVERY = (*stream_plan("r"), live_plan("r"))


@pytest.mark.parametrize("bodies", [True, False])
def test_taps_lead_to_a_tree_no_stream_keeps(*, bodies: bool) -> None:
    """A republish that a stream kept would loop. Without bodies a tap is as those of a release before, to the letter."""
    for plan in stream_plan("r"):
        tap = stream_config(plan, "atoll.r", bodies=bodies).get("republish")
        if tap:
            ends = {"src": f"atoll.r.{plan.tap}.>", "dest": f"atoll.r.tap.{plan.tap}.>"}
            assert tap == (ends if bodies else {**ends, "headers_only": True})
            assert matches(plan.subjects[0], tap["src"])
            assert not any(matches(kept, tap["dest"]) for other in EVERY for kept in other.subjects)


def test_no_tap_covers_tensors_or_leases() -> None:
    s = Subjects("r")
    stems = (
        s.global_stem(0, 1, "1.n"), s.delta_stem(0, 1, "1.n"), s.contribution_stem("a", 0, 1, 1),
        s.state_stem(0, 1, "1.n"), s.ledger_stem(0, "1.n"), s.lent_stem("a", 1, "n"),
    )  # fmt: skip
    for subject in (*(f"{stem}.0" for stem in stems), s.lease(0), s.data):
        keeper = stream_of(EVERY, subject)
        assert keeper.tap is None or not matches(f"atoll.r.{keeper.tap}.>", subject), subject


def test_what_was_heard_last_is_small_and_in_memory() -> None:
    """One message of each sender, for two minutes, and the run record from where records are."""
    config = stream_config(live_plan("r", replicas=3), "atoll.r")

    assert (config["storage"], config["max_msgs_per_subject"], config["discard"]) == ("memory", 1, "old")
    assert config["num_replicas"] == 3
    assert config["max_bytes"] <= 8 << 20
    assert config["sources"] == [{"name": "atoll_r_GL", "filter_subject": "atoll.r.gl.run"}]
    assert config["republish"] == {"src": "atoll.r.>", "dest": "atoll.r.tap.>"}
    assert stream_of(EVERY, "atoll.r.gl.run").name == "atoll_r_GL"


def test_differences_name_field_and_both_values() -> None:
    wanted = {"max_bytes": 5, "deny_purge": False, "discard": "new"}

    assert differences(wanted, {"max_bytes": 5, "discard": "new", "first_seq": 1}) == []
    assert differences(wanted, {"max_bytes": 4, "discard": "new"}) == ["max_bytes: 4 instead of 5"]


def test_a_subject_without_a_stream_is_our_bug() -> None:
    plans = (StreamPlan("S", ("a.b.>",)),)

    assert plans[0] == stream_of(plans, "a.b.*")
    with pytest.raises(ProtocolMisuse, match=r"(?s)a\.c\.d.*a\.b\.>"):
        stream_of(plans, "a.c.d")


def test_all_streams_have_as_many_copies() -> None:
    """One with fewer would stop the run with the node that holds it; what was not said is one."""
    told = [{stream_config(plan, "atoll.r")["num_replicas"] for plan in stream_plan("r", replicas=n)} for n in (1, 3)]

    assert told == [{1}, {3}]
    assert {plan.replicas for plan in stream_plan("r")} == {1}
