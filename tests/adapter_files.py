"""Adapter files for tests: good ones of any shape, and every hostile kind that must be refused.

    files = good_adapter(tiny_description())
    files.write(tmp_path)                       # adapter_config.json, adapter_model.safetensors
    for case in HOSTILE: case.build(description), case.group, case.code

The safetensors writer is this file's own, because no honest writer can lie about offsets.
"""

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.adapters.sketch import weight_sketch
from engine.types import LAYER_TARGETS, ModelDescription, ModuleSpec

PREFIX = "base_model.model."
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I8": 1, "F8_E4M3": 1}


# --------------------------------------------------------------------------- a small base model


def tiny_description(
    *, layers: int = 2, hidden: int = 16, kv: int = 8, mlp: int = 24, vocab: int = 40,
    max_rank: int = 64,
) -> ModelDescription:  # fmt: skip
    """A made-up Llama of a few kilobytes; its embedding (tied) is `tiny_embedding`."""
    shapes = {
        "q_proj": (hidden, hidden), "k_proj": (hidden, kv), "v_proj": (hidden, kv),
        "o_proj": (hidden, hidden), "gate_proj": (hidden, mlp), "up_proj": (hidden, mlp),
        "down_proj": (mlp, hidden),
    }  # fmt: skip
    modules = []
    for layer in range(layers):
        for target in LAYER_TARGETS:
            room = "mlp" if target in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            name = f"model.layers.{layer}.{room}.{target}"
            modules.append(ModuleSpec(name, target, layer, *shapes[target], norm=10.0))
    embedding = tiny_embedding(vocab, hidden)
    norm = float(np.linalg.norm(embedding))
    sketch = weight_sketch([embedding], vocab, hidden)
    modules.append(
        ModuleSpec("model.embed_tokens", "embed_tokens", -1, vocab, hidden, norm, sketch)
    )
    modules.append(ModuleSpec("lm_head", "lm_head", -1, hidden, vocab, norm, sketch))
    return ModelDescription(
        name="tiny", architecture="llama", base_digest="b" * 64, tokenizer_digest="c" * 64,
        modules=tuple(modules), layers=layers, hidden_size=hidden, vocab_size=vocab,
        context_length=256, max_rank=max_rank, eos_token_ids=(0,), kv_block_bytes=4096,
        adapter_dtype="bf16", backend="test",
    )  # fmt: skip


def tiny_embedding(vocab: int = 40, hidden: int = 16) -> np.ndarray:
    """[vocab, hidden] float32: the embedding of `tiny_description`."""
    return np.random.default_rng(7).standard_normal((vocab, hidden)).astype(np.float32)


# --------------------------------------------------------------------------- writing files


