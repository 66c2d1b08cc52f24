"""The usage journal keeps counts through every way of ending."""

import os

import pytest

from engine import journal as journal_module
from engine.clock import SimulatedClock
from engine.journal import Journal
from engine.types import RequestOutput, RequestUsage


@pytest.fixture
def path(tmp_path):
    return tmp_path / "engine.jsonl"


@pytest.fixture
def opened(path):
    """Opens journals as lives of one engine; `crash` leaves one behind as `kill -9` does."""
    journals = []

    def open_journal():
        journals.append(Journal(path, SimulatedClock(5000.0)))
        return journals[-1]

    yield open_journal
    for journal in journals:
        journal.close()


def tokens(request_id, *ids, **more):
    return RequestOutput(request_id, 0, token_ids=list(ids), **more)


def last(request_id, completion, finish="stop", **more):
    usage = RequestUsage(3, 0, completion, 0.0, 0.0, 1.0, 2.0)
    return RequestOutput(request_id, 9, finish=finish, usage=usage, **more)


def counts(journal, *ids):
    return {
        e.request_id: (e.prompt_tokens, e.completion_tokens, e.finish) for e in journal.entries(ids)
    }


class TestCounting:
    def test_tokens_are_counted_as_they_come(self, opened):
        journal = opened()
        journal.begin("a", 3)
        journal.record([tokens("a", 1, 2), tokens("a", 3, stop_token=2)])
        assert counts(journal, "a") == {"a": (3, 4, None)}

    def test_the_engines_own_count_is_final(self, opened):
        journal = opened()
        journal.begin("a", 3)
        journal.record([tokens("a", 1), last("a", 7), tokens("a", 8)])
        assert counts(journal, "a") == {"a": (3, 7, "stop")}

    def test_an_error_of_any_choice_is_an_error(self, opened):
        journal = opened()
        journal.begin("a", 3)
        journal.record([tokens("a", error_code="non_finite_logits", finish="error"), last("a", 2)])
        assert counts(journal, "a") == {"a": (3, 2, "error")}

    def test_requests_that_are_not_here_are_left_out(self, opened):
        journal = opened()
        journal.record([tokens("unknown", 1)])
        assert counts(journal, "unknown", "never") == {}


class TestLives:
    def test_after_a_crash_the_counts_are_read_back(self, opened):
        journal = opened()
        journal.begin("done", 3)
        journal.begin("running", 5)
        journal.record([last("done", 7), tokens("running", 1, 2)])
        journal.write()
        assert counts(opened(), "done", "running") == {
            "done": (3, 7, "stop"),
            "running": (5, 2, "error"),
        }

    def test_a_torn_last_line_costs_that_line_alone(self, opened, path):
        journal = opened()
        journal.begin("a", 3)
        journal.write()
        with path.open("ab") as file:
            file.write(b'{"r":"b","p":3')
        again = opened()
        again.begin("c", 1)
        again.write()
        assert set(counts(opened(), "a", "b", "c")) == {"a", "c"}

    def test_an_acknowledged_request_stays_forgotten(self, opened):
        journal = opened()
        journal.begin("a", 3)
        journal.write()
        journal.acknowledge(["a", "unknown"])
        journal.write()
        assert counts(journal, "a") == {}
        assert counts(opened(), "a") == {}

    def test_a_refused_request_leaves_nothing(self, opened):
        journal = opened()
        journal.begin("a", 3)
        journal.drop("a")
        journal.write()
        assert counts(opened(), "a") == {}

    def test_the_file_is_private(self, opened, path):
        opened()
        assert path.stat().st_mode & 0o777 == 0o600


class TestDisk:
    def test_settled_requests_leave_the_file(self, opened, path, monkeypatch):
        monkeypatch.setattr(journal_module, "_COMPACT_BYTES", 1000)
        journal = opened()
        for index in range(200):
            journal.begin(f"r{index}", 3)
        journal.write()
        journal.acknowledge([f"r{index}" for index in range(199)])
        journal.write()
        assert path.stat().st_size > 1000
        journal.sync()
        assert path.stat().st_size < 200
        assert set(counts(opened(), "r199", "r0")) == {"r199"}

    def test_after_a_full_disk_the_file_is_written_anew(self, opened, path, monkeypatch):
        journal = opened()
        journal.begin("a", 3)

        def half(file, data):
            os.write(file, bytes(data[: len(data) // 2]))
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as full:
            full.setattr(journal_module, "_write_all", half)
            with pytest.raises(OSError, match="space"):
                journal.write()
        journal.begin("b", 4)
        journal.write()
        assert counts(opened(), "a", "b") == {"a": (3, 0, "error"), "b": (4, 0, "error")}

    def test_beyond_the_bound_the_oldest_finished_go(self, opened, monkeypatch):
        monkeypatch.setattr(journal_module, "MAX_FINISHED", 2)
        journal = opened()
        for name in ("running", "old", "new"):
            journal.begin(name, 3)
        journal.record([last("old", 1), last("new", 1)])
        journal.write()
        assert set(counts(journal, "running", "old", "new")) == {"running", "new"}


class TestCost:
    def test_what_a_request_cost_survives_the_engine(self, opened):
        journal = opened()
        journal.begin("a", 3)
        usage = RequestUsage(
            3, 2, 4, 0.0, 0.0, 1.0, 2.0, prefill_ms=5.5, decode_ms=7.25, adapter_byte_seconds=9.0
        )
        journal.record([RequestOutput("a", 0, finish="stop", usage=usage)])
        journal.write()
        (entry,) = opened().entries(["a"])
        assert (entry.cached_tokens, entry.prefill_ms) == (2, 5.5)
        assert (entry.decode_ms, entry.adapter_byte_seconds) == (7.25, 9.0)


class TestAge:
    def test_what_nobody_acknowledged_for_two_days_is_forgotten(self, path):
        clock = SimulatedClock(5000.0)
        journal = Journal(path, clock)
        journal.begin("old", 3)
        journal.record([last("old", 2)])
        journal.close()
        clock.advance(journal_module.KEPT_MS - 1000)
        journal = Journal(path, clock)
        journal.begin("new", 3)
        journal.record([last("new", 2)])
        journal.close()
        clock.advance(2000)
        journal = Journal(path, clock)
        assert counts(journal, "old", "new") == {"new": (3, 2, "stop")}
        journal.close()
