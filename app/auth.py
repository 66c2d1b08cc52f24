"""Who is calling: bearer keys on /v1, operators on /admin/v1, cookies in the console.

ApiCaller       a tenant's key; never an operator's, for those carry no tenant and no limits
OperatorCaller  an operator's key, or an operator's console session
SessionUser     anyone signed in to the console (their password is their own)
PendingUser     the same, but a one-time password need not be changed yet
"""

import ipaddress
from typing import Annotated

from fastapi import Depends, Request, Response

from app.caller import Caller, KeyLimits, Role, TenantLimits
from app.deps import PlatformDep
from app.errors import Forbidden, InvalidRequest, Unauthenticated
from app.keys import token
from app.keys.access import check_access
from app.keys.cache import KeyEntry
from app.keys.networks import allows
from app.platform import Platform
from app.settings import Settings, is_loopback_host
from app.users import repository as user_rows
from app.users.sessions import OpenSession, SignedIn, find_session

__all__ = [
    "ApiCaller",
    "Caller",
    "KeyLimits",
    "OperatorCaller",
    "PendingUser",
    "Role",
    "SessionUser",
    "TenantAdmin",
    "TenantLimits",
]


class SignInNeeded(Unauthenticated):
    """No valid session: the console answers with its sign-in page."""

    code = "sign_in_needed"


class PasswordChangeNeeded(Forbidden):
    """A one-time password must be changed before anything else."""

    code = "password_change_needed"


# --------------------------------------------------------------------------- keys


def bearer(request: Request) -> str:
    """The token of `Authorization: Bearer …`. Raises Unauthenticated with the remedy."""
    header = request.headers.get("authorization")
    if header is None:
        raise Unauthenticated(
            "No API key was sent. Send the header `Authorization: Bearer lmx_…`.",
            code="missing_api_key",
        )
    scheme, _, value = header.partition(" ")
    if scheme.lower() != "bearer" or not value.strip():
        raise Unauthenticated(
            "The Authorization header is not of the form `Bearer lmx_…`.", code="invalid_api_key"
        )
    return value.strip()


def client_address(request: Request) -> str | None:
    """Where the request came from; a proxy's word counts only from LORAMUX_TRUSTED_PROXIES."""
    return None if request.client is None else request.client.host


async def authenticate_key(platform: Platform, text: str, address: str | None = None) -> Caller:
    """The caller that a key stands for. Raises Unauthenticated, or Forbidden (tenant suspended,
    or a key whose networks do not have the client's `address`).

    The text is checked before the database is asked, and its hash before anything is told about
    the key.
    """
    try:
        key = token.parse(text)
    except token.MalformedKey as error:
        raise Unauthenticated(
            f"The API key is not valid: {error}. Keys begin with `lmx_`; create one in the "
            "console under Keys, or with `loramux keys create`.",
        ) from None
    entry = platform.keys.get(key.public_id, platform.clock.monotonic_ms())
    if entry is None:
        asked_ms = platform.clock.monotonic_ms()
        entry = await platform.key_reads.do(key.public_id)
        platform.keys.put(key.public_id, entry, asked_ms)
    matches = platform.secrets.matches("api-key", key.text, entry.stored)
    if entry.caller is None or not matches:
        raise Unauthenticated(
            "The API key is not known here. Create one in the console under Keys, or with "
            "`loramux keys create`.",
        )
    _check_times(platform, entry, key)
    if not allows(entry.networks, address):
        await platform.refusals.note(entry.caller, "source_network", address=address)
        raise Forbidden(
            f"The API key lmx_{key.public_id}_… may not be used from the address {address}; its "
            "networks do not have it.",
            code="network_not_allowed",
        )
    if not entry.tenant_active:
        raise Forbidden(
            f"The tenant {entry.caller.tenant_name} is suspended; ask the operator.",
            code="tenant_suspended",
        )
    _note_use(platform, entry, key, entry.caller)
    return entry.caller


def _check_times(platform: Platform, entry: KeyEntry, key: token.KeyText) -> None:
    now = platform.clock.now()
    if entry.revoked_at is not None or (entry.revoke_at is not None and entry.revoke_at <= now):
        raise Unauthenticated(
            f"The API key lmx_{key.public_id}_… was revoked; use its successor or a new key.",
            code="revoked_api_key",
        )
    if entry.expires_at is not None and entry.expires_at <= now:
        raise Unauthenticated(
            f"The API key lmx_{key.public_id}_… has expired; create a new one.",
            code="expired_api_key",
        )


def _note_use(platform: Platform, entry: KeyEntry, key: token.KeyText, caller: Caller) -> None:
    if caller.key_id is None:
        return
    platform.last_used.mark(caller.key_id)
    if entry.stored.version != platform.secrets.current_version:
        renewed = platform.secrets.hash("api-key", key.text)
        platform.last_used.rehash(caller.key_id, entry.stored.version, renewed)


