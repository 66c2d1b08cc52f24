"""Forms of a tenant's pages as they work without JavaScript: kept input, refusals, effects."""

import html
import json
import re
import shlex
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app.adapters import states
from app.adapters.models import AdapterVersion
from app.adapters.schemas import FindingObject
from app.audit import service as audit
from app.caller import KeyBudget, KeyLimits
from app.clock import FrozenClock
from app.console.examples import examples
from app.console.version_views import grouped, norms_chart
from app.keys import service as keys
from app.limit_requests.service import MOST_A_DAY, REQUESTABLE, REQUESTED
from app.main import create_app
from app.platform import Platform
from app.tenants.models import Tenant
from app.tenants.service import update_tenant
from app.webhooks.sender import Sender
from tests.factories import bearer, make_key, make_tenant, make_user, sign_in
from tests.fake_engine import FakeEngine
from tests.serving import add_version, install_engines, make_ready_adapter

ALIAS = "/console/adapters/support/aliases"


@pytest.fixture
def app(platform: Platform) -> FastAPI:
    install_engines(platform, {"ipc://fake": FakeEngine(text="Ahoy!")})
    return create_app(platform=platform)


@pytest.fixture
async def tenant(platform: Platform, client: httpx.AsyncClient) -> Tenant:
    """With an admin who is signed in."""
    await platform.engines.refresh()
    made = await make_tenant(platform)
    client.cookies.update(await sign_in(platform, await make_user(platform, made)))
    return made


@pytest.fixture
async def version(platform: Platform, tenant: Tenant) -> AdapterVersion:
    first = await make_ready_adapter(platform, tenant)
    await add_version(platform, first, 2)
    return first


async def make_rejected_adapter(platform: Platform, tenant: Tenant, name: str) -> None:
    """One whose only version was ready before another validation rejected it."""
    version = await make_ready_adapter(platform, tenant, name)
    async with platform.db.transaction() as session:
        row = await session.get_one(AdapterVersion, version.id)
        row.state = states.REJECTED


class TestAliases:
    async def test_a_stale_page_overwrites_nothing(
        self, client: httpx.AsyncClient, version: AdapterVersion
    ) -> None:
        shares = {"version_1": "1", "weight_1": "90", "version_2": "2", "weight_2": "10"}
        first = await client.post(f"{ALIAS}/live", data=shares | {"revision": "1"})
        assert first.status_code == 303
        second = await client.post(f"{ALIAS}/live/promote", data={"version": "1", "revision": "1"})
        assert second.status_code == 412
        assert "Somebody changed it" in second.text
        assert "v2" in second.text  # the page shows what it is now

    async def test_wrong_shares_come_back_as_they_were_typed(
        self, client: httpx.AsyncClient, version: AdapterVersion
    ) -> None:
        typed = {"version_1": "1", "weight_1": "61", "version_2": "2", "weight_2": "ten"}
        answer = await client.post(f"{ALIAS}/live", data=typed)
        assert answer.status_code == 400
        assert 'value="61"' in answer.text
        assert 'value="ten"' in answer.text
        assert "weight_2 must be a number" in answer.text
        loose = await client.post(f"{ALIAS}/live", data={"weight_1": "100"})
        assert "Row 1 has a weight and no version" in loose.text

    async def test_a_new_alias_never_moves_one_that_is_there(
        self, client: httpx.AsyncClient, version: AdapterVersion
    ) -> None:
        wanted = {"alias": "stable", "version": "1"}
        assert (await client.post(ALIAS, data=wanted)).status_code == 303
        again = await client.post(ALIAS, data={"alias": "stable", "version": "2"})
        assert again.status_code == 409
        assert "stable v1" in (await client.get("/console/adapters")).text


