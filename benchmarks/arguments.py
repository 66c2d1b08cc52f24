"""Numbers that the benchmarks' commands take; argparse names the argument that is wrong."""

import argparse
import math

LEAST_A_SECOND = 1e6


def at_least_one(text: str) -> int:
    """A whole number, 1 or more."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number, 1 or more, is due")
    return number


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: a number above 0 is due")
    return number


def a_second(text: str) -> float:
    """What a device moves or multiplies; so little that giga was left out is refused."""
    number = positive(text)
    if number < LEAST_A_SECOND:
        raise argparse.ArgumentTypeError(f"{text!r} a second is too little: write 36e9 for 36 giga")
    return number


def add_speeds(parser: argparse.ArgumentParser) -> None:
    """--bandwidth and --flops, in place of a device's known or measured ones."""
    parser.add_argument("--bandwidth", type=a_second, help="bytes a second, such as 36e9")
    parser.add_argument("--flops", type=a_second, help="operations a second, such as 740e9")
