"""The doors of a broker: its configuration, made from the roll of who may enter.

Rights on subjects alone do not close a broker. A client chooses the subject to which its answer goes, and the broker does not
check that against the client's rights: a learner that may read could have the answer stored as another learner's contribution
(measured with nats-server 2.15). So every identity of an isolated kind has an *account* of its own. Accounts share no
subjects; what may pass is written down, one import for each right, and an answer returns into the account of who asked. A
message that came into `core` in this way goes on to nobody's import of a stream, so what a learner tells is also imported
from its own account, by those that may hear it. Within its account an identity has the same rights again, as permissions: so
the broker says at once what it refuses. Streams are in the account `core`, with synchronizers and operators, which are
trusted with a whole run.

A region has an account of its own at the hub, one for each of its keys. The names by which JetStream is called from behind a
leaf are mapped there in words: what the server maps by itself when a leaf connects is lost when it reads its configuration
again. Nor does it end the connection of a leaf whose account is gone (`atoll.keys.locked`).

The nodes of a cluster let each other in by the broker's certificate itself (`routes`). At the hub the account of the operator
may ask all nodes what they are (`ManagingBus.nodes`). The text is complete: whoever is not on the roll, or whose keys have
expired, cannot connect. It holds public keys only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from atoll.base.errors import SettingsError
from atoll.bus.interface import NODES
from atoll.bus.regions import HUB_DOMAIN
from atoll.keys.rights import (
    ISOLATED,
    Kind,
    Rights,
    at_leaf,
    carried,
    check_name,
    region_hears,
    region_publishes,
    rights_of,
    synchronizer_hears,
    synchronizer_publishes,
)
from atoll.wire.limits import CHUNK_BYTES
from atoll.wire.subjects import matches

CORE = "core"
SYSTEM = "$SYS"
PING = "$SYS.REQ.SERVER.PING.STATSZ"
"""Each server answers for itself: version, peers, and the tags that it wears."""
FAR = f'"$JS.{HUB_DOMAIN}.API.>": "$JS.API.>"'
CONNECTIONS_MAX = 8
"""A learner's process opens three: for messages, for chunks that it writes, and for chunks that it reads. Two processes of it
overlap when one takes over from the other, and the server sees the end of a connection that was cut only after seconds."""
SUBSCRIPTIONS_MAX = 1000
"""Of one connection. A process of ours has some tens: one for each feed, and one for each answer that it waits for."""
REGION_SUBSCRIPTIONS_MAX = 20_000
"""Of the link of a region: some for each learner there. The hub keeps 2.8 kB of each, so this is 56 MB."""
PAYLOAD_MAX = CHUNK_BYTES + (1 << 14)
"""A chunk with its headers: of larger messages fewer would fill what waits for those who hear them."""
PENDING_MAX = "max_pending: 64MB\n"
"""Bytes that may wait at the server for a connection that does not read: twice what a bus asks for at once
(`atoll.bus.nats.bus`). For a single server: the bound would hold for the routes of a cluster, too, and copies that catch up
need more."""
TLS_TIMEOUT_S = 5


@dataclass(frozen=True, slots=True)
class Entrant:
    """One identity that may enter, with the public keys that hold now (two while a key is replaced)."""

    name: str
    kind: Kind
    run: str
    keys: tuple[str, ...]
    founds: bool = False
    region: str = ""
    """Where a learner is: in this region, or at the `HUB`; empty where nobody has said it."""

    @property
    def account(self) -> str:
        """Return the name of its account at the hub."""
        if self.kind == "region":
            return f"{self.run}/{self.name}/{self.keys[0]}"
        return f"{self.run}/{self.name}" if self.kind in ISOLATED else CORE

    def may_be_in(self, region: str) -> bool:
        """Return whether a learner may be in a region, as far as the roll says."""
        return self.kind == "learner" and self.region in ("", region)


def check_entrants(entrants: Sequence[Entrant]) -> None:
    """Raise `SettingsError` if the server could not take these over, or somebody would have the rights of others."""
    holders: dict[str, Entrant] = {}
    for one in entrants:
        check_name(one.kind, one.run, one.name)
        for key in one.keys:
            if (other := holders.setdefault(key, one)) is not one:
                raise SettingsError(
                    "two identities of the roll have one public key",
                    got=f"{other.name!r} of run {other.run!r}, and {one.name!r} of run {one.run!r}",
                    allowed="a key of its own for each",
                    todo="give one of them a new key (`atoll keys rotate`) without overlap, and hand its file out",
                )


def inbox(key: str) -> str:
    """Return the prefix of the subjects on which the holder of a public key receives answers."""
    return f"_INBOX.{key}"


def doors(entrants: Sequence[Entrant], certificate: Path, key: Path, domain: str = "") -> str:
    """Return the part of nats-server's configuration that lets exactly `entrants` in, over TLS.

    At the leaf of a region, whose JetStream has the `domain`, the region's own identity is among them, for its keeper.
    """
    isolated = _isolated_entrants(entrants, at_hub=not domain)
    trusted = [one for one in entrants if one.kind not in ISOLATED and (domain or one.kind != "region")]
    granted = {one.account: _granted(one, entrants, domain) for one in isolated}
    apart = _apart(isolated, granted)
    accounts = [
        *([] if domain else [_system()]),
        _core(_users(trusted), granted, asks_nodes=not domain),
        *(_isolated(one, apart[one.account]) for one in isolated),
    ]
    return f"{tls(certificate, key)}accounts {{\n{''.join(accounts)}}}\n"


def routes(certificate: Path, key: Path, authority: Path, pinned: str) -> str:
    """Return the part of a cluster's block that lets in exactly those nodes that hold the `key` of the `pinned` certificate."""
    # The authority may be one that signs for many. The pin keeps out what else it has signed.
    only = f"ca_file: {_text(authority)}, verify: true, pinned_certs: [{_text(pinned)}]"
    return tls(certificate, key, only)