class TestUpload:
    async def test_a_refused_name_comes_back_as_it_was_typed(
        self, client: httpx.AsyncClient, tenant: Tenant
    ) -> None:
        files = {
            "adapter_config.json": b"{}",
            "adapter_model.safetensors": b"\0" * 4096,
        }
        answer = await client.post(
            "/console/adapters/upload", data={"name": "Not <allowed>"}, files=files
        )
        assert answer.status_code == 400
        assert 'value="Not &lt;allowed&gt;"' in answer.text


class TestVersions:
    async def test_the_report_is_sent_again_only_when_something_is_new(
        self, client: httpx.AsyncClient, version: AdapterVersion
    ) -> None:
        address = "/console/adapters/support/versions/1/report"
        assert (await client.get(f"{address}?seen=ready-0")).status_code == 204
        assert (await client.get(f"{address}?seen=validating-0")).status_code == 200

    async def test_calls_name_the_adapter_alone_where_live_reaches_the_version(
        self, client: httpx.AsyncClient, version: AdapterVersion
    ) -> None:
        live = (await client.get("/console/adapters/support/versions/1")).text
        assert 'playground?model=support"' in live
        assert "now v1;" in live
        other = (await client.get("/console/adapters/support/versions/2")).text
        assert 'playground?model=support@v2"' in other
        assert "alone calls v1" in other

    def test_findings_of_one_kind_are_one_line(self) -> None:
        def finding(code: str, field: str, words: str) -> FindingObject:
            return FindingObject(code=code, severity="fail", message=words, field=field)

        places = [f"layers.{n}.q" for n in range(20)]
        ranks = [finding("rank_mismatch", at, f"{at} has rank 8, not 4") for at in places]
        found = grouped([*ranks, finding("rank_mismatch", "config", "another sentence")])
        assert [(one.first.message, one.count) for one in found] == [
            ("layers.0.q has rank 8, not 4", 20),
            ("another sentence", 1),
        ]
        assert found[0].others == [one.message for one in ranks[1:]]

    def test_norms_are_charted_in_the_order_of_layers(self) -> None:
        chart = norms_chart({"update_ratio_by_layer": {"10": 0.5, "2": 0.25}})
        assert chart is not None
        assert [bar.label for bar in chart.bars] == ["layer 2", "layer 10"]
        assert chart.bars[0].title == "layer 2: 25 % of the weights' norm"
        assert norms_chart({"modules": 3}) is None


