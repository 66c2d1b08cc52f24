"""A tenant with something on every page of the console: two thousand adapters, a canary, usage.

Rows are written as the services write them, but in bulk.
"""

import itertools
import math
from datetime import timedelta
from typing import Any

from sqlalchemy import insert

from app.adapters import alias_service
from app.adapters.models import Adapter, AdapterVersion, Alias, AliasChange, Check, ValidationRun
from app.caller import Caller
from app.ids import new_id
from app.keys.models import ApiKey
from app.keys.service import create_key
from app.platform import Platform
from app.tenants.models import Tenant
from app.usage.entries import hour_of
from app.usage.models import UsageDaily, UsageHourly, UsageRecord
from app.webhooks.models import WebhookDelivery, WebhookEndpoint, WebhookEvent

ADAPTERS = 2000
CANARY = "support-bot"
REJECTED = "tone-of-voice"
WORDS = ("support", "sales", "legal", "tone", "triage", "summary", "sql", "french", "recipes")
STATES = ("ready",) * 17 + ("rejected", "failed", "archived")
RANKS = (8, 16, 16, 32, 64)


async def seed(
    platform: Platform, tenant: Tenant, base_digest: str, *, adapters: int = ADAPTERS
) -> dict[str, str]:
    """Returns the addresses of pages that need an id: `key`, `webhook`."""
    now = platform.clock.now()
    rows = _adapters(tenant, base_digest, adapters, now)
    async with platform.db.transaction() as session:
        for model, values in rows.items():
            await session.execute(insert(model), values)
    first = rows[AdapterVersion]
    caller = Caller(tenant.id, tenant.name, tenant.salt, "tenant_admin", label="ann@example.com")
    async with platform.db.transaction() as session:
        await alias_service.set_alias(
            session, caller, CANARY, "stable", [(1, 90), (2, 10)], now=now - timedelta(hours=5)
        )
    await _usage(platform, tenant, [v for v in first if v["adapter_id"] == first[0]["adapter_id"]])
    webhook_id, _ = await add_webhook(platform, tenant)
    return {"key": await _keys(platform, tenant), "webhook": webhook_id}


def _adapters(tenant: Tenant, base_digest: str, count: int, now: Any) -> dict[Any, list[Any]]:
    made: dict[Any, list[Any]] = {
        model: [] for model in (Adapter, AdapterVersion, Alias, AliasChange, ValidationRun, Check)
    }
    names = itertools.chain(
        (CANARY, REJECTED), (f"{WORDS[n % len(WORDS)]}-{n:04}" for n in itertools.count())
    )
    for n, name in zip(range(count), names, strict=False):
        at = now - timedelta(days=60) + timedelta(minutes=40 * n)
        adapter_id = new_id("adp")
        used = now - timedelta(minutes=13 * n) if n % 3 == 0 else None
        made[Adapter].append(
            {
                "id": adapter_id,
                "tenant_id": tenant.id,
                "name": name,
                "created_by": "tests",
                "created_at": at,
                "last_used_at": used,
            }
        )
        numbers = (1, 2, 3) if n == 0 else (1,)
        for number in numbers:
            state = "rejected" if name == REJECTED else STATES[n % len(STATES)]
            version = _version(tenant, adapter_id, n, number, state, base_digest, at)
            made[AdapterVersion].append(version)
            if n < 2:
                _report(made, version, at)
        if state == "ready":
            _live(made, tenant, adapter_id, version, at)
    return made


def _version(
    tenant: Tenant, adapter_id: str, n: int, number: int, state: str, base: str, at: Any
) -> dict[str, Any]:
    return {
        "id": new_id("ver"),
        "adapter_id": adapter_id,
        "tenant_id": tenant.id,
        "number": number,
        "digest": f"{n:060x}{number:04x}",
        "state": state,
        "code": "unsupported_dora" if state == "rejected" else None,
        "reason": "three attempts gave no verdict" if state == "failed" else None,
        "config_bytes": 700,
        "weights_bytes": 2_400_000 * (1 + n % 7),
        "rank": RANKS[n % len(RANKS)],
        "targets": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "base_digest": base,
        "created_by": "tests",
        "created_at": at,
        "updated_at": at,
        "ready_at": at if state == "ready" else None,
    }


