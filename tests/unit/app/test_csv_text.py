"""Cells that no spreadsheet runs."""

import pytest

from app.csv_text import cell


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r", "\n"])
def test_every_beginning_of_a_formula_is_quoted(start):
    assert cell(f"{start}1+1") == f"'{start}1+1"
    assert cell(-1) == -1
