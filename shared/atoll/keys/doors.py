"""The doors of a broker: its configuration, made from the roll of who may enter.

Rights on subjects alone do not close a broker. A client chooses the subject to which its answer goes, and the broker does not
check that against the client's rights: a learner that may read could have the answer stored as another learner's contribution
(measured with nats-server 2.15; the same hole is open for the subjects of consumers). So every identity of an isolated kind has
an *account* of its own. Accounts share no subjects; what may pass is written down, one import for each right. An answer returns
into the account of who asked, and nowhere else. Within its account an identity has the same rights again, as permissions: so
the broker says at once what it refuses, instead of leaving a request without an answer.

Streams are in the account `core`, with synchronizers and operators, which are trusted with a whole run.

The text is complete: whoever is not on the roll, or whose keys have expired, cannot connect. It holds public keys only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.keys.rights import ISOLATED, Kind, Rights, rights_of, synchronizer_hears, synchronizer_publishes

CORE = "core"
CONNECTIONS_MAX = 64
PAYLOAD_MAX = "4MB"
TLS_TIMEOUT_S = 5


@dataclass(frozen=True, slots=True)
class Entrant:
    """Who may enter: one identity with the public keys that hold now (two while a key is replaced)."""

    name: str
    kind: Kind
    run: str
    keys: tuple[str, ...]
    founds: bool = False

    @property
    def account(self) -> str:
        """Return the name of its account."""
        return f"{self.run}/{self.name}" if self.kind in ISOLATED else CORE


def inbox(key: str) -> str:
    """Return the prefix of the subjects on which the holder of a public key receives answers."""
    return f"_INBOX.{key}"


def doors(entrants: Sequence[Entrant], certificate: Path, key: Path) -> str:
    """Return the part of nats-server's configuration that lets exactly `entrants` in, over TLS.

    Args:
        entrants: who may enter.
        certificate: the broker's certificate (PEM), as the server finds it.
        key: its private key (PEM).
    """
    isolated = [one for one in entrants if one.kind in ISOLATED and one.keys]
    trusted = [one for one in entrants if one.kind not in ISOLATED]
    granted = {one.account: rights_of(one.kind, one.run, one.name, founds=one.founds) for one in isolated}
    accounts = [_core(trusted, granted), *(_isolated(one, granted[one.account]) for one in isolated)]
    return (
        f"tls {{ cert_file: {_text(certificate)}, key_file: {_text(key)}, timeout: {TLS_TIMEOUT_S}, "
        f'min_version: "1.3" }}\n'
        f"accounts {{\n{''.join(accounts)}}}\n"
    )


def _core(trusted: Iterable[Entrant], granted: dict[str, Rights]) -> str:
    """Return the account of the streams; it exports each right to those accounts that have it."""
    services, answers, streams = _by_subject(granted)
    exports = [
        *(f"{{ service: {_text(subject)}, accounts: {_list(to)} }}" for subject, to in services.items()),
        *(
            f"{{ service: {_text(subject)}, response_type: stream, accounts: {_list(to)} }}"
            for subject, to in answers.items()
        ),
        *(f"{{ stream: {_text(subject)}, accounts: {_list(to)} }}" for subject, to in streams.items()),
    ]
    return _account(CORE, "jetstream: enabled", _users(trusted), exports=exports)


def _isolated(one: Entrant, rights: Rights) -> str:
    """Return the account of one identity, which imports its rights."""
    imports = [
        f"{{ {what}: {{ account: {CORE}, subject: {_text(subject)} }} }}"
        for what, subjects in (("service", _services(rights) + rights.reads), ("stream", rights.hears))
        for subject in subjects
    ]
    publishes = (*_services(rights), *rights.reads, *rights.own)
    users = [_user(key, (*publishes, f"{inbox(key)}.>"), (*rights.hears, f"{inbox(key)}.>")) for key in one.keys]
    limits = f"limits: {{ max_connections: {CONNECTIONS_MAX}, max_payload: {PAYLOAD_MAX} }}"
    return _account(one.account, limits, users, imports=imports)


def _by_subject(
    granted: dict[str, Rights],
) -> tuple[dict[str, list[str]], dict[str, list[str]], dict[str, list[str]]]:
    """Return, by subject, the accounts that may use it: answered once (or never), answered often, heard."""
    services: dict[str, list[str]] = {}
    answers: dict[str, list[str]] = {}
    streams: dict[str, list[str]] = {}
    for account, rights in granted.items():
        for table, subjects in ((services, _services(rights)), (answers, rights.reads), (streams, rights.hears)):
            for subject in subjects:
                table.setdefault(subject, []).append(account)
    return services, answers, streams


def _services(rights: Rights) -> tuple[str, ...]:
    return (*rights.stores, *rights.tells, *rights.asks)


def _users(trusted: Iterable[Entrant]) -> list[str]:
    """Return the users of the core account; an operator has every right, and hears no inbox but its own."""
    users = []
    for one in trusted:
        for key in one.keys:
            mine = f"{inbox(key)}.>"
            if one.kind == "operator":
                users.append(_user(key, (">",), ("atoll.>", mine)))
            else:
                users.append(_user(key, (*synchronizer_publishes(one.run), mine), (*synchronizer_hears(one.run), mine)))
    return users


def _user(key: str, publishes: Iterable[str], subscribes: Iterable[str]) -> str:
    return f"{{ nkey: {key}, permissions: {{ publish: {_list(publishes)}, subscribe: {_list(subscribes)} }} }}"


def _account(
    name: str, setting: str, users: Sequence[str], *, exports: Sequence[str] = (), imports: Sequence[str] = ()
) -> str:
    parts = [f"  {_text(name)}: {{\n    {setting}\n", _block("users", users)]
    parts += [_block("exports", exports)] if exports else []
    parts += [_block("imports", imports)] if imports else []
    return "".join([*parts, "  }\n"])


def _block(name: str, lines: Sequence[str]) -> str:
    return "\n".join((f"    {name}: [", *(f"      {line}" for line in lines), "    ]\n"))


def _list(subjects: Iterable[str]) -> str:
    return f"[{', '.join(_text(subject) for subject in subjects)}]"


def _text(value: object) -> str:
    """Return a string of the configuration; JSON's are valid in its syntax."""
    return json.dumps(str(value))
