"""The operators' pages: who reaches them, what they change, and that names stay names."""

import re
from collections import deque

import pytest
from sqlalchemy import event, update

from app.adapters.models import ValidationRun
from app.console.engines import arena, last_minute, pool_lines, queue_lines
from app.engines.registry import Roll
from app.ids import new_id
from app.inference.engines import StepSample
from app.keys.models import ApiKey
from app.limit_requests import service as limit_requests
from app.main import create_app
from app.tenants import service
from app.tenants.models import Tenant
from app.users.models import User
from app.webhooks.models import WebhookDelivery, WebhookEndpoint, WebhookEvent
from engine.types import AdapterRef, Residency, StepCounts
from tests.factories import make_caller, make_key, make_tenant, make_user, sign_in
from tests.fake_engine import FakeEngine
from tests.serving import add_version, install_engines, make_ready_adapter

EVIL = '<img src=x onerror="alert(1)">'
PAGES = ("tenants", "requests", "engines", "engines/live", "jobs", "system")


@pytest.fixture
def engines():
    return {"ipc://one": FakeEngine()}


@pytest.fixture
def app(platform, engines, monkeypatch):
    monkeypatch.setattr("app.inference.engines.POLL_S", 3600.0)  # the tests ask by themselves
    install_engines(platform, engines)
    return create_app(platform=platform)


@pytest.fixture
async def operator(client, platform):
    client.cookies.update(await sign_in(platform, await make_user(platform)))
    await platform.engines.refresh()
    await platform.engines.refresh()
    return client


@pytest.fixture
async def acme(platform):
    return await make_tenant(platform, "acme")


async def audited(platform, action):
    from app.audit import service as audit

    async with platform.db.reading() as session:
        return await audit.list_events(session, tenant_id=None, action=action, limit=10)


async def fail_a_validation(platform, tenant, **changes):
    first = await make_ready_adapter(platform, tenant)
    version = await add_version(platform, first, 2, state="failed")
    now = platform.clock.now()
    async with platform.db.transaction() as session:
        session.add(
            ValidationRun(
                id=new_id("run"),
                version_id=version.id,
                tenant_id=tenant.id,
                state="failed",
                attempts=3,
                created_at=now,
                **changes,
            )
        )
    return version


async def fail_a_webhook(platform, tenant, url="https://hooks.example.com/secret-path"):
    now = platform.clock.now()
    common = {"tenant_id": tenant.id, "created_at": now}
    async with platform.db.transaction() as session:
        endpoint = WebhookEndpoint(
            id=new_id("whk"),
            url=url,
            description="",
            events=[],
            status="enabled",
            secret=b"",
            secret_version=1,
            failing_since=now,
            created_by="tests",
            updated_at=now,
            **common,
        )
        happened = WebhookEvent(id=new_id("evt"), type="version.ready", data={}, **common)
        session.add_all([endpoint, happened])
        await session.flush()
        for state in ("pending", "dead"):
            session.add(
                WebhookDelivery(
                    id=new_id("dlv"),
                    endpoint_id=endpoint.id,
                    event_id=happened.id,
                    type="version.ready",
                    state=state,
                    attempts=1,
                    next_attempt_at=now,
                    give_up_at=now,
                    attempt_log=[],
                    code="timeout",
                    **common,
                )
            )


async def ask_for_limits(platform, tenant, reason="a new product", **changes):
    """A request of its admin's; its id."""
    caller = make_caller(platform, tenant, role="tenant_admin", label="ann@example.com")
    asked = {"limit_name": "max_adapters", "wanted": 30.0, "reason": reason, **changes}
    async with platform.db.transaction() as session:
        row = await limit_requests.ask(
            session, caller, settings=platform.settings, now=platform.clock.now(), **asked
        )
    return row.id


