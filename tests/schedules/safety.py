"""What may never happen, whoever does it: the broker shows every durable change here before it is made.

The protocol's own invariants (`atoll.protocol.invariants`) are checked after every fact of a machine. Here are those that
need the broker to be stated: what a head names is there and stays there, a version is what its head says it is, a later
epoch is never followed by an earlier one, every durable push finds exactly one fate, a block of data is read by one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from atoll.archive.rebuild import REBUILDER
from atoll.base.parsing import parsed
from atoll.bus.memory import StoredMessage
from atoll.codec import KEYFRAME
from atoll.protocol.claims import BATCHES_MAX
from atoll.protocol.data import DataLedger, sums_by_epoch
from atoll.protocol.events import Acknowledge, Commit, Dismiss, PushKey, Share
from atoll.protocol.invariants import Durable, InvariantBroken, require
from atoll.protocol.ledger import FragmentLedger, life_of
from atoll.run.delta_chain import frames_of
from atoll.wire.blobs import BlobRef
from atoll.wire.messages import Beat, Contribution, Head, Included, Lease, Member, RunRecord, decode
from atoll.wire.subjects import SUM, Subjects
from schedules import values
from schedules.broker import ScheduleBroker
from schedules.hostile import HOSTILE
from schedules.values import Vector, Version

LEASE_LOST = (
    *("records spoiled", "crashes of hosts", "freezes", "clock ahead", "requests lost", "answers lost"),
    *("messages slow", "messages late", "cut both ways", "cut up", "cut down", "synchronizer cut off"),
    *("disk full", "stores lost", "host told to leave"),
)
"""After these an owner may have failed to renew its lease while others could. An absence of the broker is none of them."""


class Safety:
    """Watches one run at its broker. After `rebuilt` it begins anew with what the archive held."""

    def __init__(self, run: str, tally: Counter[str]) -> None:
        self.subjects = Subjects(run)
        self.tally = tally
        self.broker: ScheduleBroker
        self.run: RunRecord | None = None
        self.durable = Durable({})
        self.heads: dict[int, Head] = {}
        self.versions: dict[int, Version] = {}
        self.digests: dict[tuple[str, int, int], str] = {}
        self.named: Counter[str] = Counter()
        self.leases: dict[int, Lease] = {}
        self.tenures: dict[int, dict[str, int]] = {}
        self.leases_spoiled: set[int] = set()
        self.members: dict[str, Member] = {}
        self.data: DataLedger | None = None
        self.pushed: Counter[str] = Counter()
        self.folded_before = 0
        self.contributions: dict[PushKey, tuple[Contribution, Vector | None]] = {}
        self.power_cuts = 0
        self.archived: set[str] = set()
        self.on_head: list[Callable[[Head], None]] = []
        self._tail = len(self.subjects.prefix) + 1

    # --- the witness --------------------------------------------------------------------------------------------------

    def stored(self, kept: StoredMessage) -> None:
        """Check a message that is about to be stored."""
        kind = kept.subject[self._tail :].split(".")
        if kept.msg_id.startswith(HOSTILE):
            if kind[1] == "lease":
                self.leases_spoiled.add(int(kind[2]))
            return
        if kind[0] == "gl" and kind[1] == "head":
            self._see_head(decode(Head, kept.data))
        elif kind[0] == "gl" and kind[1] == "lease":
            self._see_lease(decode(Lease, kept.data))
        elif kind[0] == "gl" and kind[1] == "run":
            self._see_run(decode(RunRecord, kept.data))
        elif kind[0] == "up" and kind[1] == "m" and kind[3] != "bye":
            self._see_manifest(decode(Contribution, kept.data))
        elif kind[0] == "mb" and kind[1] == "learner":
            self._see_member(decode(Member, kept.data))
        elif kind[0] == "mb" and kind[1] == "data":
            self._see_data(decode(DataLedger, kept.data))

    def purged(self, kept: StoredMessage) -> None:
        stem = kept.subject.rpartition(".")[0]
        require(stem not in self.named, "what a head names is never deleted", (kept.subject, self.named[stem]))
        kind = stem[self._tail :].split(".")
        if kind[0] == "up" and kind[1] == "c":
            if kind[2] == SUM:  # a region's: what is in it has chunks of its own
                return
            learner, fragment, life = kind[2], int(kind[3]), kind[4].split("-")
            key = PushKey(learner, int(life[0]), fragment, int(life[1]))
            if key in self.contributions:
                fragment_ledger = self.durable.fragment_ledger.get(fragment, FragmentLedger())
                require(fragment_ledger.knows(key), "what is contributed stays until it has a durable fate", key)

    def settled(self, kept: StoredMessage) -> None:
        """Check a queued message that leaves its queue for good."""
        if kept.msg_id.startswith(HOSTILE):
            return
        kind = kept.subject[self._tail :].split(".")
        if kind[3] == "bye":
            beat = decode(Beat, kept.data)
            if self.run is None or beat.run_nonce != self.run.nonce:
                return
            fragment = min(self.run.protocol.fragments_of(int(kind[2])))
            self.durable.see_dismissed(
                Dismiss(learner=beat.learner, incarnation=beat.incarnation, fragment=fragment, cause_id="")
            )
            return
        manifest = decode(Contribution, kept.data)
        if self.run is None or manifest.run_nonce != self.run.nonce:
            self.tally["contributions of another founding"] += 1
            return
        key = manifest.key
        name, has_fate = life_of(key.learner, key.incarnation), key in self.durable.merged or key in self.durable.fates
        if not has_fate and self.durable.fragment_ledger[key.fragment].former.covers(name):
            # Its process went on after the account was closed: it had been frozen, and has a successor.
            self.tally["pushes of closed accounts"] += 1
            self.pushed[name] -= manifest.tokens
        fate = "merged" if key in self.durable.merged else "refused"
        self.durable.see_acknowledged(Acknowledge(key=key, fate=fate))
        self.tally["contributions settled"] += 1

    # --- records ------------------------------------------------------------------------------------------------------

    def _see_run(self, record: RunRecord) -> None:
        if self.run is not None and record.rebuilt is None:
            require(self.run is None, "a run is founded once", record.nonce)
        self.run = record

    def _see_member(self, member: Member) -> None:
        before = self.members.get(member.learner)
        if before is not None:
            same = member.incarnation == before.incarnation and member.nonce == before.nonce
            require(member.incarnation > before.incarnation or same, "an incarnation is claimed once", (before, member))
        self.members[member.learner] = member

    def _see_lease(self, lease: Lease) -> None:
        before, tenures = self.leases.get(lease.shard), self.tenures.setdefault(lease.shard, {})
        was, spoiled = max(tenures.values(), default=0), lease.shard in self.leases_spoiled
        mine = tenures.get(lease.nonce)
        if lease.nonce.startswith(REBUILDER):
            require(lease.epoch >= was, "a rebuilt lease is above all that were written", (was, lease))
            self.archived |= set() if lease.ledger is None else set(lease.ledger.accounts)
        elif mine == lease.epoch:
            back = before is not None and before.nonce != lease.nonce
            require(not back or spoiled, "a lease goes back to a former owner only where one was lost", (before, lease))
            require(not back or lease.epoch_max >= was, "a lease says up to where epochs are taken", (was, lease))
        else:
            # A candidate whose lease was lost before it heard that it had it takes it again.
            require(mine is None or spoiled, "a tenure has one epoch", (mine, lease))
            require(lease.epoch > was, "a tenure has one owner, and a higher epoch than those before it", (was, lease))
            require(lease.epoch == was + 1 or spoiled, "tenures are numbered without gaps", (was, lease))
            owned = () if self.run is None else self.run.protocol.fragments_of(lease.shard)
            theirs = [self.heads[p].epoch for p in owned if p in self.heads]
            require(lease.epoch > max(theirs, default=-1), "a tenure is above all heads of its shard", (theirs, lease))
            renewed = before is not None and not before.released
            excused = any(self.tally[kind] for kind in LEASE_LOST)
            require(not renewed or excused, "no lease is taken from an owner that can renew it", (before, lease))
            self.tally["tenures"] += 1
        tenures[lease.nonce] = lease.epoch
        self.leases[lease.shard] = lease

    def _see_data(self, ledger: DataLedger) -> None:
        units = (*ledger.grants, *ledger.returned)
        by_epoch: dict[int, list[tuple[int, int]]] = {}
        for unit in units:
            by_epoch.setdefault(unit.epoch, []).append((unit.start, unit.stop))
        for epoch, ranges in by_epoch.items():
            ranges.sort()
            apart = all(one[1] <= other[0] for one, other in itertools.pairwise(ranges))
            require(apart, "a block of data is leased to one", (epoch, ranges))
        for row in sums_by_epoch(ledger):
            total = row.finished + row.leased + row.returned + row.untouched
            require(total == ledger.blocks, "the blocks of an epoch add up", row)
        if self.data is not None:
            before = (self.data.epoch, self.data.next_position)
            require((ledger.epoch, ledger.next_position) >= before, "data is not granted anew", (before, ledger))
            if not self.tally["stores lost"]:  # a run that is rebuilt goes back to marks of its checkpoint
                self._see_progress(self.data, ledger)
        self.tally["changes of the data ledger"] += 1
        self.data = ledger

    def _see_progress(self, before: DataLedger, after: DataLedger) -> None:
        """A unit's mark never goes back while its holder has it."""
        held = {(grant.key, grant.holder): grant for grant in before.grants}
        for grant in after.grants:
            former = held.get((grant.key, grant.holder))
            if former is not None:
                require(grant.of != former.of or grant.read >= former.read, "reading never goes back", (former, grant))

    # --- heads --------------------------------------------------------------------------------------------------------

    def _blob(self, ref: BlobRef) -> list[bytes]:
        """Return the pieces of a blob; raise when one is missing."""
        stream = self.broker.stream(self._plans(), f"{ref.stem}.0")
        pieces = []
        for number in range(ref.chunks):
            kept = stream.kept.get(stream.revision(f"{ref.stem}.{number}"))
            require(kept is not None, "what a head names is durable before the head", (ref.stem, number))
            if kept is not None:
                pieces.append(kept.data)
        return pieces

    def _plans(self) -> Any:  # noqa: ANN401  (stream plans)
        return tuple(stream.plan for stream in self.broker.streams.values())

    def names_of(self, head: Head) -> list[BlobRef]:
        """Return everything that a head keeps from being removed."""
        refs = (*frames_of(self.subjects, head), *head.superseded, head.state, head.fragment_ledger)
        return [ref for ref in refs if ref is not None]

    def is_named(self, subject: str) -> bool:
        """Return whether a record or a queued manifest names a chunk; what is not a chunk counts as named."""
        kind = subject[self._tail :].split(".")
        if kind[:2] not in (["gl", "c"], ["gl", "d"], ["st", "c"], ["st", "b"], ["up", "c"], ["ps", "c"]):
            return True
        stem = subject.rpartition(".")[0]
        return stem in self.named or any(stem == manifest.blob.stem for manifest, _ in self.contributions.values())

    def _see_head(self, head: Head) -> None:
        for ref in self.names_of(head):
            self._blob(ref)
        before = self.heads.get(head.fragment)
        if before is None:
            self._see_first(head)
        elif head.version == before.version:
            self._see_again(before, head)
        else:
            self._see_version(before, head)
        self.heads[head.fragment] = head
        self.named = Counter(ref.stem for each in self.heads.values() for ref in self.names_of(each))
        for each in self.on_head:
            each(head)

    def _version(self, head: Head, before: Version | None) -> Version:
        """Return what a head names; `before` is the version before it, None for the first that is seen."""
        assert self.run is not None
        chain = self._values(head, before)
        protocol, derived = self.run.protocol, self._derived
        if head.state is None:
            state = values.initial_state(protocol, chain[0], derived=derived)
        else:
            state = values.state_of(b"".join(self._blob(head.state)))
        if not derived:
            return Version(head.version, chain[-1], state)
        require(set(state) <= {"momentum"}, "a derived state is a momentum at most", sorted(state))
        if "momentum" in state:
            momentum = state["momentum"].astype(np.float64)
            for former, following in itertools.pairwise(chain):
                momentum = values.derived_momentum(protocol, momentum, former, following)
            state = {"momentum": momentum}
        kept = np.full(chain[-1].size, 0.0 if before is None else np.nan)  # until the step to it was computed
        return Version(head.version, chain[-1], state, kept)

    @property
    def _derived(self) -> bool:
        """Return whether the run derives its outer state; what that rests on is said here once more."""
        assert self.run is not None
        protocol = self.run.protocol
        return protocol.codec_down != KEYFRAME and protocol.outer == "nesterov" and not protocol.average_versions

    def _see_first(self, head: Head) -> None:
        """A founder's version 0, or what an archive held: then what was merged stays merged."""
        assert self.run is not None
        self.versions[head.fragment] = self._version(head, None)
        self.durable.versions[head.fragment] = head.version
        self.durable.tokens.setdefault(head.fragment, 0)
        fragment_ledger = (
            FragmentLedger()
            if head.fragment_ledger is None
            else parsed(b"".join(self._blob(head.fragment_ledger)), FragmentLedger)
        )
        self.durable.fragment_ledger[head.fragment] = fragment_ledger
        rebuilt = self.run.rebuilt
        require(rebuilt is not None or head.version == 0, "a run is founded with version 0", head)
        if rebuilt is not None:
            was = self.digests.get((rebuilt.source, head.fragment, head.version))
            require(was == head.digest, "a run is rebuilt as it was", (head.fragment, head.version))
            settled, former = fragment_ledger.settled.values(), fragment_ledger.former
            merged = sum(account.merged + account.merged_late for account in settled)
            self.durable.tokens[head.fragment] = former.merged + former.merged_late + merged
            self.folded_before += fragment_ledger.former.settled
            for name, account in fragment_ledger.settled.items():
                self.pushed[name] += account.merged + account.merged_late + sum(account.refused.values())
                self.archived.add(name)
            self.tally["fragments rebuilt"] += 1
        self.digests[self.run.nonce, head.fragment, head.version] = head.digest

    def _see_again(self, before: Head, head: Head) -> None:
        require(head.epoch >= before.epoch, "nothing of a deposed owner becomes visible", (before.epoch, head.epoch))
        same = (head.keyframe, head.key_version, head.digest, head.deltas, head.state, head.included, head.superseded)
        was = (
            before.keyframe,
            before.key_version,
            before.digest,
            before.deltas,
            before.state,
            before.included,
            before.superseded,
        )
        require(same == was, "a version has one content", (before, head))
        require(head.tokens_merged == before.tokens_merged, "a version has one count of tokens", (before, head))
        if head.fragment_ledger != before.fragment_ledger:
            require(head.epoch == before.epoch, "a ledger is written by the owner that has fenced", (before, head))
            require(head.fragment_ledger is not None, "a ledger is never dropped", head)
            if head.fragment_ledger is not None:
                self.durable.see_ledger(head.fragment, b"".join(self._blob(head.fragment_ledger)))
        elif head.epoch > before.epoch:
            self.tally["fences"] += 1
        held = self.versions[head.fragment]
        if head.epoch > before.epoch and held.kept is not None:  # a new owner begins without what the former one kept
            held.kept = np.zeros(held.values.size)

    def _see_version(self, before: Head, head: Head) -> None:
        fragment = head.fragment
        require(head.epoch == before.epoch, "a version is written by the owner that has fenced", (before, head))
        require(head.version == before.version + 1, "visible versions follow one another", (before, head))
        self._see_frames(before, head)
        after = self._version(head, self.versions[fragment])
        self._see_shares(head)
        if head.fragment_ledger is None:
            raise InvariantBroken("a version has a ledger", got=head)
        fragment_ledger = b"".join(self._blob(head.fragment_ledger))
        commit = Commit(
            fragment=fragment,
            base_version=before.version,
            shares=tuple(share_of(fragment, each) for each in head.included),
            called_s=0.0,
            quorum_s=0.0,
            grace_s=0.0,
            end="",
            live=0,
            fragment_ledger=fragment_ledger,
        )
        self.durable.see_commit(commit)
        tokens = before.tokens_merged + sum(share.tokens for share in head.included)
        require(head.tokens_merged == tokens, "a head counts all tokens merged so far", (head.tokens_merged, tokens))
        counted = parsed(fragment_ledger, FragmentLedger).tokens_counted
        counts = head.tokens_counted == counted <= tokens
        require(counts, "only what is merged counts", (head.tokens_counted, counted, tokens))
        self._see_values(head, self.versions[fragment], after)
        self.versions[fragment] = after
        self.digests[self.run.nonce if self.run else "", fragment, head.version] = head.digest
        self.tally["commits"] += 1

    def _see_frames(self, before: Head, head: Head) -> None:
        """Keyframes are there often enough, deltas without a gap, and what was named last stays for those that read it."""
        assert self.run is not None
        protocol = self.run.protocol
        behind = head.version - head.key_version
        exact = protocol.codec_down == KEYFRAME
        require(behind < protocol.keyframe_versions or behind == 0, "a keyframe is never far", (behind, head))
        require(not exact or behind == 0, "in float32 every version is a keyframe", head)
        there = [delta.version for delta in head.deltas]
        require(there == sorted(set(there)), "deltas are named in order and once", there)
        require(set(there) >= set(range(head.key_version + 1, head.version + 1)), "no delta is missing", (there, head))
        kept = {ref.stem for ref in self.names_of(head)}
        former = {ref.stem for ref in frames_of(self.subjects, before)}
        require(former <= kept, "frames stay until the next commit", sorted(former - kept))
        self.tally["keyframes" if behind == 0 else "versions by delta alone"] += 1

    def _see_shares(self, head: Head) -> None:
        """What a head lists was durable, and is counted as its manifest says."""
        for share in head.included:
            key = PushKey(share.learner, share.incarnation, head.fragment, share.push)
            require(key in self.contributions, "what is merged was contributed", key)
            manifest, _ = self.contributions[key]
            said = (manifest.base_version, manifest.tokens, manifest.steps)
            listed = (share.base_version, share.tokens, share.steps)
            require(said == listed, "a head lists a contribution as it was", (said, listed))
            weight = share.tokens * share.tokens / share.steps
            others = [each.tokens for name, (each, _) in self.contributions.items() if name.learner != share.learner]
            large = len(others) > 1 and share.tokens > BATCHES_MAX * min(others)  # it may weigh in part
            whole = abs(share.weight - weight) <= 1e-9 * weight
            require(whole or (large and share.weight < weight), "a weight is tokens squared over steps", share)
            self.tally["merged in part"] += not whole
            age = head.version - 1 - share.base_version
            require(share.age == max(0, age), "the age of a contribution is how far behind it was", (age, share))
            if share.age:
                self.tally["merged late"] += 1
        if len(head.included) > 1:
            self.tally["commits of several"] += 1

    def _values(self, head: Head, before: Version | None) -> list[Vector]:
        """Return the values of the versions since the keyframe of a head, put together in every way in which it names them."""
        assert self.run is not None
        size, codec = self.run.layout.fragment_sizes()[head.fragment], self.run.protocol.codec_down
        results: list[Vector] = []
        deltas = {delta.version: delta for delta in head.deltas}
        refs = {ref.stem: ref for ref in frames_of(self.subjects, head)[1:]}

        def with_delta(version: int, base: Vector) -> Vector:
            delta = deltas[version]
            ref = refs[self.subjects.delta_stem(head.fragment, delta.version, delta.nonce)]
            summed: Vector = base + values.decoded(self._blob(ref), size, codec)
            return summed

        chain = [values.decoded(self._blob(head.keyframe), size, KEYFRAME)]
        for version in range(head.key_version + 1, head.version + 1):
            chain.append(with_delta(version, chain[-1]))
        results.append(chain[-1])
        if before is not None and head.version in deltas:
            results.append(with_delta(head.version, before.values))
        for result in results:
            got = values.digest_of(result)
            require(got == head.digest, "what a head names makes the values it says", (head.fragment, head.version))
        return chain

    def _see_values(self, head: Head, before: Version, after: Version) -> None:
        assert self.run is not None
        shares: list[tuple[Included, Vector]] = []
        for share in head.included:
            vector = self.contributions[PushKey(share.learner, share.incarnation, head.fragment, share.push)][1]
            if vector is None:
                return
            shares.append((share, vector))
        values.check_step(self.run.protocol, self.run.layout.slices(head.fragment), before, after, shares)
        self.tally["versions computed again"] += 1

    # --- the queue ----------------------------------------------------------------------------------------------------

    def _see_manifest(self, manifest: Contribution) -> None:
        if self.run is None or manifest.run_nonce != self.run.nonce:
            return
        key = manifest.key
        if key in self.contributions:  # who lost the answer sends again, and the broker remembers ids for a moment only
            again = msgspec.structs.replace(
                manifest, notes=self.contributions[key][0].notes
            )  # how long it took, for people
            require(again == self.contributions[key][0], "a push that is queued again is the same", key)
            return
        size, codec = self.run.layout.fragment_sizes()[manifest.fragment], self.run.protocol.codec_up
        vector = None
        try:
            vector = values.decoded([manifest.frame] if manifest.frame else self._blob(manifest.blob), size, codec)
        except InvariantBroken as error:
            if not self.power_cuts:
                raise InvariantBroken("what a manifest names is durable before it", got=manifest.blob.stem) from error
        self.contributions[key] = (manifest, vector)
        self.pushed[life_of(key.learner, key.incarnation)] += manifest.tokens
        self.tally["pushes"] += 1
        if manifest.final:
            self.tally["last pushes"] += 1

    # --- a rebuilt run ------------------------------------------------------------------------------------------------

    def lost(self) -> None:
        """Know that the broker has lost its whole store: what follows is another founding or a rebuilt run."""
        self.run = None
        self.durable = Durable({})
        self.heads.clear()
        self.versions.clear()
        self.named.clear()
        self.leases.clear()
        self.tenures.clear()
        self.members.clear()
        self.contributions.clear()
        self.pushed.clear()
        self.folded_before = 0
        self.data = None


class SetBack:
    """The witness of a store that was restored from an older copy, under processes that have `had` later versions of it."""

    def __init__(self, subjects: Subjects, had: dict[int, int]) -> None:
        self._subjects = subjects
        self._had = had

    def stored(self, kept: StoredMessage) -> None:
        """Nobody that has had more goes on from less."""
        for fragment, version in self._had.items():
            if kept.subject == self._subjects.head(fragment):
                got = decode(Head, kept.data).version
                require(False, "a store that went back is not served by who knows better", (fragment, got, version))

    def purged(self, kept: StoredMessage) -> None:
        """Nothing that is removed tells of it."""

    def settled(self, kept: StoredMessage) -> None:
        """Nothing that is acknowledged tells of it."""


def share_of(fragment: int, each: Included) -> Share:
    """Return a share as the machine lists it."""
    key = PushKey(each.learner, each.incarnation, fragment, each.push)
    return Share(
        key=key,
        base_version=each.base_version,
        tokens=each.tokens,
        steps=each.steps,
        weight=each.weight,
        age=each.age,
        credit=each.tokens,
    )
