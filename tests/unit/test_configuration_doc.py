"""docs/configuration.md lists every setting, as the code has it."""

from pathlib import Path

from app.configuration import page
from app.settings import Settings

DOC = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"


def test_the_page_is_what_the_settings_say() -> None:
    assert DOC.read_text() == page(), "run `python -m app.configuration > docs/configuration.md`"


def test_every_setting_has_its_line() -> None:
    text = DOC.read_text()
    for name in Settings.model_fields:
        assert f"| `LORAMUX_{name.upper()}` |" in text
