"""One request from submit to its last event: bounds, stop rules, counts, deadlines, errors."""

import math

import pytest

from engine.errors import NotStarted, RequestRefused
from engine.types import SequenceStart
from tests.engine_under_test import EngineUnderTest
from tests.fakes import EOS, VOCAB, describe, expected_tokens


def says(*tokens: int) -> "object":
    """A script: these tokens after the prompt, then as usual."""

    def script(start: SequenceStart, position: int) -> int | None:
        index = position - len(start.prompt)
        return tokens[index] if index < len(tokens) else None

    return script


class TestRefusals:
    @pytest.mark.parametrize(
        ("values", "code", "field"),
        [
            ({"prompt": []}, "empty_prompt", "prompt"),
            ({"prompt": [VOCAB]}, "token_out_of_range", "prompt"),
            ({"prompt": [-1]}, "token_out_of_range", "prompt"),
            ({"prompt": 100}, "context_length_exceeded", "prompt"),
            ({"choices": 0}, "out_of_range", "n"),
            ({"choices": 9}, "out_of_range", "n"),
            ({"max_tokens": 0}, "out_of_range", "max_tokens"),
            ({"weight": 0.0}, "out_of_range", "weight"),
            ({"deadline_ms": math.nan}, "out_of_range", "deadline_ms"),
            ({"prompt_logprobs": -1}, "out_of_range", "prompt_logprobs"),
            ({"sampling": {"min_tokens": 9}}, "out_of_range", "min_tokens"),
            ({"sampling": {"temperature": -1.0}}, "out_of_range", "temperature"),
            ({"sampling": {"top_p": 0.0}}, "out_of_range", "top_p"),
            ({"sampling": {"top_k": -1}}, "out_of_range", "top_k"),
            ({"sampling": {"min_p": 2.0}}, "out_of_range", "min_p"),
            ({"sampling": {"repetition_penalty": 0.0}}, "out_of_range", "repetition_penalty"),
            ({"sampling": {"presence_penalty": math.inf}}, "out_of_range", "presence_penalty"),
            ({"sampling": {"logit_bias": {VOCAB: 1.0}}}, "out_of_range", "logit_bias"),
            ({"sampling": {"logit_bias": {5: math.nan}}}, "out_of_range", "logit_bias"),
            ({"sampling": {"logprobs": VOCAB + 1}}, "out_of_range", "logprobs"),
        ],
    )
    def test_names_the_field_and_keeps_nothing(
        self, values: dict[str, object], code: str, field: str
    ) -> None:
        engine = EngineUnderTest(description=describe(context_length=100))
        with pytest.raises(RequestRefused) as refusal:
            engine.submit(**values)  # type: ignore[arg-type]
        assert (refusal.value.code, refusal.value.field) == (code, field)
        assert not engine.core.has_work

    def test_a_prompt_too_long_is_told_the_figures(self) -> None:
        engine = EngineUnderTest(description=describe(context_length=100))
        with pytest.raises(RequestRefused, match=r"120 tokens.*100 tokens"):
            engine.submit(120)

    def test_what_could_never_fit_beside_the_adapters_is_refused(self) -> None:
        engine = EngineUnderTest(extents=8)
        engine.submit(30, max_tokens=34)
        with pytest.raises(RequestRefused) as refusal:
            engine.submit(30, max_tokens=35)
        assert refusal.value.code == "exceeds_memory"
        engine.run()

    def test_an_id_in_use_is_refused_and_the_first_goes_on(self) -> None:
        engine = EngineUnderTest()
        engine.submit(request_id="same")
        with pytest.raises(RequestRefused) as refusal:
            engine.submit(request_id="same")
        assert refusal.value.code == "duplicate_request"
        engine.run()
        assert engine.last("same").finish == "length"
        engine.submit(request_id="same")

    def test_the_queue_has_a_bound(self) -> None:
        engine = EngineUnderTest(max_waiting=3)
        for _ in range(3):
            engine.submit()
        with pytest.raises(RequestRefused) as refusal:
            engine.submit()
        assert refusal.value.code == "queue_full"
        engine.step()
        engine.submit()

    def test_one_tenant_cannot_fill_the_queue(self) -> None:
        engine = EngineUnderTest(max_waiting_per_tenant=2)
        for _ in range(2):
            engine.submit(tenant="a")
        with pytest.raises(RequestRefused) as refusal:
            engine.submit(tenant="a")
        assert refusal.value.code == "queue_full"
        engine.submit(tenant="b")

    def test_a_draining_engine_finishes_what_it_has_and_takes_no_more(self) -> None:
        engine = EngineUnderTest()
        request_id = engine.submit()
        engine.core.drain()
        with pytest.raises(NotStarted) as refusal:
            engine.submit()
        assert refusal.value.code == "draining"
        engine.run()
        assert engine.last(request_id).finish == "length"
        assert engine.core.status().draining


