"""The address of a table says everything about it, and its links change one thing."""

from app.console.tables import PAGE, TableView


def test_sorting_again_turns_it_round_and_begins_at_the_first_page() -> None:
    view = TableView("/console/keys", q="a&b", sort="name", page=3, kept={"state": "ready"})
    assert view.reorder("name") == "/console/keys?q=a%26b&state=ready&sort=-name"
    assert view.reorder("rank") == "/console/keys?q=a%26b&state=ready&sort=rank"
    assert [view.order(column) for column in ("name", "rank")] == ["ascending", "none"]


def test_pages_lead_back_and_on_as_far_as_there_are_rows() -> None:
    first, last = (TableView("/x", page=n, total=PAGE + 1) for n in (1, 2))
    assert (first.before, first.after) == (None, "/x?page=2")
    assert (last.before, last.after) == ("/x", None)
    assert (last.first, last.last) == (PAGE + 1, PAGE + 1)
    assert last.wanted.offset == PAGE


def test_a_filter_narrows_and_a_sorting_does_not() -> None:
    assert TableView("/x", kept={"state": "ready"}).narrowed
    assert not TableView("/x", sort="name", kept={"state": ""}).narrowed
