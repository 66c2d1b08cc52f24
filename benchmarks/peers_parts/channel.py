"""Jobs to a worker and answers back: one JSON object a line over a Unix socket.

Standard library alone: a worker may run in an environment that has nothing of loramux's.
"""

import json
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

Jobs = dict[str, Any]
Answer = Callable[[Jobs], list[list[int]]]
"""Takes a job (`prompts`, `adapters`, `output_tokens`); gives each prompt's new tokens."""


def serve(open_peer: Callable[[Jobs], tuple[Answer, Jobs]]) -> None:
    """The worker's side, on the socket that the command line names, until the other side leaves.

    The first line is what `open_peer` is given; it returns how to answer, and facts about itself.
    The time of a job is taken here, from its start to its last token.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    with connection, connection.makefile("rw") as lines:

        def say(message: Jobs) -> None:
            lines.write(json.dumps(message) + "\n")
            lines.flush()

        answer, facts = open_peer(json.loads(lines.readline()))
        say(facts)
        for line in lines:
            job = json.loads(line)
            began = time.perf_counter()
            tokens = answer(job)
            say({"wall_s": time.perf_counter() - began, "tokens": tokens})
