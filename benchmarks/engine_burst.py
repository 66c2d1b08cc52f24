"""A mixed burst through the engine in-process, beside transformers + PEFT on the same requests.

    python -m benchmarks.engine_burst --rounds 3

32 requests at once over 16 adapters (ranks 8 x 8, 4 x 16, 2 x 32, 2 x 64 on all seven linears), 128
prompt and 64 output tokens each, greedy. The two systems take turns, round by round, in one
process; PEFT gets one batch with `adapter_names`, the engine EngineCore and CpuExecutor. Prints
output tokens per second by round, medians and their ratio, by the clock and by CPU seconds: on a
machine that others use too, run it with `--threads 1` and trust the second.
"""

import argparse
import contextlib
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.packaged import packaged_base_model
from engine.adapters.loader import StoreLoader
from engine.adapters.store import open_store
from engine.clock import SystemClock
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.model.linear import bf16_is_fast
from engine.model.loader import Checkpoint, open_checkpoint
from engine.runner import CpuExecutor
from engine.types import LAYER_TARGETS, AdapterRef, GenerateRequest, SamplingParams

RANKS = [8] * 8 + [16] * 4 + [32] * 2 + [64] * 2
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 128, 64
SALT = "5a" * 16


MIXED, BASE, PEFT = "engine, 16 adapters", "engine, base", "PEFT"


class Elapsed(NamedTuple):
    wall_s: float
    cpu_s: float


@contextlib.contextmanager
def stopwatch() -> Iterator[list[Elapsed]]:
    """Yields a list that holds the time spent inside once the block is left."""
    elapsed: list[Elapsed] = []
    wall, cpu = time.perf_counter(), time.process_time()
    yield elapsed
    elapsed.append(Elapsed(time.perf_counter() - wall, time.process_time() - cpu))


def base_in_transformers(checkpoint: Checkpoint) -> LlamaForCausalLM:
    """The checkpoint's dequantized weights in transformers' own model, in this CPU's best dtype."""
    c = checkpoint.config
    config = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=c.layers,
        intermediate_size=c.intermediate_size, num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads, rms_norm_eps=c.norm_eps, head_dim=c.head_dim,
        max_position_embeddings=c.context_length, tie_word_embeddings=c.tied_head,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    names = [n for n in model.state_dict() if not (c.tied_head and n == "lm_head.weight")]
    weights = {name: torch.from_numpy(checkpoint.weight(name).decode()) for name in names}
    model.load_state_dict(weights, strict=not c.tied_head)
    return model.to(torch.bfloat16 if bf16_is_fast() else torch.float32)


def make_adapters(model: LlamaForCausalLM, folder: Path) -> tuple[PeftModel, list[Path]]:
    """The 16 random adapters, loaded in PEFT and saved by it."""
    torch.manual_seed(0)
    peft: PeftModel | None = None
    for index, rank in enumerate(RANKS):
        config = LoraConfig(
            r=rank, lora_alpha=rank, target_modules=list(LAYER_TARGETS), task_type="CAUSAL_LM"
        )
        if peft is None:
            peft = get_peft_model(model, config, adapter_name=f"a{index}")
        else:
            peft.add_adapter(f"a{index}", config)
    assert peft is not None
    with torch.no_grad():
        for name, weight in peft.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.01)
    peft.save_pretrained(folder, save_embedding_layers=False)
    return peft.eval(), [folder / f"a{index}" for index in range(len(RANKS))]


def run_peft(peft: PeftModel, prompts: list[list[int]], output_tokens: int) -> Elapsed:
    """The whole burst as one batch."""
    names = [f"a{index % len(RANKS)}" for index in range(len(prompts))]
    tokens = torch.tensor(prompts)
    with stopwatch() as elapsed, torch.inference_mode():
        output = peft.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), adapter_names=names,
            max_new_tokens=output_tokens, min_new_tokens=output_tokens, do_sample=False,
        )  # fmt: skip
    assert output.shape[1] == len(prompts[0]) + output_tokens
    return elapsed[0]


