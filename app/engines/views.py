"""What this process knows of an engine now, beside its row: for the operator API and console."""

from app.engines.models import EngineRecord
from app.engines.schemas import EngineOut
from app.inference.engines import Engine
from app.platform import Platform


def known(platform: Platform, row: EngineRecord) -> Engine | None:
    return next((e for e in platform.engines.all if e.address == row.address), None)


def shown(platform: Platform, row: EngineRecord) -> EngineOut:
    """The row with what this process knows of the engine now."""
    registered = platform.engines.registered.get(row.address)
    return EngineOut.of(row, known(platform, row), registered)


def others(platform: Platform, row: EngineRecord) -> int:
    """Other engines of the same base model that take requests."""
    return sum(
        other.usable
        and other.address != row.address
        and other.description is not None
        and other.description.base_digest == row.base_digest
        for other in platform.engines.all
    )
