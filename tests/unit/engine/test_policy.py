import pytest

from engine.policy import (
    FirstComeFirstServed,
    LatencyBudgets,
    VirtualTokenCounter,
    load_cost,
    make_policy,
    serves_the_oldest,
    token_cost,
)


def test_output_rank_and_cold_loads_cost_more() -> None:
    assert token_cost(10, 0, 0) == 10.0
    assert token_cost(0, 10, 0) > token_cost(10, 0, 0)
    assert token_cost(10, 0, 64) > token_cost(10, 0, 8) > token_cost(10, 0, 0)
    assert load_cost(1 << 20) == 16.0


def test_every_fourth_admission_goes_by_age_but_only_past_the_bound() -> None:
    late = [serves_the_oldest(n, 101.0, 100.0) for n in range(8)]
    assert late == [True, False, False, False] * 2
    assert not any(serves_the_oldest(n, 100.0, 100.0) for n in range(8))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("slo", LatencyBudgets),
        ("vtc", VirtualTokenCounter),
        ("fcfs", FirstComeFirstServed),
    ],
)
def test_every_policy_can_be_chosen(name: str, kind: type) -> None:
    assert isinstance(make_policy(name), kind)  # type: ignore[arg-type]


class TestVirtualTokenCounter:
    def test_twice_the_weight_pays_half(self) -> None:
        policy = VirtualTokenCounter()
        policy.activate("a")
        policy.activate("b")
        policy.charge("a", 2.0, 100.0)
        policy.charge("b", 1.0, 100.0)
        assert policy.priority("a") == 50.0
        assert policy.priority("b") == 100.0

    def test_a_newcomer_starts_level_with_the_one_served_least(self) -> None:
        policy = VirtualTokenCounter()
        policy.activate("a")
        policy.charge("a", 1.0, 500.0)
        policy.admitted("a")
        policy.activate("b")
        assert policy.priority("b") == 500.0

    def test_going_away_and_coming_back_pays_no_debt(self) -> None:
        policy = VirtualTokenCounter()
        policy.activate("a")
        policy.activate("b")
        policy.charge("a", 1.0, 500.0)
        policy.deactivate("a")
        policy.activate("a")
        assert policy.priority("a") == 500.0

    def test_a_debt_is_forgotten_once_the_rest_has_caught_up(self) -> None:
        policy = VirtualTokenCounter()
        policy.activate("a")
        policy.activate("b")
        policy.charge("a", 1.0, 500.0)
        policy.deactivate("a")
        policy.charge("b", 1.0, 600.0)
        policy.admitted("b")
        assert len(policy) == 1
        assert policy.priority("a") == 600.0