class TestPlayground:
    async def test_one_refused_model_leaves_the_other_ones_answer(
        self, client: httpx.AsyncClient, version: AdapterVersion
    ) -> None:
        form = {"model": "support", "model_b": "no-such", "prompt": "Hi", "max_tokens": "50"}
        page = await client.post("/console/playground", data=form)
        assert page.status_code == 200
        assert "Ahoy!" in page.text
        assert "There is no model &#39;no-such&#39;" in page.text

    async def test_a_refusal_leads_to_the_page_that_says_why(
        self, client: httpx.AsyncClient, platform: Platform, tenant: Tenant
    ) -> None:
        await add_version(
            platform, await make_ready_adapter(platform, tenant), 2, state=states.REJECTED
        )
        for model, told, page in (
            ("support@v2", "support v2 was rejected", "/console/adapters/support/versions/2"),
            ("support@v7", "support has nothing", "/console/adapters/support"),
            ("support@beta", "support has nothing", "/console/adapters/support"),
            ("elsewhere", "There is no model", "/console/adapters"),
        ):
            body = {"model": model, "messages": [{"role": "user", "content": "Hi"}]}
            answer = await client.post("/console/playground/stream", json=body)
            assert answer.status_code == 404
            assert told in answer.json()["error"]["message"]
            assert answer.json()["page"]["href"] == page
            form = {"model": model, "prompt": "Hi"}
            assert (
                f'<a href="{page}">'
                in (await client.post("/console/playground", data=form)).text.split("data-replies")[
                    1
                ]
            )

    async def test_a_refusal_about_something_else_stays_as_the_api_words_it(
        self, client: httpx.AsyncClient, version: AdapterVersion
    ) -> None:
        body = {"model": "support", "messages": [], "stream": True}
        answer = await client.post("/console/playground/stream", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages"
        assert answer.json()["page"] is None

    async def test_only_models_that_can_answer_are_offered(
        self, client: httpx.AsyncClient, platform: Platform, version: AdapterVersion, tenant: Tenant
    ) -> None:
        await make_rejected_adapter(platform, tenant, "support-broken")
        found = (await client.get("/console/playground/models?model=support")).text
        assert found.count("<option") == 1
        assert 'value="support"' in found

    async def test_suggestions_hold_what_is_typed_and_nobody_elses(
        self, client: httpx.AsyncClient, platform: Platform, version: AdapterVersion
    ) -> None:
        await make_ready_adapter(platform, await make_tenant(platform), "foreign-support")
        found = (await client.get("/console/playground/models?model=SUPP")).text
        assert found.count("<option") == 1
        assert "support" in found
        assert "<option" not in (await client.get("/console/playground/models?model=%25")).text

    def test_code_quotes_whatever_was_typed(self) -> None:
        prompt = 'it\'s "so" $HOME \\n\n</script>'
        messages = [{"role": "user", "content": prompt}]
        curl, python, typescript = examples("http://x", "m@v1", messages=messages, stop=["\n"])
        sent = json.loads(shlex.split(curl.code)[-1])
        assert sent == {"model": "m@v1", "messages": messages, "stop": ["\n"]}
        compile(python.code, "example", "exec")
        written = next(line for line in python.code.splitlines() if "messages=" in line)
        assert eval(written.strip().removeprefix("messages=").rstrip(",")) == messages
        assert json.dumps(messages, ensure_ascii=False) in typescript.code

    async def test_a_call_marks_its_adapter_as_used(
        self,
        client: httpx.AsyncClient,
        platform: Platform,
        clock: FrozenClock,
        version: AdapterVersion,
        tenant: Tenant,
    ) -> None:
        await client.post("/console/playground", data={"model": "support", "prompt": "Hi"})
        assert await platform.adapter_uses.flush() == 1
        page = await client.get("/console/adapters?sort=-last_used")
        assert page.text.count(clock.now().isoformat()) == 2  # uploaded and used
        headers = bearer(await make_key(platform, tenant))
        first = (await client.get("/v1/adapters/support", headers=headers)).json()
        at = int(clock.now().timestamp())
        assert first["last_used_at"] == at
        assert {v["version"]: v["last_used_at"] for v in first["versions"]} == {1: at, 2: None}
        listed = (await client.get("/v1/adapters", headers=headers)).json()["data"]
        assert listed == [first]
        clock.advance(seconds=5)
        await client.post("/console/playground", data={"model": "support", "prompt": "Hi"})
        assert await platform.adapter_uses.flush() == 0  # at most once a minute


async def promise(platform: Platform, tenant: Tenant, **limits: float | None) -> None:
    """Sets limits of the tenant."""
    async with platform.db.transaction() as session:
        await update_tenant(
            session, tenant.id, changes=limits, now=platform.clock.now(), actor="tests"
        )
    platform.forget_keys()


class TestKeys:
    async def test_limits_are_set_shown_changed_and_taken_away(
        self, client: httpx.AsyncClient, platform: Platform, tenant: Tenant
    ) -> None:
        form = {"name": "ci", "requests_per_minute": "7", "monthly_tokens": "90000"}
        made = await client.post("/console/keys", data=form)
        assert made.status_code == 200
        assert "Requests per minute: 7" in made.text
        assert "Tokens per month: 90,000" in made.text
        address = re.findall(r'href="(/console/keys/key_\w+)"', made.text)[0]
        page = (await client.get(address)).text
        assert 'name="requests_per_minute" value="7"' in page
        changed = await client.post(address, data={"name": "ci", "max_concurrent": "2"})
        assert changed.status_code == 303
        async with platform.db.reading() as session:
            row = await keys.find_key(session, address.rpartition("/")[2], tenant_id=tenant.id)
        assert keys.key_limits(row) == KeyLimits(max_concurrent=2)

    @pytest.mark.parametrize(
        ("wrong", "said"),
        [("0", "whole number above 0"), ("2.5", "whole number"), ("11", "may only tighten")],
    )
    async def test_a_limit_that_cannot_be_is_refused_at_its_field(
        self, client: httpx.AsyncClient, platform: Platform, tenant: Tenant, wrong: str, said: str
    ) -> None:
        await promise(platform, tenant, requests_per_minute=10)
        form = {"name": "ci", "requests_per_minute": wrong}
        answer = await client.post("/console/keys", data=form)
        assert answer.status_code == 400
        assert said in answer.text
        assert "requests_per_minute is" not in answer.text  # the page calls it by its label
        assert re.search(r"<details open>\s*<summary>Restrict it", answer.text)
        assert re.search(rf'value="{wrong}"[^>]*at most 10[^>]*aria-invalid', answer.text)

    async def test_a_latency_budget_is_loosened_shown_changed_and_taken_away(
        self, client: httpx.AsyncClient, platform: Platform, tenant: Tenant
    ) -> None:
        await promise(platform, tenant, ttft_ms=500.0, tpot_ms=40.0, budget_percentile=0.9)
        form = {"name": "batch", "ttft_ms": "2000", "tpot_ms": "62.5", "budget_percentile": "0.8"}
        made = await client.post("/console/keys", data=form)
        address = re.findall(r'href="(/console/keys/key_\w+)"', made.text)[0]
        page = (await client.get(address)).text
        assert "From 500 ms up" in page
        assert "<dt>Time to first token</dt><dd>2000 ms</dd>" in page
        assert "<dt>Time per output token</dt><dd>62.5 ms</dd>" in page
        for name in ("ttft_ms", "tpot_ms", "budget_percentile"):
            assert f'name="{name}" value="{form[name]}"' in page
        changed = form | {"ttft_ms": "3000", "tpot_ms": ""}
        assert (await client.post(address, data=changed)).status_code == 303
        async with platform.db.reading() as session:
            row = await keys.find_key(session, address.rpartition("/")[2], tenant_id=tenant.id)
        assert keys.key_budget(row) == KeyBudget(3000.0, None, 0.8)

    @pytest.mark.parametrize(
        ("field", "wrong", "said"),
        [
            ("ttft_ms", "499", "tenant&#39;s budget 500; a key may only loosen it"),
            ("ttft_ms", "3600001", "at most 3600000"),
            ("ttft_ms", "soon", "Time to first token is a number of milliseconds, or empty"),
            ("tpot_ms", "nan", "Time per output token is a number of milliseconds, or empty"),
            ("budget_percentile", "0.95", "tenant&#39;s 0.9; a key may only loosen it"),
        ],
    )
    async def test_a_budget_that_cannot_be_is_refused_at_its_field_and_kept_as_typed(
        self,
        client: httpx.AsyncClient,
        platform: Platform,
        tenant: Tenant,
        field: str,
        wrong: str,
        said: str,
    ) -> None:
        await promise(platform, tenant, ttft_ms=500.0, tpot_ms=40.0, budget_percentile=0.9)
        key = await make_key(platform, tenant)
        for address in ("/console/keys", f"/console/keys/{key.row.id}"):
            answer = await client.post(address, data={field: wrong, "name": "kept"})
            assert answer.status_code == 400
            assert said in answer.text
            assert re.search(rf'name="{field}" value="{wrong}"[^>]*aria-invalid', answer.text)
            assert 'value="kept"' in answer.text

    async def test_without_the_tenants_promise_there_is_no_budget_to_loosen(
        self, client: httpx.AsyncClient, tenant: Tenant
    ) -> None:
        page = (await client.get("/console/keys")).text
        assert "there is none to loosen" in page
        assert 'name="ttft_ms"' not in page

    async def test_what_the_tenant_lost_meanwhile_hinders_no_other_change(
        self, client: httpx.AsyncClient, platform: Platform, tenant: Tenant
    ) -> None:
        await promise(platform, tenant, ttft_ms=500.0, requests_per_minute=10)
        form = {"name": "old", "ttft_ms": "900", "requests_per_minute": "10"}
        made = await client.post("/console/keys", data=form)
        address = re.findall(r'href="(/console/keys/key_\w+)"', made.text)[0]
        await promise(platform, tenant, ttft_ms=None, requests_per_minute=5)
        page = (await client.get(address)).text
        assert 'name="ttft_ms" value="900"' in page
        assert (await client.post(address, data=form | {"name": "new"})).status_code == 303
        emptied = form | {"ttft_ms": "", "requests_per_minute": "5"}
        assert (await client.post(address, data=emptied)).status_code == 303
        assert 'name="ttft_ms"' not in (await client.get(address)).text

    async def test_a_key_is_tightened_and_its_expiry_stays(
        self, client: httpx.AsyncClient, platform: Platform, tenant: Tenant
    ) -> None:
        key = await make_key(platform, tenant, name="old")
        address = f"/console/keys/{key.row.id}"
        form = {"name": "new", "access": "read", "networks": "10.0.0.0/8", "adapters": ""}
        assert (await client.post(address, data=form)).status_code == 303
        page = (await client.get(address)).text
        assert "looking only, no calls" in page
        assert "10.0.0.0/8" in page
        wrong = await client.post(address, data=form | {"networks": "10.0.0.1/8", "name": "kept"})
        assert wrong.status_code == 400
        assert 'value="kept"' in wrong.text

    async def test_a_key_without_a_name_is_refused(
        self, client: httpx.AsyncClient, platform: Platform, tenant: Tenant
    ) -> None:
        key = await make_key(platform, tenant, name="kept")
        for address in ("/console/keys", f"/console/keys/{key.row.id}"):
            answer = await client.post(address, data={"name": " "})
            assert answer.status_code == 400
            assert "Give the key a name" in answer.text
        async with platform.db.reading() as session:
            found = await keys.list_keys(session, tenant_id=tenant.id, limit=9)
        assert [row.name for row in found] == ["kept"]

    async def test_restrictions_are_folded_until_there_are_some(
        self, client: httpx.AsyncClient, platform: Platform, tenant: Tenant
    ) -> None:
        folded = re.compile(r"<details>\s*<summary>Restrict it")
        assert folded.search((await client.get("/console/keys")).text)
        key = await make_key(platform, tenant, name="ci", networks=["10.0.0.0/8"])
        assert not folded.search((await client.get(f"/console/keys/{key.row.id}")).text)

    async def test_a_new_key_comes_with_a_call_to_the_newest_adapter(
        self, client: httpx.AsyncClient, platform: Platform, tenant: Tenant
    ) -> None:
        def call(page: str) -> str:
            found = re.search(r'"The call in curl"><code>(.*?)</code>', page, re.DOTALL)
            return html.unescape(found[1]) if found else ""

        made = (await client.post("/console/keys", data={"name": "first"})).text
        assert "tiny-base" in call(made)
        await make_ready_adapter(platform, tenant)
        await make_rejected_adapter(platform, tenant, "broken")
        made = (await client.post("/console/keys", data={"name": "second"})).text
        secret = re.findall(r"lmx_\w+", call(made))[0]
        assert f"Bearer {secret}" in call(made)
        assert '"model": "support"' in call(made)
        form = {"name": "third", "access": "read"}
        assert call((await client.post("/console/keys", data=form)).text) == ""

    async def test_the_overlap_of_a_rotation_is_one_of_the_list(
        self, client: httpx.AsyncClient, platform: Platform, tenant: Tenant
    ) -> None:
        key = await make_key(platform, tenant)
        address = f"/console/keys/{key.row.id}/rotate"
        assert (await client.post(address, data={"overlap_s": "1"})).status_code == 400
        made = await client.post(address, data={"overlap_s": "0"})
        assert "cannot be shown again" in made.text
        assert key.secret.text not in made.text


ASKED = {"limit": "max_adapters", "wanted": "3,000", "reason": "a new product"}


class TestLimits:
    async def test_a_request_waits_for_operators_and_not_too_many_do(
        self, client: httpx.AsyncClient, platform: Platform, tenant: Tenant
    ) -> None:
        answers = [
            (await client.post("/console/limits/request", data=ASKED | {"limit": name})).status_code
            for name in REQUESTABLE[: MOST_A_DAY + 1]
        ]
        assert answers == [303] * MOST_A_DAY + [429]
        page = (await client.get("/console/limits")).text
        assert page.count("a new product") == page.count(">waiting<") == MOST_A_DAY
        async with platform.db.reading() as session:
            events = await audit.list_events(session, tenant_id=tenant.id, action=REQUESTED)
        assert {event.detail["wanted"] for event in events} == {3000}

    async def test_a_limit_that_waits_for_an_answer_is_not_asked_for_again(
        self, client: httpx.AsyncClient, tenant: Tenant
    ) -> None:
        assert (await client.post("/console/limits/request", data=ASKED)).status_code == 303
        again = await client.post("/console/limits/request", data=ASKED | {"wanted": "9"})
        assert again.status_code == 409
        assert 'value="9"' in again.text

    async def test_what_waits_can_be_withdrawn_and_asked_for_again(
        self, client: httpx.AsyncClient, tenant: Tenant
    ) -> None:
        await client.post("/console/limits/request", data=ASKED)
        page = (await client.get("/console/limits")).text
        (address,) = re.findall(r'action="(/console/limits/requests/lrq_\w+/withdraw)"', page)
        assert (await client.post(address)).status_code == 303
        again = await client.post(address)
        assert again.status_code == 409
        assert "was withdrawn meanwhile" in again.text
        assert "/withdraw" not in (await client.get("/console/limits")).text
        assert (await client.post("/console/limits/request", data=ASKED)).status_code == 303

    @pytest.mark.parametrize(
        "changed",
        [
            {"limit": "weight"},
            {"limit": "Everything"},
            {"wanted": " "},
            {"wanted": "many"},
            {"wanted": "-1"},
            {"wanted": "1.5"},
            {"wanted": "1e300"},
            {"limit": "max_rank", "wanted": "256"},  # as it is
        ],
    )
    async def test_a_request_that_asks_for_nothing_is_refused(
        self, client: httpx.AsyncClient, tenant: Tenant, changed: dict[str, str]
    ) -> None:
        form = ASKED | {"wanted": "9", "reason": "typed"} | changed
        answer = await client.post("/console/limits/request", data=form)
        assert answer.status_code == 400
        assert "typed" in answer.text


class TestWebhooks:
    async def test_a_secret_is_shown_once_and_a_wrong_form_is_kept(
        self, client: httpx.AsyncClient, app: FastAPI, platform: Platform, tenant: Tenant
    ) -> None:
        async def public(_host: str, _port: int) -> list[str]:
            return ["93.184.215.14"]

        resolver: Any = public
        app.state.webhook_sender = Sender(platform.settings, platform.clock, resolver=resolver)
        form = {"url": "https://example.com/hook", "description": "kept"}
        wrong = await client.post("/console/webhooks", data=form)
        assert wrong.status_code == 400
        assert "at least one event" in wrong.text
        assert 'value="kept"' in wrong.text
        made = await client.post("/console/webhooks", data=form | {"version.ready": "on"})
        assert made.status_code == 200
        assert "whsec_" in made.text
        assert "whsec_" not in (await client.get("/console/webhooks")).text
