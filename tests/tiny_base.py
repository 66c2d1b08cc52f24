"""A base of a few kilobytes that `loramux serve` can serve: random weights, a byte tokenizer."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.model_factories import make_llama, save_folder

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
END = "<|end|>"


def write_tiny_base(folder: Path, *, seed: int = 0, hidden: int = 64) -> Path:
    """A Hugging Face folder; its name is the base model's. Answers are noise, and long."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    model = make_llama(
        seed=seed,
        vocab_size=len(alphabet) + 1,
        eos_token_id=len(alphabet),
        hidden_size=hidden,
        max_position_embeddings=2048,
        num_hidden_layers=2,
    )
    save_folder(model, folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
