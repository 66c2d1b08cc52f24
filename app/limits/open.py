"""Which limit store the settings name."""

from app.clock import Clock
from app.limits.memory_store import MemoryLimitStore
from app.limits.redis_store import RedisLimitStore
from app.limits.service import Limits


def open_limits(redis_url: str | None, clock: Clock) -> Limits:
    """Shared through Redis where there is one, else counted by this process alone."""
    store = RedisLimitStore(redis_url) if redis_url else MemoryLimitStore(clock)
    return Limits(store)
