"""Journeys through the console in headless Chromium, on the real platform with the real model."""

import shutil
from collections import Counter
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Visitor
from tests.browser.seeded import PASSWORD, Seeded
from tests.live import EXAMPLES

pytestmark = [pytest.mark.browser, pytest.mark.timeout(150)]

VERDICT_MS = 90_000
ANSWER_MS = 60_000
WRONG = (
    ("adapter_config.json", b"not json", "is not JSON"),
    ("adapter_config.json", b'{"peft_type": "LORA", "r": 8, "use_dora": true}', "DoRA"),
    ("adapter_model.safetensors", b"PK\x03\x04" + b"\0" * 60, "pickle"),
    ("adapter_model.safetensors", b"\x02" + b"\0" * 7 + b"{}", "no tensor"),
)
"""A file, what is in it, and a part of what is told of it."""


@pytest.fixture(scope="module")
def admin(visitor: Visitor) -> str:
    """The tenant `browser` and its admin, who accepted the invitation. Returns the address."""
    visitor.live.run("tenants", "create", "browser")
    link = visitor.invite("ann@example.com", "browser")
    with visitor.page() as page:
        page.goto(link)
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Save it and sign in").click()
        page.wait_for_url("**/console/adapters")
    return "ann@example.com"


@pytest.fixture(scope="module")
def uploaded(visitor: Visitor, admin: str) -> str:
    """Uploads an example through the form, as the admin does, and sees it become ready."""
    folder = EXAMPLES / "pirate"
    with visitor.page() as page:
        visitor.sign_in(page, admin)
        page.get_by_role("button", name="Upload an adapter").first.click()
        page.get_by_label("Name").fill("corsair")
        _choose(page, folder)
        page.get_by_role("button", name="Upload and check").click()
        page.wait_for_url("**/console/adapters/corsair/versions/1")
        chip = page.locator("#report h2 .chip")
        expect(chip).to_have_text("ready", timeout=VERDICT_MS)  # filled in without a reload
        for title in ("Files", "Configuration", "Coverage", "Numbers", "Behaviour"):
            expect(page.get_by_role("heading", name=title)).to_be_visible()
        for language in ("curl", "Python", "TypeScript"):
            expect(page.get_by_role("heading", name=language)).to_be_visible()
        expect(page.get_by_role("img", name="Norm of each layer")).to_be_visible()
    return "corsair"


def _choose(page: Page, folder: Path) -> None:
    names = ("adapter_config.json", "adapter_model.safetensors")
    page.get_by_label("Both files").set_input_files([folder / name for name in names])


def _upload(page: Page, name: str) -> None:
    page.get_by_label("Name").fill(name)
    _choose(page, EXAMPLES / "haiku")
    page.get_by_role("button", name="Upload and check").click()


class TestSignIn:
    def test_the_one_time_password_opens_once_and_must_be_changed(
        self, visitor: Visitor, operator: str
    ) -> None:
        with visitor.page() as page:
            visitor.sign_in(page, operator)
            expect(page.get_by_role("heading", name="Tenants", exact=True)).to_be_visible()
        with visitor.page(refusals=1) as page:
            page.goto("/console/sign-in")
            page.get_by_label("E-mail").fill(operator)
            page.get_by_label("Password").fill(visitor.live.one_time_password())
            page.get_by_role("button", name="Sign in").click()
            expect(page.get_by_role("alert")).to_contain_text("wrong")

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

    def test_signing_out_closes_every_page(self, visitor: Visitor, seeded: Seeded) -> None:
        with visitor.page() as page:
            visitor.sign_in(page, seeded.email)
            left_open = page.context.new_page()
            left_open.goto("/console/adapters")
            page.get_by_role("button", name="Sign out").click()
            page.goto("/console/keys")
            expect(page.get_by_role("heading", name="Sign in to loramux")).to_be_visible()
            left_open.get_by_label("Search").fill("bot")  # asks for a part of the page
            expect(left_open.get_by_role("heading", name="Sign in to loramux")).to_be_visible()


