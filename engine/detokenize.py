"""From token ids back to text while they arrive: whole characters only, stop strings held back."""

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class TokenBytes(Protocol):
    """What a detokenizer needs to know of a vocabulary."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, b"" for a control token in running text."""
        ...

    def is_control(self, token_id: int) -> bool:
        """Whether the token is markup of the chat template, never text."""
        ...

    @property
    def strips_first_space(self) -> bool:
        """Whether the vocabulary writes a space before the first word (SentencePiece)."""
        ...


class Detokenizer:
    """Turns token ids into text piece by piece; bytes wait until their character is whole.

    Control tokens write nothing, but for one that is `shown`. Bytes that can never become a
    character come out as U+FFFD.
    """

    def __init__(self, codec: TokenBytes, shown: int | None = None) -> None:
        self._codec = codec
        self._shown = shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = codec.strips_first_space

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain with these tokens; may be empty."""
        text = self._utf8.decode(self._bytes(ids))
        if self._at_start and text:
            self._at_start = False
            text = text.removeprefix(" ")
        return text

    def finish(self) -> str:
        """What was still held back: at most one U+FFFD for an unfinished character."""
        return self._utf8.decode(b"", final=True)

    def _bytes(self, ids: Iterable[int]) -> bytes:
        codec, shown = self._codec, self._shown
        return b"".join(
            [codec.token_bytes(i) for i in ids if not codec.is_control(i) or i == shown]
        )


@dataclass(frozen=True, slots=True)
class StopResult:
    """`emit` may go out now; `stopped` is the stop string that ended the text, if one did."""

    emit: str
    stopped: str | None = None


class StopStrings:
    """Ends a text before the first stop string, however the text is cut into pieces.

    The first match is the one that ends first; of several that end together, the longest. What
    could still be the beginning of a stop is held back. After a stop nothing more comes out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> StopResult:
        if self._stopped:
            return StopResult("")
        text = self._held + text
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if matches:
            _, start, stop = min(matches)
            self._stopped, self._held = True, ""
            return StopResult(text[:start], stop)
        keep = self._possible_prefix(text)
        self._held = text[len(text) - keep :]
        return StopResult(text[: len(text) - keep])

    def finish(self) -> str:
        """What was held back and turned out to be no stop."""
        held, self._held = self._held, ""
        return held

    def _possible_prefix(self, text: str) -> int:
        """Length of the longest end of `text` that some stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class TextPiece(NamedTuple):
    """What some tokens brought. `used` of them count: up to the one that completed the stop."""

    text: str
    used: int
    stopped: str | None = None


class TextStream:
    """Detokenizer and stop strings of one choice, with the count of tokens that are billed."""

    def __init__(
        self, codec: TokenBytes, stops: Sequence[str] = (), shown: int | None = None
    ) -> None:
        self._detokenizer = Detokenizer(codec, shown)
        self._stops = StopStrings(stops)
        self._any_stops = bool(stops)

    def push(self, ids: Sequence[int]) -> TextPiece:
        """Tokens after the one that completed a stop are overshoot: unused, and without text."""
        if not self._any_stops:
            return TextPiece(self._detokenizer.push(ids), len(ids))
        pieces: list[str] = []
        for index, token_id in enumerate(ids):
            result = self._stops.push(self._detokenizer.push((token_id,)))
            pieces.append(result.emit)
            if result.stopped is not None:
                return TextPiece("".join(pieces), index + 1, result.stopped)
        return TextPiece("".join(pieces), len(ids))

    def finish(self) -> TextPiece:
        """The held-back rest at the end of the choice; a last U+FFFD may complete a stop."""
        result = self._stops.push(self._detokenizer.finish())
        return TextPiece(result.emit + self._stops.finish(), 0, result.stopped)
