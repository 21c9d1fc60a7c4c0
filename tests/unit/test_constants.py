"""The numbers of the protocol that no run chooses, and what a fact says where its teller says nothing: each a decision.

Whoever changes one changes this table, and says why in the changelog.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from atoll.merge import correction, fold, global_update, norms
from atoll.protocol import (
    balance,
    data,
    events,
    fragment_ledger,
    island,
    ledger,
    pacing,
    tenure,
)
from atoll.protocol import round as rounds

CONSTANTS = [
    (balance, {"SILENT_LEASES": 2.0, "BEATS_PER_LEASE": 3.0, "HOSTS_MAX": 1024}),
    (
        data,
        {"EPOCHS_KEPT": 16, "SHARD_LEASES": 10.0, "RENEWALS_PER_LEASE": 3.0, "LEARNERS_NAMED_MAX": 2048, "OLDER": -1},
    ),
    (data, {"UNITS_MAX": 2560, "HELD_MAX": 256, "UNIT_BLOCKS_MAX": 65536}),
    (fragment_ledger, {"RANGES_MAX": 1024, "LEDGER_BYTES_MAX": 64 << 20}),
    (island, {"UNHEARD_CALLS": 3}),
    (ledger, {"ACCOUNTS_MAX": 1536}),
    (pacing, {"RECENT_STEPS": 16, "ODD_TIMES": 3.0, "NEWS_SHARE": 0.2, "BEATS_PER_SILENCE": 5.0, "PAUSE_S_MIN": 0.5}),
    (pacing, {"PATIENCE_STEPS": 10.0, "EARLIER_SHARE": 0.25, "RECALL_STEPS": 2.0, "RECALL_S_MIN": 0.5}),
    (pacing, {"STEP_S_MIN": 1e-6, "STEP_S_MAX": 3600.0}),
    (rounds, {"VAIN_CALLS": 8, "PLACES": 2}),
    (tenure, {"RENEWALS_PER_LEASE": 3.0}),
    (fold, {"ROUNDING": 2.0**-23, "NORM_MIN": 1e-20, "SMALL": 128}),
    (norms, {"CLAIM_TOLERANCE": 1e-3}),
    (correction, {"CANCELLED": 2.0**-8, "FACTOR_MAX": (2.0 - 2.0**-23) * 2.0**126}),
    (global_update, {"_HEADER_BYTES_MAX": 2 << 20, "_NUMBER_BYTES_MAX": 64}),
]
SILENT: list[tuple[type, dict[str, object]]] = [
    (events.LearnerBeat, {"pushed": 0, "superseded": 0, "refused_local": 0, "cause_id": ""}),
    (events.ContributionArrived, {"final": False}),
    (events.ContributionReady, {"norm": 0.0, "base_norm": 0.0}),
    (events.QueueDrained, {"proven": True}),
    (events.PushSettled, {"reason": ""}),
    (events.Push, {"final": False, "onward": False}),
    (events.Acknowledge, {"reason": ""}),
    (balance.HostHeard, {"leaving": False}),
    (tenure.LeaseSeen, {"epoch": 0, "released": False, "ours": False}),
    (pacing.KnownLearner, {"step_s": None, "training": False, "present": True}),
    (rounds.FragmentRound, {"attempt": 0, "called_s": 0.0, "quorum_s": 0.0, "grace_s": 0.0}),
    (island.Sent, {"calls": 0}),
    (
        island.LocalInterval,
        {"from_tokens": 0, "from_steps": 0, "sent": None, "fetching": False, "ready": None, "pushes": 0},
    ),
]


@pytest.mark.parametrize(("module", "table"), CONSTANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_constants_are_those_of_the_table(module: object, table: dict[str, float]) -> None:
    assert {name: getattr(module, name) for name in table} == table


@pytest.mark.parametrize(("kind", "table"), SILENT, ids=lambda value: getattr(value, "__name__", ""))
def test_what_nobody_says_is_that_of_the_table(kind: type, table: dict[str, object]) -> None:
    is_struct = issubclass(kind, msgspec.Struct)
    fields: Any = msgspec.structs.fields(kind) if is_struct else dataclasses.fields(kind)
    defaults = {field.name: field.default for field in fields}
    assert {name: defaults[name] for name in table} == table


def test_fresh_records_are_empty() -> None:
    grant, data_ledger = data.DataGrant(3, 4, 9, "a", 1), data.DataLedger(blocks=7)
    assert (grant.read, grant.of, grant.counted, grant.renewals) == (0, 0, 0, 0)
    assert (data_ledger.epoch, data_ledger.next_position, data_ledger.schema) == (0, 0, 1)
    account, settled, report = ledger.Account(), fragment_ledger.SettledPushes(), fragment_ledger.LearnerReport()
    assert account.fates(1) == {"merged": 0, "merged_late": 0, "superseded": 0, "lost": 0}
    assert (account.trained, account.pushed, account.refused_local, account.left) == (0, 0, 0, False)
    assert (settled.merged, settled.merged_late, settled.offences) == (0, 0, 0)
    assert (report.trained, report.pushed, report.superseded, report.refused_local, report.left) == (0, 0, 0, 0, False)
    assert ledger.Ledger().run_tokens == fragment_ledger.FragmentLedger().run_tokens == 0
