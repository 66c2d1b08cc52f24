"""`python -m benchmarks.peers`: its plan, its check of every peer, its figures and its files."""

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from benchmarks.peers import main
from benchmarks.peers_parts import files
from benchmarks.peers_parts.check import agreement, judge
from benchmarks.peers_parts.processes import PeerFailed, WorkerPeer, session_cpu_s
from benchmarks.peers_parts.report import OURS, Run, as_document, figures, table, too_costly
from benchmarks.peers_parts.workload import RANKS, SCENARIOS, Job, check_jobs
from engine.model.loader import open_checkpoint
from tests.model_factories import make_adapter, make_llama, with_adapter, write_gguf

BURST, BURST_BASE, ALONE, ALONE_BASE = SCENARIOS
ECHO = "tests.unit.benchmarks.echo_peer"


class TestWorkload:
    def test_request_i_uses_adapter_i_mod_16_and_ranks_are_the_stated_ones(self) -> None:
        job = BURST.job(random.Random(1), 1000)
        assert job.adapters == [*range(16), *range(16)]
        assert sorted(RANKS) == [8] * 8 + [16] * 4 + [32] * 2 + [64] * 2
        assert BURST_BASE.job(random.Random(1), 1000).adapters == [None] * 32

    def test_one_request_alone_uses_an_adapter_of_rank_8(self) -> None:
        job = ALONE.job(random.Random(1), 1000)
        assert (job.adapters, RANKS[0]) == ([0], 8)
        assert ALONE_BASE.job(random.Random(1), 1000).adapters == [None]

    def test_every_prompt_is_new_and_128_tokens_of_the_vocabulary(self) -> None:
        rng = random.Random(1)
        prompts = BURST.job(rng, 1000).prompts + BURST.job(rng, 1000).prompts
        assert len({tuple(prompt) for prompt in prompts}) == 64
        assert all(len(prompt) == 128 and max(prompt) < 1000 for prompt in prompts)

    def test_the_check_asks_the_same_prompts_with_adapters_and_without(self) -> None:
        with_adapters, without = check_jobs(range(1000))
        assert with_adapters.prompts == without.prompts
        assert len({tuple(prompt) for prompt in without.prompts}) == 32
        assert (set(with_adapters.adapters), set(without.adapters)) == (set(range(16)), {None})
        with pytest.raises(ValueError, match="100 tokens"):
            check_jobs(range(100))


class TestCheck:
    BASE = [[1, 2, 3, 4], [5, 6, 7, 8]]
    ADAPTERS = [[1, 9, 9, 9], [9, 9, 9, 9]]

    def test_agreement_counts_up_to_the_first_other_token(self) -> None:
        assert agreement(self.BASE, self.BASE) == 1.0
        assert agreement([[1, 2, 0, 4], [0, 6, 7, 8]], self.BASE) == 0.25

    def test_a_peer_that_answers_as_peft_does_is_counted(self) -> None:
        rounding = [[1, 9, 9, 9], [9, 9, 0, 0]]
        assert judge(rounding, self.BASE, self.ADAPTERS, self.BASE).counted

    def test_a_peer_that_ignores_its_adapters_is_not_counted(self) -> None:
        verdict = judge(self.BASE, self.BASE, self.ADAPTERS, self.BASE)
        assert not verdict.counted
        assert "2 answers are the base model's" in verdict.reason

    def test_a_peer_with_other_adapters_is_not_counted(self) -> None:
        others = [[7, 9, 9, 9], [8, 9, 9, 9]]
        verdict = judge(others, self.BASE, self.ADAPTERS, self.BASE)
        assert verdict.reason == "only 0% of its tokens with adapters are PEFT's"

    def test_a_peer_with_another_base_model_is_not_counted(self) -> None:
        verdict = judge(self.ADAPTERS, [[0] * 4] * 2, self.ADAPTERS, self.BASE)
        assert verdict.reason == "only 0% of its tokens of the base model are transformers'"


def burst(number: int, peer: str, wall_s: float, cpu_s: float) -> Run:
    return Run(number, BURST.name, peer, 32, 2048, wall_s, cpu_s)