class TestAdapters:
    def test_an_upload_is_listed_with_its_live_version(
        self, visitor: Visitor, admin: str, uploaded: str
    ) -> None:
        with visitor.page() as page:
            visitor.sign_in(page, admin)
            row = page.get_by_role("row", name=uploaded)
            expect(row).to_contain_text("live v1")
            expect(row).to_contain_text("ready")

    def test_two_thousand_are_searched_sorted_and_paged(
        self, visitor: Visitor, seeded: Seeded
    ) -> None:
        with visitor.page() as page:
            visitor.sign_in(page, seeded.email)
            expect(page.get_by_label("Pages")).to_contain_text("of 2,000 adapters")
            page.get_by_role("link", name="Name").click()
            expect(page.locator("tbody tr").first).to_contain_text("french-0007")
            page.get_by_role("link", name="Next").click()
            expect(page.get_by_label("Pages")).to_contain_text("51")
            page.get_by_label("Search").fill("SUPPORT-BOT")  # no button is pressed
            expect(page.get_by_label("Pages")).to_contain_text("of 1 adapters")
            expect(page.get_by_role("row", name="support-bot")).to_contain_text("stable v1 90 %")
            page.get_by_label("Newest version is").select_option("rejected")
            expect(page.get_by_role("heading", name="No such adapter")).to_be_visible()

    def test_a_broken_adapter_is_rejected_with_the_reason(
        self, visitor: Visitor, admin: str, tmp_path: Path
    ) -> None:
        config = (EXAMPLES / "pirate" / "adapter_config.json").read_text()
        (tmp_path / "adapter_config.json").write_text(
            config.replace('"bias": "none"', '"bias": "all"')
        )
        weights = (EXAMPLES / "pirate" / "adapter_model.safetensors").read_bytes()
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
        with visitor.page() as page:
            visitor.sign_in(page, admin)
            page.goto("/console/adapters/upload")
            page.get_by_label("Name").fill("biased")
            _choose(page, tmp_path)
            page.get_by_role("button", name="Upload and check").click()
            page.wait_for_url("**/console/adapters/biased/versions/1")
            expect(page.locator("#report h2 .chip")).to_have_text("rejected", timeout=VERDICT_MS)
            expect(page.get_by_text("unsupported_bias")).to_be_visible()
            expect(page.get_by_text("What to do:")).to_be_visible()

    def test_what_is_plainly_wrong_is_told_before_a_byte_is_sent(
        self, visitor: Visitor, admin: str, tmp_path: Path
    ) -> None:
        sent: list[str] = []
        with visitor.page() as page:
            visitor.sign_in(page, admin)
            page.goto("/console/adapters/upload")
            page.on("request", lambda request: sent.append(request.url))
            page.get_by_label("Name").fill("plainly-wrong")
            for number, (name, content, told) in enumerate(WRONG):
                folder = tmp_path / str(number)
                shutil.copytree(EXAMPLES / "haiku", folder)
                (folder / name).write_bytes(content)
                _choose(page, folder)
                page.get_by_role("button", name="Upload and check").click()
                expect(page.get_by_role("alert")).to_contain_text(told)
            expect(page.get_by_label("Name")).to_have_value("plainly-wrong")
        assert [address for address in sent if "/console/" in address] == []

    def test_files_are_chosen_together_or_one_by_one_and_a_telling_name_is_proposed(
        self, visitor: Visitor, admin: str, tmp_path: Path
    ) -> None:
        named = tmp_path / "Corsair Speech.safetensors"
        shutil.copy(EXAMPLES / "haiku" / "adapter_model.safetensors", named)
        config = EXAMPLES / "haiku" / "adapter_config.json"
        with visitor.page() as page:
            visitor.sign_in(page, admin)
            page.goto("/console/adapters/upload")
            expect(page.locator("input[type=file]:visible")).to_have_count(1)
            page.get_by_role("button", name="Upload and check").click()  # the name is asked first
            both, alert = page.get_by_label("Both files"), page.get_by_role("alert")
            both.set_input_files(EXAMPLES / "haiku" / "adapter_model.safetensors")
            expect(alert).to_contain_text("adapter_config.json is missing")
            expect(page.get_by_label("Name")).to_have_value("")  # everybody's file is called so
            both.set_input_files(config)
            expect(alert).to_be_hidden()
            expect(page.locator("#chosen")).to_contain_text("adapter_config.json (")
            both.set_input_files([config, named])
            expect(page.get_by_label("Name")).to_have_value("corsair-speech")

    def test_an_upload_goes_on_after_the_page_was_closed(
        self, visitor: Visitor, admin: str
    ) -> None:
        """The line breaks at the weights; sent again, the part that arrived is not."""
        with visitor.page(complain=False) as page:
            visitor.sign_in(page, admin)
            page.goto("/console/adapters/upload")
            page.route("**/parts/1", lambda route: route.abort())
            _upload(page, "broken-off")
            expect(page.locator("[data-upload-text]")).to_contain_text("trying again")
        puts: list[str] = []
        with visitor.page() as page:
            visitor.sign_in(page, admin)
            page.goto("/console/adapters/upload")
            page.on("request", lambda r: puts.append(r.url) if r.method == "PUT" else None)
            _upload(page, "broken-off")
            page.wait_for_url("**/console/adapters/broken-off/versions/1")
        assert [address.rpartition("/")[2] for address in puts] == ["1"]

    def test_a_cancelled_upload_leaves_nothing(self, visitor: Visitor, admin: str) -> None:
        with visitor.page(complain=False) as page:
            visitor.sign_in(page, admin)
            page.goto("/console/adapters/upload")
            page.route("**/parts/1", lambda _: None)  # never answered
            _upload(page, "given-up")
            page.get_by_role("button", name="Cancel").click()
            expect(page.get_by_role("alert")).to_contain_text("Cancelled")
            left = page.evaluate("fetch('/console/uploads').then(answer => answer.json())")
        assert "given-up" not in {upload["name"] for upload in left["data"]}

    @pytest.mark.wide
    def test_the_form_works_without_scripts(self, visitor: Visitor, admin: str) -> None:
        with visitor.page(scripts=False) as page:
            visitor.sign_in(page, admin)
            page.goto("/console/adapters/upload")
            page.get_by_label("Name").fill("plain-form")
            for name in ("adapter_config.json", "adapter_model.safetensors"):
                page.get_by_label(name).set_input_files(EXAMPLES / "haiku" / name)
            page.get_by_role("button", name="Upload and check").click()
            page.wait_for_url("**/console/adapters/plain-form/versions/1")
            expect(page.get_by_role("heading", name="Validation")).to_be_visible()


