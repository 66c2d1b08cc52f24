"""The batched sampler: what a row draws, and that it never depends on its batch mates."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampler import Sampler, prompt_logprobs
from engine.types import SamplingParams, SequenceStart

VOCABULARY = 50
EOS = 2


def start(seq=0, prompt=(1, 3, 3), generated=(), choice=0, **params) -> SequenceStart:
    params = SamplingParams(**{"max_tokens": 100, **params})
    return SequenceStart(seq, list(prompt), list(generated), params, choice)


def a_sampler(*starts: SequenceStart) -> Sampler:
    sampler = Sampler(VOCABULARY, [EOS])
    for each in starts:
        sampler.start(each)
    return sampler


def row(seed: int = 0, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * 2


def tokens_of(sampler: Sampler, seq: int, logits: torch.Tensor, count: int) -> list[int]:
    return [sampler.sample(logits[None].clone(), [seq])[0].token_id for _ in range(count)]


def adjusted(logits: torch.Tensor, each: SequenceStart) -> torch.Tensor:
    """Penalties and bias, a token at a time, as their definitions say."""
    params, out = each.sampling, logits.clone().double()
    for token in set(each.prompt) | set(each.generated):
        penalty = params.repetition_penalty
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token in set(each.generated):
        out[token] -= params.presence_penalty
        out[token] -= params.frequency_penalty * each.generated.count(token)
    for token, bias in params.logit_bias.items():
        out[token] += bias
    if len(each.generated) < params.min_tokens:
        out[[EOS, *params.stop_token_ids]] = -math.inf
    return out


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.5]),
        "top_p": st.sampled_from([0.1, 0.9, 1.0]),
        "top_k": st.sampled_from([0, 1, 5, 40]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
        "presence_penalty": st.sampled_from([0.0, 0.5, -0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.7]),
        "logit_bias": st.dictionaries(st.integers(0, 49), st.floats(-100, 100), max_size=4),
        "seed": st.integers(0, 1 << 64),
        "min_tokens": st.integers(0, 3),
        "logprobs": st.sampled_from([None, 0, 3]),
    },
)


class TestGreedy:
    def test_temperature_0_takes_the_likeliest(self):
        logits = row()
        assert (
            tokens_of(a_sampler(start(temperature=0.0)), 0, logits, 3) == [int(logits.argmax())] * 3
        )

    def test_greedy_and_drawn_rows_share_a_batch(self):
        sampler = a_sampler(start(0, temperature=0.0), start(1, top_k=1), start(2, temperature=0.0))
        logits = torch.stack([row(0), row(1), row(2)])
        expected = logits.argmax(dim=-1).tolist()
        assert [s.token_id for s in sampler.sample(logits.clone(), [0, 1, 2])] == expected


class TestIndependence:
    @given(params=st.lists(PARAMS, min_size=2, max_size=5), order=st.randoms())
    @settings(max_examples=60, deadline=None)
    def test_a_row_draws_the_same_alone_and_in_any_company(self, params, order):
        starts = [start(seq, **each) for seq, each in enumerate(params)]
        logits = {seq: row(seq) for seq in range(len(starts))}
        alone = [tokens_of(a_sampler(each), each.seq, logits[each.seq], 4) for each in starts]
        together, mixed = a_sampler(*starts), [[] for _ in starts]
        for _ in range(4):
            seqs = order.sample(range(len(starts)), len(starts))
            drawn = together.sample(torch.stack([logits[seq] for seq in seqs]), seqs)
            for seq, sampled in zip(seqs, drawn, strict=True):
                mixed[seq].append(sampled.token_id)
        assert mixed == alone

    @given(params=PARAMS, cut=st.integers(0, 5))
    @settings(max_examples=60, deadline=None)
    def test_a_preempted_sequence_goes_on_as_if_nothing_had_happened(self, params, cut):
        whole = tokens_of(a_sampler(start(**params)), 0, row(), 6)
        resumed = a_sampler(start(generated=whole[:cut], **params))
        assert tokens_of(resumed, 0, row(), 6 - cut) == whole[cut:]

    def test_choices_of_one_request_differ(self):
        flat = torch.zeros(VOCABULARY)
        drawn = [tokens_of(a_sampler(start(choice=c, seed=5)), 0, flat, 8) for c in range(4)]
        assert all(a != b for a, b in itertools.combinations(drawn, 2))

    def test_seeds_differ(self):
        flat = torch.zeros(VOCABULARY)
        first, second = (tokens_of(a_sampler(start(seed=s)), 0, flat, 8) for s in (5, 6))
        assert first != second

    def test_a_dropped_sequence_leaves_nothing_behind(self):
        sampler = a_sampler(start(0, repetition_penalty=2.0, temperature=0.0))
        tokens_of(sampler, 0, row(), 5)
        sampler.drop(0)
        sampler.drop(0)
        sampler.start(start(0, temperature=0.0))
        assert tokens_of(sampler, 0, row(), 1) == [int(row().argmax())]


class TestAdjustments:
    @given(
        params=PARAMS, generated=st.lists(st.integers(0, 49), max_size=12), seed=st.integers(0, 99)
    )
    @settings(max_examples=100, deadline=None)
    def test_logprobs_equal_the_slow_definition(self, params, generated, seed):
        each = start(generated=generated, stop_token_ids=(7,), **{**params, "logprobs": 50})
        sampled = a_sampler(each).sample(row(seed)[None].clone(), [0])[0]
        expected = torch.log_softmax(adjusted(row(seed), each), dim=-1)
        top = dict(sampled.logprobs.top)
        assert len(top) == VOCABULARY
        actual = torch.tensor([top[token] for token in range(VOCABULARY)], dtype=torch.float64)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        assert sampled.logprobs.logprob == top[sampled.token_id]

    def test_penalties_follow_what_is_drawn(self):
        sampler = a_sampler(start(temperature=0.0, presence_penalty=1000.0))
        assert len(set(tokens_of(sampler, 0, row(), 10))) == 10

    def test_presence_counts_only_what_was_generated(self):
        logits = torch.zeros(VOCABULARY)
        logits[3] = 1.0  # a token of the prompt
        assert tokens_of(a_sampler(start(temperature=0.0, presence_penalty=2.0)), 0, logits, 1) == [
            3
        ]

    def test_repetition_counts_the_prompt_too(self):
        logits = torch.zeros(VOCABULARY)
        logits[3], logits[9] = 1.0, 0.9
        sampler = a_sampler(start(temperature=0.0, repetition_penalty=2.0))
        assert tokens_of(sampler, 0, logits, 1) == [9]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_bias_bans_and_forces(self, temperature):
        logits = row()
        likeliest = int(logits.argmax())
        banned = a_sampler(start(temperature=temperature, logit_bias={likeliest: -100.0}))
        assert likeliest not in tokens_of(banned, 0, logits, 30)
        forced = a_sampler(start(temperature=temperature, logit_bias={11: 100.0}))
        assert set(tokens_of(forced, 0, logits, 30)) == {11}

    def test_a_bias_without_bound_keeps_the_row_finite(self):
        sampler = a_sampler(start(logit_bias={4: 3e38, 5: -math.inf}, logprobs=1))
        sampled = sampler.sample(row()[None], [0])[0]
        assert (sampled.token_id, sampled.logprobs.logprob) == (4, 0.0)

    def test_end_tokens_wait_for_min_tokens(self):
        logits = torch.zeros(VOCABULARY)
        logits[EOS], logits[7], logits[8] = 9.0, 8.0, 1.0
        sampler = a_sampler(start(temperature=0.0, min_tokens=2, stop_token_ids=(7, 10**9)))
        assert tokens_of(sampler, 0, logits, 3) == [8, 8, EOS]

    def test_a_bias_outside_the_vocabulary_is_refused(self):
        with pytest.raises(ValueError, match="50"):
            a_sampler(start(logit_bias={50: 1.0}))


class TestLogprobs:
    def test_temperature_and_truncation_do_not_change_them(self):
        expected = torch.log_softmax(row(), dim=-1)
        for params in ({"temperature": 0.0}, {"temperature": 2.0, "top_k": 3}, {"top_p": 0.5}):
            sampled = a_sampler(start(logprobs=2, **params)).sample(row()[None].clone(), [0])[0]
            assert sampled.logprobs.logprob == pytest.approx(float(expected[sampled.token_id]))
            assert [token for token, _ in sampled.logprobs.top] == expected.topk(2).indices.tolist()

    def test_none_are_reported_unless_asked(self):
        sampler = a_sampler(start(0), start(1, logprobs=0), start(2, logprobs=2))
        drawn = sampler.sample(torch.stack([row(0), row(1), row(2)]), [0, 1, 2])
        assert drawn[0].logprobs is None
        assert drawn[1].logprobs.top == []
        assert len(drawn[2].logprobs.top) == 2

    def test_those_of_a_prompt_are_of_its_own_next_tokens(self):
        logits = torch.stack([row(0), row(1), row(2)])
        expected = torch.log_softmax(logits, dim=-1)
        entries = prompt_logprobs(logits, [4, 5, None], 3)
        assert [e.token_id for e in entries] == [4, 5, int(expected[2].argmax())]
        assert [e.logprob for e in entries] == pytest.approx(
            [float(expected[i, e.token_id]) for i, e in enumerate(entries)]
        )
        assert all(e.top[0][1] >= e.top[1][1] >= e.top[2][1] for e in entries)

    def test_a_prompt_may_ask_for_no_alternatives(self):
        assert prompt_logprobs(row()[None], [4], 0)[0].top == []


class TestBrokenRows:
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_row_that_is_not_finite_draws_nothing_and_spares_the_others(self, value):
        starts = [start(seq, seed=3, repetition_penalty=1.2) for seq in range(3)]
        logits = torch.stack([row(0), row(1), row(2)])
        broken = logits.clone()
        broken[1, 17] = value
        healthy = a_sampler(*starts).sample(logits.clone(), [0, 1, 2])
        drawn = a_sampler(*starts).sample(broken, [0, 1, 2])
        assert [s.finite for s in drawn] == [True, False, True]
        assert drawn[1].token_id == -1
        assert [drawn[0], drawn[2]] == [healthy[0], healthy[2]]

    def test_large_finite_logits_are_no_fault(self):
        logits = torch.full((1, VOCABULARY), 3e38)
        assert a_sampler(start()).sample(logits, [0])[0].finite

    def test_an_empty_batch_draws_nothing(self):
        assert a_sampler().sample(torch.empty(0, VOCABULARY), []) == []
