"""The command lines that `serve` supervises."""

import pytest

from app.processes import (
    api_command,
    beat_command,
    engine_command,
    local_engines,
    worker_command,
)
from app.settings import Settings
from app.supervisor import api_url
from engine.config import EngineConfig


def engine_config(settings, listen):
    argv = engine_command(settings, listen).argv
    return EngineConfig.from_args(argv[argv.index("engine") + 1 :], environ={})


class TestEngine:
    def test_the_settings_become_the_engines_configuration(self, settings):
        config = engine_config(settings, settings.engines[0])
        assert config.base_model == settings.base_model
        assert config.listen == settings.engines[0]
        assert config.store_url == settings.adapter_store_url
        assert config.arena_bytes == settings.arena_bytes
        assert config.max_rank == settings.max_rank
        assert config.max_waiting_per_tenant == settings.tenant_max_waiting
        assert config.curve_dir is None

    def test_every_engine_has_a_journal_of_its_own(self, tmp_path):
        settings = Settings(data_dir=tmp_path, engines=["ipc:///run/a", "ipc:///run/b"])
        first, second = (engine_config(settings, address) for address in settings.engines)
        assert first.journal_path != second.journal_path

    def test_an_engine_on_tcp_gets_the_keys(self, settings):
        config = engine_config(settings, "tcp://0.0.0.0:5555")
        assert config.curve_dir == settings.data_dir / "secrets" / "curve"

    def test_engines_on_tcp_are_not_started_here(self, tmp_path):
        settings = Settings(
            data_dir=tmp_path,
            engines=["ipc:///run/a", "tcp://gpu-1:5555"],
            engine_public_keys=["k1", "k2"],
        )
        assert local_engines(settings) == ["ipc:///run/a"]


class TestPriorities:
    def test_the_api_comes_before_the_engine_and_that_before_the_worker(self, settings):
        api, engine = api_command(settings), engine_command(settings, settings.engines[0])
        assert api.nice < engine.nice < worker_command(settings).nice
        assert worker_command(settings).nice == beat_command(settings).nice


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("example.com", "http://example.com:8000"),
    ],
)
def test_the_api_is_probed_where_it_can_be_reached(tmp_path, host, url):
    assert api_url(Settings(data_dir=tmp_path, host=host)) == url
