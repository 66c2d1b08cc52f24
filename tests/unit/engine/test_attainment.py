import random

from engine.attainment import LEAST_MARGIN, MOST_MARGIN, MOST_TENANTS, Attainment


def test_the_margin_settles_where_the_promise_is_kept_however_wrong_the_prediction_is() -> None:
    """A request is admitted when margin x prediction fits; the truth is 1.6 x the prediction."""
    draw = random.Random(4)
    attainment = Attainment()
    met = []
    for _ in range(3000):
        predicted = draw.uniform(0.0, 300.0)
        if attainment.margin("a") * predicted > 100.0:
            continue
        met.append(1.6 * predicted * draw.lognormvariate(0.0, 0.2) <= 100.0)
        attainment.first_token("a", 0.9, met=met[-1])
    later = met[100:]
    assert 0.9 <= sum(later) / len(later) < 0.99


def test_the_margin_stays_within_its_bounds() -> None:
    attainment = Attainment()
    for _ in range(500):
        attainment.first_token("late", 0.95, met=False)
        attainment.first_token("punctual", 0.95, met=True)
    assert attainment.margin("late") == MOST_MARGIN
    assert attainment.margin("punctual") == LEAST_MARGIN
    assert attainment.margin("unknown") == 1.0


def test_a_tenant_that_is_always_refused_is_tried_again() -> None:
    attainment = Attainment()
    for _ in range(50):
        attainment.first_token("a", 0.95, met=False)
    for _ in range(300):
        attainment.refused("a", 0.95)
    assert attainment.margin("a") < 1.1


def test_below_its_percentile_a_tenant_gains_and_far_above_it_can_wait() -> None:
    attainment = Attainment()
    for n in range(100):
        attainment.finished("behind", 0.95, met=n % 3 > 0)
        attainment.finished("ahead", 0.5, met=True)
    assert attainment.gain("behind") == 2.0
    assert attainment.gain("ahead") == 0.5
    assert attainment.gain("unknown") == 1.0


def test_counts_of_more_tenants_than_are_remembered_are_kept_together() -> None:
    attainment = Attainment()
    for n in range(MOST_TENANTS + 10):
        attainment.first_token(f"t{n}", 0.95, met=True)
    counts = attainment.counts()
    assert len(counts) == MOST_TENANTS + 1
    assert counts["other"].ttft_met == 10
    assert sum(kept.ttft_met for kept in counts.values()) == MOST_TENANTS + 10
