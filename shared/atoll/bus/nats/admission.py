"""Refusals of the broker, at its door and inside, as errors for the callers that wait.

A broker refuses in three ways. At the door it answers "Authorization Violation" and hangs up; or its certificate is not one
that we believe, and we hang up. Inside, a message or a subscription without the right to it is dropped, and the reason comes as
an error of the whole connection, which names the subject and no request. nats-py hands all of these to one callback.

Here they become `AccessDenied`: for the request on that subject, at once; for everything, once the door has
been shut for `SHUT_S` (a broker that restarts, or takes over a new roll, may shut it for a moment). The first connection is
refused once every node has refused it in turn: the roll of one of them may be older.
"""

from __future__ import annotations

import re
import secrets
import ssl
from asyncio import AbstractEventLoop, Future
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from atoll.base.errors import AccessDenied
from atoll.bus.nats.client import NO_TLS
from atoll.bus.options import Credentials, addresses

SHUT_S: Final = 5.0
ASK_FOR_ONE: Final = (
    "give the file that its operator made for you (broker.identity or ATOLL_BROKER__IDENTITY; in a loop of your own also "
    "JoinOptions(identity=...)); of a run of `atoll up` give the folder (--out DIR), "
    "or DIR/keys/identities/operator.toml to a verb without that option"
)
OTHER_TIME: Final = (9, 10)
"""OpenSSL's codes for a certificate that does not hold yet, and one that has ended; its authority's among them."""
_UNAUTHORISED: Final = "authorization violation"
_EXPIRED: Final = "authentication expired"
_DENIED: Final = re.compile(r"permissions violation for (publish|subscription) to \"?([^\"\s]+)")


class Admission:
    """Our credentials at one broker, and what it refused. Everything runs in the connection's loop."""

    def __init__(self, url: str, credentials: Credentials | None, loop: AbstractEventLoop) -> None:
        self._url = url
        self._credentials = credentials
        self._loop = loop
        self._waiting: dict[str, set[Future[Any]]] = {}
        self._doors = len(addresses(url))
        self._shut_times = 0
        self._shut_since_s: float | None = None
        self._reason: AccessDenied | None = None
        self.shut: Future[None] = loop.create_future()
        """Done once the broker has refused us at every door."""

    @property
    def must_encrypt(self) -> bool:
        """Return whether nothing may be sent in plain text."""
        return self._credentials is not None or self._url.startswith("tls:")

    def options(self) -> dict[str, Any]:
        """Return what nats-py needs to know of our credentials."""
        mine = self._credentials
        return {} if mine is None else {"nkeys_seed_str": mine.seed, "inbox_prefix": mine.inbox, "tls": mine.tls()}

    def inbox(self) -> str:
        """Return a new subject for answers to us."""
        prefix = "_INBOX" if self._credentials is None else self._credentials.inbox
        return f"{prefix}.{secrets.token_hex(11)}"

    @contextmanager
    def denial(self, subject: str, settles: Future[Any] | None = None) -> Iterator[Future[Any]]:
        """Yield a future that is done, with None, as soon as the broker refuses us `subject`: `settles`, or a new one."""
        denied = self._loop.create_future() if settles is None else settles
        waiting = self._waiting.setdefault(subject.lower(), set())  # nats-py tells subjects in lower case
        waiting.add(denied)
        try:
            yield denied
        finally:
            waiting.discard(denied)
            if not waiting:
                self._waiting.pop(subject.lower(), None)

    def denial_error(self, subject: str) -> AccessDenied:
        """Return the error for a subject that was refused."""
        return AccessDenied(
            "the broker does not let this identity do that",
            got=f"{subject} as {self._who()}",
            todo="ask the broker's operator which identity may (`atoll keys list`)",
        )

    def take_error(self, error: Exception) -> bool:
        """Take note of what nats-py complains about; return whether a caller waits for just that and will tell it."""
        text = str(error).lower()
        if (refused := _DENIED.search(text)) is not None:
            waiting = self._waiting.get(refused[2], set())
            for each in waiting:
                if not each.done():
                    each.set_result(None)
            return bool(waiting)
        if (reason := self._at_the_door(error, text)) is not None:
            self._reason = reason
            self._shut_times += 1
            if self._shut_since_s is None:
                self._shut_since_s = self._loop.time()
            if self._shut_times >= self._doors and not self.shut.done():
                self.shut.set_result(None)
        return False

    def note_entry(self) -> None:
        """Take note that the broker has let us in."""
        self._shut_since_s = self._reason = None
        self._shut_times = 0
        if self.shut.done():
            self.shut = self._loop.create_future()

    def check(self, patience_s: float = SHUT_S) -> None:
        """Raise `AccessDenied` if the door has been shut to us for so long."""
        if self._reason is not None and self._loop.time() - (self._shut_since_s or 0.0) >= patience_s:
            raise self._reason

    def _at_the_door(self, error: Exception, text: str) -> AccessDenied | None:
        mine = self._credentials
        if _UNAUTHORISED in text or _EXPIRED in text:
            return AccessDenied(
                f"the broker at {self._url} does not let us in",
                got=self._who(),
                allowed="an identity on its roll"
                if mine is None
                else "an identity that is not revoked, not in another region, and whose key has not ended",
                todo=ASK_FOR_ONE
                if mine is None
                else "ask its operator: `atoll keys list` says where it is, and `atoll keys rotate` makes a new key",
            )
        if isinstance(error, ssl.SSLCertVerificationError):
            if error.verify_code in OTHER_TIME:
                return AccessDenied(
                    f"the certificate of the broker at {self._url} does not hold at this time",
                    got=error.verify_message,
                    allowed="a certificate that holds by this machine's clock",
                    todo="look at this machine's clock (`atoll doctor` tells it); if it is right, the operator makes another",
                )
            return AccessDenied(
                f"the broker at {self._url} cannot prove that it is ours",
                got=error.verify_message,
                allowed="a certificate for this host, of an authority that the system knows"
                if mine is None
                else "a certificate for this host, of the authority in our identity",
                todo="check the address; the broker's operator names its hosts with `atoll keys certificate`"
                if mine is not None
                else ASK_FOR_ONE,
            )
        if NO_TLS.lower() in text:
            return AccessDenied(
                f"the broker at {self._url} offers no TLS, so we tell it nothing",
                got="plain text",
                allowed="TLS, with an identity or a tls:// address",
                todo="check the address; an open broker takes nats:// and no identity",
            )
        return None

    def _who(self) -> str:
        return "nobody (no identity)" if self._credentials is None else f"identity {self._credentials.name!r}"