async def api_caller(request: Request, platform: PlatformDep) -> Caller:
    """The tenant's caller behind a key on /v1. Raises Unauthenticated or Forbidden."""
    caller = await authenticate_key(platform, bearer(request), client_address(request))
    if caller.role == "operator" or not caller.tenant_id:
        await platform.refusals.note(caller, "operator_key_on_v1")
        raise Forbidden(
            "An operator key reaches /admin/v1 alone; calls to /v1 need a tenant's key, which "
            "carries its limits.",
            code="operator_key_on_v1",
        )
    request.state.caller = caller
    await _within_access(request, platform, caller)
    return caller


async def _within_access(request: Request, platform: Platform, caller: Caller) -> None:
    try:
        check_access(caller, request.method, request.scope["path"])
    except Forbidden as refusal:
        await platform.refusals.note(caller, refusal.code)
        raise


ApiCaller = Annotated[Caller, Depends(api_caller)]


# --------------------------------------------------------------------------- sessions


def cookie_name(settings: Settings) -> str:
    """`__Host-` binds the cookie to one https origin; plain loopback has no such thing."""
    return "__Host-loramux" if settings.https else "loramux_session"


def require_safe_transport(request: Request) -> None:
    """Raises InvalidRequest unless the browser came over https or from this machine.

    Call it where a password or a session's cookie is about to travel.
    """
    if request.url.scheme == "https":
        return
    host = request.url.hostname
    client = request.client.host if request.client is not None else None
    if is_loopback_host(host) and (client is None or _is_loopback_address(client)):
        return
    raise InvalidRequest(
        "Passwords do not travel over plain http. Use https.", code="use_https", status=403
    )


def _is_loopback_address(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address in ("testclient", "localhost")


def set_session_cookie(response: Response, platform: Platform, signed_in: SignedIn) -> None:
    response.set_cookie(
        cookie_name(platform.settings),
        signed_in.token,
        max_age=platform.settings.session_absolute_s,
        path="/",
        secure=platform.settings.https,
        httponly=True,
        samesite="lax",
    )


def clear_session_cookie(response: Response, platform: Platform) -> None:
    response.delete_cookie(
        cookie_name(platform.settings),
        path="/",
        secure=platform.settings.https,
        httponly=True,
        samesite="lax",
    )


def session_token(request: Request, platform: Platform) -> str | None:
    """The value of the session's cookie."""
    return request.cookies.get(cookie_name(platform.settings))


async def open_session(request: Request, platform: Platform) -> OpenSession | None:
    """The caller's session, if any; notes at most once a minute that it is in use."""
    value = session_token(request, platform)
    if value is None or len(value) > 100:
        return None
    now = platform.clock.now()
    async with platform.db.reading() as session:
        found = await find_session(
            session, value, secrets=platform.secrets, settings=platform.settings, now=now
        )
    if found is not None and found.stale:
        async with platform.db.transaction() as session:
            await user_rows.touch_session(session, found.session_id, now)
    return found


async def _pending_user(request: Request, platform: PlatformDep) -> Caller:
    found = await open_session(request, platform)
    if found is None:
        raise SignInNeeded("Sign in to continue.")
    request.state.caller = found.caller
    request.state.must_change_password = found.user.must_change_password
    return found.caller


PendingUser = Annotated[Caller, Depends(_pending_user)]


async def _session_user(request: Request, caller: PendingUser) -> Caller:
    if request.state.must_change_password:
        raise PasswordChangeNeeded("Change the one-time password first.")
    return caller


SessionUser = Annotated[Caller, Depends(_session_user)]


async def _tenant_admin(caller: SessionUser) -> Caller:
    if caller.role not in ("tenant_admin", "operator"):
        raise Forbidden("Only an admin of the tenant may do this; ask one.", code="admin_only")
    return caller


TenantAdmin = Annotated[Caller, Depends(_tenant_admin)]


async def _operator_caller(request: Request, platform: PlatformDep) -> Caller:
    if "authorization" in request.headers:
        caller = await authenticate_key(platform, bearer(request), client_address(request))
    else:
        found = await open_session(request, platform)
        if found is None:
            raise Unauthenticated(
                "Send an operator key (`Authorization: Bearer lmx_…`, from `loramux keys create "
                "--operator`), or sign in to the console.",
                code="missing_api_key",
            )
        if found.user.must_change_password:
            raise PasswordChangeNeeded("Change the one-time password in the console first.")
        caller = found.caller
    if caller.role != "operator":
        await platform.refusals.note(caller, "operator_only")
        raise Forbidden("Only operators may use /admin/v1.", code="operator_only")
    request.state.caller = caller
    await _within_access(request, platform, caller)
    return caller


OperatorCaller = Annotated[Caller, Depends(_operator_caller)]
