"""The operator's journeys, a page each, on the real platform in headless Chromium."""

import re

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import PASSWORD, Visitor

pytestmark = [pytest.mark.browser, pytest.mark.timeout(150)]

PAGES = ("tenants", "requests", "engines", "jobs", "system", "audit")


@pytest.fixture(scope="module")
def operator(visitor: Visitor) -> str:
    """An operator, who accepted the invitation. Returns the address."""
    made = visitor.live.json("users", "create", "olga@example.com", "--role", "operator")
    with visitor.page() as page:
        page.goto(str(made["link"]).removeprefix(visitor.live.url))
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Save it and sign in").click()
        page.wait_for_url("**/console/tenants")
    return "olga@example.com"


def make_tenant(page: Page, name: str) -> None:
    page.goto("/console/tenants")
    page.get_by_label("New tenant").fill(name)
    page.get_by_role("button", name="Create a tenant").click()
    expect(page.get_by_role("heading", name=name)).to_be_visible()


def test_a_tenant_is_made_limited_invited_and_deleted(visitor: Visitor, operator: str) -> None:
    with visitor.page(refusals=2) as page:
        visitor.sign_in(page, operator)
        make_tenant(page, "journey")
        page.get_by_label("Requests per minute").fill("many")
        page.get_by_role("button", name="Save the limits").click()
        expect(page.get_by_role("alert")).to_contain_text("Requests per minute")
        page.get_by_label("Requests per minute").fill("30")
        page.get_by_role("button", name="Save the limits").click()
        expect(page.get_by_role("status")).to_contain_text("saved")
        page.get_by_label("E-mail of whom to invite").fill("joe@example.com")
        page.get_by_role("button", name="Invite").click()
        expect(page.locator(".secret code")).to_contain_text("/console/invitation/")
        page.goto("/console/tenants?q=journ")
        row = page.get_by_role("row", name="journey")
        expect(row).to_contain_text("30")
        row.get_by_role("link").click()
        page.get_by_role("button", name="Delete").click()
        expect(page.get_by_text("This is lost for good")).to_be_visible()
        page.get_by_label("to confirm").fill("something else")
        page.get_by_role("button", name="for good").click()
        expect(page.get_by_role("alert")).to_contain_text("cannot be undone")
        page.get_by_label("to confirm").fill("journey")
        page.get_by_role("button", name="for good").click()
        expect(page.get_by_role("heading", name="Being erased")).to_be_visible()


def test_a_tenant_is_suspended_and_resumed_without_scripts(visitor: Visitor, operator: str) -> None:
    with visitor.page(scripts=False) as page:
        visitor.sign_in(page, operator)
        make_tenant(page, "plain")
        page.get_by_role("button", name="Suspend").click()
        page.get_by_role("button", name="Suspend plain").click()
        expect(page.locator("h1 .chip")).to_have_text("suspended")
        page.get_by_role("button", name="Resume").click()
        expect(page.locator("h1 .chip")).to_have_text("active")


def test_an_engine_is_drained_on_purpose_and_shows_it_by_itself(
    visitor: Visitor, operator: str
) -> None:
    with visitor.page(refusals=1) as page:
        visitor.sign_in(page, operator)
        page.goto("/console/engines")
        card = page.locator("article.engine").first
        chip = card.locator("h2 .chip")
        expect(chip).to_have_text("ready")
        expect(card.get_by_role("img").first).to_be_visible()
        card.get_by_text("Drain …").click()
        page.wait_for_timeout(2500)  # the card renews itself, and the question stays
        card.get_by_role("button", name="Drain it").click()
        page.get_by_role("button", name="Drain it all the same").click()
        expect(chip).to_have_text("drained", timeout=20_000)  # without a reload
        card.get_by_role("button", name="Resume").click()
        expect(chip).to_have_text("ready", timeout=20_000)


def test_jobs_and_system_tell_where_everything_stands(visitor: Visitor, operator: str) -> None:
    with visitor.page() as page:
        visitor.sign_in(page, operator)
        page.get_by_role("link", name="Jobs").click()
        expect(page.get_by_text("None has failed")).to_be_visible()
        page.get_by_role("link", name="System").click()
        expect(page.get_by_role("listitem").filter(has_text="Database")).to_contain_text("ok")
        expect(page.get_by_text(re.compile(r"engine-0\.jsonl"))).to_be_visible()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_operators_page_fits_a_phone(visitor: Visitor, operator: str, dark: bool) -> None:
    with visitor.page(phone=True, dark=dark) as page:
        visitor.sign_in(page, operator)
        for path in PAGES:
            page.goto(f"/console/{path}")
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, path