class TestStopRules:
    def test_the_end_of_text_stops_and_is_counted_but_not_shown(self) -> None:
        engine = EngineUnderTest(script=says(5, 6, EOS))  # type: ignore[arg-type]
        request_id = engine.submit(max_tokens=10)
        engine.run()
        last = engine.last(request_id)
        assert engine.tokens(request_id) == [5, 6]
        assert (last.finish, last.stop_token, last.token_ids) == ("stop", EOS, [])
        assert last.usage is not None
        assert last.usage.completion_tokens == 3

    def test_it_can_be_ignored(self) -> None:
        engine = EngineUnderTest(script=says(5, EOS, 6))  # type: ignore[arg-type]
        request_id = engine.submit(max_tokens=3, sampling={"ignore_eos": True})
        engine.run()
        assert engine.tokens(request_id) == [5, EOS, 6]
        assert engine.last(request_id).finish == "length"

    def test_a_stop_token_of_the_request_stops(self) -> None:
        engine = EngineUnderTest(script=says(5, 77, 6))  # type: ignore[arg-type]
        request_id = engine.submit(max_tokens=9, sampling={"stop_token_ids": (77,)})
        engine.run()
        assert (engine.last(request_id).finish, engine.last(request_id).stop_token) == ("stop", 77)

    def test_nothing_stops_before_min_tokens(self) -> None:
        engine = EngineUnderTest(script=says(EOS, EOS, EOS))  # type: ignore[arg-type]
        request_id = engine.submit(max_tokens=9, sampling={"min_tokens": 2})
        engine.run()
        assert engine.tokens(request_id) == [EOS, EOS]
        assert engine.last(request_id).finish == "stop"

    def test_max_tokens_ends_it_with_length(self) -> None:
        engine = EngineUnderTest()
        request_id = engine.submit(max_tokens=7)
        engine.run()
        assert len(engine.tokens(request_id)) == 7
        assert engine.last(request_id).finish == "length"

    def test_the_context_ends_it_with_length(self) -> None:
        engine = EngineUnderTest(description=describe(context_length=40))
        request_id = engine.submit(30, max_tokens=1000)
        engine.run()
        assert len(engine.tokens(request_id)) == 10
        assert engine.last(request_id).finish == "length"


class TestTheStream:
    def test_is_numbered_without_gaps_and_only_its_last_event_has_usage(self) -> None:
        engine = EngineUnderTest()
        ids = [engine.submit(choices=n, max_tokens=3 * n) for n in (1, 2, 3)]
        engine.run()
        for request_id in ids:
            engine.assert_stream_is_whole(request_id)
            finishes = [e.choice for e in engine.outputs[request_id] if e.finish is not None]
            assert sorted(finishes) == list(range(len(finishes)))

    def test_usage_counts_every_choice_and_the_prompt_once(self) -> None:
        engine = EngineUnderTest()
        request_id = engine.submit(20, choices=3, max_tokens=5)
        engine.run()
        usage = engine.last(request_id).usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens) == (20, 15)
        assert (usage.ttft_ms, usage.total_ms) == (10.0, 60.0)
        status = engine.core.status()
        assert (status.prompt_tokens_total, status.completion_tokens_total) == (20, 15)

    def test_logprobs_go_with_their_tokens_and_not_with_the_stop(self) -> None:
        engine = EngineUnderTest(script=says(5, EOS))  # type: ignore[arg-type]
        request_id = engine.submit(sampling={"logprobs": 0})
        engine.run()
        first, last = engine.outputs[request_id]
        assert [entry.token_id for entry in first.logprobs or []] == [5]
        assert last.logprobs == []


class TestDeadlines:
    def test_one_that_has_not_started_by_then_ends(self) -> None:
        engine = EngineUnderTest(max_running=1, max_choices=1)
        running = engine.submit(max_tokens=20)
        waiting = engine.submit(deadline_ms=55.0)
        engine.step(8)
        assert engine.last(waiting).error_code == "deadline_exceeded"
        assert engine.times_ms[waiting][0] < 80
        engine.run()
        assert engine.last(running).finish == "length"
        engine.assert_all_returned()

    def test_one_that_has_started_runs_on(self) -> None:
        engine = EngineUnderTest()
        request_id = engine.submit(max_tokens=20, deadline_ms=15.0)
        engine.run()
        assert engine.last(request_id).finish == "length"


