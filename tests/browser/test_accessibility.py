"""axe-core finds nothing serious on any page, in light and in dark; pages fit a phone."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.browser.conftest import DESKTOP, PHONE, Visitor
from tests.browser.seeded import Seeded

pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

AXE = Path(__file__).parent / "axe"
SERIOUS = ("serious", "critical")
EMPTY = ("overview", "adapters", "keys", "webhooks", "usage", "limits", "audit", "playground")


def test_axe_is_the_locked_version_unchanged() -> None:
    lock = json.loads((AXE / "lock.json").read_text())
    assert lock["version"] in (AXE / "axe.min.js").read_text()[:200]
    found = {name: hashlib.sha256((AXE / name).read_bytes()).hexdigest() for name in lock["files"]}
    assert found == lock["files"]


def serious(page: Page, **options: Any) -> list[str]:
    """What axe finds, a line each. Its text is evaluated, which the page's policy allows nobody."""
    page.evaluate((AXE / "axe.min.js").read_text() + ";0")
    found = page.evaluate("options => axe.run(document, options)", options)
    return [
        f"{one['id']}: {node['target']} {node.get('failureSummary', '')}"
        for one in found["violations"]
        if one["impact"] in SERIOUS
        for node in one["nodes"]
    ]


def faults(page: Page, address: str) -> list[str]:
    """In light by every rule, in dark by those of colours alone."""
    page.emulate_media(color_scheme="light", reduced_motion="reduce")
    page.goto(address)
    found = [f"{address} {fault}" for fault in serious(page)]
    page.emulate_media(color_scheme="dark", reduced_motion="reduce")
    dark = serious(page, runOnly=["color-contrast"])
    return found + [f"{address} in the dark {fault}" for fault in dark]


def too_wide(page: Page, address: str) -> list[str]:
    width, window = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    return [f"{address} is {width} pixels wide"] if width > window else []


def test_no_page_has_a_serious_fault_and_all_fit_a_phone(visitor: Visitor, seeded: Seeded) -> None:
    invitation = visitor.invite("axe@example.com", "seeded")
    with visitor.page(refusals=2) as page:
        found = []
        for address in ("/console/sign-in", invitation, "/console/invitation/used"):
            found += faults(page, address)
        visitor.sign_in(page, seeded.email)
        for address in (*seeded.pages.values(), "/console/adapters/no-such-adapter"):
            found += faults(page, address)
            page.set_viewport_size(PHONE)  # type: ignore[arg-type]
            found += too_wide(page, address)
            page.set_viewport_size(DESKTOP)  # type: ignore[arg-type]
    assert found == [], "\n".join(found)


@pytest.mark.wide
@pytest.mark.parametrize("who", ["viewer", "newcomer"])
def test_pages_of_a_viewer_and_empty_ones_have_no_serious_fault(
    visitor: Visitor, seeded: Seeded, newcomer: Seeded, who: str
) -> None:
    email = seeded.viewer if who == "viewer" else newcomer.email
    addresses = [address for name, address in seeded.pages.items() if name != "upload"]
    if who == "newcomer":
        addresses = [f"/console/{name}" for name in EMPTY]
    for phone in (False, True):
        with visitor.page(phone=phone) as page:
            visitor.sign_in(page, email)
            for address in addresses:
                assert faults(page, address) + too_wide(page, address) == []


@pytest.mark.wide
def test_an_operators_pages_have_no_serious_fault(visitor: Visitor, operator: str) -> None:
    with visitor.page() as page:
        visitor.sign_in(page, operator)
        links = page.locator("nav[aria-label=Console] a").all()
        for address in [str(link.get_attribute("href")) for link in links]:
            assert faults(page, address) == []