class TestRequests:
    async def test_approving_sets_the_limit_and_says_so_to_the_tenant(
        self, operator, client, platform, acme
    ):
        request_id = await ask_for_limits(platform, acme)
        page = (await operator.get("/console/requests")).text
        assert "a new product" in page
        address = f"/console/requests/{request_id}/approve"
        assert (await operator.post(address)).status_code == 303
        async with platform.db.reading() as session:
            assert (await service.find_tenant(session, acme.id)).max_adapters == 30
        assert (await audited(platform, "limits.approve"))[0].tenant_id == acme.id
        assert (await audited(platform, "tenant.update"))[0].detail["max_adapters"]["to"] == 30
        again = await operator.post(address)
        assert again.status_code == 409
        assert "was approved meanwhile" in again.text
        client.cookies.clear()
        client.cookies.update(await sign_in(platform, await make_user(platform, acme)))
        shown = (await client.get("/console/limits")).text
        assert ">approved<" in shown

    async def test_another_value_than_was_asked_can_be_approved(
        self, operator, client, platform, acme
    ):
        request_id = await ask_for_limits(platform, acme, limit_name="requests_per_minute")
        page = (await operator.get("/console/requests")).text
        assert 'name="value" value="30"' in page
        address = f"/console/requests/{request_id}/approve"
        wrong = await operator.post(address, data={"value": "2.5"})
        assert wrong.status_code == 400
        assert re.search('name="value" value="2.5"[^>]*aria-invalid', wrong.text)
        assert (await operator.post(address, data={"value": "1,200"})).status_code == 303
        async with platform.db.reading() as session:
            assert (await service.find_tenant(session, acme.id)).requests_per_minute == 1200
        client.cookies.clear()
        client.cookies.update(await sign_in(platform, await make_user(platform, acme)))
        assert "at 1,200" in (await client.get("/console/limits")).text

    async def test_declining_needs_a_reason_which_the_tenant_reads(
        self, operator, client, platform, acme
    ):
        request_id = await ask_for_limits(platform, acme)
        address = f"/console/requests/{request_id}/decline"
        assert (await operator.post(address, data={"answer": " "})).status_code == 400
        said = await operator.post(address, data={"answer": "the disk is <full>"})
        assert said.status_code == 303
        async with platform.db.reading() as session:
            assert (await service.find_tenant(session, acme.id)).max_adapters is None
        assert (await audited(platform, "limits.decline"))[0].detail["answer"] == (
            "the disk is <full>"
        )
        client.cookies.clear()
        client.cookies.update(await sign_in(platform, await make_user(platform, acme)))
        shown = (await client.get("/console/limits")).text
        assert "the disk is &lt;full&gt;" in shown
        assert ">declined<" in shown

    async def test_an_unknown_request_is_a_404(self, operator):
        for verb in ("approve", "decline"):
            answer = await operator.post(f"/console/requests/lrq_x/{verb}", data={"answer": "no"})
            assert answer.status_code == 404

    async def test_they_go_with_their_tenant(self, operator, platform, acme):
        await ask_for_limits(platform, acme)
        await operator.post(f"/console/tenants/{acme.id}/delete", data={"confirm": "acme"})
        assert "a new product" not in (await operator.get("/console/requests")).text


class TestWhoReachesThem:
    @pytest.mark.parametrize("role", ["tenant_admin", "tenant_viewer"])
    async def test_for_a_tenants_people_they_do_not_exist(self, client, platform, acme, role):
        user = await make_user(platform, acme, role=role)
        client.cookies.update(await sign_in(platform, user))
        unknown = await client.get("/console/no-such-page")
        for page in (*PAGES, f"tenants/{acme.id}", f"tenants/{acme.id}/delete"):
            answer = await client.get(f"/console/{page}")
            assert answer.status_code == 404, page
            assert answer.text == unknown.text.replace("no-such-page", page), page
        for path in (f"tenants/{acme.id}/suspend", "engines/engine-0/drain", "jobs/ver_1/retry"):
            assert (await client.post(f"/console/{path}")).status_code == 404, path

    async def test_the_signed_out_are_sent_to_sign_in(self, client):
        for page in PAGES:
            assert (await client.get(f"/console/{page}")).status_code == 303, page

    async def test_another_sites_form_changes_nothing(self, operator, acme):
        foreign = {"origin": "https://evil.example"}
        for path in (f"tenants/{acme.id}/suspend", "engines/engine-0/drain", "jobs/ver_1/retry"):
            answer = await operator.post(f"/console/{path}", headers=foreign)
            assert answer.status_code == 403, path