def remote(hubs: Sequence[str], seed: str, authority: Path) -> str:
    """Return the part of a leaf's block that says where its hub is, and who it is there; it holds a secret, the nkey `seed`."""
    who = f"account: {CORE}, nkey: {_text(seed)}, tls {{ ca_file: {_text(authority)}, timeout: {TLS_TIMEOUT_S} }}"
    return f"remotes: [{{ urls: {_list(hubs)}, compression: off, {who} }}]\n"


def _isolated_entrants(entrants: Sequence[Entrant], *, at_hub: bool) -> list[Entrant]:
    isolated = [one for one in entrants if one.kind in ISOLATED and one.keys]
    regions = [one for one in entrants if one.kind == "region"] if at_hub else []
    return isolated + [replace(region, keys=(key,)) for region in regions for key in region.keys]


def _granted(one: Entrant, entrants: Sequence[Entrant], domain: str) -> Rights:
    rights = rights_of(one.kind, one.run, one.name, founds=one.founds)
    if one.kind == "region":
        learners = [other.name for other in entrants if other.run == one.run and other.may_be_in(one.name)]
        rights = carried(rights, one.run, one.name, learners, founds=one.founds)
    return at_leaf(one.run, rights, domain) if domain else rights


def tls(certificate: Path, key: Path, more: str = "") -> str:
    """Return the block of TLS with the broker's certificate and key; a hub's block for leaves needs nothing else."""
    files = f"cert_file: {_text(certificate)}, key_file: {_text(key)}"
    return f'tls {{ {files}, timeout: {TLS_TIMEOUT_S}, min_version: "1.3"{more and ", "}{more} }}\n'


def _system() -> str:
    """Return what the system account lets the account of the streams ask: every server answers, so there are many answers."""
    question = f"{{ service: {_text(PING)}, response_type: stream, accounts: {_list([CORE])} }}"
    return _account(SYSTEM, "", [], exports=[question])


def _core(users: Sequence[str], granted: dict[str, Rights], *, asks_nodes: bool) -> str:
    exports = [
        f"{{ {what}: {_text(subject)}{more}, accounts: {_list(to)} }}"
        for what, more, subjects_of in (
            ("service", "", _services),
            ("service", ", response_type: stream", attrgetter("reads")),
            ("stream", "", attrgetter("hears")),
        )
        for subject, to in _accounts_by_subject(granted, subjects_of).items()
    ]
    ask = f"{{ service: {{ account: {_text(SYSTEM)}, subject: {_text(PING)} }}, to: {_text(NODES)} }}"
    return _account(CORE, "jetstream: enabled", users, exports=exports, imports=[ask] if asks_nodes else [])


@dataclass(frozen=True, slots=True)
class Apart:
    """The needs of an account of its own: its rights, what it hears of which other account, and who hears what it tells."""

    rights: Rights
    hears: tuple[tuple[str, str], ...]
    """Account and subject."""
    heard: dict[str, list[str]]
    """Accounts by subject."""


def _apart(everybody: Sequence[Entrant], granted: dict[str, Rights]) -> dict[str, Apart]:
    """Return what each isolated account needs beside the others, by account; a region hears of `core` alone."""
    tellers: dict[str, list[str]] = {}
    for one in everybody:
        for subject in granted[one.account].tells:
            tellers.setdefault(subject, []).append(one.account)
    matching: dict[str, list[str]] = {}
    heard: dict[str, dict[str, list[str]]] = {one.account: {} for one in everybody}
    apart = {}
    for one in everybody:
        rights = granted[one.account]
        hears: dict[tuple[str, str], None] = {}
        for pattern in rights.hears if one.kind != "region" else ():
            if pattern not in matching:  # each of a thousand learners hears subjects of its own, and all tell
                wild = "*" in pattern or ">" in pattern
                matching[pattern] = [subject for subject in tellers if matches(pattern, subject)] if wild else [pattern]
            found = [(account, subject) for subject in matching[pattern] for account in tellers.get(subject, ())]
            hears |= dict.fromkeys(found)
        for account, subject in hears:
            heard[account].setdefault(subject, []).append(one.account)
        apart[one.account] = Apart(rights, tuple(hears), heard[one.account])
    return apart