class TestFaults:
    def test_a_number_that_is_not_finite_ends_that_request_alone(self) -> None:
        engine = EngineUnderTest()
        bad, good = engine.submit(choices=2, max_tokens=8), engine.submit([9] * 20, max_tokens=8)
        engine.executor.not_finite = lambda start: start.prompt != [9] * 20
        engine.run()
        assert engine.last(bad).error_code == "non_finite_logits"
        assert [e.finish for e in engine.outputs[bad]] == ["error", "error"]
        engine.assert_stream_is_whole(bad)
        assert engine.tokens(good) == expected_tokens([9] * 20, 8)
        engine.assert_all_returned()

    def test_a_step_that_fails_ends_its_requests_and_the_engine_serves_on(self) -> None:
        engine = EngineUnderTest()
        lost = [engine.submit(choices=2, max_tokens=9), engine.submit(max_tokens=9)]
        engine.step(3)
        engine.executor.fail_on = lambda plan: True
        engine.step()
        engine.executor.fail_on = lambda plan: False
        for request_id in lost:
            assert engine.last(request_id).error_code == "engine_step_failed"
            engine.assert_stream_is_whole(request_id)
        later = engine.submit([9] * 20)
        engine.run()
        assert engine.tokens(later) == expected_tokens([9] * 20, 4)
        engine.assert_all_returned()

    def test_a_failed_step_leaves_those_alone_that_had_no_part_in_it(self) -> None:
        engine = EngineUnderTest(max_batch_tokens=32, max_running=8, prefill_chunk=16)
        first, second = engine.submit(64), engine.submit(64, tenant="b")
        engine.executor.fail_on = lambda plan: len(engine.executor.plans) == 1
        engine.run()
        ends = {engine.last(first).error_code, engine.last(second).error_code}
        assert ends == {"engine_step_failed", None}


class TestCancellation:
    def gone(self, engine: EngineUnderTest, request_id: str) -> None:
        """Cancels, and expects all trace of the request gone within two steps."""
        engine.core.cancel(request_id)
        engine.step(2)
        assert engine.last(request_id).finish == "cancelled"
        engine.assert_stream_is_whole(request_id)
        engine.assert_all_returned()

    def test_of_a_waiting_request(self) -> None:
        engine = EngineUnderTest()
        self.gone(engine, engine.submit())

    def test_of_a_loading_request(self) -> None:
        engine = EngineUnderTest()
        ref = engine.loader.add("slow", load_ms=20.0)
        request_id = engine.submit(adapter=ref)
        engine.step()
        engine.core.cancel(request_id)
        engine.step(2)
        assert engine.last(request_id).finish == "cancelled"
        assert engine.core.status().waiting == 0
        engine.run()
        engine.assert_all_returned()

    def test_of_a_prefilling_request(self) -> None:
        engine = EngineUnderTest(max_batch_tokens=64)
        request_id = engine.submit(200, choices=2)
        engine.step()
        self.gone(engine, request_id)

    def test_of_a_running_request_bills_what_was_generated(self) -> None:
        engine = EngineUnderTest()
        request_id = engine.submit(choices=2, max_tokens=50)
        engine.step(5)
        made = len(engine.tokens(request_id, 0)) + len(engine.tokens(request_id, 1))
        self.gone(engine, request_id)
        usage = engine.last(request_id).usage
        assert usage is not None
        assert usage.completion_tokens == made == 9

    def test_of_one_choice_leaves_the_others(self) -> None:
        engine = EngineUnderTest()
        request_id = engine.submit(choices=3, max_tokens=12)
        engine.step(5)
        engine.core.cancel(request_id, 1)
        engine.step(2)
        assert len(engine.executor.live) == 2
        engine.run()
        engine.assert_stream_is_whole(request_id)
        ends = {e.choice: e.finish for e in engine.outputs[request_id] if e.finish}
        assert ends == {0: "length", 1: "cancelled", 2: "length"}
        usage = engine.last(request_id).usage
        assert usage is not None
        assert usage.completion_tokens == 24 + len(engine.tokens(request_id, 1))
        engine.assert_all_returned()

    def test_of_every_choice_one_by_one_ends_the_request(self) -> None:
        engine = EngineUnderTest()
        request_id = engine.submit(choices=2, max_tokens=50)
        engine.step(4)
        for choice in (1, 0, 0, 7):  # twice, or of none, is nothing
            engine.core.cancel(request_id, choice)
        engine.step(2)
        engine.assert_stream_is_whole(request_id)
        engine.assert_all_returned()

    def test_of_a_choice_that_was_preempted(self) -> None:
        engine = EngineUnderTest(extents=16, adapter_share=0.01)
        request_id = engine.submit(choices=4, max_tokens=100)
        while engine.core.status().preemptions_total == 0:
            engine.step()
        for choice in (0, 1, 2, 3):
            engine.core.cancel(request_id, choice)
        engine.step(2)
        engine.assert_stream_is_whole(request_id)
        engine.assert_all_returned()

    def test_of_an_unknown_or_finished_request_is_nothing(self) -> None:
        engine = EngineUnderTest()
        request_id = engine.submit()
        engine.run()
        engine.core.cancel(request_id)
        engine.core.cancel("never seen")
        assert not engine.core.has_work