def _live(
    made: dict[Any, list[Any]], tenant: Tenant, adapter_id: str, version: dict[str, Any], at: Any
) -> None:
    targets = [{"version_id": version["id"], "version": version["number"], "weight": 100}]
    shared = {"adapter_id": adapter_id, "name": "live", "tenant_id": tenant.id, "revision": 1}
    alias = {"targets": targets, "by_hand": False, "updated_by": "system", "updated_at": at}
    actor = {"actor_kind": "system", "actor_id": "system", "actor_label": "system"}
    change = {"id": new_id("alc"), "action": "follow", "before": None, "at": at}
    made[Alias].append(shared | alias)
    made[AliasChange].append(shared | change | actor | {"targets": targets, "by_hand": False})


def _report(made: dict[Any, list[Any]], version: dict[str, Any], at: Any) -> None:
    run_id = new_id("run")
    shared = {"version_id": version["id"], "created_at": at}
    made[ValidationRun].append(
        shared
        | {
            "id": run_id,
            "tenant_id": version["tenant_id"],
            "state": "done",
            "attempts": 1,
            "started_at": at,
            "finished_at": at,
        }
    )
    rejected = version["state"] == "rejected"
    layers = {str(n): round(0.02 + 0.015 * math.sin(n / 4), 6) for n in range(30)}
    for position, group in enumerate(("container", "config", "coverage", "numbers", "behaviour")):
        status = "pass"
        findings: list[dict[str, Any]] = []
        if rejected and group == "config":
            status = "fail"
            sentence = "use_dora is true: DoRA's magnitudes are not served; train without use_dora"
            findings = [_finding("unsupported_dora", "fail", sentence, "use_dora")]
        elif rejected and position > 1:
            status = "skipped"
        elif group == "numbers":
            status = "warn"
            sentence = "the update of model.layers.9.mlp.down_proj is 1.20 times its weight"
            findings = [_finding("large_update", "warn", sentence, None)]
        figures = {
            "numbers": {"modules": 120, "update_ratio_by_layer": layers},
            "behaviour": {"kl_nats_mean": 0.41, "loops": 0, "cost_ms_per_token": 1.8},
        }.get(group, {})
        made[Check].append(
            shared
            | {
                "id": new_id("chk"),
                "run_id": run_id,
                "position": position,
                "check_group": group,
                "status": status,
                "findings": findings,
                "figures": {} if status == "skipped" else figures,
                "duration_ms": 12,
            }
        )


def _finding(code: str, severity: str, message: str, field: str | None) -> dict[str, Any]:
    return {"code": code, "severity": severity, "message": message, "field": field, "figures": {}}


