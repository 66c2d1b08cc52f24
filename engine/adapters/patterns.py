"""Keys of rank_pattern and alpha_pattern, matched as PEFT matches them, in bounded time.

PEFT takes the first key (in the file's order) for which `(.*\\.)?(KEY)$` matches the module's full
name. A client's regex is never run: a key is parsed into a small safe subset (literals, `.`,
classes, groups, alternation, `* + ?`, `\\d \\w`) and simulated as a Thompson automaton, whose time
is at most states x characters. Anything beyond the subset is refused by name.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

MAX_PATTERN_CHARACTERS = 512
MAX_PATTERNS = 4096
MAX_REGEX_PATTERNS = 64
"""Of the keys with regex syntax; plain names are compared directly and cost next to nothing."""

_DIGITS = frozenset("0123456789")
_WORD = _DIGITS | frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_ESCAPES = {"d": _DIGITS, "w": _WORD}
_PLAIN = _WORD | frozenset("-.")
_ANY: None = None

_V = TypeVar("_V")


class PatternRefused(ValueError):
    """The key uses syntax outside the subset; the message says which."""


@dataclass(slots=True)
class _State:
    """Consumes one character of `accepts` (None: any) and goes to `after`, or forks for free."""

    accepts: frozenset[str] | None = frozenset()
    after: list["_State"] | None = None  # None: not a consuming state
    free: list["_State"] | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of automaton with one way in and one way out."""

    start: _State
    end: _State


class ModulePattern:
    """One key, ready to be matched against full module names ("model.layers.0.mlp.up_proj")."""

    def __init__(self, key: str) -> None:
        if not key or len(key) > MAX_PATTERN_CHARACTERS:
            raise PatternRefused(f"is empty or longer than {MAX_PATTERN_CHARACTERS} characters")
        body = key.removesuffix("$")
        self.anchored = body.startswith("^")
        body = body.removeprefix("^")
        if not body:
            raise PatternRefused("names no module")
        if self.anchored and "|" in body:
            raise PatternRefused("anchors one branch of an alternation")
        self.plain = body if set(body) <= _PLAIN else None
        self._whole = None if self.plain is not None else _Parser(body).parse()

    def matches(self, name: str) -> bool:
        """Whether PEFT's `(.*\\.)?(KEY)$` matches `name` from its start."""
        if self.plain is not None:
            return self._matches_plain(self.plain, name)
        starts = [0]
        if not self.anchored:
            starts += [i + 1 for i, character in enumerate(name) if character == "."]
        return self._simulate(name, frozenset(starts))

    def _matches_plain(self, plain: str, name: str) -> bool:
        start = len(name) - len(plain)
        if start < 0 or (start > 0 and (self.anchored or name[start - 1] != ".")):
            return False
        tail = name[start:]
        if tail == plain:
            return True
        return all(p in (".", t) for p, t in zip(plain, tail, strict=True))

    def _simulate(self, name: str, starts: frozenset[int]) -> bool:
        assert self._whole is not None
        alive: dict[int, _State] = {}
        for i, character in enumerate(name):
            if i in starts:
                _enter(self._whole.start, alive)
            following: dict[int, _State] = {}
            for state in alive.values():
                if state.after is not None and (
                    state.accepts is None or character in state.accepts
                ):
                    for target in state.after:
                        _enter(target, following)
            alive = following
        if len(name) in starts:
            _enter(self._whole.start, alive)
        return id(self._whole.end) in alive


def _enter(state: _State, alive: dict[int, _State]) -> None:
    """Adds `state` and all it reaches for free."""
    pending = [state]
    while pending:
        current = pending.pop()
        if id(current) in alive:
            continue
        alive[id(current)] = current
        pending.extend(current.free or ())


