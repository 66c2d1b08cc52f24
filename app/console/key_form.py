"""The form of a key's restrictions: its fields, what was typed in them, what they are now."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from app.adapters.names import NAME
from app.caller import Caller, KeyBudget, KeyLimits
from app.console.forms import Form
from app.errors import AppError, InvalidRequest
from app.keys.models import ApiKey
from app.keys.restrictions import access_of

LIFETIMES = ((0, "never"), (7, "7 days"), (30, "30 days"), (90, "90 days"), (365, "a year"))
ACCESS = (
    ("full", "models and adapters"),
    ("inference", "calling models only"),
    ("read", "looking only, no calls"),
    ("manage", "everything, keys and users too"),
)
LIMITS = (
    ("requests_per_minute", "Requests per minute"),
    ("tokens_per_minute", "Tokens per minute"),
    ("max_concurrent", "Requests at once"),
    ("monthly_tokens", "Tokens per month"),
)
BUDGETS = (
    ("ttft_ms", "Time to first token", "ms"),
    ("tpot_ms", "Time per output token", "ms"),
    ("budget_percentile", "Share of requests inside it", ""),
)
LABELS = {
    "name": "Name",
    "days": "Expires after",
    "expires_at": "Expires after",
    "access": "Allows",
    "adapters": "Only for adapters",
    "networks": "Only from networks",
    **dict(LIMITS),
    **{name: title for name, title, _ in BUDGETS},
}
"""What the page calls each field."""
OPEN_FIELDS = ("name", "days", "expires_at", "access")
"""Those that the form always shows; the others are behind "Restrict it"."""
assert {name for name, _ in LIMITS} == KeyLimits.__dataclass_fields__.keys(), "name each limit"
assert {name for name, *_ in BUDGETS} == KeyBudget.__dataclass_fields__.keys(), "name each promise"
MOST_NETWORK_CHARACTERS = 2000
MIN_LIMIT, MOST_LIMIT = 1, 2**31 - 1
MOST_TOKENS = 2**53
"""Of a month, as in the API."""


def choices(caller: Caller) -> dict[str, Any]:
    """What the fields offer, and what the tenant itself has: a key tightens its limits and loosens
    its latency budget."""
    own = caller.limits
    return {
        "expiries": LIFETIMES,
        "access": ACCESS,
        "limits": LIMITS,
        "most": {name: getattr(own, name) for name, _ in LIMITS},
        "budgets": BUDGETS,
        "promised": {name: _plain(getattr(own, name)) for name, *_ in BUDGETS}
        if own.ttft_ms is not None or own.tpot_ms is not None
        else {},
    }


def typed_of(key: ApiKey) -> dict[str, str]:
    """The fields as they are for a key that exists."""
    numbers = {name: getattr(key, name) for name, _ in LIMITS}
    numbers |= {name: _plain(getattr(key, name)) for name, *_ in BUDGETS}
    return {
        "name": key.name,
        "adapters": ", ".join(key.scopes.get("adapters") or []),
        "access": access_of(key.scopes),
        "networks": ", ".join(key.scopes.get("networks") or []),
        **{name: str(value) for name, value in numbers.items() if value},
    }


def restricts(typed: Mapping[str, str]) -> bool:
    """Whether something is typed in a field that the form has behind "Restrict it"; a refusal of
    such a field comes back with what was typed, and so with the field in sight."""
    return any(typed.get(name) for name in LABELS if name not in OPEN_FIELDS)


def labelled(error: AppError) -> AppError:
    """The refusal as the page says it: by the field's label where it begins with its name."""
    name = error.param or ""
    if name not in LABELS or not error.message.startswith(f"{name} "):
        return error
    told = LABELS[name] + error.message.removeprefix(name)
    return AppError(told, code=error.code, param=name, status=error.status)


def restrictions(form: Form) -> dict[str, Any]:
    """All but the expiry. Raises InvalidRequest by the field's name."""
    name = form.text("name", most=80)
    if not name:
        raise InvalidRequest("Give the key a name that tells it from the others.", param="name")
    return {
        "name": name,
        "adapters": _scope(form),
        "access": form.text("access") or "full",
        "networks": _listed(form.text("networks", most=MOST_NETWORK_CHARACTERS)) or None,
        **_limits(form),
        **_budget(form),
    }


def expiry(form: Form, now: datetime) -> datetime | None:
    days = form.integer("days", 0)
    if days not in dict(LIFETIMES):
        raise InvalidRequest("Choose one of the lifetimes in the list.", param="days")
    return now + timedelta(days=days) if days else None


def limits_of(key: ApiKey) -> list[tuple[str, str]]:
    """(title, value) of the limits that a key has."""
    named = [(title, getattr(key, name)) for name, title in LIMITS]
    return [(title, f"{value:,}") for title, value in named if value is not None]


def budget_of(key: ApiKey) -> list[tuple[str, str]]:
    """(title, value with its unit) of a key's own latency budget."""
    named = [(title, _plain(getattr(key, name)), unit) for name, title, unit in BUDGETS]
    return [(title, f"{value} {unit}".strip()) for title, value, unit in named if value]


def _limits(form: Form) -> dict[str, int | None]:
    """An empty field is no limit of the key's own, and is the tenant's alone."""
    limits: dict[str, int | None] = {}
    for name, title in LIMITS:
        typed = form.text(name, most=30)
        most = MOST_TOKENS if name == "monthly_tokens" else MOST_LIMIT
        if typed and not MIN_LIMIT <= form.integer(name, 0) <= most:
            raise InvalidRequest(f"{title} is a whole number above 0, or empty.", param=name)
        limits[name] = form.integer(name, 0) if typed else None
    return limits


def _budget(form: Form) -> dict[str, float | None]:
    """An empty field follows the tenant. The form has none where the tenant is promised nothing,
    and what it does not have stays as it is."""
    budget: dict[str, float | None] = {}
    for name, title, unit in BUDGETS:
        if name not in form.fields:
            continue
        typed = form.text(name, most=30)
        try:
            budget[name] = form.number(name, 0.0) if typed else None
        except InvalidRequest:
            number = "a number of milliseconds" if unit else "a number below 1"
            raise InvalidRequest(f"{title} is {number}, or empty.", param=name) from None
    return budget


def _scope(form: Form) -> list[str] | None:
    names = _listed(form.text("adapters", most=7000))
    for name in names:
        if NAME.fullmatch(name) is None:
            raise InvalidRequest(
                f"{name[:64]!r} is no adapter's name; separate the names by commas.",
                param="adapters",
            )
    return names or None


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _plain(number: float | None) -> str:
    """As it is typed: 2000, 12.5; empty for none."""
    return "" if number is None else f"{number:.12g}"
