"""The predicted time to the first token, from plain figures."""

from dataclasses import replace

import pytest

from engine.backlog import Backlogs, Work
from engine.forecast import AnswerLength, Standing, first_token_ms
from engine.policy import LatencyBudgets, VirtualTokenCounter
from engine.step_time import StepShape, StepTimes


def times() -> StepTimes:
    """10 ms a step, 0.2 ms a prompt token, 0.5 ms a decode."""
    times = StepTimes()
    for n in range(400):
        rows, prompt = n % 17, 32 * (n % 11)
        if rows + prompt:
            times.observe(StepShape(prompt, rows), 10.0 + 0.2 * prompt + 0.5 * rows)
    return times


TIMES = times()
IDLE = Standing(Work(), 0, 100, 16, StepShape(), 256, 50.0, 0.0)
FULL = replace(IDLE, free_places=0, decodes=StepShape(0, 16, 1600))


def test_alone_it_is_its_own_prefill() -> None:
    assert first_token_ms(IDLE, TIMES) == pytest.approx(10.0 + 20.0, rel=0.2)


def test_a_long_prompt_takes_several_steps() -> None:
    long = replace(IDLE, own_tokens=1024)
    assert first_token_ms(long, TIMES) == pytest.approx(4 * (10.0 + 51.2), rel=0.2)


def test_prompts_ahead_are_computed_first() -> None:
    behind = replace(IDLE, ahead=Work(4, 2000), prefilling_tokens=560)
    expected = 10 * (10.0 + 51.2) + 30.0
    assert first_token_ms(behind, TIMES) == pytest.approx(expected, rel=0.2)


def test_without_a_free_place_each_request_ahead_waits_for_an_answer_to_end() -> None:
    one, five = (first_token_ms(replace(FULL, ahead=Work(n, 0)), TIMES) for n in (0, 4))
    assert five - one == pytest.approx(4 * 50.0 * 18.0 / 16, rel=0.2)


def test_the_adapter_comes_meanwhile() -> None:
    cold = replace(FULL, adapter_ms=2000.0)
    assert first_token_ms(cold, TIMES) > 2000.0
    assert first_token_ms(replace(FULL, adapter_ms=1.0), TIMES) == first_token_ms(FULL, TIMES)


def test_a_model_that_knows_nothing_predicts_nothing() -> None:
    assert first_token_ms(FULL, StepTimes()) == 0.0


class TestWhatComesBefore:
    def backlogs(self, policy: VirtualTokenCounter) -> Backlogs:
        """Tenant "flood" has 100 requests of 100 tokens waiting."""
        for tenant in ("flood", "modest"):
            policy.activate(tenant)
        backlogs = Backlogs(policy)
        for _ in range(100):
            backlogs.add("flood", 1.0, 100, 0.0, hurried=True)
        return backlogs

    def test_of_a_flood_only_its_fair_share(self) -> None:
        ahead = self.backlogs(VirtualTokenCounter()).before("modest", 1.0, 100, 0.0)
        assert ahead.requests == pytest.approx(1.0)

    def test_ones_own_backlog_is_all_before(self) -> None:
        ahead = self.backlogs(VirtualTokenCounter()).before("flood", 1.0, 100, 0.0)
        assert (ahead.requests, ahead.tokens) == (100, 10_000)

    def test_a_heavier_tenant_has_more_of_its_own_first(self) -> None:
        backlogs = self.backlogs(VirtualTokenCounter())
        assert backlogs.before("modest", 4.0, 100, 0.0).requests == pytest.approx(0.25)

    def test_those_without_a_budget_are_passed_as_far_as_the_lead_goes(self) -> None:
        backlogs = self.backlogs(LatencyBudgets(lead=1000.0))
        for _ in range(100):
            backlogs.add("patient", 1.0, 100, 0.0, hurried=False)
        assert backlogs.before("modest", 1.0, 100, 0.0).requests == pytest.approx(1.0)

    def test_a_tenant_that_is_hardly_served_waits_as_long_as_that_takes(self) -> None:
        backlogs = self.backlogs(VirtualTokenCounter())
        for _ in range(10):
            backlogs.take("flood", 100, hurried=True, started=True)
        # 1000 tokens in 5 s; 9100 are before the newcomer's last
        own_ms = backlogs.own_turn_ms("flood", 100, 5_000.0, token_ms=1.0)
        assert own_ms == pytest.approx(9_100 / (1_000 / 5_000.0), rel=0.2)
        assert backlogs.own_turn_ms("flood", 100, 0.0, token_ms=1.0) < 9_100 * 1.1
        assert backlogs.own_turn_ms("modest", 100, 5_000.0, token_ms=1.0) == 0.0

    def test_what_has_left_counts_no_more(self) -> None:
        backlogs = self.backlogs(VirtualTokenCounter())
        for _ in range(100):
            backlogs.take("flood", 100, hurried=True, started=True)
        assert backlogs.requests == 0
        assert backlogs.everything() == Work(0, 0)


class TestAnswerLength:
    def test_it_is_the_mean_of_the_answers(self) -> None:
        length = AnswerLength()
        for _ in range(10_000):
            length.observe(200)
        assert length.expected(0) == pytest.approx(200.0, rel=0.02)

    def test_answers_that_go_on_say_that_those_that_ended_were_the_short_ones(self) -> None:
        length = AnswerLength()
        for _ in range(10):
            length.observe(20)
        assert length.expected(running_tokens=3000) > 200
