"""Rules of the layout that import-linter cannot say; each reads the source."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINE_FOR_APP = {
    "engine.types",
    "engine.errors",
    "engine.client",
    "engine.text",
    "engine.tool_format",
    "engine.gguf",
    "engine.curve",
    "engine.registration",
    "engine.tracing",
    "engine.adapters",
}
"""What the control plane may take from the engine (of `engine.adapters`, what imports no torch)."""
STATEMENTS = {"select", "insert", "update", "delete"}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def calls(path: Path) -> Iterator[tuple[str, int]]:
    """Every called name, dotted (`datetime.now`), with its line."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node.lineno


def imports(path: Path) -> Iterator[tuple[str, str, int]]:
    """(module, name, line) of every import; the name is empty for a plain `import`."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, "", node.lineno
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.module or "", alias.name, node.lineno


def named(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_only_the_unit_of_work_commits() -> None:
    found = [
        named(path, line)
        for path in sources("app")
        if path != ROOT / "app" / "db.py"
        for call, line in calls(path)
        if call.rpartition(".")[2] in ("commit", "rollback")
        and "session" in call.rpartition(".")[0].lower()
    ]
    assert found == []


def test_only_repositories_build_sql() -> None:
    found = [
        named(path, line)
        for path in sources("app")
        if not path.stem.endswith("repository") and path != ROOT / "app" / "db.py"
        for module, name, line in imports(path)
        if module.startswith("sqlalchemy") and name in STATEMENTS
    ]
    assert found == []


@pytest.mark.parametrize("package", ["app", "engine"])
def test_only_the_clock_reads_the_time(package: str) -> None:
    readers = {
        "time.time",
        "time.time_ns",
        "time.monotonic",
        "time.monotonic_ns",
        "time.perf_counter",
        "time.perf_counter_ns",
        "datetime.now",
        "datetime.utcnow",
        "datetime.datetime.now",
        "date.today",
    }
    found = [
        named(path, line)
        for path in sources(package)
        if path != ROOT / package / "clock.py"
        for call, line in calls(path)
        if call in readers
    ]
    assert found == []


def test_the_control_plane_takes_from_the_engine_only_what_is_agreed() -> None:
    found = [
        f"{named(path, line)} {module}.{name}"
        for path in sources("app")
        for module, name, line in imports(path)
        if module.split(".")[0] == "engine"
        and ".".join(f"{module}.{name}".split(".")[:2]) not in ENGINE_FOR_APP
    ]
    assert found == []


def test_the_api_process_never_loads_torch() -> None:
    """Every module of the control plane is imported, as a process without the extra would."""
    script = (
        "import importlib, pkgutil, sys, app, app.main\n"
        "for m in pkgutil.walk_packages(app.__path__, 'app.'):\n"
        "    if not m.name.endswith('__main__'):\n"
        "        importlib.import_module(m.name)\n"
        "heavy = {'torch', 'transformers', 'triton', 'peft'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {sorted(heavy)}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_every_domain_uses_the_same_file_names() -> None:
    """A newcomer guesses the file: SQL is in repository.py, routes in routes.py."""
    for models in (ROOT / "app").glob("*/models.py"):
        assert (models.parent / "repository.py").exists(), models.parent.name
        assert (models.parent / "service.py").exists(), models.parent.name


def test_the_import_rules_hold() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
