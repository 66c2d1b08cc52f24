"""Renders a checkpoint's chat template: sandboxed, and bounded in steps and in characters.

Templates are written for transformers' environment (trim_blocks, lstrip_blocks, loop controls,
`raise_exception`, `strftime_now`, `tojson` that keeps non-ASCII text); this one offers the same.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.clock import Clock, SystemClock
from engine.errors import RequestRefused

MAX_STEPS = 2_000_000
"""Loop rounds and calls of one rendering."""
MAX_CHARACTERS = 16 << 20
"""Characters of one rendering, and of any string that it builds on the way."""

_FILTERS = (
    "abs", "batch", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby",
    "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr",
    "reverse", "round", "safe", "select", "selectattr", "slice", "sort", "string", "sum", "title",
    "trim", "unique", "upper",
)  # fmt: skip
_GROWING_METHODS = (
    "center", "encode", "expandtabs", "format", "format_map", "ljust", "rjust", "translate",
    "zfill",
)  # fmt: skip


class TemplateRefused(RequestRefused):
    """These messages cannot be written in the base model's chat format."""

    code = "chat_template_refused"

    def __init__(self, message: str) -> None:
        super().__init__(message, field="messages")


class _Meter:
    def __init__(self) -> None:
        self.steps = 0

    def charge(self, steps: int = 1) -> None:
        self.steps += steps
        if self.steps > MAX_STEPS:
            raise TemplateRefused("the chat template takes too many steps for these messages")


_meter: ContextVar[_Meter] = ContextVar("chat_template_meter")


class ChatTemplate:
    """One compiled template; safe to render from several threads."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], clock: Clock | None = None
    ) -> None:
        environment = _Environment(clock or SystemClock())
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateRefused(f"the base model's chat template is broken: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt as text. Raises TemplateRefused with the template's own reason."""
        token = _meter.set(_Meter())
        try:
            pieces = self._template.generate(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                **self._special_tokens,
            )
            return _join_bounded(pieces)
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise TemplateRefused(
                "the base model's chat template does not take these messages: "
                f"{type(error).__name__}"
            ) from error
        except RecursionError as error:
            raise TemplateRefused("the chat template nests too deeply") from error
        finally:
            _meter.reset(token)


class _Environment(ImmutableSandboxedEnvironment):
    """Charges every loop round and call, and refuses strings that outgrow the bound."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, clock: Clock) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        filters: dict[str, Callable[..., Any]] = {
            name: function for name, function in self.filters.items() if name in _FILTERS
        }
        filters |= {
            "tojson": _tojson,
            "join": _join_filter(self.filters["join"]),
            "replace": lambda text, old, new, count=-1: _replace(str(text), old, new, count),
            "_charged": _charged,
            "_bounded": _bounded,
        }
        self.filters = filters
        self.globals = {
            "range": lambda *args: _charged(range(*args)),
            "dict": dict,
            "namespace": self.globals["namespace"],
            "raise_exception": _raise_exception,
            "strftime_now": lambda layout: _now(clock).strftime(layout),
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = Parser(self, source, name, filename).parse()
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_charged", [], [], None, None)
        for joined in list(template.find_all(nodes.Concat)):
            joined.nodes = [_pairwise(joined.nodes)]
        return template

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise TemplateRefused(f"the chat template uses the operator {operator!r}")
        if operator == "*" and _size(left) * _size(right) > MAX_CHARACTERS:
            raise TemplateRefused("the chat template builds too long a text")
        return _bounded(super().call_binop(context, operator, left, right))

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        _meter.get().charge()
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str):
            if name in _GROWING_METHODS:
                raise TemplateRefused(f"the chat template calls the string method {name!r}")
            if name == "replace":
                return _replace(owner, *args, **kwargs)
            if name == "join":
                return _join_bounded(args[0], owner)
        return super().call(context, function, *args, **kwargs)


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what an assistant wrote; here, only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _pairwise(parts: list[nodes.Expr]) -> nodes.Expr:
    """a ~ b ~ c as nested pairs, each bounded, so that no single step can outgrow the bound."""
    joined = parts[0]
    for part in parts[1:]:
        joined = nodes.Filter(nodes.Concat([joined, part]), "_bounded", [], [], None, None)
    return joined


def _charged(items: Iterable[Any]) -> list[Any]:
    """The items of a loop, paid for in advance."""
    meter = _meter.get()
    if isinstance(items, Sized):
        meter.charge(len(items))
        return list(items)
    return list(_charged_lazily(items, meter))


def _charged_lazily(items: Iterable[Any], meter: _Meter) -> Iterator[Any]:
    for item in items:
        meter.charge()
        yield item


def _size(value: Any) -> int:
    if isinstance(value, int):
        return abs(value)
    return len(value) if hasattr(value, "__len__") else 1


def _bounded(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_CHARACTERS:
        raise TemplateRefused("the chat template builds too long a text")
    return value


def _join_bounded(pieces: Iterable[Any], separator: str = "") -> str:
    parts: list[str] = []
    length = 0
    for piece in pieces:
        parts.append(str(piece))
        length += len(parts[-1]) + len(separator)
        if length > MAX_CHARACTERS:
            raise TemplateRefused("the chat template builds too long a text")
    return separator.join(parts)


def _join_filter(original: Callable[..., Any]) -> Callable[..., Any]:
    @jinja2.pass_eval_context
    def join(context: Any, items: Any, d: str = "", attribute: Any = None) -> Any:
        items = _charged(items)
        if attribute is None:
            return _join_bounded(items, str(d))
        return _bounded(original(context, items, d, attribute))

    return join


def _replace(text: str, old: Any, new: Any, count: int = -1) -> str:
    old, new = str(old), str(new)
    found = text.count(old)
    if len(text) + found * len(new) > MAX_CHARACTERS:
        raise TemplateRefused("the chat template builds too long a text")
    return text.replace(old, new, count)


def _tojson(
    value: Any,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes and with non-ASCII text as it is, as templates expect."""
    return json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefused(f"the base model's chat format does not allow this: {str(message)[:200]}")


def _now(clock: Clock) -> datetime:
    return datetime.fromtimestamp(clock.wall_ms() / 1000, tz=UTC)
