"""One platform and one Chromium for all browser tests; every page is watched for errors."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser.seeded import PASSWORD, Seeded, seed_live
from tests.live import LivePlatform

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]
PHONE = {"width": 360, "height": 740}
DESKTOP = {"width": 1200, "height": 800}


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


class Visitor:
    """Opens pages in contexts of their own, and fails on anything the browser complained about."""

    def __init__(self, live: LivePlatform, browser: Browser) -> None:
        self.live = live
        self._browser = browser

    @contextmanager
    def page(
        self,
        *,
        phone: bool = False,
        dark: bool = False,
        scripts: bool = True,
        refusals: int = 0,
        complain: bool = True,
    ) -> Iterator[Page]:
        """`refusals`: how many answers of 4xx the journey is meant to see. `complain=False`: it
        breaks connections, which the browser reports as errors."""
        context = self._browser.new_context(
            base_url=self.live.url,
            viewport=PHONE if phone else DESKTOP,
            color_scheme="dark" if dark else "light",
            java_script_enabled=scripts,
        )
        page = context.new_page()
        complaints: list[str] = []
        refused: list[str] = []
        page.on(
            "console",
            lambda message: (
                complaints.append(message.text)
                if message.type in ("error", "warning") and "status of 4" not in message.text
                else None
            ),
        )
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "response",
            lambda answer: (
                refused.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None
            ),
        )
        yield page
        context.close()
        assert complaints == [] or not complain
        assert len(refused) == refusals, refused

    def invite(self, email: str, tenant: str, role: str = "admin") -> str:
        """The path at which the invited user chooses a password."""
        made = self.live.json("users", "create", email, "--tenant", tenant, "--role", role)
        return str(made["link"]).removeprefix(self.live.url)

    def sign_in(self, page: Page, email: str, password: str = PASSWORD) -> None:
        page.goto("/console/sign-in")
        page.get_by_label("E-mail").fill(email)
        page.get_by_label("Password").fill(password)
        page.get_by_role("button", name="Sign in").click()
        page.wait_for_url(lambda url: "sign-in" not in url)


@pytest.fixture(scope="session")
def visitor(live: LivePlatform, chromium: Browser) -> Visitor:
    return Visitor(live, chromium)


@pytest.fixture(scope="session")
def seeded(live: LivePlatform) -> Seeded:
    """A tenant with two thousand adapters and something on every page."""
    return seed_live(live, "seeded")


@pytest.fixture(scope="session")
def newcomer(live: LivePlatform) -> Seeded:
    """A tenant with nothing."""
    return seed_live(live, "newcomer", adapters=0)


@pytest.fixture(scope="session")
def operator(visitor: Visitor) -> str:
    """The operator's name; the one-time password is used up and PASSWORD chosen."""
    once = visitor.live.one_time_password()
    with visitor.page() as page:
        visitor.sign_in(page, "operator", once)
        page.get_by_label("Current password").fill(once)
        page.get_by_label("New password").fill(PASSWORD)
        page.get_by_role("button", name="Save").click()
        page.wait_for_url(lambda url: "password" not in url)
    return "operator"
