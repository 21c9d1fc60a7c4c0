"""A folder of keys that makes identities for tests."""

from __future__ import annotations

import time
from pathlib import Path

from atoll.keys.identity import HeldIdentity, read_identity
from atoll.keys.rights import Kind
from atoll.keys.roll import KeyFolder
from atoll.keys.signatures import IdentitySignatures

RUN = "demo"


class SigningOffice:
    """A folder of keys that makes identities for tests."""

    def __init__(self, folder: Path, run: str = RUN) -> None:
        self.run = run
        self.keys = KeyFolder(folder)
        self.keys.create(["127.0.0.1"], time.time())

    def identity(self, name: str, kind: Kind = "learner", run: str = "", *, until_s: float = 0.0) -> HeldIdentity:
        return read_identity(self.keys.add(name, kind, run or self.run, time.time(), until_s=until_s))

    def signatures(self, name: str, kind: Kind = "learner", run: str = "") -> IdentitySignatures:
        """Return the signatures of a new identity."""
        return self.identity(name, kind, run).signatures()