@dataclass(frozen=True)
class Tensor:
    """Bytes under a name; `dtype` and `shape` are what the header will claim."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def tensor(values: np.ndarray, dtype: str = "F32") -> Tensor:
    """`values` stored in `dtype` (bf16 by truncation: test values are few bits wide)."""
    exact = np.ascontiguousarray(values, np.float32)
    if dtype == "BF16":
        data = (exact.view(np.uint32) >> 16).astype("<u2").tobytes()
    else:
        data = exact.astype({"F16": "<f2", "F64": "<f8"}.get(dtype, "<f4")).tobytes()
    return Tensor(dtype, tuple(values.shape), data)


def pack(
    tensors: Mapping[str, Tensor],
    *,
    metadata: dict[str, Any] | None = None,
    edit: Callable[[dict[str, Any]], None] | None = None,
) -> bytes:
    """A safetensors file; `edit` may lie in the header before it is written."""
    header: dict[str, Any] = {"__metadata__": metadata or {"format": "pt"}}
    at = 0
    for name, item in tensors.items():
        offsets = [at, at + len(item.data)]
        header[name] = {"dtype": item.dtype, "shape": list(item.shape), "data_offsets": offsets}
        at += len(item.data)
    if edit is not None:
        edit(header)
    return with_header(json.dumps(header).encode(), b"".join(t.data for t in tensors.values()))


def with_header(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """A file from a raw header; `length` may lie about it."""
    return struct.pack("<Q", len(header) if length is None else length) + header + data


@dataclass(frozen=True)
class AdapterFiles:
    """The two files as bytes; None: not written. `extra` are other files of the folder."""

    config: bytes | None
    weights: bytes | None
    extra: dict[str, bytes] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in (
            ("adapter_config.json", self.config),
            ("adapter_model.safetensors", self.weights),
            *self.extra.items(),
        ):
            if data is not None:
                (folder / name).write_bytes(data)
        return folder


def config_json(**changes: Any) -> bytes:
    """A config as PEFT writes it, with keys changed or added."""
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": None,
        "bias": "none",
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "init_lora_weights": True,
    }
    return json.dumps(config | changes).encode()


def pair_names(module: ModuleSpec) -> tuple[str, str]:
    if module.target == "embed_tokens":
        stem = f"{PREFIX}{module.name}.lora_embedding_"
        return f"{stem}A", f"{stem}B"
    stem = f"{PREFIX}{module.name}.lora_"
    return f"{stem}A.weight", f"{stem}B.weight"


def lora_tensors(
    description: ModelDescription,
    *,
    rank: int | Callable[[ModuleSpec], int] = 4,
    targets: Iterable[str] = LAYER_TARGETS,
    layers: Iterable[int] | None = None,
    dtype: str = "F32",
    seed: int = 0,
) -> dict[str, Tensor]:
    """Random pairs for the chosen modules, as PEFT names and shapes them."""
    rng = np.random.default_rng(seed)
    wanted, kept = set(targets), None if layers is None else set(layers)
    result = {}
    for module in description.modules:
        if module.target not in wanted or (kept is not None and module.layer not in kept):
            continue
        r = rank(module) if callable(rank) else rank
        a_name, b_name = pair_names(module)
        # few mantissa bits, so that every dtype holds the same numbers
        a = rng.integers(-8, 9, (r, module.in_features)) / 256
        b = rng.integers(-8, 9, (module.out_features, r)) / 256
        result[a_name], result[b_name] = tensor(a, dtype), tensor(b, dtype)
    return result


def good_adapter(
    description: ModelDescription, *, config: dict[str, Any] | None = None, **shape: Any
) -> AdapterFiles:
    """An adapter that every check accepts; `shape` goes to `lora_tensors`."""
    rank = shape.get("rank", 4)
    changes = ({"r": rank} if isinstance(rank, int) else {}) | (config or {})
    return AdapterFiles(config_json(**changes), pack(lora_tensors(description, **shape)))


# --------------------------------------------------------------------------- hostile kinds


@dataclass(frozen=True)
class HostileCase:
    """One way to be refused: in which group of checks, and with which code."""

    name: str
    group: str
    code: str
    build: Callable[[ModelDescription], AdapterFiles]


HOSTILE: list[HostileCase] = []


def _hostile(
    name: str, group: str, code: str
) -> Callable[[Callable[[ModelDescription], AdapterFiles]], None]:
    def register(build: Callable[[ModelDescription], AdapterFiles]) -> None:
        HOSTILE.append(HostileCase(name, group, code, build))

    return register


def _weights(name: str, code: str, build: Callable[[bytes], bytes]) -> None:
    """A broken container made from a good file."""

    def files(description: ModelDescription) -> AdapterFiles:
        good = good_adapter(description)
        assert good.weights is not None
        return replace(good, weights=build(good.weights))

    HOSTILE.append(HostileCase(name, "container", code, files))


def _header(name: str, code: str, edit: Callable[[dict[str, Any]], None]) -> None:
    """A good file whose header lies."""

    def files(description: ModelDescription) -> AdapterFiles:
        return AdapterFiles(config_json(), pack(lora_tensors(description), edit=edit))

    HOSTILE.append(HostileCase(name, "container", code, files))


def _config(name: str, code: str, **changes: Any) -> None:
    """Good weights under a config that must be refused."""

    def files(description: ModelDescription) -> AdapterFiles:
        return replace(good_adapter(description), config=config_json(**changes))

    HOSTILE.append(HostileCase(name, "config", code, files))


def _raw_config(name: str, code: str, data: bytes) -> None:
    HOSTILE.append(
        HostileCase(name, "config", code, lambda d: replace(good_adapter(d), config=data))
    )


def _tensors(
    name: str, code: str, edit: Callable[[dict[str, Tensor]], object], group: str = "coverage"
) -> None:
    """A well-formed file whose tensors cannot be served."""

    def files(description: ModelDescription) -> AdapterFiles:
        tensors = lora_tensors(description)
        edit(tensors)
        return AdapterFiles(config_json(), pack(tensors))

    HOSTILE.append(HostileCase(name, group, code, files))


def _added(name: str, code: str, tensor_name: str, shape: tuple[int, ...] = (4, 4)) -> None:
    """A good adapter with one tensor more."""
    _tensors(name, code, lambda t: t.update({tensor_name: tensor(np.ones(shape))}))


def _rename(name: str, code: str, rename: Callable[[str], str]) -> None:
    """Every tensor of a good adapter under another name."""

    def edit(tensors: dict[str, Tensor]) -> None:
        renamed = {rename(key): value for key, value in tensors.items()}
        tensors.clear()
        tensors.update(renamed)

    _tensors(name, code, edit)


def _first(header: dict[str, Any], nth: int = 0) -> dict[str, Any]:
    return header[[key for key in header if key != "__metadata__"][nth]]  # type: ignore[no-any-return]


def _reshape(
    tensors: dict[str, Tensor],
    a: Callable[[int, int], tuple[int, ...]] | None = None,
    b: Callable[[int, int], tuple[int, ...]] | None = None,
) -> None:
    """Gives the first query projection's factors other shapes."""
    for side, change in (("A", a), ("B", b)):
        if change is not None:
            name = f"{Q0}.lora_{side}.weight"
            height, width = tensors[name].shape
            tensors[name] = tensor(np.ones(change(height, width)))


