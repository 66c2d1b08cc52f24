"""Numbers that a benchmark cannot run with end it at once, by the name of their argument."""

import argparse

import pytest

from benchmarks import kernels
from benchmarks.arguments import a_second, at_least_one, positive


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        *((at_least_one, text) for text in ("0", "-1", "1.5", "x", "")),
        *((positive, text) for text in ("0", "-1", "nan", "inf", "x")),
        *((a_second, text) for text in ("0", "36", "nan")),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_is_due(type_, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=f"^{text!r}"):
        type_(text)


def test_what_makes_sense_is_taken() -> None:
    assert (at_least_one("3"), positive("0.5"), a_second("36e9")) == (3, 0.5, 36e9)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--bandwidth", "36"], "argument --bandwidth"),
        (["--device", "h200", "--only", "no such case"], "argument --only"),
    ],
)
def test_the_command_names_the_argument_and_measures_nothing(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        kernels.main(arguments)
    shown = capsys.readouterr()
    assert ended.value.code == 2
    assert named in shown.err