class TestAlias:
    def test_a_canary_is_compared_promoted_and_rolled_back(
        self, visitor: Visitor, seeded: Seeded
    ) -> None:
        with visitor.page(refusals=1) as page:
            visitor.sign_in(page, seeded.email)
            page.goto(seeded.pages["alias"])
            errors = page.get_by_role("row", name="Error rate")
            expect(errors.get_by_role("cell").nth(0)).to_contain_text("4.29%")
            expect(errors.get_by_role("cell").nth(1)).to_contain_text("12.00%")
            for row in ("Finish reasons", "Output length", "Time to first token"):
                expect(page.get_by_role("row", name=row)).to_be_visible()
            page.get_by_label("Percent").nth(1).fill("30")
            page.get_by_role("button", name="Share out").click()
            expect(page.get_by_role("alert")).to_contain_text("sum to 120")
            expect(page.get_by_label("Percent").nth(1)).to_have_value("30")
            page.get_by_label("Percent").nth(0).fill("70")
            page.get_by_role("button", name="Share out").click()
            share = page.get_by_role("row", name="Share of requests")
            expect(share).to_contain_text("70 %")
            page.get_by_role("button", name="Promote v2").click()
            expect(share).to_contain_text("100 %")
            page.get_by_role("button", name="Roll back to v1 70 %, v2 30 %").click()
            expect(share).to_contain_text("70 %")
            expect(page.get_by_role("row", name="rolled back").first).to_be_visible()

    @pytest.mark.wide
    def test_the_comparison_counts_what_callers_were_answered(
        self, visitor: Visitor, admin: str, uploaded: str
    ) -> None:
        """Two versions on the real engine: every answer names its version, and so does the page."""
        live, alias = visitor.live, f"{uploaded}@trial"
        key = str(live.json("keys", "create", "--tenant", "browser")["key"])
        live.run("adapters", "push", str(EXAMPLES / "haiku"), "--name", uploaded, key=key)
        with httpx.Client(
            base_url=live.url, headers={"authorization": f"Bearer {key}"}, timeout=60
        ) as client:
            path = f"/v1/adapters/{uploaded}/aliases/trial"
            targets = [{"version": 1, "weight": 50}, {"version": 2, "weight": 50}]
            assert client.put(path, json={"targets": targets}).status_code == 200
            told = Counter[str]()
            while min(told["@v1"], told["@v2"]) < 2:
                body = {"model": alias, "prompt": "Ahoy", "max_tokens": 3}
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                told[answer.headers["x-loramux-adapter"].partition(";")[0][-3:]] += 1
        with visitor.page() as page:
            visitor.sign_in(page, admin)
            page.goto(f"/console/adapters/{uploaded}/aliases/trial")
            requests = page.get_by_role("row", name="Requests", exact=False).last
            for column, version in enumerate(("@v1", "@v2")):
                cell = requests.get_by_role("cell").nth(column)
                expect(cell).to_have_text(str(told[version]), timeout=20_000)  # renewed by itself
                errors = page.get_by_role("row", name="Error rate").get_by_role("cell")
                expect(errors.nth(column)).to_have_text("0.00%")
                first = page.get_by_role("row", name="Time to first token").get_by_role("cell")
                expect(first.nth(column)).to_contain_text("median")


