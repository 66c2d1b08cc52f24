"""The choice of an engine, as a function of what is known of each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.inference.routing import SPILL_WAITING, Candidate, choose, cost


def address_of(*candidates, key="adapter"):
    return choose(candidates, key).address


class TestLoad:
    def test_the_less_loaded_engine_is_chosen(self):
        assert address_of(Candidate("a", 5), Candidate("b", 4)) == "b"

    def test_a_waiting_request_weighs_more_than_a_running_one(self):
        assert address_of(Candidate("a", 5, waiting=1), Candidate("b", 6)) == "b"

    def test_equal_engines_share_the_adapters(self):
        engines = [Candidate(name, 0) for name in "abc"]
        homes = [address_of(*engines, key=f"adapter-{i}") for i in range(300)]
        assert all(60 < homes.count(name) < 140 for name in "abc")

    def test_an_adapter_keeps_its_home_when_another_engine_leaves(self):
        engines = [Candidate(name, 0) for name in "abc"]
        for i in range(50):
            home = address_of(*engines, key=str(i))
            left = [e for e in engines if e.address != "c"]
            assert home == "c" or address_of(*left, key=str(i)) == home


class TestResidency:
    @pytest.mark.parametrize("tier", ["device", "host", "loading"])
    def test_an_adapter_stays_where_it_lies(self, tier):
        assert address_of(Candidate("a", 1, tier=tier), Candidate("b", 0)) == "a"

    def test_the_device_beats_the_host(self):
        assert address_of(Candidate("a", 1, tier="host"), Candidate("b", 1, tier="device")) == "b"

    def test_requests_spill_over_when_its_engine_is_that_much_busier(self):
        assert address_of(Candidate("a", 9, tier="device"), Candidate("b", 0)) == "b"

    def test_a_long_queue_takes_the_bonus_away(self):
        full = Candidate("a", 0, waiting=SPILL_WAITING, tier="device")
        assert cost(full) == cost(Candidate("b", 0, waiting=SPILL_WAITING))

    def test_an_engine_that_has_set_the_adapter_aside_is_the_last_resort(self):
        aside = Candidate("a", 0, tier="quarantined")
        assert address_of(aside, Candidate("b", 50)) == "b"
        assert address_of(aside) == "a"


candidates = st.lists(
    st.builds(
        Candidate,
        address=st.sampled_from("abcdef"),
        running=st.integers(0, 50),
        waiting=st.integers(0, 50),
        tier=st.sampled_from([None, "device", "host", "loading"]),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda candidate: candidate.address,
)


@given(candidates, st.text(max_size=8))
def test_nothing_cheaper_is_passed_over_and_the_order_does_not_matter(engines, key):
    chosen = choose(engines, key)
    assert cost(chosen) == min(cost(engine) for engine in engines)
    assert choose(engines[::-1], key) == chosen
