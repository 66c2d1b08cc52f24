"""The bodies of chat and text completions: every parameter is honoured or refused by name.

`read_json` -> `chat_call` / `completion_call` -> a `Call` with everything checked that needs
neither the model nor the tenant.
"""

from dataclasses import dataclass
from typing import Any

import msgspec

from app.errors import InvalidRequest
from app.inference.fields import Fields, clip, kind, refused, unsupported
from app.inference.messages import chat_messages, needs_tools
from app.inference.response_format import response_grammar
from app.inference.tools import LEGACY, ToolUse, tool_use
from app.json_body import unreadable
from app.settings import Settings
from engine.types import Grammar, LatencyBudget

LARGEST_SEED = 2**63 - 1
MOST_TOP_LOGPROBS = 20
MOST_COMPLETION_LOGPROBS = 5
LONGEST_BUDGET_MS = 3_600_000.0
LARGEST_INTEGER = 2**31 - 1

INERT = (
    "user",
    "metadata",
    "prompt_cache_key",
    "safety_identifier",
)
"""Accepted, documented, without effect; so are store=false and service_tier=auto|default."""

REMEDIES = {
    "modalities": "answers are text; remove it",
    "audio": "answers are text; remove it",
    "prediction": "remove it",
    "reasoning_effort": "remove it",
    "verbosity": "say in the prompt how long the answer should be",
    "web_search_options": "put what was found into the prompt",
    "suffix": "put the text that follows into the prompt",
}


@dataclass(frozen=True, slots=True)
class SamplingChoices:
    """What the caller asked of sampling; `max_tokens` None means the default."""

    max_tokens: int | None
    max_tokens_param: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    logprobs: int | None
    seed: int | None
    stop: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A checked body. Exactly one of `messages`, `text`, `token_ids` is set."""

    chat: bool
    model: str
    sampling: SamplingChoices
    choices: int
    stream: bool
    include_usage: bool
    budget: LatencyBudget | None
    grammar: Grammar | None = None  # of a call without tools; theirs: see call_grammar
    grammar_param: str = "response_format"  # what a refusal of the grammar names
    tools: ToolUse | None = None
    tools_param: str | None = None  # the first field that needs a chat format with tools
    messages: tuple[dict[str, Any], ...] | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None

    @property
    def endpoint(self) -> str:
        return "chat.completions" if self.chat else "completions"

    @property
    def prompt_param(self) -> str:
        return "messages" if self.chat else "prompt"


def read_json(body: bytes) -> dict[str, Any]:
    """The body as an object; 400 `invalid_json` says why it is none."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(body) from error
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"The body is {kind(value)}; send one JSON object.", code="invalid_json"
        )
    return value


def chat_call(body: dict[str, Any], settings: Settings) -> Call:
    """A body of POST /v1/chat/completions."""
    fields = Fields(body)
    messages = chat_messages(fields.take("messages"), settings)
    wants_logprobs = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, MOST_TOP_LOGPROBS)
    if top is not None and not wants_logprobs:
        raise refused("top_logprobs", "needs logprobs; send logprobs=true as well")
    return _finish(
        fields,
        settings,
        chat=True,
        logprobs=(top or 0) if wants_logprobs else None,
        messages=messages,
    )


def completion_call(body: dict[str, Any], settings: Settings) -> Call:
    """A body of POST /v1/completions."""
    fields = Fields(body)
    text, token_ids = _prompt(fields.take("prompt"))
    if fields.flag("echo"):
        raise unsupported("echo", "put the prompt before the answer yourself")
    if fields.integer("best_of", 0, LARGEST_INTEGER, 1) != 1:
        raise unsupported("best_of", "ask for n answers with logprobs and choose one")
    return _finish(
        fields,
        settings,
        chat=False,
        logprobs=fields.integer("logprobs", 0, MOST_COMPLETION_LOGPROBS),
        text=text,
        token_ids=token_ids,
    )


def _finish(
    fields: Fields,
    settings: Settings,
    *,
    chat: bool,
    logprobs: int | None,
    messages: tuple[dict[str, Any], ...] | None = None,
    text: str | None = None,
    token_ids: tuple[int, ...] | None = None,
) -> Call:
    """The parameters that both calls share; refuses whatever is left."""
    model = fields.text("model")
    if not model:
        raise refused(
            "model", "is missing; name a model from GET /v1/models", code="missing_parameter"
        )
    _check_neutral(fields)
    stream = fields.flag("stream")
    grammar = response_grammar(fields, settings)
    tools = _tools(fields, settings, grammar, chat=chat)
    call = Call(
        chat=chat,
        model=model,
        sampling=_sampling(fields, settings, logprobs),
        choices=fields.integer("n", 1, settings.max_choices, 1) or 1,
        stream=stream,
        include_usage=_include_usage(fields, stream),
        budget=_budget(fields),
        grammar=grammar if tools is None else None,
        grammar_param="response_format" if tools is None else "tools",
        tools=tools,
        tools_param="tools" if tools is not None else needs_tools(messages or ()),
        messages=messages,
        text=text,
        token_ids=token_ids,
    )
    fields.finish()
    return call