class TestPlayground:
    def test_two_answers_stream_beside_each_other_with_their_tokens(
        self, visitor: Visitor, admin: str, uploaded: str
    ) -> None:
        with visitor.page() as page:
            visitor.sign_in(page, admin)
            page.goto(f"/console/playground?model={uploaded}")
            page.get_by_label("Compare with").fill(f"{uploaded}@v1")
            page.get_by_label("Temperature").fill("0")
            page.get_by_label("Maximum tokens").fill("24")
            page.get_by_label("Prompt").fill("Where do penguins live?")
            legend = page.locator("[data-legend]")
            expect(legend).to_be_hidden()
            page.get_by_label("Show how likely each token was").check()
            expect(legend).to_contain_text("below 10 %")
            page.get_by_role("button", name="Send").click()
            status = page.locator("[data-status]")
            expect(status).to_have_text("Done", timeout=ANSWER_MS)
            told = page.locator(".reply .text").all_inner_texts()
            assert len(told[0]) > 10
            assert told[0] == told[1]  # one version under two names, at temperature 0
            page.locator(".reply .text").first.focus()
            page.keyboard.press("ArrowRight")
            detail = page.locator("[data-token]").first
            expect(detail).to_contain_text("instead of")
            before = detail.inner_text()
            page.locator(".reply").first.locator(".token").nth(3).hover()
            expect(detail).not_to_have_text(before)
            page.get_by_role("button", name="View as code").click()
            expect(page.locator("#code")).to_contain_text("Where do penguins live?")
            page.get_by_role("button", name="Regenerate").click()
            expect(status).to_have_text("Done", timeout=ANSWER_MS)
            assert page.locator(".reply .text").all_inner_texts() == told

    def test_stopping_keeps_what_was_said(
        self, visitor: Visitor, admin: str, uploaded: str
    ) -> None:
        with visitor.page(complain=False) as page:
            visitor.sign_in(page, admin)
            page.goto(f"/console/playground?model={uploaded}")
            page.get_by_label("Maximum tokens").fill("2000")
            page.get_by_label("Prompt").fill("Count slowly from one to a thousand.")
            page.route("**/stream", lambda _: None)  # an engine that never says a word
            page.get_by_role("button", name="Send").click()
            page.get_by_role("button", name="Stop").click()
            expect(page.locator("[data-status]")).to_have_text("Stopped")
            expect(page.get_by_label("Prompt")).to_have_value(
                "Count slowly from one to a thousand."
            )
            expect(page.get_by_role("button", name="Regenerate")).to_be_visible()

    def test_a_refusal_is_a_sentence(self, visitor: Visitor, admin: str) -> None:
        with visitor.page(refusals=1) as page:
            visitor.sign_in(page, admin)
            page.goto("/console/playground?model=no-such-model")
            page.get_by_label("Prompt").fill("Hello")
            page.get_by_role("button", name="Send").click()
            expect(page.get_by_role("alert")).to_contain_text("no-such-model")
            expect(page.locator("[data-status]")).to_have_text("Refused")
            page.get_by_role("link", name="Your adapters").click()
            page.wait_for_url("**/console/adapters")

    @pytest.mark.wide
    def test_both_answers_come_without_scripts_too(
        self, visitor: Visitor, admin: str, uploaded: str
    ) -> None:
        with visitor.page(scripts=False) as page:
            visitor.sign_in(page, admin)
            page.goto(f"/console/playground?model={uploaded}&model_b={uploaded}@v1")
            page.get_by_label("Maximum tokens").fill("8")
            page.get_by_label("Prompt").fill("Hello")
            page.get_by_role("button", name="Send").click()
            for n in (0, 1):
                expect(page.locator(".reply .text").nth(n)).not_to_be_empty(timeout=ANSWER_MS)


