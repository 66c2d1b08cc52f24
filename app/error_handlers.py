"""Turns every failure of a route into an answer: OpenAI's object, or a page in the console."""

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from sqlalchemy.exc import DataError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException

from app.auth import PasswordChangeNeeded, SignInNeeded
from app.errors import (
    AppError,
    Forbidden,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    RateLimited,
    TooLarge,
    Unauthenticated,
)
from app.json_body import unreadable
from app.logging import where
from app.metrics import REFUSALS

_log = structlog.get_logger("loramux.errors")
CONSOLE = "/console"
SIGN_IN = "/console/sign-in"
CHANGE_PASSWORD = "/console/password"
_QUOTED_CHARACTERS = 40
_CONTENT_FIELDS = {"messages", "prompt", "password", "content", "input", "suffix"}


class MethodNotAllowed(InvalidRequest):
    status = 405
    code = "method_not_allowed"


def install(app: FastAPI) -> None:
    """Registers the handlers; `app.middleware.RequestContext` catches what is left."""
    app.add_exception_handler(AppError, _app_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(DataError, _unstorable)
    for unreachable in (OperationalError, InterfaceError, PoolTimeout):
        app.add_exception_handler(unreachable, _database_error)


def answer(request: Request, error: AppError) -> Response:
    """The response for an error, as the part of the site expects it."""
    REFUSALS.labels(error.code).inc()
    path = request.url.path
    if path == CONSOLE or path.startswith(f"{CONSOLE}/"):
        return _console_answer(request, error)
    response = JSONResponse(error.body(), status_code=error.status, headers=error.headers())
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


async def _app_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AppError)
    return answer(request, error)


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    if found[0].get("type") == "json_invalid":
        return answer(request, unreadable(await request.body()))
    return answer(request, from_validation(found))


async def _database_error(request: Request, error: Exception) -> Response:
    """The database is away, locked or full: nothing was kept, and a retry can help."""
    _log.error("database_unavailable", error=type(error).__name__, where=where(error))
    refused = Overloaded(
        "The database does not answer, so nothing was started; try again.",
        code="database_unavailable",
        retry_after_ms=2000,
    )
    return answer(request, refused)


async def _unstorable(request: Request, error: Exception) -> Response:
    """PostgreSQL has no text with a NUL: whatever field brought one, it is told here."""
    if not any(sign in str(getattr(error, "orig", "")) for sign in ("NUL", "\\u0000")):
        _log.error("unexpected", error=type(error).__name__, where=where(error))
        return answer(request, internal(request))
    given = (*request.path_params.items(), *request.query_params.items())
    name = next((name for name, value in given if "\0" in str(value)), None)
    what = f"`{name}`" if name else "A text of the request's body"
    refused = InvalidRequest(
        f"{what} has a NUL character; leave it out.", code="invalid_value", param=name
    )
    return answer(request, refused)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    cause = error.__cause__
    if isinstance(cause, RecursionError | ValueError):  # of reading JSON; the body is kept
        return answer(request, unreadable(await request.body()))
    refused = cause if isinstance(cause, AppError) else from_status(request, error)
    response = answer(request, refused)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


# --------------------------------------------------------------------------- to our own tree


def from_status(request: Request, error: HTTPException) -> AppError:
    """The framework's own refusals, in our tree; its wording of details is not passed on."""
    status = error.status_code
    method, path = request.method, request.url.path[:80]
    if status == 404:
        return NotFound(f"There is no {method} {path}; /docs lists the routes.", code="no_route")
    if status == 405:
        return MethodNotAllowed(f"{path} does not take {method}; /docs lists its methods.")
    if status == 401:
        return Unauthenticated("Send the header `Authorization: Bearer lmx_…`.")
    if status == 403:
        return Forbidden("This is not allowed with your credentials.")
    if status == 413:
        return TooLarge("The request's body is too large.")
    if status == 429:
        return RateLimited("Too many requests; wait and try again.")
    if status == 503:
        return Overloaded("Not available now; try again.")
    if 400 <= status < 500:
        return InvalidRequest(
            "The request's body could not be read; send what its Content-Type says.",
            code="malformed_body",
            status=status,
        )
    return InternalError(f"Something failed here. {_find_it(request)}", status=status)