def run_engine(
    core: EngineCore,
    refs: list[AdapterRef] | None,
    prompts: list[list[int]],
    output_tokens: int,
    name: str,
) -> Elapsed:
    """From the first submit to the last token. `refs` None: the base model alone."""
    with stopwatch() as elapsed:
        _run_to_the_end(core, refs, prompts, output_tokens, name)
    return elapsed[0]


def _run_to_the_end(
    core: EngineCore,
    refs: list[AdapterRef] | None,
    prompts: list[list[int]],
    output_tokens: int,
    name: str,
) -> None:
    for index, prompt in enumerate(prompts):
        core.submit(
            GenerateRequest(
                request_id=f"{name}-{index}", tenant=f"t{index % len(RANKS)}", prompt=prompt,
                sampling=SamplingParams(
                    max_tokens=output_tokens, temperature=0.0, ignore_eos=True
                ),
                cache_salt=f"{name}-{index}",
                adapter=refs[index % len(refs)] if refs else None,
            )
        )  # fmt: skip
    done = tokens = 0
    while done < len(prompts):
        for output in core.step():
            assert output.error_code is None, output
            tokens += len(output.token_ids)
            done += output.usage is not None
    assert tokens == len(prompts) * output_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, default=packaged_base_model())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--skip-peft", action="store_true")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--kv-dtype", default="auto")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        peft, saved = make_adapters(base_in_transformers(open_checkpoint(arguments.base)), folder)
        config = EngineConfig(
            base_model=arguments.base, data_dir=folder, store_url=f"file://{folder / 'store'}",
            arena_bytes=1 << 30, threads=arguments.threads, kv_dtype=arguments.kv_dtype,
            batch_invariant=arguments.batch_invariant, prefix_caching=False,
        )  # fmt: skip
        store = open_store(config.store_url)
        refs = []
        for path in saved:
            staging = store.stage()
            staging.write_config((path / "adapter_config.json").read_bytes())
            staging.write_weights((path / "adapter_model.safetensors").read_bytes())
            refs.append(staging.commit(SALT).ref)
        executor = CpuExecutor(config)
        loader = StoreLoader(config, store, executor.description)
        core = EngineCore(config, executor, loader, SystemClock())
        runs: dict[str, list[Elapsed]] = {name: [] for name in (MIXED, BASE, PEFT)}
        for round_number in range(arguments.rounds + 1):
            output_tokens = OUTPUT_TOKENS if round_number else 4
            prompts = [
                [rng.randrange(100, 49000) for _ in range(PROMPT_TOKENS)] for _ in range(REQUESTS)
            ]
            elapsed = {
                MIXED: run_engine(core, refs, prompts, output_tokens, f"a{round_number}"),
                BASE: run_engine(core, None, prompts, output_tokens, f"b{round_number}"),
            }
            if not arguments.skip_peft:
                elapsed[PEFT] = run_peft(peft, prompts, output_tokens)
            if not round_number:
                continue  # the warm-up
            for name, time_spent in elapsed.items():
                runs[name].append(time_spent)
            print(f"round {round_number}:", describe(elapsed), flush=True)
        loader.close()
    medians = {
        name: Elapsed(*(statistics.median(values) for values in zip(*times, strict=True)))
        for name, times in runs.items()
        if times
    }
    print("median:", describe(medians))
    if PEFT in medians:
        wall, cpu = (
            theirs / ours for theirs, ours in zip(medians[PEFT], medians[MIXED], strict=True)
        )
        print(f"engine / PEFT: {wall:.2f} by the clock, {cpu:.2f} by CPU seconds")


def describe(elapsed: dict[str, Elapsed]) -> str:
    """Output tokens per second of wall time, and per second of CPU time."""
    tokens = REQUESTS * OUTPUT_TOKENS
    return ", ".join(
        f"{name} {tokens / spent.wall_s:.1f} tok/s ({tokens / spent.cpu_s:.1f} per CPU second)"
        for name, spent in elapsed.items()
    )


if __name__ == "__main__":
    main()
