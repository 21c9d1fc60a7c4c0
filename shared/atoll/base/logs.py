"""Logs as events: one canonical line per unit of work, coloured text on a terminal and JSON elsewhere.

Event names are constants of the form `noun.verb`; values are keys. `configure` sets the keys that every line of a process
carries, in all its threads. Standard-library loggers (nats, jax) go to the same stream. No line carries arrays or secrets.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import structlog

from atoll.base.errors import on_one_line

Format = Literal["auto", "json", "console"]


@dataclass(slots=True)
class Outlet:
    """The voice of this process: whether the error that ends it is a line of its JSON log; None until that is configured."""

    last_word_as_json: bool | None = None


outlet = Outlet()


def configure(form: Format = "auto", level: str = "info", **bound: str | int) -> None:
    """Send structured logs to standard error with `bound` on every line."""
    as_json = form == "json" or (form == "auto" and not sys.stderr.isatty())
    # A verb that answers a person logs errors only, and its last word stays a text.
    outlet.last_word_as_json = as_json and level != "error"

    def bind(
        _logger: structlog.types.WrappedLogger, _method: str, event: structlog.types.EventDict
    ) -> structlog.types.EventDict:
        # Errors have messages of several lines; a log line is one.
        told = {key: on_one_line(value) if isinstance(value, str) else value for key, value in event.items()}
        return {**bound, **told}

    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        bind,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: structlog.types.Processor = (
        structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("jax").setLevel(logging.WARNING)
    logging.getLogger("nats").setLevel(logging.ERROR)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


@contextlib.contextmanager
def restore_at_end() -> Iterator[None]:
    """Leave logging, at the end of the block, as it was at its start."""
    root = logging.getLogger()
    handlers, threshold, events = root.handlers[:], root.level, structlog.get_config()
    configured = structlog.is_configured()
    last_word_as_json = outlet.last_word_as_json
    try:
        yield
    finally:
        outlet.last_word_as_json = last_word_as_json
        root.handlers[:] = handlers
        root.setLevel(threshold)
        structlog.reset_defaults()
        if configured:
            structlog.configure(**events)


@contextlib.contextmanager
def logging_to(path: Path, level: str = "info", **bound: str | int) -> Iterator[None]:
    """Send structured logs to a file while the block runs, because the live console owns the terminal."""
    with path.open("a", encoding="utf-8") as log, restore_at_end():
        configure("json", level, **bound)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.setStream(log)
        yield


def say_in_this_task(**values: str | int) -> None:
    """Put `values` on every line of the running asyncio task and of the tasks it starts from now on."""
    structlog.contextvars.bind_contextvars(**values)


def is_power_of_two(count: int) -> bool:
    """Return whether the `count`-th of its kind deserves a line: a flood that is told at powers of two fills no log."""
    return count & (count - 1) == 0


def get(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger of a module."""
    logger: structlog.stdlib.BoundLogger = structlog.wrap_logger(
        None, wrapper_class=cast("type[structlog.types.BindableLogger]", _as_configured), logger_factory_args=(name,)
    )
    return logger


_quiet: Any = structlog.make_filtering_bound_logger(logging.INFO)


def _as_configured(
    logger: structlog.types.WrappedLogger,
    processors: Iterable[structlog.types.Processor],
    context: structlog.types.Context,
) -> structlog.types.BindableLogger:
    # Where nobody has configured structlog, it would print to standard output, where a script or `--json` has its answer.
    if structlog.is_configured():
        kind = structlog.get_config()["wrapper_class"]
    else:
        kind, logger = _quiet, structlog.PrintLogger(sys.stderr)
    bound: structlog.types.BindableLogger = kind(logger, processors=processors, context=context)
    return bound
