"""What an answer must look like: grammars compiled in threads, and matchers for running sequences.

    compile()   hands a request's grammar to a thread; nothing of it happens on the step path
    poll()      whose grammar is ready, or was refused and why
    matcher()   a matcher at the first token, one for every choice, and again after a preemption

Every request compiles its own: a compiled grammar remembers what its matchers have met, so a shared
one would let a request's bounds depend on what others have asked before. Compiling takes about
a millisecond. Bounds: bytes, time, size, lexer states and work of one mask; what exceeds them is
refused. llguidance (Rust) does the work and is imported on first use, which may fail.
"""

import itertools
import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from engine.clock import Clock, SystemClock
from engine.errors import RequestRefused
from engine.types import Grammar

if TYPE_CHECKING:  # it brings jinja2, which the step path does not need
    from engine.text import TextCodec

FIELD = "response_format"
"""The parameter that refusals name; tools have grammars too, and the api names those itself."""
WHITESPACE = r"(\x20|\n\x20{0,16})?"
"""Between two tokens of JSON: a model that may write space without end sometimes does."""
THREADS = 2
STACK_BYTES = 256 << 20
"""Address space for the recursion of a chain of references as long as `max_bytes` allows."""
_MESSAGE_CHARACTERS = 200

GRAMMAR_CODES = frozenset({"invalid_schema", "schema_too_complex", "grammar_unavailable"})
"""Codes of the refusals made here, also where they end a request that waited or ran."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may cost. The masks of a step are computed on the step path."""

    max_bytes: int = 128 << 10  # of the grammar's text
    compile_ms: float = 10_000.0  # from the moment a thread begins
    max_size: int = 100_000  # symbols
    lexer_states: int = 20_000  # about 1 kB each
    lexer_fuel: int = 1_000_000  # about 50k a millisecond, once
    step_fuel: int = 100_000  # about 14k a millisecond, every mask
    step_items: int = 20_000  # about 20k a millisecond, every mask


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens as bytes. `encode` tokenizes; `end` are the tokens that end an answer."""

    tokens: Sequence[bytes]
    control: Sequence[int]
    end: Sequence[int]
    encode: Callable[[str], list[int]]

    @classmethod
    def of(cls, codec: "TextCodec", end: Iterable[int]) -> "Vocabulary":
        ids = range(codec.vocab_size)
        return cls(
            tokens=[codec.token_bytes(token_id) for token_id in ids],
            control=[token_id for token_id in ids if codec.is_control(token_id)],
            end=tuple(end),
            encode=codec.encode,
        )


@dataclass(frozen=True, slots=True)
class Compiled:
    """One grammar is done: ready when `refused` is None."""

    request_id: str
    refused: RequestRefused | None = None


class Matcher(Protocol):
    """Where one sequence stands in its grammar."""

    def allow(self, words: npt.NDArray[np.int32]) -> bool:
        """Sets the bits of the tokens that may come next ([words] int32, lowest bit first).

        False when the grammar has outgrown its bounds: nothing may come.
        """
        ...

    def advance(self, token: int) -> None: ...


class MatcherSource(Protocol):
    """What the sampler needs of the engine's grammars."""

    @property
    def words(self) -> int:
        """int32 words of one mask."""
        ...

    def matcher(self, request_id: str) -> Matcher: ...


class GrammarSource(Protocol):
    """What the core needs of them."""

    def compile(self, request_id: str, tenant: str, grammar: Grammar) -> None: ...

    def poll(self) -> list[Compiled]: ...

    def drop(self, request_id: str) -> None: ...


@dataclass(slots=True)
class _Job:
    request_id: str
    tenant: str
    grammar: Grammar
    began_ms: float | None = None
    over: bool = False  # answered, or no longer wanted
    prototype: Any = None


