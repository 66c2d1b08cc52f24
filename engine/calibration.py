"""Primes the step-time model at start-up, with requests that go the way of all requests.

A first round pays what only the first steps cost and is forgotten. Then come batches of growing
size and prompts of several lengths, until the shapes are through or the time is up.
"""

import logging
import secrets
from typing import Protocol

from engine.clock import Clock
from engine.errors import RequestRefused
from engine.step_time import StepTimes
from engine.types import GenerateRequest, RequestOutput, SamplingParams

log = logging.getLogger(__name__)

ROUNDS = ((1, 400), (1, 24), (8, 16), (2, 100), (1, 900), (4, 48), (16, 24), (3, 256), (32, 16))
"""(requests, prompt tokens of each), run to their ends one after the other.

A long prompt comes first: where the time is short, guesses about long ones from short ones would
be wild.
"""
ANSWER_TOKENS = 8


class Core(Protocol):
    """What calibration needs of EngineCore."""

    step_times: StepTimes

    @property
    def has_work(self) -> bool: ...
    def submit(self, request: GenerateRequest) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def step(self) -> list[RequestOutput]: ...


def calibrate(core: Core, clock: Clock, limit_ms: float) -> None:
    """Runs at most about `limit_ms` (and one step); the model then holds what it found."""
    _run(core, clock, 1, 16, clock.now_ms() + limit_ms)
    core.step_times.forget()
    began_ms = clock.now_ms()
    for requests, prompt in ROUNDS:
        if clock.now_ms() - began_ms >= limit_ms:
            break
        _run(core, clock, requests, prompt, began_ms + limit_ms)
    core.step_times.anchor()
    log.info(
        "calibrated on %d steps in %.0f ms", core.step_times.samples, clock.now_ms() - began_ms
    )


def _run(core: Core, clock: Clock, requests: int, prompt: int, until_ms: float) -> None:
    """One round; what does not fit this engine is left out, what is not done in time cancelled."""
    submitted = []
    for _ in range(requests):
        request = GenerateRequest(
            request_id=f"calibration-{secrets.token_hex(8)}",
            tenant="system",
            prompt=[index % 8 for index in range(prompt)],
            sampling=SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True),
            cache_salt=secrets.token_hex(16),
            system=True,
        )
        try:
            core.submit(request)
        except RequestRefused:
            break
        submitted.append(request.request_id)
    while core.has_work:
        if clock.now_ms() >= until_ms:
            for request_id in submitted:
                core.cancel(request_id)
        core.step()
