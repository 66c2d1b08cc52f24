"""Whether the compiled forward pass serves: asked before anything is laid out for it."""

import importlib.util

from engine.config import EngineConfig
from engine.model.config import ModelConfig
from engine.native.build import Library, load
from engine.native.layout import fits

HEAD_DIMS = (16, 32, 64, 128)
"""Those that `attention.h` is compiled for."""


def native_library(config: EngineConfig, model: ModelConfig) -> Library | None:
    """The library, where the settings, the model and this machine let it run.

    Raises ValueError when the settings ask for it and it cannot.
    """
    if config.linear_path not in ("auto", "native"):
        return None
    library = load() if serves(model) and _adapters_are_compiled() else None
    if config.linear_path == "native":
        if library is None:
            raise ValueError(
                "linear_path native needs a C++ compiler, numba and a model of fitting sizes"
            )
        return library
    return library if library is not None and library.speed else None


def serves(model: ModelConfig) -> bool:
    """Whether `forward.cpp` takes a model of these sizes."""
    return (
        model.head_dim in HEAD_DIMS
        and fits(model.intermediate_size, model.hidden_size)
        and fits(model.hidden_size, model.intermediate_size)
        and fits(model.hidden_size, model.q_width)
        and fits(model.kv_width, model.hidden_size)
        and fits(model.vocab_size, model.hidden_size)
    )


def _adapters_are_compiled() -> bool:
    """It calls an adapter pass by its address, numba's for fp32 adapters, on torch's threads."""
    if importlib.util.find_spec("numba") is None:
        return False
    from engine.kernels.lora_cpu import thread_pool

    return thread_pool() is not None
