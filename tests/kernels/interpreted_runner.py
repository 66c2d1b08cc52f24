"""The whole CUDA runner with its Triton kernels, under Triton's interpreter."""

from pathlib import Path

import pytest
import torch

from engine.cuda import steps
from engine.cuda.faces import Faces
from tests.cuda_driver import CudaDriver
from tests.fake_device import FakeDevice
from tests.model_factories import make_adapter, make_llama, read_blob, with_adapter, write_gguf
from tests.parity.driver import Piece, reference_logits

TOKENS = [(5 * index * index + index + 4) % 96 for index in range(12)]
TINY = {
    "max_running": 2, "max_batch_tokens": 16, "max_rank": 16, "max_slots": 2,
    "kv_dtype": "bf16", "adapter_dtype": "bf16", "linear_path": "auto",
}  # fmt: skip


# rows of padding hold what was in memory before: numbers of any size, which nobody reads
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_prompts_and_replayed_decodes_are_right_within_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "MAX_PARTIALS", 4)  # programs without work cost time here
    model = make_llama(
        seed=3, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=64,
    )  # fmt: skip
    served = write_gguf(model, tmp_path / "base.gguf", "Q4_1")
    targets = ["embed_tokens", "q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head"]
    folder = make_adapter(served, tmp_path / "a", seed=1, r=6, target_modules=targets)
    device = FakeDevice(total_bytes=16 << 20)
    driver = CudaDriver(tmp_path / "base.gguf", tmp_path, device=device, faces=Faces(), **TINY)
    driver.add_adapter(1, read_blob(folder, driver.executor.description))
    wanted = [reference_logits(m, TOKENS) for m in (served, with_adapter(served, folder))]
    at = 0
    for size in (7, 1, 1):
        device.log.clear()
        got = driver.feed(
            *(Piece(seq, TOKENS[at : at + size], slot) for seq, slot in ((0, -1), (1, 1)))
        )
        at += size
        assert (("replay",) in device.log) == (size == 1)
        for logits, want in zip(got, wanted, strict=True):
            assert torch.cosine_similarity(logits, want[at - 1], dim=0) > 0.999
            assert (logits - want[at - 1]).abs().max() < 0.15
    assert (wanted[0] - wanted[1]).abs().max() > 0.5  # the adapter is seen
