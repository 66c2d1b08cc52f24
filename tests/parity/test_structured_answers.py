"""Answers that follow a schema, by the whole engine with a tiny random model: scheduler,
preemption, choices and sampler together. The vocabulary is bytes."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.clock import SimulatedClock
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.grammar import json_grammar
from engine.runner import CpuExecutor
from engine.types import GenerateRequest, RequestOutput, SamplingParams
from tests.fakes import FakeLoader
from tests.grammars import BYTES, END, SCHEMAS, byte_grammars, text_of
from tests.model_factories import make_llama, save_folder

MOST_TOKENS = 120


class Engine:
    """One engine with a tiny model, asked several things at once."""

    def __init__(self, base: Path, data_dir: Path, **options: object) -> None:
        values: dict[str, object] = {
            "arena_bytes": 2 << 20, "linear_path": "fp32", "kv_dtype": "fp32", "threads": 1,
            "prefix_caching": False, "batch_invariant": True,
        }  # fmt: skip
        config = EngineConfig(base_model=base, data_dir=data_dir, **{**values, **options})
        grammars = byte_grammars()
        executor = CpuExecutor(config, grammars=grammars)
        clock = SimulatedClock()
        self.core = EngineCore(config, executor, FakeLoader(clock), clock, grammars=grammars)
        self._asked = 0

    def ask(self, schema: object | None, **values: object) -> str:
        self._asked += 1
        seed = values.pop("seed", self._asked)
        self.core.submit(
            GenerateRequest(
                request_id=f"r{self._asked}",
                tenant="a",
                prompt=[10, 20, 30 + seed % 50],  # type: ignore[operator]
                sampling=SamplingParams(
                    MOST_TOKENS,
                    seed=seed,  # type: ignore[arg-type]
                    logit_bias={END: 6.0} | dict.fromkeys(b'"}],', 4.0),
                ),
                cache_salt="a",
                grammar=None if schema is None else json_grammar(schema),
                **values,  # type: ignore[arg-type]
            )
        )
        return f"r{self._asked}"

    def run(self) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        until = time.monotonic() + 60
        while self.core.has_work:
            new = self.core.step()
            outputs += new
            if not new:
                time.sleep(0.0005)  # a grammar is being compiled
            assert time.monotonic() < until
        return outputs


def answers(outputs: list[RequestOutput], request_id: str) -> dict[int, tuple[str, str]]:
    """By choice: the text and how it ended."""
    tokens: dict[int, list[int]] = {}
    ends: dict[int, str] = {}
    for output in outputs:
        if output.request_id == request_id:
            assert output.error_code is None, output.error_message
            tokens.setdefault(output.choice, []).extend(output.token_ids)
            if output.finish is not None:
                ends[output.choice] = output.finish
    return {choice: (text_of(tokens[choice]), end) for choice, end in ends.items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_llama(
        seed=5,
        vocab_size=BYTES + 7,  # as checkpoints pad it: no grammar may let the padding through
        eos_token_id=END,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        max_position_embeddings=512,
    )
    return save_folder(model, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def engine(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    return Engine(base, tmp_path_factory.mktemp("engine"))


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(schemas=st.lists(SCHEMAS, min_size=1, max_size=4))
def test_every_answer_that_ends_by_itself_validates(engine: Engine, schemas: list) -> None:
    asked = [(engine.ask(schema), schema) for schema in schemas]
    engine.ask(None)
    outputs = engine.run()
    for request_id, schema in asked:
        text, end = answers(outputs, request_id)[0]
        if end == "stop":
            jsonschema.validate(json.loads(text), schema)


SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "minLength": 20, "maxLength": 40},
        "b": {"enum": [1, 2]},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_seeds_choices_and_preemption(base: Path, engine: Engine, tmp_path: Path) -> None:
    """Little memory preempts; the answers are those of an engine with plenty, choice by choice."""
    roomy = [engine.ask(SCHEMA, choices=3, seed=seed) for seed in range(4)]
    outputs = engine.run()
    want = [answers(outputs, request_id) for request_id in roomy]
    assert all(end == "stop" for each in want for _, end in each.values())
    assert len({text for each in want for text, _ in each.values()}) > 4

    tight = Engine(base, tmp_path, arena_bytes=1 << 16)
    crowded = [tight.ask(SCHEMA, choices=3, seed=seed) for seed in range(4)]
    outputs = tight.run()
    assert tight.core.status().preemptions_total > 0
    assert [answers(outputs, request_id) for request_id in crowded] == want
    for text, _ in want[0].values():
        jsonschema.validate(json.loads(text), SCHEMA)
