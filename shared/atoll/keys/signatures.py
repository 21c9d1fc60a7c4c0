"""Signatures: who wrote a message, provable to every reader who trusts the operator's root key.

    root key ──signs──► voucher (name, kind, run, public key) ──► key of an identity ──signs──► message for a subject

An identity sends its voucher along with each message, so readers need no roll. A signature is one line behind the message, in
base64 without padding:

    signed:<voucher>.<signature of the voucher by the root>.<signature of the message>

It covers the subject, so a message moved to another run, learner, fragment or shard is refused, and the founding of the run,
so nothing passes to a later run of the same id. A message that is repeated where it was meets the versions, epochs and push
numbers that refuse it on an open run, too. A reader asks of the voucher what the broker asks of a connection
(`atoll.keys.rights`).

The key that signs is derived from the one that opens the broker's door. At the door an identity signs a number that the broker
chooses, and a broker that chooses a message as its number must not get a signature of that message.

After a voucher's end the broker lets nobody in, and readers believe nothing that is said live. What is stored was let in
before, and stays true: the record of a run must outlive the key of its founder.

Limits: signatures hide nothing; a reader without memory can be shown an old head; a key that is revoked is unknown to the
broker, yet to readers its voucher holds until it ends. All signatures are Ed25519 (RFC 8032).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Final

import msgspec
import nkeys
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from atoll.base.errors import PeerMisbehaved
from atoll.base.parsing import parsed
from atoll.keys.rights import Kind, may_write
from atoll.wire.messages import SIGNATURE

KEY_BYTES: Final = 32
SIGNATURE_BYTES_MAX: Final = 2048
VOUCHERS_KNOWN: Final = 4096
_PURPOSE: Final = b"atoll signature"
_OF_VOUCHER: Final = b"atoll voucher 1\0"
_OF_MESSAGE: Final = b"atoll message 1\0"
_OF_FOUNDING: Final = b"atoll message of a founding 1\0"


class Voucher(msgspec.Struct, frozen=True):
    """The root's word on one key: who its holder is. `until_s` in seconds since the epoch, 0 for no end."""

    name: str
    kind: Kind
    run: str
    public: str
    founds: bool = False
    until_s: float = 0.0


class Root:
    """The operator's root key: it vouches for identities."""

    def __init__(self, secret: str) -> None:
        """Take the key's 32 bytes in hex; raise `ValueError` for anything else."""
        self._key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret))
        self.public = self._key.public_key().public_bytes_raw().hex()

    @staticmethod
    def new_secret() -> str:
        """Return a new root key of the system's randomness, in hex."""
        return os.urandom(KEY_BYTES).hex()

    def vouch(self, voucher: Voucher) -> str:
        """Return a voucher and the signature of it, as text."""
        claims = msgspec.json.encode(voucher)
        return f"{_text(claims)}.{_text(self._key.sign(_OF_VOUCHER + claims))}"


def signing_public(seed: str) -> str:
    """Return the public half, in hex, of the key with which the holder of an nkey seed signs messages."""
    return _signing_key(seed).public_key().public_bytes_raw().hex()


def _signing_key(seed: str) -> Ed25519PrivateKey:
    secret = bytes(nkeys.decode_seed(seed.encode())[1])
    return Ed25519PrivateKey.from_private_bytes(
        hashlib.blake2b(secret, digest_size=KEY_BYTES, person=_PURPOSE).digest()
    )


class IdentitySignatures:
    """The signatures of one identity, and its belief in others' (`atoll.bus.signed.Signatures`)."""

    def __init__(self, seed: str, root: str, voucher: str, wall: Callable[[], float] = time.time) -> None:
        """Take the identity's nkey seed, the root's public half and its voucher; raise `ValueError` if they do not fit."""
        self._key = _signing_key(seed)
        self._root = Ed25519PublicKey.from_public_bytes(bytes.fromhex(root))
        self._wall = wall
        self._voucher = voucher
        self._vouched = lru_cache(maxsize=VOUCHERS_KNOWN)(self._checked_voucher)
        try:
            fits = self._vouched(*voucher.split(".", 1)).public == signing_public(seed)
        except (PeerMisbehaved, TypeError) as error:
            raise ValueError("the root did not sign this voucher") from error
        if not fits:
            raise ValueError("the voucher is of another key")

    def sign(self, subject: str, message: bytes, founding: str = "") -> bytes:
        """Return a message with our signature for `subject` in a founding of the run; the same bytes each time."""
        signature = _text(self._key.sign(_signed_bytes(subject, message, founding)))
        return b"".join((message, SIGNATURE, self._voucher.encode(), b".", signature.encode()))

    def verify(self, subject: str, data: bytes, founding: str = "", *, live: bool = False) -> bytes:
        """Return the message in `data`; raise `PeerMisbehaved` if nobody signed it who may write on `subject`."""
        message, mark, signature = data.rpartition(SIGNATURE)
        if not mark:
            raise PeerMisbehaved("nobody signed this", got="no signature")
        parts = signature.decode("ascii", "replace").split(".") if len(signature) <= SIGNATURE_BYTES_MAX else []
        if len(parts) != 3:
            raise PeerMisbehaved("nobody signed this", got="a signature that is none")
        voucher = self._vouched(parts[0], parts[1])
        who = f"{voucher.kind} {voucher.name!r} of run {voucher.run!r}"
        if live and voucher.until_s and self._wall() >= voucher.until_s:
            raise PeerMisbehaved("the signer's key has ended", got=who)
        if not may_write(voucher.kind, voucher.run, voucher.name, subject, founds=voucher.founds):
            raise PeerMisbehaved("the signer may not write here", got=f"{who}, on {subject}")
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(voucher.public)).verify(
                _bytes(parts[2]), _signed_bytes(subject, message, founding)
            )
        except (InvalidSignature, ValueError):
            raise PeerMisbehaved("the signature does not fit", got=f"{who}, on {subject}") from None
        return message

    def _checked_voucher(self, claims: str, signature: str) -> Voucher:
        try:
            told = _bytes(claims)
            self._root.verify(_bytes(signature), _OF_VOUCHER + told)
            return parsed(told, Voucher)
        except (InvalidSignature, ValueError, msgspec.MsgspecError):
            raise PeerMisbehaved(
                "the operator of the run does not vouch for the signer", got="another's voucher"
            ) from None


def _signed_bytes(subject: str, message: bytes, founding: str) -> bytes:
    """Return what a signature covers; neither subject nor founding has a zero byte, so nothing moves from part to part."""
    if founding:
        return b"".join((_OF_FOUNDING, founding.encode(), b"\0", subject.encode(), b"\0", message))
    return b"".join((_OF_MESSAGE, subject.encode(), b"\0", message))


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: str) -> bytes:
    """Return what a text stands for; raise `ValueError` if it is not the one text for it."""
    try:
        data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError(text) from error
    if _text(data) != text:
        raise ValueError(text)
    return data
