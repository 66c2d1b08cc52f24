"""A peer without a model, behind the channel: it repeats each prompt's first token."""

import os
from typing import Any

from benchmarks.peers_parts.channel import Answer, serve


def open_peer(setup: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
    if "broken" in setup:
        raise SystemExit(setup["broken"])

    def answer(job: dict[str, Any]) -> list[list[int]]:
        length = job["output_tokens"] - setup.get("missing", 0)
        return [prompt[:1] * length for prompt in job["prompts"]]

    return answer, {"greeting": os.environ["ECHO_GREETING"]}


if __name__ == "__main__":
    serve(open_peer)
