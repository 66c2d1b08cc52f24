"""Pages from templates: what every page is given, and how an error becomes one."""

from dataclasses import dataclass
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from app.api_docs import WEB
from app.caller import Caller
from app.errors import AppError

TENANT_PAGES = (
    ("Overview", "/console/overview"),
    ("Adapters", "/console/adapters"),
    ("Playground", "/console/playground"),
    ("Keys", "/console/keys"),
    ("Webhooks", "/console/webhooks"),
    ("Usage", "/console/usage"),
    ("Limits", "/console/limits"),
    ("Audit", "/console/audit"),
)
OPERATOR_PAGES = (
    ("Tenants", "/console/tenants"),
    ("Requests", "/console/requests"),
    ("Engines", "/console/engines"),
    ("Jobs", "/console/jobs"),
    ("System", "/console/system"),
    ("Audit", "/console/audit"),
)
HOMES = {"operator": "/console/tenants"}
"""Where a role begins; others at their adapters."""
HEADINGS = {
    403: "Not allowed",
    404: "Not found",
    405: "Not possible here",
    429: "Too often",
    503: "Not available now",
}

_templates = Environment(
    loader=FileSystemLoader(WEB / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


@dataclass(frozen=True, slots=True)
class NavigationItem:
    label: str
    href: str
    current: bool


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks at the page, as its corner shows it."""

    email: str
    place: str


def render(
    request: Request,
    template: str,
    *,
    status: int = 200,
    error: AppError | None = None,
    **context: object,
) -> HTMLResponse:
    """`console/{template}` with the navigation of whoever is signed in.

    `error`: why a form is shown again; the page has its sentence, its field and its status.
    """
    caller: Caller | None = getattr(request.state, "caller", None)
    shared: dict[str, Any] = {"navigation": _navigation(caller, request.url.path)}
    shared["viewer"] = None if caller is None else Viewer(caller.label, _place(caller))
    shared["error"] = "" if error is None else error.message
    shared["error_field"] = "" if error is None else error.param
    if error is not None:
        status = error.status
    html = _templates.get_template(f"console/{template}").render(**shared, **context)
    return HTMLResponse(html, status_code=status)


def error_page(request: Request, error: AppError) -> HTMLResponse:
    """The sentence of a refusal, on a page of its own."""
    heading = HEADINGS.get(error.status, "That did not work")
    request_id = getattr(request.state, "request_id", "") if error.status >= 500 else ""
    return render(
        request,
        "error.html",
        status=error.status,
        heading=heading,
        message=error.message,
        request_id=request_id,
    )


def home(caller: Caller) -> str:
    """The first page for this role."""
    return HOMES.get(caller.role, "/console/adapters")


def _navigation(caller: Caller | None, path: str) -> list[NavigationItem]:
    if caller is None:
        return []
    pages = OPERATOR_PAGES if caller.role == "operator" else TENANT_PAGES
    return [NavigationItem(label, href, path.startswith(href)) for label, href in pages]


def _place(caller: Caller) -> str:
    if caller.role == "operator":
        return "operator"
    return f"{caller.tenant_name}, {'admin' if caller.role == 'tenant_admin' else 'viewer'}"
