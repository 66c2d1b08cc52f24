"""`python -m engine.describe --base-model PATH`: what an engine would say of a base model, as JSON.

Reads headers and weights with numpy alone, so that adapters can be checked where no engine runs.
"""

import argparse
import logging
import sys
from pathlib import Path

import msgspec

from engine.errors import EngineError
from engine.model.description import describe, identify
from engine.model.loader import open_checkpoint


def main() -> int:
    """Exit status 0, or 2 with the reason on stderr when the base model cannot be served."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(prog="python -m engine.describe")
    parser.add_argument("--base-model", type=Path, required=True)
    parser.add_argument("--data-dir", type=Path, required=True, help="where the result is kept")
    parser.add_argument("--max-rank", type=int, required=True)
    options = parser.parse_args()
    try:
        checkpoint = open_checkpoint(options.base_model)
        description = describe(
            checkpoint,
            identify(checkpoint, options.data_dir / "base-models"),
            max_rank=options.max_rank,
            kv_block_bytes=0,
            adapter_dtype="bf16",
            backend="none",
        )
    except EngineError as error:
        logging.error("%s: %s", error.code, error.message)
        return 2
    sys.stdout.buffer.write(msgspec.json.encode(description))
    return 0


if __name__ == "__main__":
    sys.exit(main())
