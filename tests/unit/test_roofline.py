"""The bytes and operations that kernels are measured against."""

import pytest

from benchmarks import roofline
from benchmarks.roofline import Work


def test_the_floor_is_the_longer_of_moving_and_multiplying():
    assert Work(2000, 10).floor_ms(1e6, 1e6) == 2.0
    assert Work(10, 3000).floor_ms(1e6, 1e6) == 3.0


def test_rows_that_surround_products_move_in_and_out():
    assert roofline.norm(3, 10, residual=False) == Work(2 * 10 * 7)
    assert roofline.norm(3, 10, residual=True) == Work(2 * 10 * 13)
    assert roofline.silu_gate(3, 10) == Work(180)
    assert roofline.rotate_and_write(1, 4, 2, 64) == Work(64 * (2 * 8 * 2 + 4))
    assert roofline.sample(2, 100) == Work(800)


def test_keys_and_values_are_read_once_a_sequence():
    decode = roofline.attention([(9, 1)], 4, 2, 64)
    assert decode == Work(2 * 64 * (2 * 2 * 10 + 8), 4 * 4 * 64 * 10)
    chunk = roofline.attention([(8, 2)], 4, 2, 64)
    assert chunk == Work(2 * 64 * (2 * 2 * 10 + 16), 4 * 4 * 64 * (9 + 10))


@pytest.mark.parametrize(("window", "seen"), [(4, 4), (100, 10)])
def test_a_window_bounds_what_is_read(window, seen):
    work = roofline.attention([(9, 1)], 4, 2, 64, window)
    assert work == Work(2 * 64 * (2 * 2 * seen + 8), 4 * 4 * 64 * seen)


def test_weights_count_by_their_own_size():
    assert roofline.int4_linear(1, 256, 512, 128, zeros=True) == Work(
        256 * 512 // 2 + 256 * 4 * 2 * 2 + 2 * (512 + 256), 2 * 256 * 512
    )
    assert roofline.fp8_linear(1, 256, 512).bytes == 256 * 512 + 4 * 256 + 2 * (512 + 256)


def test_an_adapter_is_read_once_however_many_rows_use_it():
    work = roofline.lora([8, 8, 16], [8, 16], slices=3, width=100, out=50)
    assert work == Work(2 * (24 * 350 + 3 * 200), 2 * 32 * 350)
