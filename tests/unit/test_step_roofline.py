"""Work of a whole step, against numbers computed by hand."""

from benchmarks.roofline import Work
from benchmarks.step_roofline import Shape, step

TINY = Shape("tiny", 2, 8, 16, 2, 1, 4, 32, 5, 8.5, kv_bytes=1)


def test_a_decode_step_by_part() -> None:
    parts = step(TINY, [(9, 1), (4, 1)], [2, 4], [2, 4], logits=2)
    # a layer's linears: 8 x 16, 8 x 8, 8 x 32, 16 x 8 = 576 weights; rows in and out: 104
    assert parts["linears"] == Work(2 * 576 * 5 // 8 + 2 * 2 * 2 * 104, 2 * 2 * 2 * 576)
    assert parts["head"] == Work(272 + 256, 2 * 2 * 256)
    # 15 positions of 4 keys and 4 values in one byte; q in and out of 8 in two
    assert parts["attention"] == Work(2 * (15 * 8 + 2 * 32), 2 * 4 * 8 * 15)
    # A and B of a rank: 3 * 8 + 16, 8 + 8, 2 * 8 + 32, 16 + 8 = 128 numbers; y twice: 40 + 64 * 2
    assert parts["LoRA"] == Work(2 * 2 * (6 * 128 + 2 * (40 + 2 * 64)), 2 * 2 * 6 * 128)


def test_without_adapters_lora_is_nothing() -> None:
    assert step(TINY, [(0, 3)], [], [], logits=1)["LoRA"] == Work(0)
