"""How far a sequence's logits depend on the way it was served: 50 prompts x 64 tokens.

    python -m benchmarks.agreement [--base BASE] [--batch-invariant] [--adapter DIR ...]

Each prompt is first answered alone and greedily. The same tokens are then fed again in a mixed
batch (beside seven other prompts and, when given, adapters), in chunks, after a preemption and
after a cached prefix. Prints for each way the largest logit difference, the share of positions
whose likeliest token agrees, and how many positions are bitwise equal.
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.arguments import at_least_one
from benchmarks.packaged import packaged_base_model
from engine.text import TextCodec
from engine.types import BLOCK_TOKENS
from tests.model_factories import read_blob
from tests.parity.driver import Driver, Piece

PROMPTS, OUTPUT_TOKENS, NEIGHBOURS = 50, 64, 7
TEXT = Path(__file__).parents[1] / "tests" / "data" / "english_4k.txt"


@dataclass
class Agreement:
    """Totals over all positions compared."""

    positions: int = 0
    agreeing: int = 0
    bitwise: int = 0
    largest: float = 0.0

    def add(self, got: Tensor, want: Tensor) -> None:
        self.positions += 1
        self.agreeing += int(got.argmax() == want.argmax())
        self.bitwise += int(torch.equal(got, want))
        self.largest = max(self.largest, (got - want).abs().max().item())


class Comparison:
    """One prompt served in every way; sequence 0 is the prompt, others its neighbours."""

    def __init__(self, driver: Driver, prompts: list[list[int]], index: int, slots: list[int]):
        self.driver = driver
        self.prompt = prompts[index]
        self.slot = slots[index % len(slots)]
        self.others = [prompts[(index + n) % len(prompts)] for n in range(1, NEIGHBOURS + 1)]
        self.slots = slots
        self.tokens = list(self.prompt)
        self.want: list[Tensor] = []

    def answer_alone(self) -> None:
        """Fills `want` and `tokens`."""
        (logits,) = self.driver.feed(Piece(0, self.prompt, self.slot))
        for _ in range(OUTPUT_TOKENS):
            self.want.append(logits)
            self.tokens.append(int(logits.argmax()))
            (logits,) = self.driver.feed(Piece(0, self.tokens[-1:], self.slot))

    def mixed(self) -> Iterator[Tensor]:
        def beside(n: int, tokens: list[int]) -> Piece:
            return Piece(n, tokens, self.slots[n % len(self.slots)])

        others = [beside(n, other) for n, other in enumerate(self.others, start=1)]
        yield self.driver.feed(*others[:3], Piece(0, self.prompt, self.slot), *others[3:])[3]
        for at in range(len(self.prompt), len(self.tokens) - 1):
            others = [beside(n, [other[at % len(other)]]) for n, other in enumerate(self.others, 1)]
            mine = Piece(0, self.tokens[at : at + 1], self.slot)
            yield self.driver.feed(*others[:3], mine, *others[3:])[3]

    def chunked(self) -> Iterator[Tensor]:
        """The prompt in chunks of 13, then decodes."""
        for at in range(0, len(self.prompt), 13):
            (logits,) = self.driver.feed(Piece(0, self.prompt[at : at + 13], self.slot))
        yield logits
        yield from self._decodes(len(self.prompt))

    def preempted(self) -> Iterator[Tensor]:
        """Started over half-way: what was generated is computed again as one prefill."""
        half = len(self.prompt) + OUTPUT_TOKENS // 2
        (logits,) = self.driver.feed(Piece(0, self.tokens[:half], self.slot))
        yield logits
        yield from self._decodes(half)

    def prefix_cached(self) -> Iterator[Tensor]:
        """The full blocks of the prompt come from another sequence's prefill."""
        blocks = (len(self.prompt) - 1) // BLOCK_TOKENS
        self.driver.feed(Piece(1, self.prompt[: blocks * BLOCK_TOKENS], self.slot))
        self.driver.share_prefix(0, owner=1, blocks=blocks)
        (logits,) = self.driver.feed(Piece(0, self.prompt[blocks * BLOCK_TOKENS :], self.slot))
        yield logits
        yield from self._decodes(len(self.prompt))

    def _decodes(self, start: int) -> Iterator[Tensor]:
        for at in range(start, len(self.tokens) - 1):
            (logits,) = self.driver.feed(Piece(0, self.tokens[at : at + 1], self.slot))
            yield logits


WAYS = ("mixed", "chunked", "preempted", "prefix_cached")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=packaged_base_model())
    parser.add_argument("--prompts", type=at_least_one, default=PROMPTS)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--adapter", type=Path, nargs="*", default=[])
    arguments = parser.parse_args()
    text = TextCodec.load(arguments.base).encode(TEXT.read_text())
    prompts = [text[i * 70 : i * 70 + 30 + i // 2] for i in range(arguments.prompts)]
    totals = {way: Agreement() for way in WAYS}
    with tempfile.TemporaryDirectory() as data_dir:
        driver = Driver(
            arguments.base, Path(data_dir), arena_bytes=512 << 20, threads=arguments.threads,
            linear_path="auto", kv_dtype="auto", adapter_dtype="auto",
            batch_invariant=arguments.batch_invariant,
        )  # fmt: skip
        for slot, folder in enumerate(arguments.adapter):
            driver.add_adapter(slot, read_blob(folder, driver.executor.description))
        slots = [-1, *range(len(arguments.adapter))]
        for index in range(arguments.prompts):
            comparison = Comparison(driver, prompts, index, slots)
            comparison.answer_alone()
            driver.close_all()
            for way, total in totals.items():
                logits = list(getattr(comparison, way)())
                for got, want in zip(logits, comparison.want[-len(logits) :], strict=True):
                    total.add(got, want)
                driver.close_all()
    for way, total in totals.items():
        agreeing = 100 * total.agreeing / total.positions
        print(
            f"{way}: largest logit difference {total.largest:.3g}, agreement {agreeing:.2f} %, "
            f"bitwise equal {total.bitwise} of {total.positions}"
        )


if __name__ == "__main__":
    main()
