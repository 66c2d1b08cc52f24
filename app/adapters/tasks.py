"""The adapters domain's Celery tasks, as plain coroutines; `app.worker` gives them to Celery."""

from app.adapters import base_change, sweeps
from app.adapters.resources import Resources
from app.adapters.validation import validate


async def validate_version(resources: Resources, version_id: str) -> str:
    """One delivery of `adapters.validate`."""
    return await validate(resources, version_id)


async def sweep(resources: Resources) -> str:
    """Finds validations and erasures that nobody works on."""
    sent = await sweeps.sweep_validations(resources)
    still = await sweeps.sweep_erasures(resources)
    return f"{sent} validations sent, {still} erasures pending"


async def follow_base(resources: Resources) -> str:
    """Looks whether the engines serve another base model."""
    return f"{await base_change.sweep_base_change(resources)} versions due on a new base model"


async def clean(resources: Resources) -> str:
    """Drops expired uploads, and removes what crashes and broken-off uploads left in the store."""
    staging = await sweeps.sweep_staging(resources)
    expired = await sweeps.sweep_uploads(resources)
    orphans = await sweeps.sweep_orphans(resources)
    return f"{staging} staging leftovers, {expired} expired uploads and {orphans} orphans removed"
