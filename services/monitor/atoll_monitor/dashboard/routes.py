"""The page over HTTP: its files, the newest state as JSON, and the same as server-sent events.

The page loads nothing from elsewhere and runs no script of anybody else (`POLICY`), so it works without a network, and a name
that a peer has chosen stays text.
"""

from __future__ import annotations

import asyncio
from typing import Final

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.report.page import STATIC
from atoll_monitor.dashboard.feed import Feed, Mailbox

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
RETRY_S: Final = 5


class PageHeaders:
    """Adds the page's policy to each answer."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap an application."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message["headers"],
                    (b"content-security-policy", POLICY.encode()),
                    (b"referrer-policy", b"no-referrer"),
                    (b"cross-origin-opener-policy", b"same-origin"),
                    (b"cross-origin-resource-policy", b"same-origin"),
                ]
            await send(message)

        await self._app(scope, receive, send_with_headers)


class FrameStream:
    """Server-sent events from one mailbox, until the server stops or the connection ends: its viewer left, or stalled."""

    def __init__(self, feed: Feed, mailbox: Mailbox) -> None:
        """Send nothing yet."""
        self._feed = feed
        self._mailbox = mailbox

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        """Send frames as the viewer fetches them."""
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
        ends = [asyncio.ensure_future(self._left(receive)), asyncio.ensure_future(self._feed.stopped.wait())]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send(b"retry: %d\n\n" % (1000 * RETRY_S), send)
            while not any(end.done() for end in ends):
                taking = asyncio.ensure_future(self._mailbox.take())
                await asyncio.wait({taking, *ends}, return_when=asyncio.FIRST_COMPLETED)
                if not taking.done():
                    taking.cancel()
                    break
                await self._send(taking.result(), send)
            if self._feed.stopped.is_set():
                await self._send(b"event: end\ndata: {}\n\n", send)
                await send({"type": "http.response.body", "body": b""})
        finally:
            self._feed.leave(self._mailbox)
            for end in ends:
                end.cancel()

    async def _send(self, data: bytes, send: Send) -> None:
        # Sending waits while the viewer's connection is full, until `BoundedConnection` closes it; what is made meanwhile
        # replaces itself in the mailbox.
        await send({"type": "http.response.body", "body": data, "more_body": True})

    async def _left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


def page_routes(feed: Feed) -> list[BaseRoute]:
    """Return the routes of the page; they answer everything that no route before them does."""

    async def page(_: Request) -> Response:
        return FileResponse(STATIC / "index.html", headers={"Cache-Control": "no-cache"})

    async def data(request: Request) -> Response:
        run = request.query_params.get("run", feed.first)
        if run not in feed.scenes:
            return _unknown(feed, run)
        await feed.ask(run)
        scene = feed.scenes[run]
        parts = {"state": scene.state(), "curves": scene.curves(), "causes": scene.causes()}
        return JSONResponse(parts, headers={"Cache-Control": "no-store"})

    async def events(request: Request) -> Response | FrameStream:
        run = request.query_params.get("run", feed.first)
        if run not in feed.scenes:
            return _unknown(feed, run)
        mailbox = feed.enter(run)
        if mailbox is None:
            text, later = "too many look at this monitor: close some pages\n", {"Retry-After": str(RETRY_S)}
            return PlainTextResponse(text, status_code=503, headers=later)
        return FrameStream(feed, mailbox)

    routes: list[BaseRoute] = [
        Route("/", page),
        Route("/data.json", data),
        Route("/events", events),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return [Mount("/", routes=routes, middleware=[Middleware(PageHeaders)])]


def _unknown(feed: Feed, run: str) -> Response:
    known = ", ".join(feed.scenes)
    return PlainTextResponse(f"no run {run!r} is shown here; there are: {known}\n", status_code=404)
