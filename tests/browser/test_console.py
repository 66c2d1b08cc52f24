"""Journeys through the console in headless Chromium, on the real platform with the real model."""

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import PASSWORD, Visitor
from tests.live import EXAMPLES

pytestmark = [pytest.mark.browser, pytest.mark.timeout(150)]

VERDICT_MS = 90_000
ANSWER_MS = 60_000
PAGES = (
    "overview",
    "adapters",
    "adapters/upload",
    "playground",
    "keys",
    "usage",
    "limits",
    "audit",
)


@pytest.fixture(scope="module")
def admin(visitor: Visitor) -> str:
    """The tenant `browser` and its admin, who accepted the invitation. Returns the address."""
    visitor.live.run("tenants", "create", "browser")
    link = visitor.invite("ann@example.com", "browser")
    with visitor.page() as page:
        page.goto(link)
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Save the password").click()
        page.wait_for_url("**/console/sign-in?saved=1")
    return "ann@example.com"


@pytest.fixture(scope="module")
def uploaded(visitor: Visitor, admin: str) -> str:
    """Uploads an example through the form, as the admin does, and sees it become ready."""
    folder = EXAMPLES / "pirate"
    with visitor.page() as page:
        visitor.sign_in(page, admin)
        expect(page.get_by_role("heading", name="No adapter yet")).to_be_visible()
        page.get_by_role("button", name="Upload an adapter").first.click()
        page.get_by_label("Name").fill("corsair")
        _choose(page, folder)
        page.get_by_role("button", name="Upload and check").click()
        page.wait_for_url("**/console/adapters/corsair/versions/1")
        chip = page.locator("#report h2 .chip")
        expect(chip).to_have_text("ready", timeout=VERDICT_MS)  # filled in without a reload
        for title in ("Files", "Configuration", "Coverage", "Numbers", "Behaviour"):
            expect(page.get_by_role("heading", name=title)).to_be_visible()
        expect(page.get_by_text("chat.completions.create")).to_be_visible()
    return "corsair"


