"""The benchmark of pages works, and on few rows already holds what does not depend on time."""

from pathlib import Path

import pytest

from app.inference import engines
from benchmarks.pages import MOST_BYTES, MOST_STATEMENTS, USAGE_STATEMENTS, measure
from benchmarks.pages_parts import rows


async def test_every_page_of_everybody_keeps_to_its_statements_and_bytes(
    sqlite_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(engines, "POLL_S", 3600.0)
    monkeypatch.setattr(rows, "DAYS", 3)
    monkeypatch.setattr(rows, "AUDIT_EVENTS", 200)
    platform = await rows.prepare(sqlite_url, tmp_path, tenants=30, adapters=60, rows=3000)
    found = await measure(platform, 1, "")
    await platform.close()
    assert {one.who for one in found} == {"admin", "viewer", "operator", "key", "operator's key"}
    assert len(found) >= 65
    for one in found:
        most = USAGE_STATEMENTS if one.usage else MOST_STATEMENTS
        assert 1 <= one.statements <= most, one
        assert one.first_bytes < MOST_BYTES, one
    assert f"{found[0].who:15}{found[0].name}" in capsys.readouterr().out
