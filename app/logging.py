"""Structured logs: one JSON line an event, to stderr. No content, no keys, no bodies.

What a line says is chosen where it is written; as a second wall, values of secret-looking names
and anything shaped like an API key are struck out here.
"""

import logging
import sys
import traceback
from collections.abc import Callable, MutableMapping
from typing import Any, TextIO

import msgspec
import structlog

from app.keys.token import KEY_PATTERN

STRUCK = "[struck out]"
_SECRET_NAMES = ("password", "secret", "token", "authorization", "cookie", "api_key")


def strike_secrets(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """A processor: replaces what must never be in a log."""
    for name, value in event.items():
        if any(part in name.lower() for part in _SECRET_NAMES) and not isinstance(value, int):
            event[name] = STRUCK
        elif isinstance(value, str) and "lmx_" in value:
            event[name] = KEY_PATTERN.sub(STRUCK, value)
    return event


def where(error: BaseException) -> list[str]:
    """The error's stack as `file:line function`, innermost last; no values, no message.

    Messages of unexpected errors may quote what a caller sent.
    """
    chain: list[str] = []
    current: BaseException | None = error
    while current is not None and len(chain) < 60:
        frames = traceback.extract_tb(current.__traceback__)[-15:]
        chain[:0] = [f"{f.filename}:{f.lineno} {f.name}" for f in frames] + [type(current).__name__]
        current = current.__cause__ or current.__context__
    return chain


def configure_logging(level: str, *, stream: TextIO | None = None) -> None:
    """Writes structlog's and the libraries' lines the same way. Call once a process."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        strike_secrets,
    ]
    render = structlog.processors.JSONRenderer(serializer=_json)
    structlog.configure(
        processors=[*shared, render],
        logger_factory=structlog.WriteLoggerFactory(stream or sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(level.upper()),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, _drop_traceback],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                strike_secrets,
                render,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name, quietest in (
        ("uvicorn.access", logging.CRITICAL),  # app.middleware writes the access log
        ("sqlalchemy.engine", logging.WARNING),
        ("alembic", logging.WARNING),
        ("celery.worker.strategy", logging.WARNING),  # app.worker writes a line a task
        ("celery.app.trace", logging.WARNING),
        ("celery.beat", logging.WARNING),
        ("httpx", logging.WARNING),
        ("httpcore", logging.WARNING),  # it would write the headers of webhooks
        ("aiosqlite", logging.WARNING),
        ("multipart", logging.WARNING),
        ("python_multipart", logging.WARNING),
    ):
        logging.getLogger(name).setLevel(quietest)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True


def _json(event: dict[str, Any], default: Callable[[Any], Any], **_: Any) -> str:
    return msgspec.json.encode(event, enc_hook=default).decode()


def _drop_traceback(
    _logger: Any, _method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """A library's traceback becomes places alone."""
    info = event.pop("exc_info", None)
    if isinstance(info, tuple) and info[1] is not None:
        event["where"] = where(info[1])
    return event
