"""The compiled library: made once, kept, and never in the way."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.native import build


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.load.cache_clear()
    yield
    build.load.cache_clear()


def compiler(tmp_path: Path, script: str) -> str:
    path = tmp_path / "cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_without_a_compiler_there_is_none_and_a_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert build.load() is None
    assert "apt install g++" in caplog.text


def test_a_compiler_that_fails_is_no_error_and_its_words_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", compiler(tmp_path, "echo it broke >&2; exit 1"))
    assert build.load() is None
    assert "it broke" in caplog.text
    assert not list((tmp_path / "loramux").iterdir())


def test_a_file_that_is_no_library_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    junk = 'while [ "$1" != -o ]; do shift; [ $# = 0 ] && exit 0; done; echo junk > "$2"'
    monkeypatch.setenv("CXX", compiler(tmp_path, junk))
    assert build.load() is None
    assert "cannot be built" in caplog.text


def test_it_is_compiled_once_for_all_later_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    real = build._compiler()
    assert real is not None
    monkeypatch.setenv(
        "CXX", compiler(tmp_path, f'echo run >> {tmp_path}/runs; exec {real} "$@" -O0')
    )
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        library = build.load()
        assert library is not None
        assert library.speed in (0, 1, 2, 3)
        build.load.cache_clear()
    assert not caplog.text
    runs = (tmp_path / "runs").read_text().splitlines()
    assert len(runs) == 3  # its version twice, for the name, and one compilation
    assert [path.suffix for path in (tmp_path / "loramux").iterdir()] == [".so"]


def test_it_can_be_kept_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LORAMUX_NATIVE", "0")
    assert build.load() is None
    assert not (tmp_path / "loramux").exists()