def _isolated(one: Entrant, apart: Apart) -> str:
    rights = apart.rights
    imports = [
        f"{{ {what}: {{ account: {CORE}, subject: {_text(subject)} }} }}"
        for what, subjects in (("service", _services(rights) + rights.reads), ("stream", rights.hears))
        for subject in dict.fromkeys(subjects)  # twice the same import is a configuration that the server refuses
    ]
    imports += [
        f"{{ stream: {{ account: {_text(account)}, subject: {_text(subject)} }} }}" for account, subject in apart.hears
    ]
    exports = [f"{{ stream: {_text(subject)}, accounts: {_list(to)} }}" for subject, to in apart.heard.items()]
    if one.kind == "region":
        link = rights_of(one.kind, one.run, one.name, founds=one.founds)
        publishes, hears, setting = region_publishes(link), region_hears(link), f"mappings: {{ {FAR} }}\n    "
        most = {"max_leafnodes": CONNECTIONS_MAX, "max_subscriptions": REGION_SUBSCRIPTIONS_MAX}
    else:
        publishes, hears, setting = (*_services(rights), *rights.reads, *rights.own), rights.hears, ""
        most = {"max_subscriptions": SUBSCRIPTIONS_MAX, "max_payload": PAYLOAD_MAX}
    most["max_connections"] = CONNECTIONS_MAX
    setting += f"limits: {{ {', '.join(f'{what}: {bound}' for what, bound in most.items())} }}"
    users = [_user(key, (*publishes, f"{inbox(key)}.>"), (*hears, f"{inbox(key)}.>")) for key in one.keys]
    return _account(one.account, setting, users, exports=exports, imports=imports)


def _accounts_by_subject(
    granted: dict[str, Rights], subjects_of: Callable[[Rights], tuple[str, ...]]
) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for account, rights in granted.items():
        for subject in dict.fromkeys(subjects_of(rights)):
            found.setdefault(subject, []).append(account)
    return found


def _services(rights: Rights) -> tuple[str, ...]:
    return (*rights.stores, *rights.tells, *rights.asks)


def _users(trusted: Iterable[Entrant]) -> list[str]:
    """Return the users of the core account: operators, who hear no inbox but their own, synchronizers, a region at its leaf.

    Synchronizers may answer each other, once each question: a shard asks the synchronizer of a region.
    """
    users = []
    for one in trusted:
        for key in one.keys:
            mine = f"{inbox(key)}.>"
            if one.kind == "operator":
                users.append(_user(key, (">",), ("atoll.>", mine), taps="*"))
            elif one.kind == "region":
                users.append(_user(key, (">",), (">",)))
            else:
                sends, hears = synchronizer_publishes(one.run), synchronizer_hears(one.run)
                users.append(_user(key, (*sends, mine), (*hears, mine), "allow_responses: true", taps=one.run))
    return users


def _user(key: str, publishes: Iterable[str], subscribes: Iterable[str], more: str = "", taps: str = "") -> str:
    """Return a user; `taps` are the runs on whose taps it may not send although it may send on what is above them."""
    sends = _list(publishes)
    if taps:  # only the broker writes there: a watcher reads what was stored
        sends = f"{{ allow: {sends}, deny: {_list((f'atoll.{taps}.tap.>',))} }}"
    lists = f"publish: {sends}, subscribe: {_list(subscribes)}"
    return f"{{ nkey: {key}, permissions: {{ {lists}{more and ', '}{more} }} }}"


def _account(
    name: str, setting: str, users: Sequence[str], *, exports: Sequence[str] = (), imports: Sequence[str] = ()
) -> str:
    parts = [f"  {_text(name)}: {{\n", *([f"    {setting}\n"] if setting else []), _block("users", users)]
    parts += [_block("exports", exports)] if exports else []
    parts += [_block("imports", imports)] if imports else []
    return "".join([*parts, "  }\n"])


def _block(name: str, lines: Sequence[str]) -> str:
    return "\n".join((f"    {name}: [", *(f"      {line}" for line in lines), "    ]\n"))


def _list(subjects: Iterable[str]) -> str:
    return f"[{', '.join(_text(subject) for subject in subjects)}]"


def _text(value: object) -> str:
    return json.dumps(str(value))
