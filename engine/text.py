"""Text on the api's side of the engine, without torch: chat template, tokenizer, detokenizer.

A user's text never becomes a control token inside a chat: see `TextCodec.encode_chat`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine.chat_template import ChatTemplate, TemplateRefused
from engine.clock import Clock
from engine.detokenize import Detokenizer, StopResult, StopStrings, TextPiece, TextStream
from engine.errors import RequestRefused
from engine.tokenizer_files import TokenizerFiles, TokenizerUnsupported, read_tokenizer
from engine.tool_format import (
    MISTRAL_MARK,
    ToolFormat,
    ToolSetting,
    tool_template,
    uses_tools,
    with_ids_of,
)

__all__ = [
    "Detokenizer",
    "StopResult",
    "StopStrings",
    "TemplateRefused",
    "TextCodec",
    "TextPiece",
    "TextStream",
    "TokenizerUnsupported",
]

Message = Mapping[str, Any]
"""{"role": "user", "content": "…"}; every string value in it is a user's text."""

_MARKS = range(0xF0000, 0xFFFFE)  # private use, plane 15
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class TextCodec:
    """A base model's tokenizer and chat format. Safe to use from several threads."""

    def __init__(
        self,
        files: TokenizerFiles,
        clock: Clock | None = None,
        tool_format: ToolSetting = "auto",
    ) -> None:
        """Raises EngineError subclasses."""
        self.tokenizer_digest = files.digest
        self._tokenizer = files.tokenizer
        self._template = (
            ChatTemplate(files.chat_template, files.special_tokens, clock)
            if files.chat_template is not None
            else None
        )
        added = files.tokenizer.get_added_tokens_decoder()
        self._control = {
            token.content: (token_id, token)
            for token_id, token in sorted(added.items())
            if token.special
        }
        found = tool_template(files.chat_template, self._control, tool_format)
        self.tool_format: ToolFormat | None = None if found is None else found[0]
        self._tool_template = (
            self._template
            if found is None or found[1] == files.chat_template
            else ChatTemplate(found[1], files.special_tokens, clock)
        )
        self._control_ids = frozenset(token_id for token_id, _ in self._control.values())
        mark = self._control.get(MISTRAL_MARK) if self.tool_format == "mistral" else None
        self.call_mark: int | None = None if mark is None else mark[0]
        """The control token that opens a call, where the format has one: a reader of calls has to
        see it."""
        self._token_bytes, self.strips_first_space = _read_vocabulary(files.tokenizer)
        self._longest_bytes = max((len(token) for token in self._token_bytes if token), default=1)

    @classmethod
    def load(
        cls,
        base_model: Path | str,
        clock: Clock | None = None,
        tool_format: ToolSetting = "auto",
    ) -> "TextCodec":
        """Reads a GGUF file or a Hugging Face folder. Raises EngineError subclasses."""
        return cls(read_tokenizer(Path(base_model)), clock, tool_format)

    # ---------------------------------------------------------------------- tokens

    @property
    def vocab_size(self) -> int:
        return len(self._token_bytes)

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes, a control token's being those of its name; b"" for an unknown id."""
        if 0 <= token_id < len(self._token_bytes):
            return self._token_bytes[token_id]
        return b""

    def token_text(self, token_id: int) -> str:
        """The token alone as text; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def is_control(self, token_id: int) -> bool:
        """Whether it is markup such as <|im_end|>, which never appears in an answer's text."""
        return token_id in self._control_ids

    # ---------------------------------------------------------------------- text to ids

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the tokens of `text`, without tokenizing it: none is longer than the
        vocabulary's longest, and space around it may be dropped. 0 where the tokenizer may
        shorten a text."""
        if self._tokenizer.normalizer is not None:
            return 0
        return -(-len(text.strip().encode("utf-8", "surrogatepass")) // self._longest_bytes)

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of a raw prompt, whose control tokens are the writer's own and are honoured.

        `add_special` puts the checkpoint's BOS (where it has one) in front.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a finished answer."""
        detokenizer = Detokenizer(self)
        return detokenizer.push(ids) + detokenizer.finish()

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The conversation in the checkpoint's chat format, ready for the assistant to go on."""
        return self._chat_template.render([dict(message) for message in messages])

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Token ids of a conversation; control tokens come from the template alone.

        `tools` are shown to the model; they and messages with calls or results need `tool_format`.
        Where a message spells a control token (or could complete one together with its
        surroundings), a private mark is set inside it before the template is rendered. The mark
        keeps the spelling from being recognised, and is taken out again before the text around it
        is tokenized as plain text.
        """
        mark = _unused_mark([*messages, *tools])
        marked, shown = (
            [_map_strings(dict(item), lambda s: self._marked(s, mark)) for item in items]
            for items in (messages, tools)
        )
        template = self._chat_template
        if tools or uses_tools(messages):
            if self.tool_format is None or self._tool_template is None:
                raise RequestRefused(
                    "this base model's chat format has no tools", code="tools_unsupported"
                )
            template = self._tool_template
            marked = [with_ids_of(self.tool_format, message) for message in marked]
        rendered = template.render(marked, tools=shown or None)
        if mark not in rendered:
            ids: list[int] = self._tokenizer.encode(rendered, add_special_tokens=False).ids
            return ids
        return self._encode_marked(rendered, mark)

    # ---------------------------------------------------------------------- inside

    @property
    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise RequestRefused(
                "this base model has no chat template; use /v1/completions",
                code="no_chat_template",
                field="messages",
            )
        return self._template

    def _marked(self, text: str, mark: str) -> str:
        """`text` with a mark inside whatever spells a control token, or half of one at an end."""
        if self._control_pattern is None:
            return text
        at = {match.start() + 1 for match in self._control_start.finditer(text)}
        stripped = text.strip()
        if stripped:
            first = len(text) - len(text.lstrip())
            last = first + len(stripped)
            ends, beginnings = self._control_halves
            if stripped.startswith(ends):
                at.add(first)
            if stripped.endswith(beginnings):
                at.add(last)
        cuts = [0, *sorted(at), len(text)]
        return mark.join(text[start:end] for start, end in pairwise(cuts))

    def _encode_marked(self, rendered: str, mark: str) -> list[int]:
        ids: list[int] = []
        at = 0
        assert self._control_pattern is not None
        for match in self._control_pattern.finditer(rendered):
            ids += self._encode_plain(rendered[at : match.start()].replace(mark, ""))
            ids.append(self._control[match[0].strip()][0])
            at = match.end()
        return ids + self._encode_plain(rendered[at:].replace(mark, ""))

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        ids: list[int] = self._plain_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _plain_tokenizer(self) -> Tokenizer:
        """The same tokenizer, blind to control tokens."""
        plain = Tokenizer.from_str(self._tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _control_pattern(self) -> re.Pattern[str] | None:
        """Finds control tokens as the tokenizer does: leftmost, longest, with its stripping."""
        if not self._control:
            return None
        return re.compile(
            "|".join(
                (r"\s*" if token.lstrip else "")
                + re.escape(name)
                + (r"\s*" if token.rstrip else "")
                for name, (_, token) in sorted(
                    self._control.items(), key=lambda item: len(item[0]), reverse=True
                )
            )
        )

    @cached_property
    def _control_start(self) -> re.Pattern[str]:
        """The first character wherever some control token is spelled, overlapping ones too."""
        by_first: dict[str, list[str]] = {}
        for name in self._control:
            by_first.setdefault(name[0], []).append(re.escape(name[1:]))
        return re.compile(
            "|".join(f"{re.escape(c)}(?={'|'.join(rest)})" for c, rest in by_first.items())
        )

    @cached_property
    def _control_halves(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Every end, and every beginning, of a control token that is cut in two."""
        cuts = [(name[cut:], name[:cut]) for name in self._control for cut in range(1, len(name))]
        return tuple({end for end, _ in cuts}), tuple({beginning for _, beginning in cuts})