class TestKeys:
    def test_a_key_is_made_changed_rotated_and_revoked(
        self, visitor: Visitor, seeded: Seeded
    ) -> None:
        with visitor.page(refusals=1) as page:
            visitor.sign_in(page, seeded.email)
            page.goto("/console/keys")
            page.get_by_label("Name", exact=True).fill("from the browser")
            page.get_by_text("Restrict it").click()
            page.get_by_label("Only for adapters").fill("no-such-adapter")
            page.get_by_role("button", name="Create a key").click()
            expect(page.get_by_role("alert")).to_contain_text("no-such-adapter")
            expect(page.get_by_label("Name", exact=True)).to_have_value("from the browser")
            page.get_by_label("Only for adapters").fill("support-bot")
            page.get_by_label("Expires after").select_option("30 days")
            page.get_by_role("button", name="Create a key").click()
            secret = page.locator(".secret code").inner_text()
            assert secret.startswith("lmx_")
            expect(page.get_by_label("The call in curl", exact=True)).to_contain_text(
                f"Bearer {secret}"
            )
            page.goto("/console/keys")
            assert secret not in page.content()
            page.get_by_role("link", name="from the browser").click()
            page.get_by_label("Allows").select_option("calling models only")
            page.get_by_role("button", name="Save").click()
            expect(page.get_by_text("calling models only").first).to_be_visible()
            page.get_by_label("The old one ends").select_option("in an hour")
            page.get_by_role("button", name="Rotate").click()
            assert page.locator(".secret code").inner_text() not in ("", secret)
            page.get_by_role("link", name="from the browser").first.click()
            page.get_by_text("Revoke this key").click()
            page.get_by_role("button", name="Revoke it").click()
            row = page.get_by_role("row", name="from the browser").first
            expect(row).to_contain_text("revoked")

    @pytest.mark.parametrize("scripts", [True, False])
    def test_a_keys_latency_budget_is_loosened_and_never_tightened(
        self, visitor: Visitor, seeded: Seeded, scripts: bool
    ) -> None:
        name = f"unhurried {scripts}"
        with visitor.page(scripts=scripts, refusals=1) as page:
            visitor.sign_in(page, seeded.email)
            page.goto("/console/keys")
            page.get_by_label("Name", exact=True).fill(name)
            page.get_by_text("Restrict it").click()
            first_token = page.get_by_label("Time to first token, ms")
            expect(page.get_by_text("From 60000 ms up")).to_be_visible()
            first_token.fill("500")
            page.get_by_role("button", name="Create a key").click()
            expect(page.get_by_role("alert")).to_contain_text("may only loosen it")
            expect(first_token).to_have_value("500")
            expect(page.get_by_label("Name", exact=True)).to_have_value(name)
            first_token.fill("90000")
            page.get_by_role("button", name="Create a key").click()
            page.goto("/console/keys")
            page.get_by_role("link", name=name).click()
            expect(page.locator("dl.facts")).to_contain_text("90000 ms")
            first_token.fill("")
            page.get_by_role("button", name="Save").click()
            expect(page.locator("dl.facts")).not_to_contain_text("90000 ms")

    @pytest.mark.wide
    def test_a_viewer_sees_keys_and_changes_nothing(self, visitor: Visitor, seeded: Seeded) -> None:
        with visitor.page(refusals=1) as page:
            visitor.sign_in(page, seeded.viewer)
            for name in ("keys", "key", "webhooks", "webhook", "alias", "adapter", "limits"):
                page.goto(seeded.pages[name])
                assert page.locator("main form[method=post]").count() == 0, name
            page.goto("/console/adapters/upload")
            expect(page.get_by_role("heading", name="Not allowed")).to_be_visible()


class TestWebhooksAndLimits:
    def test_a_webhook_is_tested_disabled_and_deleted(
        self, visitor: Visitor, seeded: Seeded
    ) -> None:
        with visitor.page(refusals=1) as page:
            visitor.sign_in(page, seeded.email)
            page.goto("/console/webhooks")
            page.get_by_label("Address").fill("https://127.0.0.1/hook")
            page.get_by_label("Description").fill("kept")
            page.get_by_role("button", name="Create a webhook").click()
            expect(page.get_by_role("alert")).to_contain_text("public https address")
            expect(page.get_by_label("Description")).to_have_value("kept")
            page.get_by_role("link", name="hooks.example.com").click()
            expect(page.get_by_role("row", name="http error 500")).to_contain_text("dead")
            page.get_by_role("button", name="Send a test").click()
            expect(page.get_by_role("row", name="webhook.test")).to_be_visible()
            page.get_by_text("Disable this webhook").click()
            page.get_by_role("button", name="Disable it").click()
            expect(page.get_by_text("Nothing is sent")).to_be_visible()
            page.get_by_text("Delete this webhook").click()
            page.get_by_role("button", name="Delete it").click()
            expect(page.get_by_role("heading", name="No webhook yet")).to_be_visible()

    def test_a_change_of_limits_is_asked_for(self, visitor: Visitor, seeded: Seeded) -> None:
        with visitor.page(scripts=False) as page:
            visitor.sign_in(page, seeded.email)
            page.goto("/console/limits")
            page.locator("select[name=limit]").select_option("Adapters")
            page.get_by_label("Should be").fill("3000")
            page.get_by_role("button", name="Ask").click()
            expect(page.get_by_role("row", name="Adapters")).to_contain_text("3,000")
