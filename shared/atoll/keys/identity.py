"""An identity: one file, whose holder is that learner, synchronizer, reader or operator to a broker.

It holds the secret half of a key (Ed25519, as an nkey seed), the name and the run that the key stands for, the authority that
vouches for the broker, and what signing messages takes (`atoll.keys.signatures`). The broker keeps the public half, and asks
for a signature over a number of its own: the secret never travels. A file that its group or the world may read is refused. No
message, log line or error shows a seed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import nkeys

from atoll.base.errors import EnvironmentFault, SettingsError
from atoll.base.files import (
    DOCUMENT_BYTES_MAX,
    NotRegular,
    NotText,
    TooLarge,
    opened_file,
    read_whole,
    text_of_bytes,
    write_whole,
)
from atoll.base.parsing import parsed_toml
from atoll.bus.options import Credentials
from atoll.keys.certificates import check_authority
from atoll.keys.rights import EVERY_RUN, KINDS, Kind
from atoll.keys.signatures import IdentitySignatures
from atoll.wire.subjects import token

SECRET_MODE: Final = 0o600
FOLDER_MODE: Final = 0o700
_OTHERS: Final = 0o077
_SEED_BYTES: Final = 32
_FIELDS: Final = ("name", "kind", "run", "seed", "authority", "root", "voucher")


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A new key: the secret seed and the public half, as nkeys writes them."""

    seed: str = field(repr=False)
    public: str


def new_key() -> KeyPair:
    """Return a key of the system's randomness."""
    seed = nkeys.encode_seed(os.urandom(_SEED_BYTES), nkeys.PREFIX_BYTE_USER)
    return KeyPair(seed.decode(), _public_of(seed.decode()))


def _public_of(seed: str) -> str:
    pair = nkeys.from_seed(bytearray(seed.encode()))
    public: bytes = pair.public_key
    return public.decode()


@dataclass(frozen=True, slots=True)
class HeldIdentity:
    """Content of an identity file; `run` is `*` for an operator of every run. One that `founds` may begin its run."""

    name: str
    kind: Kind
    run: str
    seed: str = field(repr=False)
    authority: str = field(repr=False)
    root: str
    voucher: str = field(repr=False)
    founds: bool = False

    def credentials(self) -> Credentials:
        """Return what a bus shows at the door, and what signs its messages."""
        return Credentials(self.name, self.seed, _public_of(self.seed), self.authority, self.signatures())

    def signatures(self) -> IdentitySignatures:
        """Return what signs our messages and checks others'; raise `ValueError` if the parts of the file do not fit."""
        return IdentitySignatures(self.seed, self.root, self.voucher)

    def check_run(self, run: str) -> None:
        """Raise `SettingsError` if this identity is of another run."""
        if self.run not in (run, EVERY_RUN):
            raise SettingsError(
                f"this identity is of another run: {self.kind} {self.name!r}",
                got=run,
                allowed=self.run,
                todo="correct the run id, or ask the operator for an identity of this run",
            )

    def check_learner(self, learner: str) -> None:
        """Raise `SettingsError` if this is not the identity of a learner of that id."""
        if self.kind == "operator" or (self.kind, self.name) == ("learner", learner):
            return
        raise SettingsError(
            f"this is the identity of another: {self.kind} {self.name!r}",
            got=f"learner {learner!r}",
            allowed=f"learner {self.name!r}" if self.kind == "learner" else "the identity of a learner",
            todo="use the learner id that the identity was made for, or ask the operator for another identity",
        )


def write_identity(path: Path, identity: HeldIdentity) -> None:
    """Write an identity for its holder alone."""
    write_secret(
        path,
        f"# Whoever has this file is {identity.kind} {identity.name} to the broker of run {identity.run}. Keep it secret.\n"
        f'name = "{identity.name}"\nkind = "{identity.kind}"\nrun = "{identity.run}"\n'
        f'founds = {str(identity.founds).lower()}\nseed = "{identity.seed}"\n'
        f'root = "{identity.root}"\nvoucher = "{identity.voucher}"\n'
        f'authority = """\n{identity.authority}"""\n',
    )


def write_secret(path: Path, text: str) -> None:
    """Write a file that nobody but its owner may read, whole or not at all."""
    path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.new")
    # Created closed: between its creation and a later chmod anybody could open it.
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, SECRET_MODE))
    draft.chmod(SECRET_MODE)
    write_whole(path, text.encode(), draft)


def read_identity(path: Path) -> HeldIdentity:
    """Return the identity in a file; raise `SettingsError` if there is none, or others may read it."""
    try:
        with opened_file(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            text = text_of_bytes(read_whole(file, DOCUMENT_BYTES_MAX, path), path)
    except FileNotFoundError:
        raise SettingsError(
            "there is no such identity",
            got=path,
            todo="correct broker.identity, ATOLL_BROKER__IDENTITY or JoinOptions(identity=…)",
        ) from None
    except NotText:
        raise _no_identity(path, "not text") from None  # a byte of it could be one of the secret
    except (NotRegular, TooLarge) as error:
        raise _no_identity(path, str(error.strerror)) from None
    except OSError as error:
        raise EnvironmentFault("an identity cannot be read", got=f"{path}: {error.strerror}") from error
    if mode & _OTHERS:
        raise SettingsError(
            "others may read this identity, so it is no secret",
            got=f"{path} has mode {mode & 0o777:04o}",
            allowed="0600, or less",
            todo=f"chmod 600 {path}; if others could have read it, ask the operator for a new key (`atoll keys rotate`)",
        )
    return _parse(path, text)


def learner_identity(path: Path | str, run: str, learner: str) -> HeldIdentity:
    """Return the identity of a learner of a run; raise `SettingsError` if the file makes us somebody else."""
    identity = read_identity(Path(path))
    identity.check_run(run)
    identity.check_learner(learner)
    return identity


def run_credentials(path: Path, run: str) -> Credentials:
    """Return the credentials of an identity of a run; raise `SettingsError` if it is of another."""
    identity = read_identity(path)
    identity.check_run(run)
    return identity.credentials()


def _parse(path: Path, text: str) -> HeldIdentity:
    try:
        table = parsed_toml(text)
    except ValueError:
        raise _no_identity(path, "not TOML") from None  # its words could show a part of the secret
    wrong = [name for name in _FIELDS if not isinstance(table.get(name), str)]
    if wrong or table["kind"] not in KINDS:
        raise _no_identity(path, f"without {', '.join(wrong)}" if wrong else f"of kind {table['kind']!r}")
    try:
        _public_of(table["seed"])
    except Exception:  # noqa: BLE001  (nkeys raises many kinds, some with the seed in their words)
        raise _no_identity(path, "with a seed that is none") from None
    token(table["name"], "name of an identity")
    identity = HeldIdentity(**{name: table[name] for name in _FIELDS}, founds=table.get("founds") is True)
    try:
        identity.signatures()
    except ValueError as error:
        raise _no_identity(path, f"that does not fit together: {error}") from None
    try:
        check_authority(identity.authority)
    except ValueError:
        raise _no_identity(path, "with an authority that is no certificate") from None
    return identity


def _no_identity(path: Path, why: str) -> SettingsError:
    return SettingsError(
        "this file is no identity",
        got=f"{path}, {why}",
        allowed="a file that `atoll keys add` or `atoll keys rotate` wrote",
        todo="ask the operator of the broker for it again",
    )
