"""Reads as much of PromQL as our dashboards and alerts use; refuses what it does not know.

`parse(text)` returns the selectors and groupings of a query. Grammar: binary operators (with
on/ignoring, group_left/right), aggregations (by/without before or after), functions, selectors
with matchers and a range, numbers, strings, parentheses.
"""

import re
from dataclasses import dataclass, field

AGGREGATIONS = {"sum", "max", "min", "avg", "count", "topk", "bottomk", "quantile"}
FUNCTIONS = {"rate", "increase", "irate", "histogram_quantile", "clamp_min", "clamp_max", "time",
             "absent", "vector", "scalar", "abs", "round", "changes"}  # fmt: skip
OPERATORS = {"+", "-", "*", "/", "%", "^", "==", "!=", ">", "<", ">=", "<=", "and", "or", "unless"}
TOKEN = re.compile(
    r"\s*(?:(?P<string>\"(?:[^\"\\]|\\.)*\")|(?P<range>\[[^\]]+\])|(?P<number>\d+(?:\.\d+)?)"
    r"|(?P<word>[A-Za-z_:][A-Za-z0-9_:]*)|(?P<sign>=~|!~|!=|==|>=|<=|[-+*/%^(){},=<>]))"
)
RANGE = re.compile(r"\[(?:\d+[smhd]|\$__rate_interval)\]")


class PromqlError(ValueError):
    """The query is not what this parser, and thus Prometheus, can read."""


@dataclass
class Selector:
    metric: str
    matchers: set[str] = field(default_factory=set)
    ranged: bool = False


@dataclass
class Query:
    selectors: list[Selector] = field(default_factory=list)
    groupings: list[tuple[set[str], list[Selector]]] = field(default_factory=list)
    """Labels that an aggregation keeps, and the selectors below it."""


def parse(text: str) -> Query:
    """Raises PromqlError."""
    parser = _Parser(_tokens(text))
    parser.expression()
    if parser.rest:
        raise PromqlError(f"unexpected {parser.rest[0][1]!r} in {text}")
    return parser.query


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, at = [], 0
    text = text.strip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise PromqlError(f"cannot read {text[at : at + 20]!r}")
        kind = str(match.lastgroup)
        tokens.append((kind, match.group(kind)))
        at = match.end()
    return tokens


class _Parser:
    def __init__(self, rest: list[tuple[str, str]]) -> None:
        self.rest = rest
        self.query = Query()

    def peek(self) -> str:
        return self.rest[0][1] if self.rest else ""

    def take(self, *wanted: str) -> str:
        kind_value = self.rest.pop(0) if self.rest else ("end", "the end")
        if wanted and kind_value[1] not in wanted:
            raise PromqlError(f"expected {' or '.join(wanted)}, found {kind_value[1]!r}")
        return kind_value[1]

    def expression(self) -> None:
        self.operand()
        while self.peek() in OPERATORS:
            self.take()
            while self.peek() in ("on", "ignoring", "group_left", "group_right", "bool"):
                if self.take() != "bool" and self.peek() == "(":
                    self.labels()
            self.operand()

    def operand(self) -> None:
        kind = self.rest[0][0] if self.rest else "end"
        value = self.peek()
        if value == "(":
            self.take()
            self.expression()
            self.take(")")
        elif kind in ("number", "string"):
            self.take()
        elif value in AGGREGATIONS:
            self.aggregation()
        elif value in FUNCTIONS:
            self.take()
            self.arguments()
        elif kind == "word":
            self.selector()
        else:
            raise PromqlError(f"expected an operand, found {value!r}")

    def aggregation(self) -> None:
        self.take()
        first = len(self.query.selectors)
        kept: set[str] | None = None
        if self.peek() in ("by", "without"):
            kept = self.grouping()
        self.arguments()
        if kept is None and self.peek() in ("by", "without"):
            kept = self.grouping()
        self.query.groupings.append((kept or set(), self.query.selectors[first:]))

    def grouping(self) -> set[str]:
        self.take("by", "without")
        return self.labels()

    def labels(self) -> set[str]:
        self.take("(")
        found = set()
        while self.peek() != ")":
            found.add(self.take())
            if self.peek() == ",":
                self.take()
        self.take(")")
        return found

    def arguments(self) -> None:
        self.take("(")
        while self.peek() != ")":
            self.expression()
            if self.peek() == ",":
                self.take()
            elif self.peek() != ")":
                raise PromqlError(f"expected , or ), found {self.peek()!r}")
        self.take(")")

    def selector(self) -> None:
        found = Selector(self.take())
        if self.peek() == "{":
            self.take()
            while self.peek() != "}":
                found.matchers.add(self.take())
                self.take("=", "!=", "=~", "!~")
                if not self.take().startswith('"'):
                    raise PromqlError(f"a matcher of {found.metric} has no string")
                if self.peek() == ",":
                    self.take()
            self.take("}")
        if self.rest and self.rest[0][0] == "range":
            if not RANGE.fullmatch(self.peek()):
                raise PromqlError(f"{self.peek()} is no range")
            self.take()
            found.ranged = True
        self.query.selectors.append(found)
