"""`loramux tenants`: a tenant's end."""

import json

from app.adapters.deps import open_resources
from app.clock import FrozenClock
from app.platform import Platform
from app.settings import Settings
from app.tenants import deletion
from tests.unit.app.cli.conftest import Run, on_platform


def test_delete_needs_the_name_typed_and_begins_at_once(run: Run, settings: Settings) -> None:
    run("tenants", "create", "acme")
    wrong = run("tenants", "delete", "acme", input="acm\n")
    assert wrong.exit_code == 1
    assert "send its name" in wrong.stderr
    done = run("tenants", "delete", "acme", input="acme\n")
    assert done.exit_code == 0
    assert "being erased" in done.stdout
    assert "the usage ledger" in done.stdout
    refused = run("keys", "create", "--tenant", "acme")
    assert "tenant_deleted" in refused.stderr


def test_deletion_shows_the_receipt_by_the_name_that_is_free_again(
    run: Run, settings: Settings
) -> None:
    run("tenants", "create", "acme")
    run("tenants", "delete", "acme", "--confirm", "acme")

    async def finish(platform: Platform) -> None:
        clock = FrozenClock(platform.clock.now())
        clock.advance(seconds=60)
        platform.clock = clock
        await deletion.sweep(open_resources(platform))

    on_platform(settings, finish)
    receipt = json.loads(run("tenants", "deletion", "acme", "--json").stdout)
    assert receipt["complete"] is True
    assert json.loads(run("tenants", "list", "--json").stdout) == []
    assert run("tenants", "create", "acme").exit_code == 0
    assert run("tenants", "deletion", "nobody").exit_code == 1
