"""What a process remembers of keys."""

from app.crypto import KeyedHash
from app.keys.cache import KeyCache, KeyEntry

ENTRY = KeyEntry(None, KeyedHash("0" * 64, 1), True, None, None, None)


def test_an_entry_is_forgotten_when_it_is_as_old_as_allowed() -> None:
    cache = KeyCache(ttl_s=2)
    cache.put("a", ENTRY, now_ms=1000)
    assert cache.get("a", now_ms=2999) is ENTRY
    assert cache.get("a", now_ms=3000) is None


def test_the_least_recently_used_entry_goes_first() -> None:
    cache = KeyCache(ttl_s=60, capacity=2)
    cache.put("a", ENTRY, 0)
    cache.put("b", ENTRY, 0)
    assert cache.get("a", 1) is ENTRY
    cache.put("c", ENTRY, 2)
    assert (cache.get("a", 3), cache.get("b", 3)) == (ENTRY, None)
    assert len(cache) == 2


def test_a_time_to_live_of_zero_remembers_nothing() -> None:
    cache = KeyCache(ttl_s=0)
    cache.put("a", ENTRY, 5)
    assert cache.get("a", 5) is None
