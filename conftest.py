"""With LORAMUX_TEST_STRICT=1 a skipped test fails: the full run must not lose tests silently."""

import os
from collections.abc import Generator

import pytest


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