async def test_a_page_takes_at_most_eight_statements(operator, platform, acme, engines):
    await make_key(platform, acme)
    await make_user(platform, acme)
    await fail_a_validation(platform, acme)
    await fail_a_webhook(platform, acme)
    engines["ipc://one"].adapters = [Residency(AdapterRef(acme.salt, "d1"), "device", 10, 0)]
    await platform.engines.refresh()
    gone = await make_tenant(platform, "gone")
    await operator.post(f"/console/tenants/{gone.id}/delete", data={"confirm": "gone"})
    watched = platform.db.engine.sync_engine
    of_tenant = [f"tenants/{acme.id}{page}" for page in ("", "/suspend", "/delete")]
    for page in (*PAGES, *of_tenant, f"tenants/{gone.id}"):
        statements = []

        def note(_connection, _cursor, statement, *_rest, told=statements):
            told.append(statement)

        event.listen(watched, "before_cursor_execute", note)
        try:
            assert (await operator.get(f"/console/{page}")).status_code == 200, page
        finally:
            event.remove(watched, "before_cursor_execute", note)
        own = [s for s in statements if s != "BEGIN"]
        own = [s for s in own if "engines" in page or "FROM engines" not in s]  # the router's
        assert len(own) <= 8, (page, own)


async def test_names_are_text_on_every_page(operator, platform, acme, engines):
    await make_user(platform, acme, email="evil@example.com")
    await make_key(platform, acme, name=EVIL)
    await ask_for_limits(platform, acme, reason=EVIL)
    await fail_a_validation(platform, acme, code="x", message=EVIL)
    await fail_a_webhook(platform, acme, url=f"https://{EVIL.replace('/', '')}")
    engines["ipc://one"].adapters = [Residency(AdapterRef(acme.salt, "d1"), "device", 10, 0)]
    engines["ipc://one"].figures = {"waiting_by_tenant": {EVIL: 1, acme.id: 2}}
    async with platform.db.transaction() as session:
        await session.execute(update(Tenant).where(Tenant.id == acme.id).values(name=EVIL))
        await session.execute(
            update(User).where(User.email == "evil@example.com").values(email=EVIL)
        )
    await platform.engines.refresh()
    platform.checks[EVIL] = platform.checks["engine"]
    of_tenant = [f"tenants/{acme.id}{page}" for page in ("", "/suspend", "/delete")]
    for page in (*PAGES, *of_tenant, f"tenants?q={EVIL}"):
        answer = await operator.get(f"/console/{page}")
        assert answer.status_code == 200, page
        assert "<img" not in answer.text, page
        assert "&lt;img" in answer.text, page


