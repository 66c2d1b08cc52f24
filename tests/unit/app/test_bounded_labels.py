"""Labels of tenants and adapters: bounded, never taken away, and nothing gets lost."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from app.bounded_labels import NONE, OTHER, BoundedLabels


def test_half_of_the_places_go_to_whoever_comes_first():
    labels = BoundedLabels(4)
    assert [labels.label(name) for name in "abc"] == ["a", "b", OTHER]


def test_a_busy_latecomer_earns_a_place():
    labels = BoundedLabels(4)
    for name in "ab":
        labels.label(name)
    for number in range(200):
        labels.label(f"small-{number}")
        labels.label("heavy")
    assert labels.label("heavy") == "heavy"
    assert labels.label("small-7") == OTHER


def test_no_adapter_is_none():
    assert BoundedLabels(1).label(None) == NONE


@given(st.lists(st.integers(0, 400), max_size=600), st.integers(1, 6))
def test_labels_stay_bounded_and_events_add_up(events, places):
    labels = BoundedLabels(places)
    counted = Counter(labels.label(str(event)) for event in events)
    assert counted.total() == len(events)
    assert len(set(counted) - {OTHER}) <= places


@given(st.lists(st.integers(0, 30), max_size=300))
def test_whoever_has_a_place_keeps_it(events):
    labels = BoundedLabels(5)
    placed = set()
    for event in map(str, events):
        label = labels.label(event)
        assert event not in placed or label == event
        if label != OTHER:
            placed.add(event)