def alone(number: int, peer: str, first_s: float, wall_s: float) -> Run:
    return Run(number, ALONE.name, peer, 1, 64, wall_s, wall_s, first_s)


class TestFigures:
    def test_ratios_are_taken_within_each_round(self) -> None:
        """The machine was half as fast in the second round, for both alike."""
        runs = [
            *(burst(1, OURS, 10, 20), burst(1, "PEFT", 40, 60)),
            *(burst(2, OURS, 20, 40), burst(2, "PEFT", 80, 120)),
        ]
        peft = figures(runs)[BURST.name, "PEFT"]
        assert peft.ratio is not None
        assert peft.cpu_ratio is not None
        assert (peft.ratio.least, peft.ratio.median, peft.ratio.most) == (4, 4, 4)
        assert peft.cpu_ratio.median == 3
        assert (peft.tokens_s.least, peft.tokens_s.most) == (2048 / 80, 2048 / 40)

    def test_a_token_alone_is_timed_without_the_prompt(self) -> None:
        by_key = figures([alone(1, OURS, 0.1, 0.73), alone(1, "vLLM", 0.2, 1.46)])
        figure = by_key[ALONE.name, "vLLM"]
        assert figure.token_ms is not None
        assert figure.first_ms is not None
        assert figure.ratio is not None
        assert figure.token_ms.median == pytest.approx(20.0)
        assert figure.first_ms.median == pytest.approx(200.0)
        assert figure.ratio.median == pytest.approx(2.0)

    def test_a_round_that_a_peer_missed_counts_for_no_ratio(self) -> None:
        runs = [burst(1, OURS, 10, 20), burst(2, OURS, 99, 99), burst(1, "vLLM", 50, 100)]
        figure = figures(runs)[BURST.name, "vLLM"]
        assert figure.rounds == 1
        assert figure.ratio is not None
        assert figure.ratio.most == 5

    def test_the_table_has_a_row_for_each_peer_and_scenario(self) -> None:
        runs = [burst(n, peer, 10 * n, 20) for n in (1, 2) for peer in (OURS, "PEFT")]
        lines = table(figures([*runs, alone(1, OURS, 0.1, 0.73)]))
        assert (
            "| 32 at once, 16 adapters: PEFT | 153.6 (102.4 .. 204.8) | 102.4 | 1.00 | 1.00 | 2 |"
        ) in lines
        assert "| one request, adapter of rank 8: loramux | 10.0 | 100 | 87.7 |  |  | 1 |" in lines

    def test_the_document_has_facts_figures_and_every_run(self) -> None:
        document = as_document([burst(1, OURS, 10, 20)], threads=2)
        assert document["threads"] == 2
        assert document["figures"][BURST.name][OURS]["tokens_s"]["median"] == 204.8
        assert document["runs"][0]["wall_s"] == 10

    def test_the_dearest_is_left_out_of_the_rounds_that_would_take_too_long(self) -> None:
        costs = {(BURST.name, "vLLM"): 200.0, (BURST.name, "PEFT"): 30.0, (ALONE.name, OURS): 1.0}
        assert too_costly(costs, 2, 462.0) == set()
        assert too_costly(costs, 2, 461.0) == {(BURST.name, "vLLM")}
        assert too_costly(costs, 2, 0.0) == set(costs)
        assert too_costly(costs, 0, 0.0) == set()


