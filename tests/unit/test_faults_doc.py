"""docs/faults.md names tests that there are, one or more for every fault."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in (ROOT / "docs" / "faults.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| fault ")
]
SECTIONS = ("Keys", "Quotas", "Usage", "Streaming", "Adapters", "Security", "Metrics")


def names_of_tests(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


def test_every_part_of_the_platform_is_there() -> None:
    headings = re.findall(r"^## (\w+)", (ROOT / "docs" / "faults.md").read_text(), re.MULTILINE)
    assert set(headings) == set(SECTIONS)
    assert len(ROWS) >= 35


@pytest.mark.parametrize(("fault", "held_by"), ROWS)
def test_a_fault_is_held_by_tests_that_exist_or_says_why_not_yet(fault: str, held_by: str) -> None:
    if held_by.startswith("later: "):
        assert len(held_by) > len("later: ") + 10
        return
    named = re.findall(r"`([^`]+)`", held_by)
    assert named, fault
    for name in named:
        file, _, test = name.partition("::")
        path = ROOT / "tests" / file
        assert path.is_file(), name
        assert not test or test in names_of_tests(path), name
        assert test or names_of_tests(path), name