class TestTenants:
    async def test_every_list_says_what_to_do_when_it_is_empty(self, operator):
        assert "No tenant yet" in (await operator.get("/console/tenants")).text
        assert "No such tenant" in (await operator.get("/console/tenants?q=nobody")).text
        assert "No such tenant" in (await operator.get("/console/tenants?page=9")).text

    async def test_search_and_pages_find_every_tenant_once(self, operator, platform):
        for number in range(27):
            await make_tenant(platform, f"shop-{number:02}")
        pages = [(await operator.get(f"/console/tenants?page={n}")).text for n in (1, 2)]
        assert [page.count(">shop-") for page in pages] == [25, 2]
        assert "page 1 of 2" in pages[0]
        found = (await operator.get("/console/tenants?q=P-26")).text
        assert found.count(">shop-") == 1

    async def test_a_new_one_opens_and_a_bad_name_is_told(self, operator):
        made = await operator.post("/console/tenants", data={"name": "fresh"})
        page = await operator.get(made.headers["location"])
        for sentence in ("Nobody yet", "No key yet", "has not called anything yet"):
            assert sentence in page.text
        refused = await operator.post("/console/tenants", data={"name": "Not A Name"})
        assert refused.status_code == 400
        assert 'value="Not A Name"' in refused.text

    async def test_limits_are_set_and_emptied_and_audited(self, operator, platform, acme):
        path = f"/console/tenants/{acme.id}"
        given = {
            "requests_per_minute": "7",
            "max_resident_bytes": "2000000000",
            "ttft_ms": "250.5",
            "weight": "2",
        }
        assert (await operator.post(f"{path}/limits", data=given)).status_code == 303
        page = (await operator.get(path)).text
        assert 'name="requests_per_minute" value="7"' in page
        assert 'name="ttft_ms" value="250.5"' in page
        assert 'name="max_resident_bytes" value="2000000000"' in page
        await operator.post(f"{path}/limits", data={"weight": "2"})
        assert 'name="requests_per_minute" value=""' in (await operator.get(path)).text
        first, second = reversed(await audited(platform, "tenant.update"))
        assert first.detail["requests_per_minute"] == {"from": None, "to": 7}
        assert set(second.detail) == {"name", *given} - {"weight"}

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("requests_per_minute", "0"),
            ("tokens_per_minute", "many"),
            ("max_rank", "1.5"),
            ("monthly_tokens", "9" * 25),
            ("ttft_ms", "nan"),
            ("budget_percentile", "2"),
        ],
    )
    async def test_a_bad_limit_is_named_and_kept_in_its_field(self, operator, acme, field, value):
        path = f"/console/tenants/{acme.id}/limits"
        answer = await operator.post(path, data={field: value, "max_tokens": "5"})
        assert answer.status_code == 400
        assert f'name="{field}" value="{value}"' in answer.text
        assert answer.text.count('aria-invalid="true"') == 1
        assert 'role="alert"' in answer.text
        assert (
            'name="max_tokens" value=""' in (await operator.get(f"/console/tenants/{acme.id}")).text
        )

    async def test_suspending_tells_first_and_resuming_undoes_it(self, operator, platform, acme):
        await make_key(platform, acme)
        path = f"/console/tenants/{acme.id}"
        assert "1 active API key refused" in (await operator.get(f"{path}/suspend")).text
        await operator.post(f"{path}/suspend")
        assert "suspended" in (await operator.get(path)).text
        await operator.post(f"{path}/resume")
        assert await audited(platform, "tenant.suspend")
        assert await audited(platform, "tenant.resume")

    async def test_deleting_needs_the_name_and_says_what_is_lost(self, operator, platform, acme):
        await make_ready_adapter(platform, acme)
        path = f"/console/tenants/{acme.id}"
        assert "1 adapter with all versions" in (await operator.get(f"{path}/delete")).text
        refused = await operator.post(f"{path}/delete", data={"confirm": "other"})
        assert refused.status_code == 400
        async with platform.db.reading() as session:
            assert (await service.find_tenant(session, acme.id)).state == "active"
        await operator.post(f"{path}/delete", data={"confirm": "acme"})
        page = (await operator.get(path)).text
        assert "Being erased" in page
        assert await audited(platform, "tenant.delete")
        assert (await operator.post(f"{path}/limits", data={"max_rank": "4"})).status_code == 409

    async def test_an_invited_user_and_a_revoked_key_are_shown(self, operator, platform, acme):
        key = await make_key(platform, acme, name="production")
        path = f"/console/tenants/{acme.id}"
        invited = await operator.post(
            f"{path}/invite", data={"email": "ann@example.com", "role": "tenant_admin"}
        )
        assert "/console/invitation/" in invited.text
        assert "no-store" in invited.headers["cache-control"]
        assert invited.text.index('id="users"') < invited.text.index('id="limits"')
        await operator.post(f"{path}/keys/{key.row.id}/revoke")
        async with platform.db.reading() as session:
            assert (await session.get_one(ApiKey, key.row.id)).revoked_at is not None
        other = await make_tenant(platform)
        foreign = await operator.post(f"/console/tenants/{other.id}/keys/{key.row.id}/revoke")
        assert foreign.status_code == 404