def _choose(page: Page, folder: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        page.locator(f'input[name="{name}"]').set_input_files(folder / name)


class TestSignIn:
    def test_the_one_time_password_opens_once_and_must_be_changed(self, visitor: Visitor) -> None:
        with visitor.page() as page:
            visitor.sign_in(page, "operator", visitor.live.one_time_password())
            expect(page.get_by_role("heading", name="Choose a password")).to_be_visible()
            page.get_by_label("Current password").fill(visitor.live.one_time_password())
            page.get_by_label("New password").fill(PASSWORD)
            page.get_by_role("button", name="Save").click()
            expect(page.get_by_role("heading", name="Tenants", exact=True)).to_be_visible()

    def test_a_wrong_password_is_refused_and_the_address_is_kept(
        self, visitor: Visitor, admin: str
    ) -> None:
        with visitor.page(refusals=1) as page:
            page.goto("/console/sign-in")
            page.get_by_label("E-mail").fill(admin)
            page.get_by_label("Password").fill("not the password")
            page.get_by_role("button", name="Sign in").click()
            expect(page.get_by_role("alert")).to_contain_text("wrong")
            expect(page.get_by_label("E-mail")).to_have_value(admin)

    def test_signing_out_closes_every_page(self, visitor: Visitor, admin: str) -> None:
        with visitor.page() as page:
            visitor.sign_in(page, admin)
            page.get_by_role("button", name="Sign out").click()
            page.goto("/console/keys")
            expect(page.get_by_role("heading", name="Sign in to loramux")).to_be_visible()


class TestAdapters:
    def test_an_upload_is_listed_with_its_live_version(
        self, visitor: Visitor, admin: str, uploaded: str
    ) -> None:
        with visitor.page() as page:
            visitor.sign_in(page, admin)
            row = page.get_by_role("row", name=uploaded)
            expect(row).to_contain_text("v1")
            expect(row).to_contain_text("ready")

    def test_a_broken_adapter_is_rejected_with_the_reason(
        self, visitor: Visitor, admin: str, tmp_path: Path
    ) -> None:
        config = (EXAMPLES / "pirate" / "adapter_config.json").read_text()
        (tmp_path / "adapter_config.json").write_text(
            config.replace('"use_dora": false', '"use_dora": true')
        )
        weights = (EXAMPLES / "pirate" / "adapter_model.safetensors").read_bytes()
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        with visitor.page() as page:
            visitor.sign_in(page, admin)
            page.goto("/console/adapters/upload")
            page.get_by_label("Name").fill("dora")
            _choose(page, tmp_path)
            page.get_by_role("button", name="Upload and check").click()
            page.wait_for_url("**/console/adapters/dora/versions/1")
            expect(page.locator("#report h2 .chip")).to_have_text("rejected", timeout=VERDICT_MS)
            expect(page.get_by_text("unsupported_dora")).to_be_visible()

    def test_what_is_plainly_wrong_is_told_before_a_byte_is_sent(
        self, visitor: Visitor, admin: str, tmp_path: Path
    ) -> None:
        (tmp_path / "adapter_config.json").write_text("not json")
        (tmp_path / "adapter_model.safetensors").write_bytes(b"\0" * 64)
        with visitor.page() as page:
            visitor.sign_in(page, admin)
            page.goto("/console/adapters/upload")
            page.get_by_label("Name").fill("plainly-wrong")
            _choose(page, tmp_path)
            page.get_by_role("button", name="Upload and check").click()
            expect(page.get_by_role("alert")).to_contain_text("is not JSON")
            expect(page.get_by_label("Name")).to_have_value("plainly-wrong")

    def test_the_form_works_without_scripts(self, visitor: Visitor, admin: str) -> None:
        with visitor.page(scripts=False) as page:
            visitor.sign_in(page, admin)
            page.goto("/console/adapters/upload")
            page.get_by_label("Name").fill("plain-form")
            _choose(page, EXAMPLES / "haiku")
            page.get_by_role("button", name="Upload and check").click()
            page.wait_for_url("**/console/adapters/plain-form/versions/1")
            expect(page.get_by_role("heading", name="Validation")).to_be_visible()


class TestPlayground:
    def test_an_answer_streams_from_the_uploaded_adapter(
        self, visitor: Visitor, admin: str, uploaded: str
    ) -> None:
        with visitor.page() as page:
            visitor.sign_in(page, admin)
            page.goto(f"/console/playground?model={uploaded}")
            page.get_by_label("Temperature").fill("0")
            page.get_by_label("Maximum tokens").fill("24")
            page.get_by_label("Prompt").fill("Where do penguins live?")
            page.get_by_role("button", name="Send").click()
            expect(page.locator("[data-status]")).to_contain_text("tokens in", timeout=ANSWER_MS)
            assert len(page.locator(".message.assistant").inner_text()) > 10

    def test_a_refusal_is_a_sentence(self, visitor: Visitor, admin: str, uploaded: str) -> None:
        with visitor.page(refusals=1) as page:
            visitor.sign_in(page, admin)
            page.goto("/console/playground?model=no-such-model")
            page.get_by_label("Prompt").fill("Hello")
            page.get_by_role("button", name="Send").click()
            expect(page.get_by_role("alert")).to_contain_text("no-such-model")

    def test_the_answer_comes_without_scripts_too(
        self, visitor: Visitor, admin: str, uploaded: str
    ) -> None:
        with visitor.page(scripts=False) as page:
            visitor.sign_in(page, admin)
            page.goto(f"/console/playground?model={uploaded}")
            page.get_by_label("Maximum tokens").fill("8")
            page.get_by_label("Prompt").fill("Hello")
            page.get_by_role("button", name="Send").click()
            expect(page.locator(".message.assistant")).not_to_be_empty(timeout=ANSWER_MS)


class TestKeys:
    def test_a_secret_is_shown_once_and_a_revoked_key_says_so(
        self, visitor: Visitor, admin: str
    ) -> None:
        with visitor.page() as page:
            visitor.sign_in(page, admin)
            page.goto("/console/keys")
            page.get_by_role("textbox", name="Name", exact=True).fill("from the browser")
            page.get_by_role("button", name="Create a key").click()
            secret = page.locator(".secret code").inner_text()
            assert secret.startswith("lmx_")
            page.goto("/console/keys")
            assert secret not in page.content()
            row = page.get_by_role("row", name="from the browser")
            page.on("dialog", lambda dialog: dialog.accept())
            row.get_by_role("button", name="Revoke").click()
            expect(row).to_contain_text("revoked")

    def test_a_viewer_sees_keys_and_changes_nothing(self, visitor: Visitor, admin: str) -> None:
        link = visitor.invite("vera@example.com", "browser", role="viewer")
        with visitor.page(refusals=1) as page:
            page.goto(link)
            page.get_by_label("Password").fill(PASSWORD)
            page.get_by_role("button", name="Save the password").click()
            visitor.sign_in(page, "vera@example.com")
            page.goto("/console/keys")
            assert page.get_by_role("button", name="Create a key").count() == 0
            page.goto("/console/adapters/upload")
            expect(page.get_by_role("heading", name="Not allowed")).to_be_visible()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_page_fits_a_phone(visitor: Visitor, admin: str, uploaded: str, dark: bool) -> None:
    with visitor.page(phone=True, dark=dark) as page:
        visitor.sign_in(page, admin)
        for path in (*PAGES, f"adapters/{uploaded}", f"adapters/{uploaded}/versions/1"):
            page.goto(f"/console/{path}")
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, path