@dataclass(slots=True)
class _Lanes:
    """Jobs by tenant: one of each at a time, tenants in turn."""

    waiting: dict[str, deque[_Job]] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)

    def next(self) -> _Job | None:
        tenant = next((name for name in self.waiting if name not in self.busy), None)
        if tenant is None:
            return None
        lane = self.waiting.pop(tenant)
        job = lane.popleft()
        if lane:
            self.waiting[tenant] = lane  # to the end of the turn
        self.busy.add(tenant)
        return job


class Grammars:
    """The grammars of this engine. Called by the step thread; compiles in its own."""

    def __init__(
        self,
        load_vocabulary: Callable[[], Vocabulary],
        limits: GrammarLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._load_vocabulary = load_vocabulary
        self._limits = limits or GrammarLimits()
        self._clock = clock or SystemClock()
        self._tokenizer: Any = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()  # guards lanes and running
        self._lanes = _Lanes()
        self._running: list[_Job] = []
        self._wake = threading.Semaphore(0)
        self._done: queue.SimpleQueue[tuple[_Job, RequestRefused | None]] = queue.SimpleQueue()
        self._jobs: dict[str, _Job] = {}
        self._threads: list[threading.Thread] = []

    # ------------------------------------------------------------------ the step thread

    @property
    def words(self) -> int:
        return -(-int(self._tokenizer.vocab_size) // 32)

    def prepare(self) -> None:
        """Begins to read the vocabulary, so that the first grammar need not wait for it."""
        if _installed():
            self._start_threads()
            threading.Thread(target=self._prepare, name="grammar-vocabulary", daemon=True).start()

    def compile(self, request_id: str, tenant: str, grammar: Grammar) -> None:
        """Takes in a request's grammar; `poll` says what became of it.

        Raises RequestRefused when llguidance is not installed or the text is too long.
        """
        if not _installed():
            raise RequestRefused(
                "This engine has no llguidance, which structured answers need; install "
                "loramux[engine], or ask for text.",
                code="grammar_unavailable",
                field=FIELD,
            )
        size, most = len(grammar.text.encode()), self._limits.max_bytes
        if size > most:
            raise _too_complex(f"It has {size} bytes; at most {most} are allowed.")
        job = self._jobs[request_id] = _Job(request_id, tenant, grammar)
        with self._lock:
            self._lanes.waiting.setdefault(tenant, deque()).append(job)
        self._start_threads()
        self._wake.release()

    def poll(self) -> list[Compiled]:
        """What was decided since the last call; never blocks."""
        decided: list[Compiled] = []
        with self._lock:
            for job in self._running:
                began_ms = job.began_ms
                if job.over or began_ms is None:
                    continue
                if self._clock.now_ms() - began_ms > self._limits.compile_ms:
                    job.over = True
                    late = _too_complex("It could not be compiled in time.")
                    decided.append(Compiled(job.request_id, late))
        while True:
            try:
                job, refused = self._done.get_nowait()
            except queue.Empty:
                break
            if not job.over:
                job.over = True
                decided.append(Compiled(job.request_id, refused))
        for verdict in decided:
            if verdict.refused is not None:
                self._jobs.pop(verdict.request_id, None)
        return decided

    def drop(self, request_id: str) -> None:
        """The request is over; one that is unknown is no error."""
        job = self._jobs.pop(request_id, None)
        if job is not None:
            job.over = True

    def matcher(self, request_id: str) -> Matcher:
        """A new matcher of a grammar that is ready."""
        return LlMatcher(self._jobs[request_id].prototype.deep_copy())

    # ------------------------------------------------------------------ the threads

    def _start_threads(self) -> None:
        if self._threads:
            return
        before = threading.stack_size(STACK_BYTES)
        try:
            for number in range(THREADS):
                thread = threading.Thread(target=self._work, name=f"grammar-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        finally:
            threading.stack_size(before)

    def _prepare(self) -> None:
        try:
            self._vocabulary()
        except Exception:  # noqa: BLE001 - the first grammar meets it again, and says so
            return

    def _work(self) -> None:
        while True:
            self._wake.acquire()
            with self._lock:
                job = self._lanes.next()
                if job is None:  # its tenant is busy: the one that ends wakes somebody
                    continue
                if not job.over:
                    job.began_ms = self._clock.now_ms()
                    self._running.append(job)
            refused: RequestRefused | None = None
            try:
                if not job.over:
                    job.prototype = self._compile(job.grammar)
            except RequestRefused as error:
                refused = error
            except Exception as error:  # noqa: BLE001 - a thread that dies would hang its requests
                refused = RequestRefused(
                    f"The engine cannot compile grammars: {type(error).__name__}.",
                    code="grammar_unavailable",
                    field=FIELD,
                )
            with self._lock:
                self._lanes.busy.discard(job.tenant)
                self._running = [other for other in self._running if other is not job]
                more = any(tenant not in self._lanes.busy for tenant in self._lanes.waiting)
            self._done.put((job, refused))
            if more:
                self._wake.release()

    def _compile(self, grammar: Grammar) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        tokenizer = self._vocabulary()
        limits = self._limits
        source = grammar.text
        if grammar.kind == "json_schema":
            try:
                source = LLMatcher.grammar_from_json_schema(
                    grammar.text, overrides={"whitespace_pattern": WHITESPACE}
                )
            except ValueError as error:
                raise _refused(str(error)) from None
        matcher = LLMatcher(
            tokenizer,
            source,
            log_level=0,
            limits=LLParserLimits(
                initial_lexer_fuel=limits.lexer_fuel,
                step_lexer_fuel=limits.step_fuel,
                step_max_items=limits.step_items,
                max_lexer_states=limits.lexer_states,
                max_grammar_size=limits.max_size,
                verbose_errors=False,
            ),
        )
        matcher.compute_bitmask()  # the most expensive one, and whether there is any
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return matcher

    def _vocabulary(self) -> Any:
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = open_tokenizer(self._load_vocabulary())
            return self._tokenizer


class LlMatcher:
    """A Matcher of llguidance."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allow(self, words: npt.NDArray[np.int32]) -> bool:
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return not self._matcher.is_error() and bool(words.any())

    def advance(self, token: int) -> None:
        self._matcher.consume_token(token)


def json_grammar(schema: object) -> Grammar:
    """The grammar of a JSON schema."""
    return Grammar("json_schema", json.dumps(schema, separators=(",", ":")))


def open_tokenizer(vocabulary: Vocabulary) -> Any:
    """llguidance's own view of a vocabulary."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(
        TokenizerWrapper(_Tokens(vocabulary)), eos_token=[int(token) for token in vocabulary.end]
    )


class _Tokens:
    """What TokenizerWrapper asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if not vocabulary.end:
            raise ValueError("the base model names no token that ends an answer")
        self.eos_token_id = next(iter(vocabulary.end))
        self.bos_token_id = None
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = list(vocabulary.control)
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        return self._encode(text)


def _installed() -> bool:
    try:
        import llguidance  # noqa: F401
    except ImportError:
        return False
    return True


def _refused(reason: str) -> RequestRefused:
    """llguidance's own words, which name the keyword, without the state that follows them."""
    first = " ".join(itertools.takewhile(lambda line: line != "<non-verbose/>", reason.split("\n")))
    text = first.strip()[:_MESSAGE_CHARACTERS]
    if any(word in reason for word in ("too many", "too large", "limit", "max is", "Too many")):
        return _too_complex(text)
    return RequestRefused(
        f"The schema cannot be followed: {text}", code="invalid_schema", field=FIELD
    )


def _too_complex(reason: str) -> RequestRefused:
    return RequestRefused(
        f"The schema is too complex. {reason} Use fewer optional properties, shorter enums or "
        "simpler patterns.",
        code="schema_too_complex",
        field=FIELD,
    )
