"""Tests that want a service skip where it is not there; with LORAMUX_TEST_STRICT=1 a skip fails."""

import os
import socket
from collections.abc import Generator
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest

# torch's threads spin while they wait for one another, and here others want the core: read as its
# library is loaded, so before anything imports it, and by every process that a test starts
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a GPU machine runs tests/gpu without it
    pass
else:  # a busy machine must not fail a property
    unhurried = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("unhurried", **unhurried)
    settings.load_profile("unhurried")

POSTGRES = os.environ.get("LORAMUX_TEST_POSTGRES", "postgresql://postgres@127.0.0.1:5432/postgres")
CHROMIUM = Path("/usr/bin/chromium")


@cache
def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(2.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _missing(item: pytest.Item) -> str | None:
    """The service that this test wants and that is not there."""
    if item.get_closest_marker("postgres") and not _answers(urlsplit(POSTGRES).port or 5432):
        return "PostgreSQL does not answer on 127.0.0.1"
    if item.get_closest_marker("redis") and not _answers(6379):
        return "Redis does not answer on 127.0.0.1:6379"
    if item.get_closest_marker("browser") and not CHROMIUM.exists():
        return f"{CHROMIUM} is not installed"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    missing = _missing(item)
    if missing is not None:
        pytest.skip(missing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    strict = os.environ.get("LORAMUX_TEST_STRICT") == "1"
    if strict and report.skipped and item.get_closest_marker("gpu") is None:
        report.outcome = "failed"
        report.longrepr = f"skipped in a strict run: {report.longrepr}"
    return report
