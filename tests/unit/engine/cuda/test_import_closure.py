"""A GPU machine may have torch, Triton and a few more, and nothing else: that must be enough."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
THERE = {
    "torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "peft", "pytest",
}  # fmt: skip
OURS = {"engine", "benchmarks", "tests"}
STARTS = [
    *sorted((ROOT / "engine" / "cuda").glob("*.py")),
    ROOT / "engine" / "core.py",
    *sorted((ROOT / "benchmarks").glob("gpu*.py")),
    *sorted((ROOT / "tests" / "gpu").glob("*.py")),
]


def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def imported(file: Path) -> Iterator[str]:
    """Modules that importing the file imports; not those inside functions or for type checkers."""
    pending = list(ast.parse(file.read_text()).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            pending += node.orelse
        elif isinstance(node, ast.If | ast.With | ast.Try | ast.ClassDef):
            pending += [
                child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)
            ]


def foreign(start: Path) -> dict[str, str]:
    """What the closure of a file imports from elsewhere, and one of our files that asks for it."""
    found: dict[str, str] = {}
    seen: set[Path] = set()
    pending = [start]
    while pending:
        file = pending.pop()
        if file in seen:
            continue
        seen.add(file)
        for module in imported(file):
            top = module.partition(".")[0]
            if top not in OURS:
                found.setdefault(top, file.name)
            elif (ours := file_of(module)) is not None:
                pending.append(ours)
    return {top: file for top, file in found.items() if top not in sys.stdlib_module_names}


@pytest.mark.parametrize("start", STARTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_a_gpu_machine_runs_imports_nothing_that_it_may_lack(start: Path) -> None:
    assert {top: by for top, by in foreign(start).items() if top not in THERE} == {}


def test_the_closure_is_followed_through_our_own_files() -> None:
    assert "triton" in foreign(ROOT / "engine" / "cuda" / "runner.py")
    assert "zmq" in foreign(ROOT / "engine" / "server.py")
