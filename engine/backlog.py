"""What waits by tenant, in requests and prompt tokens; how much of it comes before a newcomer."""

from dataclasses import dataclass

from engine.policy import OUTPUT_COST, Policy

YOUNG_BACKLOG_MS = 200.0


@dataclass(slots=True)
class Work:
    """Requests of which nothing has run yet, and their prompts."""

    requests: float = 0.0
    tokens: float = 0.0


@dataclass(slots=True)
class _Tenant:
    weight: float
    requests: int = 0
    tokens: int = 0
    hurried: int = 0  # of the requests, those with a budget for their first token
    since_ms: float = 0.0  # when its backlog began
    started_tokens: int = 0  # of its requests that have started since


class Backlogs:
    """Sums that are kept up to date; nothing here looks at single requests."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._tenants: dict[str, _Tenant] = {}
        self._requests = 0
        self._tokens = 0

    @property
    def requests(self) -> int:
        return self._requests

    def of(self, tenant: str) -> int:
        """Requests of a tenant."""
        found = self._tenants.get(tenant)
        return 0 if found is None else found.requests

    def add(self, tenant: str, weight: float, tokens: int, now_ms: float, *, hurried: bool) -> None:
        found = self._tenants.setdefault(tenant, _Tenant(weight, since_ms=now_ms))
        found.weight = weight
        found.requests += 1
        found.tokens += tokens
        found.hurried += hurried
        self._requests += 1
        self._tokens += tokens

    def take(self, tenant: str, tokens: int, *, hurried: bool, started: bool) -> None:
        """One of the tenant's requests has started, or left."""
        found = self._tenants[tenant]
        found.started_tokens += tokens if started else 0
        found.requests -= 1
        found.tokens -= tokens
        found.hurried -= hurried
        self._requests -= 1
        self._tokens -= tokens
        if not found.requests:
            del self._tenants[tenant]

    def own_turn_ms(self, tenant: str, tokens: int, now_ms: float, token_ms: float) -> float:
        """How long the tenant's own backlog and `tokens` more take at the rate it is served at.

        What others send meanwhile, and are served first for, shows in that rate and nowhere else.
        `token_ms`: a prompt token's time by the model, believed while the backlog is young.
        """
        found = self._tenants.get(tenant)
        if found is None:
            return 0.0
        backlogged_ms = now_ms - found.since_ms + YOUNG_BACKLOG_MS
        started = found.started_tokens + YOUNG_BACKLOG_MS / max(token_ms, 1e-6)
        return (found.tokens + tokens) * backlogged_ms / started

    def everything(self) -> Work:
        return Work(self._requests, self._tokens)

    def before(self, tenant: str, weight: float, tokens: int, output_tokens: float) -> Work:
        """What is served before a newcomer with a budget and a prompt of `tokens`, by fair shares.

        Of every other tenant: what brings it level with this one, and then as much of its backlog
        as its weight claims while this tenant's own is worked off. Whoever has no budget is passed
        as far as the newcomer's lead goes. `output_tokens`: of a usual answer.
        """
        own = self._tenants.get(tenant)
        mine = Work() if own is None else Work(own.requests, own.tokens)
        answer = OUTPUT_COST * output_tokens
        due = (mine.tokens + tokens + (mine.requests + 1) * answer) / weight
        counter = self._policy.priority(tenant)
        lead = self._policy.lead(tenant)
        ahead = Work(mine.requests, mine.tokens)
        for name, other in self._tenants.items():
            if name == tenant:
                continue
            backlog = other.tokens + other.requests * answer
            passed = 0.0 if other.hurried else lead
            claim = (due + counter - passed - self._policy.priority(name)) * other.weight
            share = min(1.0, max(0.0, claim / backlog))
            ahead.requests += share * other.requests
            ahead.tokens += share * other.tokens
        return ahead