async def _usage(platform: Platform, tenant: Tenant, versions: list[dict[str, Any]]) -> None:
    now = platform.clock.now()
    records, sums = [], []
    for n in range(400):
        at = now - timedelta(minutes=2 + n % 240, seconds=n % 60)
        version = versions[1 if n % 8 == 0 else 0]
        failed = n % (23 if version is versions[0] else 9) == 0
        records.append(
            {
                "request_id": f"req_seed_{tenant.id}_{n}",
                "tenant_id": tenant.id,
                "adapter_id": version["adapter_id"],
                "version_id": version["id"],
                "alias": "stable",
                "model": f"{CANARY}@v{version['number']}",
                "endpoint": "chat.completions",
                "streamed": True,
                "engine": "ipc://seed",
                "status": "failed" if failed else "completed",
                "error_code": "engine_error" if failed else None,
                "finish_reasons": ["length" if n % 5 == 0 else "stop"],
                "reserved_tokens": 300,
                "prompt_tokens": 120,
                "cached_tokens": 30,
                "completion_tokens": 60 + n % 90,
                "overshoot_tokens": 0,
                "started_at": at,
                "started_hour": hour_of(at),
                "lease_until": at,
                "closed_at": at,
                "ttft_ms": 90.0 + n % 50,
                "total_ms": 1900.0 + 7 * (n % 90),
            }
        )
    for hours in range(24 * 30):
        at = now - timedelta(hours=hours)
        busy = 20 + int(18 * math.sin(hours / 4))
        sums.append(
            {
                "tenant_id": tenant.id,
                "key_id": "",
                "adapter_id": versions[0]["adapter_id"],
                "model": f"{CANARY}@v1",
                "requests": busy,
                "cancelled": 0,
                "failed": busy // 20,
                "prompt_tokens": 120 * busy,
                "cached_tokens": 30 * busy,
                "completion_tokens": 90 * busy,
                "prefill_us": 9000 * busy,
                "decode_us": 400_000 * busy,
                "hour": hour_of(at),
            }
        )
    days: dict[int, dict[str, Any]] = {}
    for row in sums:
        day = days.setdefault(row["hour"] // 24, {**row, "day": row["hour"] // 24})
        if day["hour"] != row["hour"]:
            for name in ("requests", "failed", "prompt_tokens", "cached_tokens"):
                day[name] += row[name]
            for name in ("completion_tokens", "prefill_us", "decode_us"):
                day[name] += row[name]
    for day in days.values():
        del day["hour"]
    async with platform.db.transaction() as session:
        await session.execute(insert(UsageRecord), records)
        await session.execute(insert(UsageHourly), sums)
        await session.execute(insert(UsageDaily), list(days.values()))


async def _keys(platform: Platform, tenant: Tenant) -> str:
    now = platform.clock.now()
    names = ("production", "staging", "nightly evaluation", "")
    async with platform.db.transaction() as session:
        made: list[ApiKey] = []
        for n, name in enumerate(names):
            key = await create_key(
                session,
                secrets=platform.secrets,
                now=now,
                actor="tests",
                tenant=tenant,
                name=name,
                adapters=[CANARY] if n == 1 else None,
                access="inference" if n == 2 else "full",
                networks=["203.0.113.0/24"] if n == 1 else None,
                expires_at=now + timedelta(days=30) if n == 1 else None,
            )
            made.append(key.row)
        made[0].last_used_at = now - timedelta(minutes=4)
        made[3].revoked_at = now
    return made[1].id


async def add_webhook(platform: Platform, tenant: Tenant) -> tuple[str, str]:
    """A webhook that took most of its deliveries; its id and that of its newest delivery."""
    now = platform.clock.now()
    endpoint_id = new_id("whe")
    endpoint = {
        "id": endpoint_id,
        "tenant_id": tenant.id,
        "url": "https://hooks.example.com/loramux/releases",
        "description": "tells the release channel",
        "events": ["version.ready", "version.rejected"],
        "status": "enabled",
        "secret": platform.secrets.seal("webhook", b"whsec_seed"),
        "secret_version": platform.secrets.current_version,
        "last_success_at": now - timedelta(minutes=40),
        "created_by": "tests",
        "created_at": now - timedelta(days=9),
        "updated_at": now,
    }
    events, deliveries = [], []
    for n, state in enumerate(("delivered", "delivered", "dead", "delivered")):
        at = now - timedelta(hours=n + 1)
        event_id = new_id("evt")
        attempt = {
            "attempt": 1,
            "at": int(at.timestamp()),
            "code": "http_error" if state == "dead" else "delivered",
            "status": 500 if state == "dead" else 204,
            "duration_ms": 130,
        }
        shared = {"tenant_id": tenant.id, "type": "version.ready", "created_at": at}
        events.append(shared | {"id": event_id, "data": {}})
        deliveries.append(
            shared
            | {
                "id": new_id("whd"),
                "endpoint_id": endpoint_id,
                "event_id": event_id,
                "state": state,
                "attempts": 1,
                "next_attempt_at": at,
                "give_up_at": at,
                "code": attempt["code"],
                "attempt_log": [attempt],
                "finished_at": at,
            }
        )
    async with platform.db.transaction() as session:
        await session.execute(insert(WebhookEndpoint), [endpoint])
        await session.execute(insert(WebhookEvent), events)
        await session.execute(insert(WebhookDelivery), deliveries)
    return endpoint_id, deliveries[0]["id"]


def pages(made: dict[str, str]) -> dict[str, str]:
    """A name for each page of a tenant -> its address."""
    return {
        "overview": "/console/overview",
        "adapters": "/console/adapters",
        "adapter": f"/console/adapters/{CANARY}",
        "alias": f"/console/adapters/{CANARY}/aliases/stable",
        "version": f"/console/adapters/{CANARY}/versions/1",
        "version-rejected": f"/console/adapters/{REJECTED}/versions/1",
        "upload": "/console/adapters/upload",
        "playground": f"/console/playground?model={CANARY}&model_b={CANARY}@v2",
        "keys": "/console/keys",
        "key": f"/console/keys/{made['key']}",
        "webhooks": "/console/webhooks",
        "webhook": f"/console/webhooks/{made['webhook']}",
        "usage": "/console/usage",
        "limits": "/console/limits",
        "audit": "/console/audit",
        "password": "/console/password",
    }