Q0 = f"{PREFIX}model.layers.0.self_attn.q_proj"

# --- the container
HOSTILE.append(HostileCase("no weights file", "container", "missing_file",
               lambda d: replace(good_adapter(d), weights=None)))  # fmt: skip
HOSTILE.append(HostileCase("no config file", "container", "missing_file",
               lambda d: replace(good_adapter(d), config=None)))  # fmt: skip
HOSTILE.append(HostileCase("an empty config file", "container", "empty_file",
               lambda d: replace(good_adapter(d), config=b"")))  # fmt: skip
HOSTILE.append(HostileCase("only adapter_model.bin", "container", "pickle_file",
               lambda d: replace(good_adapter(d), weights=None,
                                 extra={"adapter_model.bin": b"PK\x03\x04"})))  # fmt: skip
_weights("an empty weights file", "empty_file", lambda w: b"")
_weights("a pickle archive under the right name", "pickle_file", lambda w: b"PK\x03\x04" + w)
_weights("a bare pickle", "pickle_file", lambda w: b"\x80\x04\x95" + w)
_weights("a git-LFS pointer", "lfs_pointer",
         lambda w: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n")  # fmt: skip
_weights("AppleDouble metadata", "not_safetensors", lambda w: b"\x00\x05\x16\x07" + b"\0" * 172)
_weights("a GGUF file", "not_safetensors", lambda w: b"GGUF" + w)
_weights("an HTML page", "not_safetensors", lambda w: b"<!DOCTYPE html><html></html>")
_weights("cut in the first eight bytes", "truncated_file", lambda w: w[:5])
_weights("cut inside the header", "truncated_file", lambda w: w[:100])
_weights("cut inside the last tensor", "truncated_file", lambda w: w[:-1])
_weights("one byte too many", "trailing_bytes", lambda w: w + b"\0")
_weights("a header of 100 MB", "header_too_large",
         lambda w: struct.pack("<Q", 100 * 1024 * 1024) + w[8:])  # fmt: skip
_weights("a header of 2^63 bytes", "header_too_large", lambda w: b"\xff" * 8 + w[8:])
_weights("a header that is no JSON", "header_invalid", lambda w: with_header(b"{ nope }"))
_weights("a header that is a list", "header_invalid", lambda w: with_header(b"[]"))
_weights("a header nested a thousand deep", "header_invalid",
         lambda w: with_header(b'{"a":' * 1000 + b"1" + b"}" * 1000))  # fmt: skip
_weights("a name given twice", "header_invalid",
         lambda w: with_header(b'{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
                               b',"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}')
         )  # fmt: skip
_header("offsets beyond the file", "truncated_file",
        lambda h: (_last := h[list(h)[-1]]).update(
            shape=[1 << 20, 1 << 20],
            data_offsets=[_last["data_offsets"][0], _last["data_offsets"][0] + (4 << 40)],
        ))  # fmt: skip
_header("offsets that do not fit the shape", "offsets_mismatch",
        lambda h: _first(h).update(shape=[4, 15]))  # fmt: skip
_header("offsets that run backwards", "header_invalid",
        lambda h: _first(h).update(data_offsets=[256, 0]))  # fmt: skip
_header("negative offsets", "header_invalid", lambda h: _first(h).update(data_offsets=[-256, 0]))
_header("offsets as text", "header_invalid", lambda h: _first(h).update(data_offsets=["0", "256"]))
_header("two tensors on the same bytes", "offsets_overlap",
        lambda h: _first(h, 1).update(data_offsets=_first(h)["data_offsets"],
                                      shape=_first(h)["shape"]))  # fmt: skip
_header("a tensor that nobody names", "offsets_gap", lambda h: h.pop(f"{Q0}.lora_B.weight"))
_header("a dimension of minus one", "header_invalid", lambda h: _first(h).update(shape=[-4, -16]))
_header("a shape that overflows 64 bits", "offsets_mismatch",
        lambda h: _first(h).update(shape=[2**40, 2**40]))  # fmt: skip
_header("nine dimensions", "header_invalid", lambda h: _first(h).update(shape=[1] * 8 + [64]))
_header("a field too many", "header_invalid", lambda h: _first(h).update(extra=1))
_header("metadata that is no text", "header_invalid", lambda h: h.update(__metadata__={"a": 1}))
_header("an unknown dtype", "dtype_unsupported", lambda h: _first(h).update(dtype="F128"))
_header("8-bit floats", "dtype_unsupported", lambda h: _first(h).update(dtype="F8_E4M3"))
_tensors("64-bit floats", "dtype_unsupported",
         lambda t: t.update({f"{Q0}.lora_A.weight": tensor(np.ones((4, 16)), "F64")}),
         group="container")  # fmt: skip

# --- the config
_raw_config("not JSON", "malformed_json", b"{'r': 8}")
_raw_config("a list", "malformed_json", b"[]")
_raw_config("NaN as alpha", "malformed_json", b'{"peft_type":"LORA","r":4,"lora_alpha":NaN}')
_raw_config("an alpha beyond any float", "malformed_json",
            b'{"peft_type":"LORA","r":4,"lora_alpha":1e999}')  # fmt: skip
_raw_config("a million digits", "malformed_json", b'{"r":' + b"9" * 200_000 + b"}")
_raw_config("a byte-order mark", "byte_order_mark", b"\xef\xbb\xbf" + config_json())
_raw_config("UTF-16", "byte_order_mark", config_json().decode().encode("utf-16"))
_raw_config("a key given twice", "duplicate_key", b'{"peft_type":"LORA","r":4,"r":8}')
_raw_config("nested a thousand deep", "json_too_deep", b'{"a":' * 1000 + b"1" + b"}" * 1000)
_raw_config("half a surrogate pair", "malformed_json", b'{"revision":"\\ud800"}')
_raw_config("a config of 300 KB", "config_too_large", b'{"a":"' + b"x" * 300_000 + b'"}')
for _rank in (0, -1, 257, 1.5, 8.0, "8", True, None):
    _config(f"rank {_rank!r}", "rank_out_of_range", r=_rank)
_config("a rank pattern of 0", "rank_out_of_range", rank_pattern={"q_proj": 0})
_config("a look-ahead as pattern", "unsupported_pattern", rank_pattern={"(?=q)q_proj": 4})
_config("a back-reference as pattern", "unsupported_pattern", alpha_pattern={r"(q)\1": 4})
_config("alpha as text", "alpha_invalid", lora_alpha="16")
_config("no alpha", "alpha_invalid", lora_alpha=None)
_config("alpha true", "alpha_invalid", lora_alpha=True)
_config("IA3", "unsupported_peft_type", peft_type="IA3")
_config("a classifier", "unsupported_task_type", task_type="SEQ_CLS")
_config("a vision model", "unsupported_model_class",
        auto_mapping={"base_model_class": "CLIPModel"})  # fmt: skip
_config("DoRA", "unsupported_dora", use_dora=True)
_config("trained biases", "unsupported_bias", bias="all")
_config("LoRA's own biases only", "unsupported_bias", bias="lora_only")
_config("lora_bias", "unsupported_bias", lora_bias=True)
_config("modules_to_save", "unsupported_modules_to_save", modules_to_save=["lm_head"])
_config("trained tokens", "unsupported_trainable_tokens", trainable_token_indices=[1, 2])
_config("target_parameters", "unsupported_target_parameters", target_parameters=["experts.w"])
_config("replicated layers", "unsupported_layer_replication", layer_replication=[[0, 1], [0, 2]])
_config("QA-LoRA", "unsupported_qalora", use_qalora=True)
_config("activated LoRA", "unsupported_alora", alora_invocation_tokens=[1])
_config("block-diagonal LoRA", "unsupported_bdlora", use_bdlora={"nblocks": 2})
_config("KaSA", "unsupported_kasa", kasa_config={"beta": 1e-4})
_config("arrow routing", "unsupported_arrow", arrow_config={"top_k": 3})
_config("sampled weights", "unsupported_monteclora", monteclora_config={"num_samples": 2})
_config("MergedLinear", "unsupported_merged_linear", enable_lora=[True, False, True])
_config("LoftQ", "unsupported_base_changing_init", loftq_config={"loftq_bits": 4})
for _init in ("pissa", "pissa_niter_16", "olora", "corda", "lora_ga", "loftq", "OLoRA"):
    _config(f"init {_init}", "unsupported_base_changing_init", init_lora_weights=_init)
_config("an init of tomorrow", "unsupported_init", init_lora_weights="hologram")
_config("rsLoRA as text", "invalid_value", use_rslora="true")
_config("targets as a number", "invalid_value", target_modules=3)
_config("a negative layer", "invalid_value", layers_to_transform=[-1])
_config("a pattern table that is a list", "invalid_value", rank_pattern=["q_proj"])

# --- coverage
_tensors("no tensors", "no_tensors", lambda t: t.clear())
_rename("a renamed prefix", "no_tensor_matched", lambda n: n.replace("base_model", "my_model"))
_rename("no prefix", "unknown_prefix", lambda n: n.removeprefix(PREFIX))
_rename("the prefix twice", "no_tensor_matched", lambda n: PREFIX + n)
_rename("another architecture", "module_not_in_base", lambda n: n.replace("layers", "h"))
_rename("a vision tower's prefix", "module_not_in_base",
        lambda n: n.replace("model.layers", "language_model.layers"))  # fmt: skip
_rename("more layers than the base has", "module_not_in_base",
        lambda n: n.replace("layers.0", "layers.77"))  # fmt: skip
_rename("mlx-lm", "mlx_names",
        lambda n: n.removeprefix(PREFIX).replace("lora_A.weight", "lora_a")
        .replace("lora_B.weight", "lora_b"))  # fmt: skip
_rename("kohya", "kohya_names",
        lambda n: "lora_unet_" + n.removeprefix(PREFIX).replace(".", "_")
        .replace("_lora_A_weight", ".lora_down.weight")
        .replace("_lora_B_weight", ".lora_up.weight"))  # fmt: skip
_rename("no ending .weight", "lora_without_weight", lambda n: n.removesuffix(".weight"))
_rename("fused experts", "expert_lora", lambda n: n.replace("q_proj", "experts.base_layer"))
_added("a fused q, k, v", "module_not_in_base",
       f"{PREFIX}model.layers.0.self_attn.qkv_proj.lora_A.weight")  # fmt: skip
_added("a DoRA magnitude", "dora_tensors", f"{Q0}.lora_magnitude_vector")
_added("an AdaLoRA tensor", "adalora_tensors", f"{Q0}.lora_E")
_added("a KaSA diagonal", "kasa_tensors", f"{Q0}.lora_diag.weight")
_added("a bias", "bias_tensors", f"{Q0}.base_layer.bias")
_added("a LoRA bias", "bias_tensors", f"{Q0}.lora_B.bias")
_added("a saved module", "modules_to_save_tensors",
       f"{PREFIX}lm_head.modules_to_save.default.weight")  # fmt: skip
_added("an original module", "modules_to_save_tensors",
       f"{PREFIX}classifier.original_module.weight")  # fmt: skip
_added("trained token rows", "trainable_token_tensors",
       f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta")  # fmt: skip
_added("a whole head", "full_weight", f"{PREFIX}lm_head.weight")
_added("a score head", "full_weight", f"{PREFIX}score.weight")
_added("a quantized base", "base_state_saved",
       f"{PREFIX}model.layers.0.self_attn.k_proj.qzeros")  # fmt: skip
_added("a name of control characters", "unknown_tensor", f"{Q0}\x1b[31m.lora_A.weight")
_added("a name of 10,000 characters", "unknown_tensor", PREFIX + "x" * 10_000)
_added("a path as name", "unknown_tensor", "../../../../etc/passwd")
_added("the same factor under two adapter names", "duplicate_tensor",
       f"{Q0}.lora_A.other.weight", (4, 16))  # fmt: skip
_added("an embedding factor on a linear", "embedding_layout", f"{Q0}.lora_embedding_A", (4, 16))
_added("a linear factor on the embedding", "embedding_layout",
       f"{PREFIX}model.embed_tokens.lora_A.weight", (4, 40))  # fmt: skip
_tensors("A without B", "missing_pair", lambda t: t.pop(f"{Q0}.lora_B.weight"))
_tensors("B without A", "missing_pair", lambda t: t.pop(f"{Q0}.lora_A.weight"))
_tensors("a factor too wide", "shape_mismatch",
         lambda t: _reshape(t, a=lambda r, i: (r, i + 1)))  # fmt: skip
_tensors("a transposed factor", "shape_mismatch",
         lambda t: _reshape(t, a=lambda r, i: (i, r)))  # fmt: skip
_tensors("A and B of different ranks", "shape_mismatch",
         lambda t: _reshape(t, b=lambda o, r: (o, r + 1)))  # fmt: skip
_tensors("three dimensions", "shape_mismatch",
         lambda t: _reshape(t, a=lambda r, i: (r, i, 1)))  # fmt: skip
_tensors("a rank the config does not give", "rank_mismatch",
         lambda t: _reshape(t, a=lambda r, i: (r + 1, i), b=lambda o, r: (o, r + 1)))  # fmt: skip
_tensors("a rank of zero", "rank_above_limit",
         lambda t: _reshape(t, a=lambda r, i: (0, i), b=lambda o, r: (o, 0)))  # fmt: skip


@_hostile("added tokens", "coverage", "vocabulary_changed")
def _added_tokens(description: ModelDescription) -> AdapterFiles:
    tensors = lora_tensors(description, targets=["lm_head"])
    rows = description.vocab_size + 2
    tensors[f"{PREFIX}lm_head.lora_B.weight"] = tensor(np.ones((rows, 4)))
    return AdapterFiles(config_json(), pack(tensors))


@_hostile("a base head with added tokens", "coverage", "vocabulary_changed")
def _longer_head(description: ModelDescription) -> AdapterFiles:
    tensors = lora_tensors(description, targets=["lm_head"])
    rows = description.vocab_size + 2
    name = f"{PREFIX}lm_head.base_layer.weight"
    tensors[name] = tensor(np.ones((rows, description.hidden_size)))
    return AdapterFiles(config_json(), pack(tensors))


@_hostile("tied embedding adapters", "coverage", "weight_tying")
def _tied(description: ModelDescription) -> AdapterFiles:
    tensors = lora_tensors(description, targets=["embed_tokens"])
    return AdapterFiles(config_json(ensure_weight_tying=True), pack(tensors))


# --- the numbers
def _value(name: str, code: str, value: float, which: str = "A", dtype: str = "F32") -> None:
    def files(description: ModelDescription) -> AdapterFiles:
        tensors = lora_tensors(description, dtype=dtype)
        key = f"{Q0}.lora_{which}.weight"
        values = np.zeros(tensors[key].shape, np.float32)
        values.flat[-1] = value
        tensors[key] = tensor(values, dtype)
        return AdapterFiles(config_json(), pack(tensors))

    HOSTILE.append(HostileCase(name, "numbers", code, files))


_value("one NaN", "non_finite", np.nan)
_value("one infinity", "non_finite", np.inf, "B")
_value("one NaN in bf16", "non_finite", np.nan, "B", "BF16")
_value("one infinity in fp16", "non_finite", -np.inf, "A", "F16")


@_hostile("every B zero", "numbers", "zero_effect")
def _untrained(description: ModelDescription) -> AdapterFiles:
    tensors = lora_tensors(description)
    for name in list(tensors):
        if "lora_B" in name:
            tensors[name] = tensor(np.zeros(tensors[name].shape))
    return AdapterFiles(config_json(), pack(tensors))


@_hostile("a scale of zero", "numbers", "zero_effect")
def _scaled_away(description: ModelDescription) -> AdapterFiles:
    return AdapterFiles(config_json(lora_alpha=0), pack(lora_tensors(description)))


@_hostile("a base head that was trained", "numbers", "base_weight_differs")
def _trained_head(description: ModelDescription) -> AdapterFiles:
    tensors = lora_tensors(description, targets=["lm_head"])
    module = next(m for m in description.modules if m.target == "lm_head")
    # the right size and the right norm, and still not this base's weight
    values = np.random.default_rng(3).standard_normal((module.out_features, module.in_features))
    name = f"{PREFIX}lm_head.base_layer.weight"
    tensors[name] = tensor(values / np.linalg.norm(values) * module.norm)
    return AdapterFiles(config_json(), pack(tensors))
