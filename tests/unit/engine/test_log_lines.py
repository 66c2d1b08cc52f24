"""The engine's log lines."""

import io
import json
import logging

import pytest

from engine import log_lines


@pytest.fixture
def log():
    stream = io.StringIO()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    log_lines.configure(stream=stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def only(log):
    (line,) = log.getvalue().splitlines()
    return json.loads(line)


def test_a_line_is_one_json_object_with_its_request(log):
    logging.getLogger("engine.x").warning("step %d", 4, extra={"request_id": "req_1"})
    line = only(log)
    assert (line["event"], line["level"], line["request_id"]) == ("step 4", "warning", "req_1")
    assert line["timestamp"].endswith("+00:00")


def test_an_error_is_told_by_place_and_type_and_never_by_what_it_says(log):
    try:
        raise ValueError("canary-31fe")
    except ValueError:
        logging.getLogger("engine.x").exception("it failed")
    line = only(log)
    assert line["error"] == "ValueError"
    assert "test_log_lines.py" in line["where"][-1]
    assert "canary" not in log.getvalue()
