"""Signing in and out, choosing a password."""

import re
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import RedirectResponse

from app.auth import (
    PendingUser,
    SessionUser,
    clear_session_cookie,
    open_session,
    require_safe_transport,
    session_token,
    set_session_cookie,
)
from app.console.forms import read_form
from app.console.render import home, render
from app.deps import PlatformDep
from app.errors import AppError, NotFound
from app.users import service as users
from app.users import sessions
from app.users.service import TokenKind
from app.users.sessions import SignedIn

router = APIRouter(include_in_schema=False)

SIGN_IN = "/console/sign-in"
_LOCAL_PAGE = re.compile(r"/console(/[A-Za-z0-9._~/@-]*)?")


def _next(value: str) -> str:
    """Only ever a page of the console, so that a link cannot send anyone elsewhere."""
    return value if _LOCAL_PAGE.fullmatch(value) else "/console"


@router.get("/")
async def root() -> Response:
    return RedirectResponse("/console", status_code=303)


@router.get("/console")
async def start(caller: SessionUser) -> Response:
    return RedirectResponse(home(caller), status_code=303)


@router.get(SIGN_IN)
async def sign_in_page(
    request: Request,
    platform: PlatformDep,
    next_page: Annotated[str, Query(alias="next", max_length=300)] = "/console",
    saved: Annotated[bool, Query()] = False,
) -> Response:
    require_safe_transport(request)
    if await open_session(request, platform) is not None:
        return RedirectResponse(_next(next_page), status_code=303)
    return render(request, "sign_in.html", next=_next(next_page), email="", saved=saved)


@router.post(SIGN_IN)
async def sign_in(request: Request, platform: PlatformDep) -> Response:
    require_safe_transport(request)
    form = await read_form(request)
    email, target = form.text("email"), _next(form.text("next"))
    try:
        signed_in = await _sign_in(request, platform, email, form.secret("password"))
    except AppError as error:
        page = render(
            request,
            "sign_in.html",
            next=target,
            email=email,
            error=error,
            saved=False,
        )
        page.headers.update(error.headers())
        return page
    response = RedirectResponse(target, status_code=303)
    set_session_cookie(response, platform, signed_in)
    return response


async def _sign_in(request: Request, platform: PlatformDep, email: str, password: str) -> SignedIn:
    return await platform.sign_in(
        email=email,
        password=password,
        address=request.client.host if request.client is not None else "",
        user_agent=request.headers.get("user-agent", ""),
        old_token=session_token(request, platform),
    )


@router.post("/console/sign-out")
async def sign_out(request: Request, platform: PlatformDep) -> Response:
    token = session_token(request, platform)
    if token is not None:
        async with platform.db.transaction() as session:
            await sessions.sign_out(session, token, secrets=platform.secrets)
    response = RedirectResponse(SIGN_IN, status_code=303)
    clear_session_cookie(response, platform)
    return response


@router.get("/console/password")
async def password_page(request: Request, caller: PendingUser) -> Response:
    return _password_page(request)


@router.post("/console/password")
async def change_password(request: Request, platform: PlatformDep, caller: PendingUser) -> Response:
    require_safe_transport(request)
    form = await read_form(request)
    assert caller.user_id is not None
    try:
        async with platform.db.transaction() as session:
            await users.change_password(
                session,
                caller.user_id,
                current=form.secret("current"),
                new=form.secret("new"),
                keep_session=session_token(request, platform),
                secrets=platform.secrets,
                passwords=platform.passwords,
                settings=platform.settings,
                now=platform.clock.now(),
            )
    except AppError as error:
        return _password_page(request, error)
    return RedirectResponse("/console", status_code=303)


def _password_page(request: Request, error: AppError | None = None) -> Response:
    return render(
        request,
        "password.html",
        forced=request.state.must_change_password,
        error=error,
    )


_Link = Annotated[str, Path(max_length=100)]
_TITLES: dict[TokenKind, str] = {
    "invitation": "Welcome to loramux",
    "password-reset": "Choose a new password",
}


@router.get("/console/invitation/{token}")
async def invitation_page(token: _Link, request: Request, platform: PlatformDep) -> Response:
    return await _offer(request, platform, "invitation", token)


@router.post("/console/invitation/{token}")
async def accept_invitation(token: _Link, request: Request, platform: PlatformDep) -> Response:
    return await _redeem(request, platform, "invitation", token)


@router.get("/console/password-reset/{token}")
async def reset_page(token: _Link, request: Request, platform: PlatformDep) -> Response:
    return await _offer(request, platform, "password-reset", token)


@router.post("/console/password-reset/{token}")
async def reset_password(token: _Link, request: Request, platform: PlatformDep) -> Response:
    return await _redeem(request, platform, "password-reset", token)


async def _offer(request: Request, platform: PlatformDep, kind: TokenKind, token: str) -> Response:
    """The form, or why there is none. Looking uses nothing up: mail programs preview links."""
    require_safe_transport(request)
    try:
        async with platform.db.reading() as session:
            await users.require_link(
                session,
                kind=kind,
                token=token,
                secrets=platform.secrets,
                now=platform.clock.now(),
            )
    except NotFound as error:
        return _link_page(request, kind, error)
    return _link_page(request, kind)


def _link_page(request: Request, kind: TokenKind, error: AppError | None = None) -> Response:
    """With the form, unless the link is what was refused: then with what to do."""
    return render(
        request,
        "link.html",
        title=_TITLES[kind],
        dead=isinstance(error, NotFound),
        error=error,
    )


async def _redeem(request: Request, platform: PlatformDep, kind: TokenKind, token: str) -> Response:
    """Whoever has the link chooses the password, and is signed in with it."""
    require_safe_transport(request)
    form = await read_form(request)
    try:
        async with platform.db.transaction() as session:
            user = await users.redeem(
                session,
                kind=kind,
                token=token,
                password=form.secret("password"),
                secrets=platform.secrets,
                passwords=platform.passwords,
                settings=platform.settings,
                now=platform.clock.now(),
            )
    except AppError as error:
        return _link_page(request, kind, error)
    try:
        signed_in = await _sign_in(request, platform, user.email, form.secret("password"))
    except AppError:  # somebody guesses at this account: the password is kept
        return RedirectResponse(f"{SIGN_IN}?saved=1", status_code=303)
    response = RedirectResponse("/console", status_code=303)
    set_session_cookie(response, platform, signed_in)
    return response
