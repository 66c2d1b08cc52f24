"""Weighted aliases: which targets are allowed, and who gets which."""

from collections import Counter

import pytest

from app.adapters.aliases import Target, check_weights, pick
from app.errors import InvalidRequest

KEY = b"a tenant's salt"


@pytest.mark.parametrize("weights", [[(1, 100)], [(3, 90), (4, 10)], [(n, 20) for n in range(5)]])
def test_weights_that_sum_to_a_hundred_are_allowed(weights: list[tuple[int, int]]) -> None:
    check_weights(weights)


@pytest.mark.parametrize(
    ("weights", "param"),
    [
        ([], "targets"),
        ([(1, 99)], "targets"),
        ([(1, 60), (2, 60)], "targets"),
        ([(1, 0)], "targets[0].weight"),
        ([(1, 100), (2, 0)], "targets[1].weight"),
        ([(1, 150), (2, -50)], "targets[0].weight"),
        ([(1, 50), (1, 50)], "targets[1].version"),
        ([(n, 10) for n in range(10)], "targets"),
    ],
)
def test_others_are_refused_by_the_field_that_is_wrong(
    weights: list[tuple[int, int]], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_weights(weights)
    assert refused.value.param == param


def chosen(targets: list[Target], count: int, *, key: bytes = KEY, alias: str = "a@b") -> list[str]:
    return [pick(targets, f"req_{n}", key=key, alias=alias).version_id for n in range(count)]


def test_a_request_always_gets_the_same_target() -> None:
    targets = [Target("old", 90), Target("new", 10)]
    assert chosen(targets, 200) == chosen(targets, 200)


def chi_square(observed: Counter[str], expected: dict[str, float]) -> float:
    return sum((observed[name] - count) ** 2 / count for name, count in expected.items())


@pytest.mark.parametrize(
    ("weights", "critical"),
    [([90, 10], 10.83), ([1, 99], 10.83), ([33, 33, 34], 13.82), ([1, 2, 3, 94], 16.27)],
)
def test_the_split_fits_the_weights_by_chi_square(weights: list[int], critical: float) -> None:
    """20,000 fixed ids; `critical` is the 0.1 % point for that many targets."""
    targets = [Target(f"v{n}", weight) for n, weight in enumerate(weights)]
    observed = Counter(chosen(targets, 20_000))
    expected = {target.version_id: 200.0 * target.weight for target in targets}
    assert chi_square(observed, expected) < critical


@pytest.mark.parametrize("other", [{"key": b"another tenant"}, {"alias": "a@c"}])
def test_another_tenant_or_alias_decides_independently(other: dict[str, object]) -> None:
    """Of two fair and independent splits, about half of all ids agree."""
    targets = [Target("one", 50), Target("two", 50)]
    pairs = zip(chosen(targets, 4000), chosen(targets, 4000, **other), strict=True)  # type: ignore[arg-type]
    same = sum(a == b for a, b in pairs)
    assert chi_square(Counter(same=same, other=4000 - same), {"same": 2000, "other": 2000}) < 10.83