def internal(request: Request) -> InternalError:
    """What a caller is told of an unexpected failure: nothing but where to find it."""
    return InternalError(f"Something failed here. {_find_it(request)}")


def _find_it(request: Request) -> str:
    request_id = getattr(request.state, "request_id", "")
    return f"Name the request id {request_id} to the operator." if request_id else ""


def from_validation(errors: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """The first thing that was wrong with the parameters, naming the field and the remedy."""
    first = errors[0]
    kind = str(first.get("type", ""))
    param = field_name(first.get("loc", ()))
    if not param:
        return InvalidRequest(
            "Send a JSON object as the body, with `Content-Type: application/json`.",
            code="malformed_body",
        )
    if kind == "missing":
        return InvalidRequest(f"`{param}` is missing; send it.", code="missing_field", param=param)
    if kind == "extra_forbidden":
        return InvalidRequest(
            f"`{param}` is not a parameter here; remove it, or see /docs for those there are.",
            code="unknown_field",
            param=param,
        )
    return InvalidRequest(
        f"`{param}`{_complaint(first)}{_given(first, param)}.", code="invalid_value", param=param
    )


def _complaint(error: Mapping[str, Any]) -> str:
    """What follows the field's name: pydantic's own sentences begin with "Input should be"."""
    if error.get("type") == "string_unicode":
        return " has half a surrogate pair, such as a lone \\ud800; write the whole character"
    message = str(error.get("msg", "Invalid value")).removeprefix("Value error, ").rstrip(".")
    message = message.partition(", unable to parse")[0].replace(" after validation", "")
    must = re.sub(
        r"^(?:Input|Value|String|List|Dictionary|Data|Tuple|Set) should ", "must ", message
    )
    return f" {must}" if must != message else f": {message}"


def field_name(location: Sequence[str | int]) -> str:
    """("body", "messages", 0, "role") as `messages[0].role`; union tags are left out."""
    parts = list(location)
    if parts and parts[0] in ("body", "query", "path", "header", "cookie", "form"):
        parts = parts[1:]
    name = ""
    for part in parts:
        if isinstance(part, int):
            name += f"[{part}]"
        elif re.fullmatch(r"[A-Za-z_][\w-]*", part) or not name:
            name += f".{part}" if name else part
    return name[:120]


def _given(error: Mapping[str, Any], param: str) -> str:
    """The wrong value, when it is a number or a short word that is not content."""
    value = error.get("input")
    if isinstance(value, bool | int | float) and len(repr(value)) <= _QUOTED_CHARACTERS:
        return f"; {value!r} was given"
    root = re.split(r"[.\[]", param)[0]
    secret = root in _CONTENT_FIELDS or param.rpartition(".")[2] in _CONTENT_FIELDS
    if isinstance(value, str) and error.get("type") in ("literal_error", "enum") and not secret:
        return f"; {value[:_QUOTED_CHARACTERS]!r} was given"
    return ""


# --------------------------------------------------------------------------- the console


def _console_answer(request: Request, error: AppError) -> Response:
    """Sign-in where it is needed, else a page (a fragment for htmx) with the sentence."""
    target = None
    if isinstance(error, SignInNeeded):
        target = SIGN_IN
    elif isinstance(error, PasswordChangeNeeded):
        target = CHANGE_PASSWORD
    htmx = request.headers.get("hx-request") == "true"
    if target is not None:
        if htmx:
            return Response(status_code=204, headers={"HX-Redirect": target})
        return RedirectResponse(target, status_code=303)
    render = getattr(request.app.state, "render_console_error", None)
    if render is not None:
        page: Response = render(request, error)
    else:
        page = HTMLResponse(_plain_page(error), status_code=error.status)
    page.headers.update(error.headers())
    return page


def _plain_page(error: AppError) -> str:
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>loramux</title>'
        f"<h1>{error.status}</h1><p>{html.escape(error.message)}</p>"
        f'<p><a href="{CONSOLE}">Back to the console</a></p></html>'
    )
