"""How the engine's process treats the machine."""

import os

import pytest

from engine.__main__ import yield_cores


@pytest.fixture
def environ(monkeypatch):
    """The environment without a choice of its own; what a test sets is undone."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    return monkeypatch


class TestIdleThreads:
    @pytest.mark.parametrize("threads", [0, 4, 8])
    def test_they_sleep_when_the_engine_uses_every_core(self, environ, threads):
        yield_cores(threads)
        assert os.environ["OMP_WAIT_POLICY"] == "passive"

    def test_they_spin_when_a_core_is_left(self, environ):
        yield_cores(3)
        assert "OMP_WAIT_POLICY" not in os.environ

    def test_the_operators_choice_wins(self, environ):
        environ.setenv("OMP_WAIT_POLICY", "active")
        yield_cores(0)
        assert os.environ["OMP_WAIT_POLICY"] == "active"
        environ.delenv("OMP_WAIT_POLICY")
        environ.setenv("GOMP_SPINCOUNT", "1000")
        yield_cores(0)
        assert "OMP_WAIT_POLICY" not in os.environ
