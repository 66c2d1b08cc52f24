"""What is unsafe about a configuration that each setting alone does not show.

`refuse` stops the start; `warn` is said and logged. Looks at the settings and at the files and
mounts they name, never at the network.
"""

import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from app.processes import curve_dir
from app.settings import Settings, is_loopback_host
from engine import tracing

MIN_TOKEN_CHARACTERS = 16
NETWORK_FILESYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs"})
MOUNTS = Path("/proc/mounts")


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding. `setting` is the variable to change; the message says to what."""

    severity: Literal["refuse", "warn"]
    code: str
    setting: str
    message: str

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def check(
    settings: Settings, *, mounts: str | None = None, serves_http: bool = True
) -> list[Problem]:
    """All findings, those that stop the start first. `mounts`: what /proc/mounts says.

    `serves_http`: the process is an api; others listen to nobody that a browser reaches.
    """
    if mounts is None:
        mounts = MOUNTS.read_text() if MOUNTS.exists() else ""
    found = [
        *(_exposure(settings) if serves_http else ()),
        *_sharing(settings, mounts),
        *_files(settings),
        *_transport(settings),
    ]
    return sorted(found, key=lambda problem: problem.severity)


def _exposure(settings: Settings) -> Iterator[Problem]:
    public = not is_loopback_host(urlsplit(settings.public_url).hostname)
    listens_everywhere = not is_loopback_host(settings.host)
    token = settings.metrics_token
    if listens_everywhere and not public:
        yield Problem(
            "refuse",
            "plain_http_listener",
            "LORAMUX_PUBLIC_URL",
            f"LORAMUX_HOST is {settings.host}, so other machines reach the api, and "
            "LORAMUX_PUBLIC_URL is a loopback address: keys and passwords would travel in the "
            "clear. Set LORAMUX_PUBLIC_URL to the https address of the proxy in front, or listen "
            "on 127.0.0.1.",
        )
    if token is not None and len(token.get_secret_value()) < MIN_TOKEN_CHARACTERS:
        yield Problem(
            "refuse",
            "metrics_token_weak",
            "LORAMUX_METRICS_TOKEN",
            f"LORAMUX_METRICS_TOKEN has fewer than {MIN_TOKEN_CHARACTERS} characters; give a "
            "random one (`openssl rand -hex 24`).",
        )
    if public and token is None and not listens_everywhere:
        yield Problem(
            "refuse",
            "metrics_open_behind_proxy",
            "LORAMUX_METRICS_TOKEN",
            "The api listens on this machine alone and is published by a proxy on it, for which "
            "every client looks like this machine: /metrics would be open to all. Set "
            "LORAMUX_METRICS_TOKEN.",
        )
    elif public and token is None:
        yield Problem(
            "warn",
            "metrics_for_loopback_alone",
            "LORAMUX_METRICS_TOKEN",
            "Without LORAMUX_METRICS_TOKEN /metrics answers this machine alone, so a Prometheus "
            "elsewhere reads nothing.",
        )
    if public and not settings.trusted_proxies:
        yield Problem(
            "warn",
            "no_trusted_proxies",
            "LORAMUX_TRUSTED_PROXIES",
            "The console is published and LORAMUX_TRUSTED_PROXIES is empty: every client has the "
            "proxy's address, in the log and where sign-in is throttled by address.",
        )


def _sharing(settings: Settings, mounts: str) -> Iterator[Problem]:
    sqlite = settings.database_url.startswith("sqlite")
    if sqlite:
        file = Path(settings.database_url.partition(":///")[2]).absolute()
        kind = filesystem_of(file, mounts)
        if kind in NETWORK_FILESYSTEMS:
            yield Problem(
                "refuse",
                "sqlite_on_network",
                "LORAMUX_DATABASE_URL",
                f"{file} lies on {kind}: SQLite's write-ahead log corrupts there as soon as two "
                "hosts use it. Set LORAMUX_DATABASE_URL to a PostgreSQL, or to a local disk.",
            )
    if settings.redis_url and settings.broker_url.startswith("filesystem:"):
        yield Problem(
            "refuse",
            "folder_broker_beside_redis",
            "LORAMUX_BROKER_URL",
            "LORAMUX_REDIS_URL says that several hosts may serve, and LORAMUX_BROKER_URL keeps "
            "tasks in a folder that only this one sees. Leave LORAMUX_BROKER_URL unset: it then "
            "uses Redis.",
        )
    if settings.redis_url and sqlite:
        yield Problem(
            "warn",
            "sqlite_beside_redis",
            "LORAMUX_DATABASE_URL",
            "LORAMUX_REDIS_URL allows several hosts and SQLite serves one: use PostgreSQL before "
            "you start an api on a second host.",
        )
    if not sqlite and not settings.redis_url:
        yield Problem(
            "warn",
            "limits_per_process",
            "LORAMUX_REDIS_URL",
            "Without LORAMUX_REDIS_URL each api process counts limits for itself: run one, or set "
            "it.",
        )


def _files(settings: Settings) -> Iterator[Problem]:
    for path, what in (
        (settings.data_dir, "data folder"),
        (settings.root_secret_file, "root secret"),
        (settings.root_secret_file.parent, "folder of the secrets"),
    ):
        mode = _mode(path)
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            yield Problem(
                "refuse",
                "writable_by_others",
                "LORAMUX_DATA_DIR" if path == settings.data_dir else "LORAMUX_ROOT_SECRET_FILE",
                f"The {what} {path} can be written by every user of this machine; run "
                f"`chmod o-w {path}`.",
            )
    secret = settings.root_secret_file
    if settings.root_secret is None and _mode(secret) & 0o077:
        yield Problem(
            "refuse",
            "root_secret_readable",
            "LORAMUX_ROOT_SECRET_FILE",
            f"{secret} can be read by other users; run `chmod 600 {secret}`.",
        )
    if settings.database_url.startswith("sqlite"):
        file = Path(settings.database_url.partition(":///")[2])
        if _mode(file) & 0o007 and _mode(file.parent) & 0o001:
            yield Problem(
                "warn",
                "database_readable",
                "LORAMUX_DATABASE_URL",
                f"{file} can be read by every user of this machine; run `chmod o= {file}`.",
            )


def _transport(settings: Settings) -> Iterator[Problem]:
    if settings.tracing and not tracing.installed():
        yield Problem(
            "refuse",
            "tracing_not_installed",
            "LORAMUX_TRACING",
            "LORAMUX_TRACING is on and its packages are not installed; run "
            "`pip install 'loramux[tracing]'`.",
        )
    for name, url in (
        ("LORAMUX_REDIS_URL", settings.redis_url or ""),
        ("LORAMUX_ENGINE_REGISTRY_URL", settings.engine_registry_url or ""),
        ("LORAMUX_DATABASE_URL", settings.database_url),
    ):
        parts = urlsplit(url)
        if parts.hostname and not is_loopback_host(parts.hostname) and not parts.password:
            yield Problem(
                "warn",
                "no_password",
                name,
                f"{name} names {parts.hostname} without a password: whoever reaches it holds "
                "every tenant's limits and tasks. Give it one.",
            )
    remote = any(address.startswith("tcp://") for address in settings.engines)
    if remote or (settings.engine_registry_url and settings.engine_public_keys):
        folder = curve_dir(settings)
        if not folder.is_dir():
            yield Problem(
                "refuse",
                "no_curve_keys",
                "LORAMUX_ENGINES",
                f"Engines over tcp are named or may register, and {folder} holds no keys for "
                "them; `loramux secrets init` makes them.",
            )


def filesystem_of(path: Path, mounts: str) -> str:
    """The type of the mount that holds `path`, by the longest mount point; "" if unknown."""
    best, kind = "", ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = point == "/" or str(path) == point or str(path).startswith(point + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def _mode(path: Path) -> int:
    """Permission bits; 0 for what is not there."""
    try:
        return stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return 0
