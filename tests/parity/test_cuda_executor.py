"""The whole CUDA runner on a device that is not there, with plain faces: its answers are right."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.cuda_driver import CudaDriver
from tests.model_factories import (
    ALL_TARGETS,
    make_adapter,
    make_llama,
    make_model,
    read_blob,
    save_folder,
    with_adapter,
    write_gguf,
)
from tests.parity.driver import Driver, Piece, reference_logits

PROMPT = [(5 * index * index + index + 4) % 96 for index in range(60)]


def feed_in_pieces(driver: Driver, tokens: list[int], sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """The logits after each piece of the one sequence 0."""
    return [driver.feed(Piece(0, tokens[len(driver.fed(0)) :][:size]))[0] for size in sizes]


def test_a_mixed_batch_equals_peft_in_prompts_and_replayed_decodes(tmp_path: Path) -> None:
    model = make_llama(seed=11, tie_word_embeddings=False)
    driver = CudaDriver(save_folder(model, tmp_path / "base"), tmp_path, linear_path="fp32")
    targets = {4: ["embed_tokens", "lm_head", "q_proj"], 17: ALL_TARGETS}
    folders = [
        make_adapter(model, tmp_path / f"r{rank}", seed=rank, r=rank, target_modules=names)
        for rank, names in targets.items()
    ]
    for slot, folder in enumerate(folders):
        driver.add_adapter(slot, read_blob(folder, driver.executor.description))
    oracles = [*(with_adapter(model, folder) for folder in folders), model]
    wanted = {slot: reference_logits(oracles[slot], PROMPT) for slot in (0, 1, -1)}
    at = 0
    for size in (11, 6, 1, 1):
        pieces = [Piece(slot, PROMPT[at : at + size], slot) for slot in wanted]
        before = len(driver.device.log)
        got = driver.feed(*pieces)
        at += size
        assert (("replay",) in driver.device.log[before:]) == (size == 1)
        for slot, logits in zip(wanted, got, strict=True):
            torch.testing.assert_close(logits, wanted[slot][at - 1], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "BF16"])
def test_every_stored_form_of_a_weight_is_served_within_bf16(tmp_path: Path, kind: str) -> None:
    served = write_gguf(make_llama(seed=3), tmp_path / "base.gguf", kind)
    driver = CudaDriver(tmp_path / "base.gguf", tmp_path, linear_path="auto", kv_dtype="bf16")
    want = reference_logits(served, PROMPT)
    for at, got in zip((30, 31), feed_in_pieces(driver, PROMPT, (30, 1)), strict=True):
        assert (got - want[at - 1]).abs().max() < 0.15  # logits spread over some ten units
        assert torch.cosine_similarity(got, want[at - 1], dim=0) > 0.999


FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "sliding window": (MistralForCausalLM, MistralConfig, {"sliding_window": 20}),
    "head norms": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_families_differ_in_is_right(tmp_path: Path, family: str) -> None:
    kind, config, changes = FAMILIES[family]
    model = make_model(kind, config, seed=5, **changes)
    driver = CudaDriver(save_folder(model, tmp_path / "base"), tmp_path, linear_path="fp32")
    want = reference_logits(model, PROMPT)
    for at, got in zip((40, 41, 60), feed_in_pieces(driver, PROMPT, (40, 1, 19)), strict=True):
        torch.testing.assert_close(got, want[at - 1], atol=1e-4, rtol=0.0)


def test_long_contexts_are_attended_in_splits_that_a_graph_merges(tmp_path: Path) -> None:
    model = make_llama(seed=7, max_position_embeddings=1024)
    tokens = [(7 * index * index + 3) % 96 for index in range(602)]
    driver = CudaDriver(save_folder(model, tmp_path / "base"), tmp_path, linear_path="fp32")
    want = reference_logits(model, tokens)
    sizes = (128, 128, 128, 128, 88, 1, 1)
    got = feed_in_pieces(driver, tokens, sizes)
    for at, logits in zip((600, 601, 602), got[-3:], strict=True):
        torch.testing.assert_close(logits, want[at - 1], atol=2e-4, rtol=0.0)


def test_prompt_logprobs_are_those_of_the_text(tmp_path: Path) -> None:
    model = make_llama(seed=31)
    driver = CudaDriver(save_folder(model, tmp_path / "base"), tmp_path, linear_path="fp32")
    want = torch.log_softmax(reference_logits(model, PROMPT), dim=-1)
    driver.prompts[0] = PROMPT
    entries = []
    for piece in (PROMPT[:9], PROMPT[9:10], PROMPT[10:]):
        driver.feed(Piece(0, piece, prompt_logprobs=3))
        entries += driver.results[0].prompt_logprobs or []
    for at, entry in enumerate(entries[:-1]):
        assert entry.token_id == PROMPT[at + 1]
        assert entry.logprob == pytest.approx(want[at, PROMPT[at + 1]].item(), abs=1e-4)
        assert [token for token, _ in entry.top] == want[at].topk(3).indices.tolist()


def test_overflow_in_one_adapter_is_reported_for_its_rows_alone(tmp_path: Path) -> None:
    model = make_llama(seed=31)
    driver = CudaDriver(save_folder(model, tmp_path / "base"), tmp_path, linear_path="fp32")
    folder = make_adapter(
        model, tmp_path / "a", seed=1, strength=1e30, r=4, target_modules=["q_proj", "down_proj"]
    )
    driver.add_adapter(0, read_blob(folder, driver.executor.description))
    for size in (20, 1):  # a prompt, then a replayed decode
        at = len(driver.fed(0))
        pieces = [Piece(seq, PROMPT[at : at + size], slot) for seq, slot in ((0, -1), (1, 0))]
        got = driver.feed(*pieces)[0]
        good, broken = driver.results
        assert (broken.finite, broken.token_ids) == (False, [])
        assert (good.finite, len(good.token_ids)) == (True, 1)
        want = reference_logits(model, PROMPT[: at + size])[-1]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0.0)
