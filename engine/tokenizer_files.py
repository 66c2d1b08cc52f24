"""Builds a `tokenizers.Tokenizer` from a GGUF file's metadata or a Hugging Face folder."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from engine.errors import EngineError
from engine.gguf import GgufFile, metadata_tokenizer_digest, tokenizer_digest

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


class TokenizerUnsupported(EngineError):
    """The checkpoint's tokenizer is of a kind that cannot be read here."""

    code = "tokenizer_unsupported"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer with what its checkpoint says about using it."""

    tokenizer: Tokenizer
    digest: str
    chat_template: str | None
    special_tokens: dict[str, str] = field(default_factory=dict)  # "bos_token": "<s>"


def read_tokenizer(base_model: Path) -> TokenizerFiles:
    """From a .gguf file or a folder with tokenizer.json. Raises EngineError subclasses."""
    if base_model.is_dir():
        return _from_folder(base_model)
    return _from_gguf(base_model)


# --------------------------------------------------------------------------- GGUF


def _from_gguf(path: Path) -> TokenizerFiles:
    metadata = GgufFile(path).metadata
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        raise TokenizerUnsupported(
            f"{path.name} has a {metadata.get('tokenizer.ggml.model')!r} tokenizer; of GGUF files "
            "only byte-level BPE ('gpt2') is read. Name a Hugging Face folder instead"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    kind = metadata.get("tokenizer.ggml.pre", "default")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=kind == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = _word_splitter(kind, path.name)
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    for token, token_type in zip(tokens, types, strict=True):
        if token_type == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    special = {
        name: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"))
        if f"tokenizer.ggml.{key}_token_id" in metadata
    }
    if metadata.get("tokenizer.ggml.add_bos_token") and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return TokenizerFiles(
        tokenizer,
        metadata_tokenizer_digest(metadata),
        metadata.get("tokenizer.chat_template"),
        special,
    )


def _word_splitter(kind: str, name: str) -> Any:
    """How text is cut before BPE, by llama.cpp's name for it."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    if kind in ("gpt-2", "default"):
        return whole
    if kind in ("llama-bpe", "qwen2"):
        words = Regex(_LLAMA3_WORDS if kind == "llama-bpe" else _QWEN2_WORDS)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(words, behavior="isolated"), cut])
    raise TokenizerUnsupported(
        f"{name} cuts words as {kind!r}, which is not known here; read are smollm, gpt-2, "
        "llama-bpe and qwen2. Name a Hugging Face folder with tokenizer.json instead"
    )


# --------------------------------------------------------------------------- Hugging Face


def _from_folder(folder: Path) -> TokenizerFiles:
    digest = tokenizer_digest(folder)  # raises when there is no tokenizer.json
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the Rust library raises no other
        raise TokenizerUnsupported(f"cannot read {folder.name}/tokenizer.json: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    config = _read_json(folder / "tokenizer_config.json")
    special = {
        name: text
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _token_text(config.get(name))) is not None
    }
    return TokenizerFiles(tokenizer, digest, _folder_template(folder, config), special)


def _folder_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over the config's entry; of named ones, "default" is taken."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(entry: object) -> str | None:
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        parsed = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerUnsupported(f"{file.parent.name}/{file.name} is not JSON") from error
    return parsed if isinstance(parsed, dict) else {}