def _tools(
    fields: Fields, settings: Settings, answer: Grammar | None, *, chat: bool
) -> ToolUse | None:
    if chat:
        return tool_use(fields, settings, answer)
    fields.ignore(["parallel_tool_calls"])
    for name in ("tools", "tool_choice", *LEGACY):
        if fields.take(name) is not None:
            raise unsupported(name, "use /v1/chat/completions", code="tools_unsupported")
    return None


def _check_neutral(fields: Fields) -> None:
    """Fields whose neutral value alone is accepted, and those with no accepted value."""
    fields.ignore(INERT)
    if fields.flag("store"):
        raise unsupported("store", "nothing is stored; send store=false or remove it")
    tier = fields.text("service_tier")
    if tier not in (None, "auto", "default"):
        raise unsupported("service_tier", "send auto or default, or remove it")
    fields.refuse(REMEDIES)


def _sampling(fields: Fields, settings: Settings, logprobs: int | None) -> SamplingChoices:
    old = fields.integer("max_tokens", 1, LARGEST_INTEGER)
    new = fields.integer("max_completion_tokens", 1, LARGEST_INTEGER)
    if old is not None and new is not None and old != new:
        raise refused("max_tokens", "differs from max_completion_tokens; send one of the two")
    seed = fields.integer("seed", -LARGEST_SEED - 1, LARGEST_SEED)
    return SamplingChoices(
        max_tokens=old if new is None else new,
        max_tokens_param="max_tokens" if new is None else "max_completion_tokens",
        temperature=fields.number("temperature", 0.0, 2.0, 1.0),
        top_p=fields.number("top_p", 0.0, 1.0, 1.0),
        top_k=_top_k(fields),
        min_p=fields.number("min_p", 0.0, 1.0, 0.0),
        repetition_penalty=fields.number("repetition_penalty", 0.01, 10.0, 1.0),
        presence_penalty=fields.number("presence_penalty", -2.0, 2.0, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -2.0, 2.0, 0.0),
        logit_bias=_logit_bias(fields, settings),
        logprobs=logprobs,
        seed=None if seed is None else seed & LARGEST_SEED,
        stop=_stop(fields.take("stop"), settings),
    )


def _top_k(fields: Fields) -> int:
    """0 and -1 both mean "off", as other servers write it."""
    return max(0, fields.integer("top_k", -1, LARGEST_INTEGER, 0) or 0)


def _include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.object("stream_options")
    if options is None:
        return False
    if not stream:
        raise refused("stream_options", "is for streams; send stream=true or remove it")
    include = options.flag("include_usage")
    if options.flag("include_obfuscation"):
        raise unsupported("stream_options.include_obfuscation", "remove it")
    options.finish()
    return include


def _budget(fields: Fields) -> LatencyBudget | None:
    """`loramux: {ttft_ms, tpot_ms}`; whether it loosens the tenant's is checked at admission."""
    own = fields.object("loramux")
    if own is None:
        return None
    figures: dict[str, float | None] = {}
    for name in ("ttft_ms", "tpot_ms"):
        figure = own.number(name, 0.1, LONGEST_BUDGET_MS, 0.0)
        figures[name] = figure or None
    own.finish()
    return LatencyBudget(ttft_ms=figures["ttft_ms"], tpot_ms=figures["tpot_ms"])


def _logit_bias(fields: Fields, settings: Settings) -> dict[int, float]:
    entries = fields.object("logit_bias")
    if entries is None:
        return {}
    biases: dict[int, float] = {}
    for name, value in entries.items():
        param = f"logit_bias[{clip(name)!r}]"
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            raise refused(param, "is not a token id; use decimal ids as keys")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refused(param, f"must be a number, not {kind(value)}")
        if not -100 <= value <= 100:
            raise refused(param, f"must be from -100 to 100, not {clip(value)}")
        biases[int(name)] = float(value)
    if len(biases) > settings.max_logit_bias:
        raise refused(
            "logit_bias", f"has {len(biases)} entries; send at most {settings.max_logit_bias}"
        )
    return biases


def _stop(value: object, settings: Settings) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise refused("stop", f"must be a string or a list of strings, not {kind(value)}")
    if len(stops) > settings.max_stop_strings:
        raise refused("stop", f"has {len(stops)} strings; send at most {settings.max_stop_strings}")
    for index, stop in enumerate(stops):
        param = "stop" if isinstance(value, str) else f"stop[{index}]"
        if not isinstance(stop, str) or not stop:
            raise refused(param, "must be a string of at least one character")
        if len(stop) > settings.max_stop_characters:
            raise refused(
                param,
                f"has {len(stop)} characters; send at most {settings.max_stop_characters}",
            )
    return tuple(stops)


# --------------------------------------------------------------------------- prompts


def _prompt(value: object) -> tuple[str | None, tuple[int, ...] | None]:
    """(text, None) or (None, token ids): one prompt a call."""
    if value is None:
        raise refused("prompt", "is missing; send a string", code="missing_parameter")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise refused("prompt", "is empty; send some text", code="empty_prompt")
        return value, None
    if not isinstance(value, list):
        raise refused("prompt", f"must be a string or a list of token ids, not {kind(value)}")
    if not value:
        raise refused("prompt", "is empty; send a string", code="empty_prompt")
    if isinstance(value[0], str | list):
        raise unsupported("prompt", "several prompts in one call are not; send one call for each")
    for index, token_id in enumerate(value):
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise refused(f"prompt[{index}]", "must be a token id, a whole number from 0")
    return None, tuple(value)
