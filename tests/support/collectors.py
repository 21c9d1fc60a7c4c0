"""A collector of OpenTelemetry for tests: it takes spans by OTLP over HTTP and keeps them."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@contextmanager
def collecting() -> Iterator[tuple[str, list[Any]]]:
    """Yield the address of a collector and the spans that it was told."""
    found: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        """Keeps what it is sent."""

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = zlib.decompress(body, wbits=31)
            asked = ExportTraceServiceRequest()
            asked.ParseFromString(body)
            found.extend(span for one in asked.resource_spans for scope in one.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", found
        finally:
            server.shutdown()
            thread.join()
