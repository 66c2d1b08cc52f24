"""What stops the start, and what is only said."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.config_check import check, filesystem_of
from app.settings import Settings

LOCAL = "/dev/sda1 / ext4 rw 0 0\n"
PUBLIC = {"public_url": "https://loramux.example.com", "metrics_token": "m" * 32}


@pytest.fixture
def make(settings, tmp_path):
    """Settings with changes, on a private folder."""
    tmp_path.chmod(0o700)

    def of(**changes):
        return Settings(**{"data_dir": settings.data_dir, **changes})

    return of


def codes(settings, severity="refuse", mounts=LOCAL):
    return {p.code for p in check(settings, mounts=mounts) if p.severity == severity}


def test_the_embedded_defaults_are_safe(make):
    assert check(make(), mounts=LOCAL) == []


class TestExposure:
    def test_a_listener_for_everyone_without_https_is_refused(self, make):
        assert "plain_http_listener" in codes(make(host="0.0.0.0"))
        assert codes(make(host="0.0.0.0", **PUBLIC)) == set()

    def test_metrics_behind_a_proxy_on_this_machine_need_a_token(self, make):
        public = {"public_url": PUBLIC["public_url"]}
        assert "metrics_open_behind_proxy" in codes(make(**public))
        assert "metrics_for_loopback_alone" in codes(make(host="10.0.0.5", **public), "warn")

    def test_a_short_token_is_refused_and_not_shown(self, make):
        (problem,) = check(make(metrics_token="s3cret"), mounts=LOCAL)
        assert problem.code == "metrics_token_weak"
        assert "s3cret" not in problem.message

    def test_a_published_console_without_trusted_proxies_is_said(self, make):
        assert "no_trusted_proxies" in codes(make(**PUBLIC), "warn")
        assert codes(make(trusted_proxies="10.0.0.1", **PUBLIC), "warn") == set()


class TestSharing:
    def test_sqlite_on_a_network_filesystem_is_refused(self, make, settings):
        mounts = f"{LOCAL}nas:/x {settings.data_dir} nfs4 rw 0 0\n"
        assert codes(make(), mounts=mounts) == {"sqlite_on_network"}
        postgres = make(database_url="postgresql://u:p@db/x", redis_url="redis://:p@r/0")
        assert codes(postgres, mounts=mounts) == set()

    def test_a_folder_broker_beside_redis_is_refused(self, make):
        url = {"redis_url": "redis://127.0.0.1/0"}
        assert "folder_broker_beside_redis" in codes(make(broker_url="filesystem://", **url))
        assert codes(make(**url)) == set()
        assert "sqlite_beside_redis" in codes(make(**url), "warn")

    def test_limits_that_each_process_counts_for_itself_are_said(self, make):
        postgres = make(database_url="postgresql://u:p@127.0.0.1/x")
        assert codes(postgres, "warn") == {"limits_per_process"}

    def test_services_elsewhere_without_a_password_are_said(self, make):
        open_redis = make(database_url="postgresql://u:p@db/x", redis_url="redis://cache/0")
        assert codes(open_redis, "warn") == {"no_password"}


class TestFiles:
    def test_a_folder_that_everyone_can_write_is_refused(self, make, settings):
        settings.data_dir.chmod(0o777)
        assert codes(make()) == {"writable_by_others"}

    def test_a_root_secret_that_others_can_read_is_refused(self, make, settings):
        secret = settings.root_secret_file
        secret.parent.mkdir(mode=0o700, parents=True)
        secret.write_text("{}")
        secret.chmod(0o644)
        assert codes(make()) == {"root_secret_readable"}
        secret.chmod(0o600)
        assert codes(make()) == set()

    def test_an_engine_over_tcp_needs_keys(self, make):
        remote = make(engines="tcp://gpu-1:5555", engine_public_keys="k" * 40)
        assert codes(remote) == {"no_curve_keys"}


class TestMounts:
    MOUNTS = "a / ext4 rw\nb /srv nfs rw\nc /srv/fast xfs rw\nd /with\\040space cifs rw\n"

    @pytest.mark.parametrize(
        ("path", "kind"),
        [
            ("/srv/x.db", "nfs"),
            ("/srv/fast/x.db", "xfs"),
            ("/srvx/x.db", "ext4"),
            ("/with space/x.db", "cifs"),
        ],
    )
    def test_the_innermost_mount_counts(self, path, kind):
        assert filesystem_of(Path(path), self.MOUNTS) == kind


class TestCommands:
    @staticmethod
    def run(tmp_path, *arguments, **environment):
        clean = {k: v for k, v in os.environ.items() if not k.startswith("LORAMUX_")}
        clean |= {"LORAMUX_DATA_DIR": str(tmp_path / "data"), **environment}
        return subprocess.run(
            [str(Path(sys.executable).parent / "loramux"), *arguments],
            env=clean,
            capture_output=True,
            text=True,
            check=False,
        )

    def test_config_check_says_what_and_exits_1(self, tmp_path):
        found = self.run(tmp_path, "config", "check", "--json", LORAMUX_HOST="0.0.0.0")
        assert found.returncode == 1
        assert json.loads(found.stdout)["problems"][0]["code"] == "plain_http_listener"

    def test_the_start_is_refused_with_the_same_sentence(self, tmp_path):
        found = self.run(tmp_path, "api", LORAMUX_HOST="0.0.0.0")
        assert found.returncode == 1
        assert "LORAMUX_PUBLIC_URL" in found.stderr
        assert not (tmp_path / "data").exists()