def _unused_mark(messages: Sequence[Message]) -> str:
    """A private character that no message contains."""
    used: set[str] = set()

    def note(text: str) -> str:
        used.update(character for character in text if ord(character) >= _MARKS[0])
        return text

    _map_strings(list(messages), note)
    for code in _MARKS:
        if chr(code) not in used:
            return chr(code)
    raise TemplateRefused("the messages use every private character of Unicode")


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):  # the names in a tool's schema are a user's text as well
        return {change(key): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value


# --------------------------------------------------------------------------- vocabulary


def _read_vocabulary(tokenizer: Tokenizer) -> tuple[list[bytes], bool]:
    """The bytes of every token by id, and whether decoding drops the first space."""
    decoder = json.dumps(json.loads(tokenizer.to_str())["decoder"])
    to_bytes: Callable[[str], bytes] = _sentence_piece
    if '"ByteLevel"' in decoder:
        to_bytes, strips = partial(_byte_level, alphabet=_byte_alphabet()), False
    elif '"ByteFallback"' in decoder:
        strips = '"Strip"' in decoder
    elif '"Metaspace"' in decoder:
        strips = '"never"' not in decoder
    else:
        raise TokenizerUnsupported(
            "the tokenizer is neither byte-level BPE nor SentencePiece; its tokens have no bytes"
        )
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        table[token_id] = to_bytes(token)
    return table, strips


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + index): byte for index, byte in enumerate(others)
    }


def _byte_level(token: str, alphabet: dict[str, int]) -> bytes:
    if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return token.encode()


def _sentence_piece(token: str) -> bytes:
    match = _BYTE_FALLBACK.fullmatch(token)
    if match:
        return bytes([int(match[1], 16)])
    return token.replace("▁", " ").encode()