class TestFiles:
    def test_a_gguf_adapter_adds_what_peft_adds(self, tmp_path: Path) -> None:
        """Beside whole models in llama.cpp's format: the base, and the base with it merged."""
        model = make_llama(seed=1)
        adapter = make_adapter(
            model, tmp_path / "a", seed=2, r=4, lora_alpha=6, target_modules=files.LAYER_TARGETS
        )
        merged = with_adapter(model, adapter).merge_and_unload()
        for name, one in (("base", model), ("merged", merged)):
            write_gguf(one, tmp_path / f"{name}.gguf", "F32", edges="F32")
        config = open_checkpoint(tmp_path / "base.gguf").config
        files.write_gguf_adapter(adapter, tmp_path / "a.gguf", config)

        before, after, lora = (
            {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / f"{name}.gguf").tensors}
            for name in ("base", "merged", "a")
        )
        alpha = GGUFReader(tmp_path / "a.gguf").get_field("adapter.lora.alpha")
        assert alpha is not None
        changed = [name for name in before if not np.array_equal(before[name], after[name])]
        assert len(changed) == 3 * 7
        assert sorted(lora) == sorted(f"{name}.lora_{side}" for name in changed for side in "ab")
        for name in changed:
            a, b = lora[f"{name}.lora_a"], lora[f"{name}.lora_b"]
            delta = float(alpha.contents()) / len(a) * (b @ a)
            np.testing.assert_allclose(delta, after[name] - before[name], atol=1e-6)

    @pytest.mark.parametrize("odd", [{"use_rslora": True}, {"rank_pattern": {"q_proj": 2}}])
    def test_what_llama_cpp_cannot_say_is_refused(
        self, tmp_path: Path, odd: dict[str, object]
    ) -> None:
        model = make_llama(seed=1)
        adapter = make_adapter(model, tmp_path / "a", seed=2, r=4, target_modules=["q_proj"], **odd)
        write_gguf(model, tmp_path / "base.gguf", "F32")
        config = open_checkpoint(tmp_path / "base.gguf").config
        with pytest.raises(ValueError, match=next(iter(odd))):
            files.write_gguf_adapter(adapter, tmp_path / "a.gguf", config)


class TestPeers:
    def peer(self, folder: Path, **setup: object) -> WorkerPeer:
        return WorkerPeer("echo", folder, {"ECHO_GREETING": "hello"}, ECHO, setup)

    async def test_a_worker_answers_and_tells_about_itself(self, tmp_path: Path) -> None:
        peer = self.peer(tmp_path)
        await peer.start(60.0)
        try:
            answer = await peer.ask(Job([[5], [7]], [None, 3], 2), 60.0)
            assert answer.tokens == [[5, 5], [7, 7]]
            assert answer.wall_s > 0
            assert peer.facts == {"greeting": "hello"}
            assert session_cpu_s(peer.pid) > 0
        finally:
            await peer.stop()
        assert session_cpu_s(peer.pid) == 0  # nothing of it is left

    async def test_a_paused_worker_answers_once_it_is_resumed(self, tmp_path: Path) -> None:
        peer = self.peer(tmp_path)
        await peer.start(60.0)
        try:
            peer.pause()
            asked = asyncio.create_task(peer.ask(Job([[5]], [None], 1), 60.0))
            assert await asyncio.wait({asked}, timeout=0.1) == (set(), {asked})
            peer.resume()
            assert (await asked).tokens == [[5]]
        finally:
            await peer.stop()

    async def test_a_worker_that_does_not_start_says_why(self, tmp_path: Path) -> None:
        peer = self.peer(tmp_path, broken="no such model")
        with pytest.raises(PeerFailed, match=r"(?s)echo ended.*no such model"):
            await peer.start(60.0)
        await peer.stop()

    async def test_a_worker_that_takes_too_long_has_failed(self, tmp_path: Path) -> None:
        peer = self.peer(tmp_path)
        await peer.start(60.0)
        try:
            peer.pause()
            with pytest.raises(PeerFailed, match="echo took longer than 0 s"):
                await peer.ask(Job([[5]], [None], 1), 0.01)
        finally:
            await peer.stop()

    async def test_answers_of_another_length_are_a_failure(self, tmp_path: Path) -> None:
        peer = self.peer(tmp_path, missing=1)
        await peer.start(60.0)
        try:
            with pytest.raises(PeerFailed, match=r"gave 1 answers of \[3\] tokens"):
                await peer.ask(Job([[5]], [None], 4), 60.0)
        finally:
            await peer.stop()


def test_a_peer_variable_without_its_peer_is_refused() -> None:
    with pytest.raises(SystemExit, match="--env nobody:A=1"):
        main(["--env", "nobody:A=1"])