class _Parser:
    """Recursive descent over alternation > sequence > repeated atom; depth is bounded."""

    max_depth = 8

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.depth = 0

    def parse(self) -> _Part:
        part = self._alternation()
        if self.at < len(self.text):
            raise PatternRefused(f"has {self.text[self.at]!a} out of place")
        return part

    def _peek(self) -> str:
        return self.text[self.at] if self.at < len(self.text) else ""

    def _alternation(self) -> _Part:
        branches = [self._sequence()]
        while self._peek() == "|":
            self.at += 1
            branches.append(self._sequence())
        if len(branches) == 1:
            return branches[0]
        end = _State()
        for branch in branches:
            branch.end.free = [*(branch.end.free or ()), end]
        return _Part(_State(free=[branch.start for branch in branches]), end)

    def _sequence(self) -> _Part:
        first = _State()
        last = first
        while (character := self._peek()) and character not in "|)":
            part = self._repeated()
            last.free = [*(last.free or ()), part.start]
            last = part.end
        return _Part(first, last)

    def _repeated(self) -> _Part:
        part = self._atom()
        sign = self._peek()
        if not sign or sign not in "*+?":
            return part
        self.at += 1
        if self._peek() and self._peek() in "*+?{":
            raise PatternRefused(f"repeats a repetition ({self._peek()!a} after {sign!a})")
        start, end = _State(free=[part.start]), _State()
        part.end.free = [*(part.end.free or ()), end]
        if sign in "*+":
            part.end.free.append(part.start)
        if sign in "*?":
            start.free = [part.start, end]
        return _Part(start, end)

    def _atom(self) -> _Part:
        character = self._peek()
        self.at += 1
        if character == "(":
            return self._group()
        if character == "[":
            return _one(self._character_class())
        if character == ".":
            return _one(_ANY)
        if character == "\\":
            return _one(self._escape())
        if character in _WORD or character == "-":
            return _one(frozenset(character))
        raise PatternRefused(f"uses {character!a}, which is outside the supported patterns")

    def _group(self) -> _Part:
        self.depth += 1
        if self.depth > self.max_depth:
            raise PatternRefused(f"nests groups deeper than {self.max_depth}")
        if self._peek() == "?":
            if not self.text.startswith("?:", self.at):
                raise PatternRefused("uses a special group (?...)")
            self.at += 2
        part = self._alternation()
        if self._peek() != ")":
            raise PatternRefused("leaves a group open")
        self.at += 1
        self.depth -= 1
        return part

    def _escape(self) -> frozenset[str]:
        character = self._peek()
        self.at += 1
        if character in _ESCAPES:
            return _ESCAPES[character]
        if not character or character.isalnum() or not character.isascii():
            raise PatternRefused(f"uses the escape \\{character!a}")
        return frozenset(character)

    def _character_class(self) -> frozenset[str]:
        members: set[str] = set()
        if self._peek() in ("^", "]"):
            raise PatternRefused("uses a negated or empty character class")
        while (character := self._peek()) != "]":
            self.at += 1
            if character == "\\":
                members |= self._escape()
            elif (
                character in _WORD and self._peek() == "-" and self.text[self.at + 1 :][:1] in _WORD
            ):
                low, high = ord(character), ord(self.text[self.at + 1])
                if low > high:
                    raise PatternRefused("has a character range that runs backwards")
                members |= {chr(code) for code in range(low, high + 1)}
                self.at += 2
            elif character in _PLAIN:
                members.add(character)
            else:
                raise PatternRefused("leaves a character class open or uses an odd member")
        self.at += 1
        return frozenset(members)


def _one(accepts: frozenset[str] | None) -> _Part:
    end = _State()
    return _Part(_State(accepts=accepts, after=[end]), end)


class PatternTable(Generic[_V]):
    """rank_pattern or alpha_pattern: the value of the first key that matches a module's name."""

    def __init__(self, entries: Iterable[tuple[ModulePattern, _V]]) -> None:
        self._entries = tuple(entries)

    def get(self, name: str, default: _V) -> _V:
        """The value for the module `name`, `default` where no key matches."""
        for pattern, value in self._entries:
            if pattern.matches(name):
                return value
        return default
