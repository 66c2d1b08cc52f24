"""Documentation points at files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "examples/README.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_every_named_source_file_exists(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)\)", text)
    named = re.findall(
        r"`((?:app|engine|migrations|web|tests|benchmarks|examples)/[\w./-]+)`", text
    )
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert missing == []