class TestEngines:
    async def test_a_card_tells_state_pool_queue_and_steps(self, operator, platform, acme, engines):
        engine = engines["ipc://one"]
        engine.adapters = [
            Residency(AdapterRef(acme.salt, "a"), "device", 2048, 1),
            Residency(AdapterRef("f" * 32, "b"), "host", 1024, 0),
        ]
        engine.figures = {"waiting_by_tenant": {acme.id: 3}, "extents_total": 16}
        await platform.engines.refresh()
        engine.figures |= {"steps": 10, "step_counts": StepCounts([], 50.0, 40, 10, 100, 5, 10)}
        await platform.engines.refresh()
        page = (await operator.get("/console/engines")).text
        assert 'hx-get="/console/engines/live"' in page
        for words in ("ready", "tiny-base", "acme", "a tenant that is gone", "5.0 ms"):
            assert words in page, words
        engine.alive = False
        gone = (await operator.get("/console/engines/live")).text
        assert "unreachable" in gone
        assert "Pool" not in gone

    async def test_the_last_engine_is_drained_only_on_purpose(self, operator, platform, engines):
        rows = (await operator.get("/console/engines")).text
        engine_id = rows.partition('action="/console/engines/')[2].partition("/")[0]
        refused = await operator.post(f"/console/engines/{engine_id}/drain")
        assert refused.status_code == 409
        assert "Drain it all the same" in refused.text
        await operator.post(f"/console/engines/{engine_id}/drain", data={"force": "yes"})
        await platform.engines.refresh()
        assert engines["ipc://one"].held
        await operator.post(f"/console/engines/{engine_id}/resume")
        await platform.engines.refresh()
        assert not engines["ipc://one"].held
        assert await audited(platform, "engine.drain")

    async def test_a_refused_registration_is_told(self, operator, platform, monkeypatch):
        class Told:
            roll = Roll(refused={"tcp://gpu-9:5555": "its key is unknown"})
            problem = "the engine registry does not answer"

            async def read(self):
                return False

            async def close(self): ...

        monkeypatch.setattr(platform.engines, "_registry", Told())
        page = (await operator.get("/console/engines")).text
        assert "tcp://gpu-9:5555" in page
        assert "The engine registry does not answer" in page

    def test_the_rest_of_many_tenants_is_one_line(self):
        from tests.engine_process import InventedCore

        status = InventedCore().status()
        for number in range(20):
            ref = AdapterRef(f"{number:032x}", "d")
            status.adapters.append(Residency(ref, "device", 100 * (number + 1), 1))
        lines = pool_lines(status, {})
        assert len(lines) == 9
        assert lines[-1].name == "other tenants"
        assert lines[-1].counts["device"] == 12
        assert sum(line.total_bytes for line in lines) == 100 * 210
        queue = queue_lines({f"ten_{n}": n for n in range(20)}, {})
        assert queue[0] == ("ten_19", 19)
        assert sum(count for _, count in queue) == 190
        segments = arena(status, lines)
        assert all(segment.x + segment.width <= 1000.01 for segment in segments)

    def test_a_restart_begins_the_minute_anew(self):
        def sample(engine_id, steps):
            return StepSample(engine_id, steps, StepCounts([], steps * 4.0, steps * 3))

        samples = deque([sample("old", 900), sample("new", 10), sample("new", 30)])
        told = last_minute(samples)
        assert (told.steps, told.ms, told.decode_rows) == (20, 4.0, 3.0)
        assert last_minute(deque([sample("new", 10)])) is None
        assert last_minute(deque()) is None


class TestJobs:
    async def test_empty_groups_say_so(self, operator):
        page = (await operator.get("/console/jobs")).text
        for sentence in ("None has failed", "None runs now", "None waits", "Every endpoint took"):
            assert sentence in page

    async def test_a_failed_validation_is_tried_again(self, operator, platform, acme):
        version = await fail_a_validation(platform, acme, code="engine_lost", message="it died")
        page = (await operator.get("/console/jobs")).text
        for words in ("engine_lost", "it died", "3 of 3", "acme"):
            assert words in page
        again = await operator.post(f"/console/jobs/{version.id}/retry")
        assert again.status_code == 303
        assert "None has failed" in (await operator.get("/console/jobs")).text
        assert (await operator.post(f"/console/jobs/{version.id}/retry")).status_code == 409
        assert await audited(platform, "adapter.validate_again")

    async def test_a_failing_webhook_is_shown_by_its_host_alone(self, operator, platform, acme):
        await fail_a_webhook(platform, acme)
        page = (await operator.get("/console/jobs")).text
        assert "hooks.example.com" in page
        assert "timeout" in page
        assert "secret-path" not in page


async def test_the_system_page_tells_parts_queue_and_what_lies_on_the_disk(operator, platform):
    data = platform.settings.data_dir
    (data / "journal").mkdir()
    (data / "journal" / "engine-0.jsonl").write_text("x" * 2048)
    (data / "spool" / "req_1.json").write_text("{}")
    (data / "spool" / "req_2.bad").write_text("{}")
    page = (await operator.get("/console/system")).text
    for words in (
        "Database",
        "schema 0",
        "engine-0.jsonl",
        "2.0 KiB",
        "cannot be read",
        "tiny-base",
    ):
        assert words in page, words
