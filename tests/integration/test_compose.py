"""docker-compose.yml without a container engine: every command of ours is started as a local
process with its own environment, against the local PostgreSQL and Redis, and its health check run.

What this does not show: that the images build, and that the containers reach each other.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import redis
import yaml

from tests.conftest import POSTGRES
from tests.live import free_port

pytestmark = [pytest.mark.postgres, pytest.mark.redis, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS = {name: s for name, s in SERVICES.items() if s["image"].startswith("loramux/")}
RUNNING = ("engine-cpu", "api", "worker", "beat")
REDIS = "redis://127.0.0.1:6379/11"
HEALTHY_S = 90.0


class TestTheFile:
    def test_no_secret_has_a_default(self) -> None:
        text = (ROOT / "docker-compose.yml").read_text()
        secret = r"(\w*(?:PASSWORD|SECRET|TOKEN|GRAFANA_ADMIN)\w*)"
        for variable, operator in re.findall(rf"(?<!\$)\$\{{{secret}(:?[-?][^}}]?)", text):
            optional = operator == ":-" and f"$${{{variable}:?" in text  # its service refuses
            assert optional or operator[:2] == ":?", f"{variable} must stop what needs it"
        named = set(re.findall(r"\$\{(\w+):\?", text))
        example = (ROOT / ".env.example").read_text()
        assert all(re.search(rf"^{name}=$", example, re.MULTILINE) for name in named)

    def test_every_service_that_stays_up_has_a_health_check(self) -> None:
        for name, service in SERVICES.items():
            assert ("healthcheck" in service) == (name != "migrate"), name

    def test_what_depends_on_what_exists_and_can_be_waited_for(self) -> None:
        for service in SERVICES.values():
            for other, wanted in service.get("depends_on", {}).items():
                if wanted["condition"] == "service_healthy":
                    assert "healthcheck" in SERVICES[other]
                else:
                    assert SERVICES[other].get("restart") == "no"

    def test_volumes_are_declared_or_in_the_repository_and_profiles_are_these(self) -> None:
        used = {v.split(":")[0] for s in SERVICES.values() for v in s.get("volumes", [])}
        ours = {volume for volume in used if volume.startswith("./")}
        assert all((ROOT / volume).exists() for volume in ours)
        assert used - ours == set(COMPOSE["volumes"])
        profiles = {name: s["profiles"] for name, s in SERVICES.items() if "profiles" in s}
        assert profiles == {
            "engine-cpu": ["cpu"],
            "engine-gpu": ["gpu"],
            "prometheus": ["monitoring"],
            "grafana": ["monitoring"],
        }


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    name = f"loramux_compose_{secrets.token_hex(4)}"
    with psycopg.connect(POSTGRES, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    yield f"{POSTGRES.rpartition('/')[0]}/{name}"
    with psycopg.connect(POSTGRES, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="module")
def broker() -> Iterator[str]:
    client = redis.Redis.from_url(REDIS)
    client.flushdb()
    yield REDIS
    client.flushdb()
    client.close()


def environment_of(
    service: str, data: Path, database: str, broker: str, port: int
) -> dict[str, str]:
    """The service's environment as compose would give it, on this machine's addresses."""
    given = {
        "POSTGRES_PASSWORD": "unused-here",
        "REDIS_PASSWORD": "unused-here",
        "LORAMUX_ROOT_SECRET": "0123456789abcdef0123456789abcdef",
        "LORAMUX_PUBLIC_URL": "https://loramux.example.com",
    }
    here = {
        "LORAMUX_DATA_DIR": str(data),
        "LORAMUX_DATABASE_URL": database,
        "LORAMUX_REDIS_URL": broker,
        "LORAMUX_ENGINE_REGISTRY_URL": broker,
        "LORAMUX_PORT": str(port),
    }
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("LORAMUX_")}
    own = {k: _filled(str(v), given) for k, v in OURS[service]["environment"].items()}
    assert set(here) - {"LORAMUX_PORT"} <= set(own)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return inherited | own | here | {"PATH": path}


def _filled(value: str, given: dict[str, str]) -> str:
    def fill(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        if name in given:
            return given[name]
        assert operator == ":-", f"{name} has no value"
        return rest

    return re.sub(r"\$\{(\w+)(:[-?])([^}]*)\}", fill, value)


def test_migrate_then_every_service_becomes_healthy(
    tmp_path: Path, database: str, broker: str
) -> None:
    port = free_port()
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        migrate = subprocess.run(
            ["loramux", *OURS["migrate"]["command"]],
            env=environment_of("migrate", tmp_path, database, broker, port),
            capture_output=True,
            timeout=60,
        )
        assert migrate.returncode == 0, migrate.stderr.decode()
        for name in RUNNING:
            with (tmp_path / f"{name}.log").open("wb") as log:
                started[name] = subprocess.Popen(
                    ["loramux", *OURS[name]["command"]],
                    env=environment_of(name, tmp_path, database, broker, port),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        for name in RUNNING:
            environment = environment_of(name, tmp_path, database, broker, port)
            _until_healthy(name, environment, started[name], tmp_path)
    finally:
        for process in started.values():
            process.send_signal(signal.SIGTERM)
        for process in started.values():
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def test_a_health_check_fails_when_its_process_is_not_there(
    tmp_path: Path, database: str, broker: str
) -> None:
    for name in RUNNING:
        environment = environment_of(name, tmp_path, database, broker, free_port())
        assert _check(name, environment).returncode != 0, name


def _until_healthy(
    name: str, environment: dict[str, str], process: subprocess.Popen[bytes], logs: Path
) -> None:
    deadline = time.monotonic() + HEALTHY_S
    while time.monotonic() < deadline:
        assert process.poll() is None, (logs / f"{name}.log").read_text()[-3000:]
        answer = _check(name, environment)
        if answer.returncode == 0:
            return
        time.sleep(2)  # each check is a process, which takes a core from what is starting
    raise AssertionError(f"{name}: {answer.stderr.decode()}\n{(logs / f'{name}.log').read_text()}")


def _check(name: str, environment: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    kind, *command = OURS[name]["healthcheck"]["test"]
    assert kind == "CMD"
    return subprocess.run(command, env=environment, capture_output=True, timeout=40)
