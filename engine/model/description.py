"""What the engine says about its base model: identity, modules, shapes and norms.

The sha256 of the weight files and the Frobenius norms take a while on a large model, so they are
kept in one small file of the data folder, keyed by each file's path, size and modification time.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from engine.adapters.sketch import weight_sketch
from engine.model.config import ModelConfig
from engine.model.loader import Checkpoint, module_shape
from engine.model.quantization import Floats
from engine.model.weights import Weight
from engine.types import EDGE_TARGETS, LAYER_TARGETS, ModelDescription, ModuleSpec

_CHUNK_BYTES = 1 << 22
_CHUNK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Identity:
    """What is derived from the weights' bytes alone."""

    base_digest: str
    norms: dict[str, float]  # by module name
    sketches: dict[str, list[float]]  # of the modules outside the blocks, see ModuleSpec


def describe(
    checkpoint: Checkpoint,
    identity: Identity,
    *,
    max_rank: int,
    kv_block_bytes: int,
    adapter_dtype: Literal["bf16", "fp32"],
    backend: str,
) -> ModelDescription:
    """The description under which adapters, routing and the model list know this base."""
    config = checkpoint.config
    return ModelDescription(
        name=checkpoint.name,
        architecture=config.architecture,
        base_digest=identity.base_digest,
        tokenizer_digest=checkpoint.tokenizer_digest(),
        modules=tuple(_module(config, name, identity) for name in module_names(config)),
        layers=config.layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        context_length=config.context_length,
        max_rank=max_rank,
        eos_token_ids=config.eos_token_ids,
        kv_block_bytes=kv_block_bytes,
        adapter_dtype=adapter_dtype,
        backend=backend,
    )


def module_names(config: ModelConfig) -> list[str]:
    """Every module that an adapter may target, in the order of the forward."""
    blocks = [
        f"model.layers.{layer}.{'self_attn' if target in LAYER_TARGETS[:4] else 'mlp'}.{target}"
        for layer in range(config.layers)
        for target in LAYER_TARGETS
    ]
    return ["model.embed_tokens", *blocks, "lm_head"]


def identify(checkpoint: Checkpoint, cache_dir: Path | None) -> Identity:
    """Digest and norms of a checkpoint, from `cache_dir` when its files are unchanged."""
    files = checkpoint.files()
    stats = [(str(file.resolve()), file.stat()) for file in files]
    key = json.dumps([[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats])
    cached = (
        cache_dir / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json" if cache_dir else None
    )
    known = _read(cached, module_names(checkpoint.config)) if cached else None
    if known is not None:
        return known
    identity = Identity(_digest(files), _norms(checkpoint), _sketches(checkpoint))
    if cached is not None:
        cached.parent.mkdir(parents=True, exist_ok=True)
        unfinished = cached.with_suffix(".tmp")
        unfinished.write_text(json.dumps(asdict(identity)))
        unfinished.replace(cached)
    return identity


def _read(file: Path, names: list[str]) -> Identity | None:
    """The kept identity, or None when there is none or it cannot be used."""
    try:
        kept = json.loads(file.read_text())
        identity = Identity(str(kept["base_digest"]), dict(kept["norms"]), dict(kept["sketches"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return identity if all(name in identity.norms for name in names) else None


def _digest(files: list[Path]) -> str:
    """The file's own sha256 for one file; over the files' names and digests for several."""
    digests = [(file.name, _sha256(file)) for file in files]
    if len(digests) == 1:
        return digests[0][1]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(_CHUNK_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _norms(checkpoint: Checkpoint) -> dict[str, float]:
    norms: dict[str, float] = {}
    for name in module_names(checkpoint.config):
        if name == "lm_head" and checkpoint.config.tied_head:
            norms[name] = norms["model.embed_tokens"]
        else:
            norms[name] = _frobenius(checkpoint.weight(f"{name}.weight"))
            checkpoint.release()
    return norms


def _sketches(checkpoint: Checkpoint) -> dict[str, list[float]]:
    config = checkpoint.config
    sketches: dict[str, list[float]] = {}
    for name in ("model.embed_tokens", "lm_head"):
        if name == "lm_head" and config.tied_head:
            sketches[name] = sketches["model.embed_tokens"]
        else:
            weight = checkpoint.weight(f"{name}.weight")
            rows, columns = weight.shape
            sketches[name] = list(weight_sketch(_pieces(weight), rows, columns))
            checkpoint.release()
    return sketches


def _pieces(weight: Weight) -> Iterator[Floats]:
    for start in range(0, weight.shape[0], _CHUNK_ROWS):
        yield weight.decode(start, start + _CHUNK_ROWS)


def _frobenius(weight: Weight) -> float:
    return math.sqrt(sum(float(np.vdot(piece, piece)) for piece in _pieces(weight)))


def _module(config: ModelConfig, name: str, identity: Identity) -> ModuleSpec:
    target = name.rpartition(".")[2]
    out_features, in_features = module_shape(config, target)
    if target == "embed_tokens":  # maps a token to a hidden vector; its weight lies transposed
        out_features, in_features = in_features, out_features
    layer = -1 if target in EDGE_TARGETS else int(name.split(".")[2])
    return ModuleSpec(
        name=name,
        target=target,
        layer=layer,
        in_features=in_features,
        out_features=out_features,
        norm=identity.norms[name],
        sketch=tuple(identity.sketches.get(name, ())),
    )
