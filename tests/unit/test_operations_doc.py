"""docs/operations.md against the code."""

import re
from pathlib import Path

from tests.exported_metrics import families

DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"
ROW = re.compile(r"^\| `(loramux_\w+)` \| (\w+) \|([\w, ]*)\|", re.MULTILINE)


async def test_the_table_of_metrics_is_what_is_exported() -> None:
    documented = {
        name: (kind, set(re.findall(r"\w+", labels)))
        for name, kind, labels in ROW.findall(DOCUMENT.read_text())
    }
    assert documented == await families()
