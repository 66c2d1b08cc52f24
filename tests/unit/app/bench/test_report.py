"""The arithmetic of reports, on outcomes small enough to check by hand."""

import json
from pathlib import Path

import pytest

from app.bench.outcomes import Outcome
from app.bench.report import Percentiles, jain_index, summarise
from app.bench.tables import as_document, print_reports, write_json
from app.bench.workloads import Budget

TIGHT = Budget(ttft_ms=100.0, tpot_ms=10.0, percentile=0.5)


def outcome(
    *token_ms: float,
    tenant: str = "t0",
    budget: Budget = TIGHT,
    refused: str = "",
    done: bool = True,
) -> Outcome:
    """A request sent at 0 that asked for 100 tokens and got one at each of these times."""
    made = Outcome(tenant, "a", 0.0, 100, budget)
    for at_ms in token_ms:
        made.take(at_ms)
    made.refused, made.done = refused, done
    return made


class TestOneRequest:
    def test_times_are_counted_from_the_request(self) -> None:
        made = Outcome("t", "a", sent_ms=50.0, asked_tokens=10)
        made.take(80.0)
        made.take(90.0)
        made.take(110.0)
        assert made.ttft_ms == 30.0
        assert made.tpot_ms == 15.0
        assert list(made.gaps_ms) == [10.0, 20.0]

    def test_a_token_is_due_at_first_token_plus_k_times_tpot(self) -> None:
        assert outcome(90.0, 100.0, 110.0).late_tokens == 0
        assert outcome(90.0, 92.0, 110.0).late_tokens == 0  # early ones save up
        assert outcome(90.0, 101.0, 110.0).late_tokens == 1

    def test_tokens_that_come_together_are_due_one_by_one(self) -> None:
        made = Outcome("t", "a", 0.0, 10, TIGHT)
        made.take(50.0)
        made.take(70.0, count=2)  # due at 60 and 70
        assert made.late_tokens == 1
        assert made.tokens == 3

    def test_good_is_whole_and_inside_the_budget(self) -> None:
        assert outcome(100.0, 105.0).good
        assert not outcome(101.0, 105.0).good
        assert not outcome(90.0, 101.0).good
        assert not outcome(90.0, done=False).good
        assert not outcome(90.0, refused="cancelled").good

    def test_a_late_token_that_is_made_up_for_is_good_at_the_end_alone(self) -> None:
        made = outcome(90.0, 101.0, 110.0)
        assert made.good_at_end
        assert not made.good
        assert not outcome(90.0, 101.0).good_at_end
        assert not outcome(101.0, 102.0).good_at_end

    def test_no_budget_is_no_promise(self) -> None:
        assert outcome(1e6, 2e6, budget=Budget()).good


class TestReport:
    def test_refusals_count_in_the_denominator_of_goodput_but_not_of_attainment(self) -> None:
        report = summarise([outcome(50.0), outcome(200.0), outcome(refused="queue_full")], 2.0)
        assert report.goodput == pytest.approx(1 / 3)
        assert report.tenants[0].attainment == pytest.approx(1 / 2)
        assert report.tenants[0].attains
        assert report.refused == {"queue_full": 1}

    def test_throughput_counts_prompts_of_whole_answers_only(self) -> None:
        report = summarise([outcome(1.0, 2.0), outcome(1.0, 2.0, 3.0, refused="cancelled")], 2.0)
        assert report.output_tokens_per_s == 2.5
        assert report.total_tokens_per_s == (100 + 3) / 2.0

    def test_a_tenant_attains_from_its_percentile_on(self) -> None:
        mine = [outcome(50.0, tenant="a"), outcome(200.0, tenant="a")]
        theirs = [outcome(50.0, tenant="b"), *(outcome(200.0, tenant="b") for _ in range(2))]
        report = summarise(mine + theirs, 1.0)
        assert {t.tenant: t.attains for t in report.tenants} == {"a": True, "b": False}
        assert report.tenants_attaining == 0.5

    def test_a_tenant_without_answers_has_no_attainment(self) -> None:
        report = summarise([outcome(refused="queue_full")], 1.0)
        assert report.tenants[0].attainment is None
        assert report.ttft_ms == Percentiles(None, None, None)

    def test_jain_is_over_the_shares_that_tenants_were_served(self) -> None:
        both = summarise([outcome(1.0, tenant="a"), outcome(1.0, tenant="b")], 1.0)
        one = summarise([outcome(1.0, tenant="a"), outcome(tenant="b", refused="x")], 1.0)
        assert both.jain == pytest.approx(1.0)
        assert one.jain == pytest.approx(0.5)

    def test_nothing_offered_is_a_report_all_the_same(self) -> None:
        report = summarise([], 1.0)
        assert (report.offered, report.goodput, report.jain) == (0, 1.0, 1.0)


def test_jain_index_of_known_vectors() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain_index([4.0, 2.0]) == pytest.approx(36 / 40)
    assert jain_index([0.0, 0.0]) == 1.0


def test_percentiles_interpolate() -> None:
    assert Percentiles.of(range(101)) == Percentiles(50.0, 95.0, 99.0)


class TestOutput:
    def test_the_table_names_runs_refusals_and_tenants_that_missed(self) -> None:
        found = [outcome(200.0, tenant="late"), outcome(50.0), outcome(refused="queue_full")]
        lines: list[str] = []
        print_reports(lines.append, {"vtc": summarise(found, 1.0)})
        text = "\n".join(lines)
        assert "0.333" in text
        assert "vtc: not answered: 1 queue_full" in text
        assert any("late" in line and "0.000" in line for line in lines)
        assert not any(line.split()[1:2] == ["t0"] for line in lines)  # that one attained

    def test_json_holds_every_figure_and_no_infinity(self, tmp_path: Path) -> None:
        report = summarise([outcome(50.0, 60.0), outcome(refused="queue_full")], 1.0)
        write_json(tmp_path / "new" / "out.json", {"vtc": report}, seed=4)
        document = json.loads((tmp_path / "new" / "out.json").read_text())
        assert document["seed"] == 4
        run = document["runs"]["vtc"]
        assert run["goodput"] == 0.5
        assert run["ttft_ms"]["p99"] == 50.0
        assert run["tenants"][0]["tenant"] == "t0"
        assert document == json.loads(json.dumps(as_document({"vtc": report}, seed=4)))
