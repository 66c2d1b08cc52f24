"""How long somebody who guesses passwords must wait. A pure decision.

An account's wait is short, because anyone can provoke it for anyone; an address's grows longer.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from math import ceil


@dataclass(frozen=True, slots=True)
class Policy:
    """After `free` failures each further one doubles the wait, from one second to `longest`."""

    free: int
    longest: timedelta


ACCOUNT = Policy(free=5, longest=timedelta(minutes=5))
ADDRESS = Policy(free=20, longest=timedelta(minutes=30))
FORGET_AFTER = timedelta(hours=1)
"""Failures older than this no longer count."""


def wait(policy: Policy, failures: int, last_failure: datetime, now: datetime) -> timedelta:
    """Time until the next attempt is allowed; zero when it is allowed now."""
    if failures < policy.free or now - last_failure >= FORGET_AFTER:
        return timedelta(0)
    doublings = min(failures - policy.free, 20)
    due = last_failure + min(timedelta(seconds=2**doublings), policy.longest)
    return max(due - now, timedelta(0))


def told(wait: timedelta) -> str:
    """A wait in words, never shorter than it is: "1 second", "2 minutes"."""
    seconds = ceil(wait.total_seconds())
    count, unit = (seconds, "second") if seconds <= 90 else (ceil(seconds / 60), "minute")
    return f"{count} {unit}{'' if count == 1 else 's'}"
