"""Pictures of every page: `python -m tests.browser.screenshots [FOLDER]`, or `make screenshots`.

A platform with the real model is started; a tenant with two thousand adapters, one with nothing and
the operator look at their pages on a desktop, on a phone and in the dark. `--docs` writes the few
that docs/console.md shows.
"""

import argparse
import io
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.conftest import CHROMIUM, DESKTOP, FLAGS, PHONE
from tests.browser.seeded import PASSWORD, Seeded, seed_live
from tests.live import EXAMPLES, REPOSITORY, LivePlatform, free_port

LOOKS: dict[str, dict[str, object]] = {
    "desktop": {"viewport": DESKTOP},
    "phone": {"viewport": PHONE, "device_scale_factor": 2, "has_touch": True},
    "dark": {"viewport": DESKTOP, "color_scheme": "dark"},
}
DOCS = REPOSITORY / "docs" / "images"
SHOWN = ("adapters", "version", "alias", "playground")
EMPTY = ("overview", "adapters", "keys", "webhooks", "usage", "limits", "audit", "playground")
ANSWER_MS = 120_000
SCREENFUL = 1600
"""Pixels of a page's height that a picture shows at most."""


class Photographer:
    """Writes FOLDER/look/name.png."""

    def __init__(self, live: LivePlatform, browser: Browser, folder: Path) -> None:
        self.live = live
        self.browser = browser
        self.folder = folder

    @contextmanager
    def visit(self, look: str, email: str, password: str = PASSWORD) -> Iterator[Page]:
        context = self.browser.new_context(base_url=self.live.url, **LOOKS[look])  # type: ignore[arg-type]
        page = context.new_page()
        page.goto("/console/sign-in")
        if email:
            page.get_by_label("E-mail").fill(email)
            page.get_by_label("Password").fill(password)
            page.get_by_role("button", name="Sign in").click()
            page.wait_for_url(lambda url: "sign-in" not in url)
        yield page
        context.close()

    def take(self, page: Page, look: str, name: str) -> None:
        path = self.folder / look / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = page.viewport_size or {"width": DESKTOP["width"], "height": DESKTOP["height"]}
        page.evaluate("scrollTo(0, 0)")  # what is pinned to the window is pictured at the top
        height = int(page.evaluate("document.documentElement.scrollHeight"))
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(height, SCREENFUL)}
        page.screenshot(path=path, full_page=True, clip=clip)  # type: ignore[arg-type]
        sys.stdout.write(f"{path}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=REPOSITORY / "build/screenshots")
    parser.add_argument("--docs", action="store_true", help=f"also write {DOCS}")
    chosen = parser.parse_args()
    data = Path(tempfile.mkdtemp(prefix="loramux-screenshots-"))
    live = LivePlatform(data, free_port())
    try:
        live.start()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            take_all(Photographer(live, browser, chosen.folder))
            browser.close()
    finally:
        live.stop()
        shutil.rmtree(data, ignore_errors=True)
    if chosen.docs:
        write_docs(chosen.folder)


def take_all(photographer: Photographer) -> None:
    live = photographer.live
    full, empty = seed_live(live, "acme"), seed_live(live, "newcomer", adapters=0)
    key = str(live.json("keys", "create", "--tenant", "acme")["key"])
    for name in ("pirate", "haiku"):
        live.run("adapters", "push", str(EXAMPLES / name), "--name", name, key=key)
    operator(photographer)
    for look in LOOKS:
        with photographer.visit(look, "") as page:
            photographer.take(page, look, "sign-in")
        with photographer.visit(look, full.email) as page:
            for name, address in full.pages.items():
                page.goto(address)
                photographer.take(page, look, name)
            page.goto("/console/adapters/pirate/versions/1")
            photographer.take(page, look, "version-of-the-model")
            for name, act in ACTS.items():
                act(page, full)
                photographer.take(page, look, name)
        with photographer.visit(look, empty.email) as page:
            for name in EMPTY:
                page.goto(f"/console/{name}")
                photographer.take(page, look, f"empty-{name}")


def operator(photographer: Photographer) -> None:
    """Whatever the operator's navigation leads to."""
    once = photographer.live.one_time_password()
    with photographer.visit("desktop", "operator", once) as page:
        page.get_by_label("Current password").fill(once)
        page.get_by_label("New password").fill(PASSWORD)
        page.get_by_role("button", name="Save").click()
        page.wait_for_url(lambda url: "password" not in url)
        links = page.locator("nav[aria-label=Console] a").all()
        pages = [str(link.get_attribute("href")) for link in links]
    for look in LOOKS:
        with photographer.visit(look, "operator") as page:
            for address in pages:
                page.goto(address)
                photographer.take(page, look, f"operator-{address.rpartition('/')[2]}")


# ------------------------------------------------------------------ acts


def answered(page: Page, _seeded: Seeded) -> None:
    page.goto("/console/playground?model=pirate&model_b=haiku")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Maximum tokens").fill("48")
    page.get_by_label("Prompt").fill("Where do penguins live?")
    page.get_by_label("Show how likely each token was").check()
    page.get_by_role("button", name="Send").click()
    expect(page.locator("[data-status]")).to_have_text("Done", timeout=ANSWER_MS)
    page.locator(".reply .token").nth(4).hover()


def as_code(page: Page, seeded: Seeded) -> None:
    answered(page, seeded)
    page.get_by_role("button", name="View as code").click()
    expect(page.locator("#code pre").first).to_be_visible()


def wrong_shares(page: Page, seeded: Seeded) -> None:
    page.goto(seeded.pages["alias"])
    page.get_by_label("Percent").first.fill("80")
    page.get_by_role("button", name="Share out").click()
    expect(page.get_by_role("alert")).to_contain_text("100")


def wrong_key(page: Page, _seeded: Seeded) -> None:
    page.goto("/console/keys")
    page.get_by_label("Name", exact=True).fill("from the browser")
    page.get_by_text("Restrict it").click()
    page.get_by_label("Only for adapters").fill("no-such-adapter")
    page.get_by_role("button", name="Create a key").click()
    expect(page.get_by_role("alert")).to_be_visible()


def wrong_webhook(page: Page, _seeded: Seeded) -> None:
    page.goto("/console/webhooks")
    page.get_by_label("Address").fill("https://127.0.0.1/hook")
    page.get_by_role("button", name="Create a webhook").click()
    expect(page.get_by_role("alert")).to_be_visible()


def nothing_found(page: Page, _seeded: Seeded) -> None:
    page.goto("/console/adapters?q=nothing-like-it")


def not_found(page: Page, _seeded: Seeded) -> None:
    page.goto("/console/adapters/no-such-adapter")


def about_to_erase(page: Page, seeded: Seeded) -> None:
    page.goto(seeded.pages["version"])
    page.get_by_text("Erase this version").click()


def upload_refused(page: Page, _seeded: Seeded) -> None:
    page.goto("/console/adapters/upload")
    page.get_by_label("Name").fill("plainly-wrong")
    names = ("adapter_config.json", "adapter_model.safetensors")
    page.get_by_label("Both files").set_input_files(
        [{"name": name, "mimeType": "application/json", "buffer": b"not json"} for name in names]
    )
    page.get_by_role("button", name="Upload and check").click()
    expect(page.get_by_role("alert")).to_be_visible()


ACTS: dict[str, Callable[[Page, Seeded], None]] = {
    "playground-answered": answered,
    "playground-code": as_code,
    "error-alias": wrong_shares,
    "error-key": wrong_key,
    "error-webhook": wrong_webhook,
    "error-upload": upload_refused,
    "error-not-found": not_found,
    "empty-search": nothing_found,
    "ask-erase": about_to_erase,
}


def write_docs(folder: Path) -> None:
    """Small copies: 64 colours, 900 pixels wide."""
    DOCS.mkdir(parents=True, exist_ok=True)
    for name in SHOWN:
        taken = "playground-answered" if name == "playground" else name
        with Image.open(folder / "desktop" / f"{taken}.png") as picture:
            small = picture.convert("RGB").crop((0, 0, picture.width, min(picture.height, 1000)))
            small.thumbnail((900, 900))
            written = io.BytesIO()
            small.quantize(64).save(written, "PNG", optimize=True)
        (DOCS / f"console-{name}.png").write_bytes(written.getvalue())


if __name__ == "__main__":
    main()
