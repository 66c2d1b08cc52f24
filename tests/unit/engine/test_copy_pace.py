from engine.adapters.copy_pace import COPY_SHARE, LEAST_BYTES, CopyPace

MIB = 1 << 20


def pace_of(ms_per_mib: float) -> CopyPace:
    """A pace that has seen copies of this speed."""
    pace = CopyPace(16 * MIB)
    pace.started(0, 4 * MIB)
    pace.moved(4 * MIB, 4.0 * ms_per_mib)
    return pace


def test_before_a_speed_was_measured_the_setting_is_the_bound() -> None:
    assert CopyPace(16 * MIB).bytes_now(20.0) == 16 * MIB


def test_a_copy_adds_its_share_to_a_step_and_no_more() -> None:
    pace = pace_of(0.25)
    assert pace.bytes_now(20.0) == COPY_SHARE * 20.0 / 0.25 * MIB


def test_where_copies_take_no_time_the_setting_is_the_bound() -> None:
    assert pace_of(0.0).bytes_now(20.0) == 16 * MIB


def test_however_slow_it_is_a_copy_gets_on() -> None:
    assert pace_of(1000.0).bytes_now(20.0) == LEAST_BYTES


def test_what_is_left_is_counted_oldest_first() -> None:
    pace = CopyPace(16 * MIB)
    pace.started(3, 2 * MIB)
    pace.started(1, 5 * MIB)
    pace.moved(3 * MIB, 1.0)
    assert pace.left_bytes == 4 * MIB
    pace.dropped(1)
    assert pace.left_bytes == 0


def test_a_poll_that_moved_nothing_says_nothing_of_the_speed() -> None:
    pace = CopyPace(16 * MIB)
    pace.moved(8 * MIB, 5.0)
    assert pace.bytes_now(20.0) == 16 * MIB
