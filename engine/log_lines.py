"""The engine's log: one JSON object a line on stderr, with the same names as the other processes'.

An error is shown as places in the code and its type, never with its message or values: those may
quote what a caller sent.
"""

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import TextIO

FRAMES = 15
CARRIED = ("request_id", "adapter")
"""Attributes that a caller of the logger may give by `extra`."""


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "event": record.getMessage(),
            "level": record.levelname.lower(),
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "logger": record.name,
            "process": "engine",
        }
        line |= {name: getattr(record, name) for name in CARRIED if hasattr(record, name)}
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
            line["where"] = _places(record.exc_info[2])
        return json.dumps(line, default=str)


def configure(level: int = logging.INFO, *, stream: TextIO | None = None) -> None:
    """Call once a process."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def _places(trace: TracebackType | None) -> list[str]:
    frames = traceback.extract_tb(trace)[-FRAMES:]
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
