"""docs/validation.md, written from the codes: `python -m app.adapters.codes_page > docs/…`."""

import sys
from collections.abc import Sequence

from app.adapters.outcome import ATTEMPT_CODES, BEHAVIOUR_CODES, PROCESS_CODES
from engine.adapters.findings import CODES, GROUPS

HEADER = """# What an adapter is checked for

Five groups of checks, in this order. A group that fails ends the version `rejected`; later groups
are skipped. `warn` and `info` are shown and change nothing. The first four groups run without the
engine, in a process with limits on memory and time; `loramux adapters check FOLDER` runs the same
ones on your machine. The fifth loads the adapter into the engine, in quarantine, and answers
fixed prompts with it and with the base model.

A validation that could not be finished (a crash, a limit, no engine) is tried again, and after
three attempts is `failed`, which is not a verdict on the adapter. An attempt that only waits for
an engine or for the store does not count. Operators see all of it under
`GET /admin/v1/adapters/validations` and try a failed one again with
`POST /admin/v1/adapters/versions/ID/validate`.

When the engines serve another base model, every version that was validated against the old one is
validated again; until then a call is refused with `version_base_changed`.

This page is written from the code (`python -m app.adapters.codes_page > docs/validation.md`).
"""
TITLES = {
    "container": "container: the two files",
    "config": "config: adapter_config.json",
    "coverage": "coverage: every tensor has its place",
    "numbers": "numbers: what the tensors hold",
}


def page() -> str:
    """The whole page."""
    parts = [HEADER]
    for group in GROUPS:
        rows = [(str(c), str(s), t) for c, (g, s, t) in CODES.items() if g == group]
        parts.append(_section(TITLES[group], rows))
    for title, table in (
        ("behaviour: on the engine", BEHAVIOUR_CODES),
        ("the process that reads the files", PROCESS_CODES),
    ):
        parts.append(_section(title, [(c, s, text) for c, (s, text) in table.items()]))
    attempts = [(code, "attempt", text) for code, text in ATTEMPT_CODES.items()]
    parts.append(_section("attempts that end without a verdict", attempts))
    return "\n".join(parts)


def _section(title: str, rows: Sequence[tuple[str, str, str]]) -> str:
    lines = [f"| `{code}` | {severity} | {text} |" for code, severity, text in rows]
    return "\n".join(
        [f"## {title}", "", "| code | severity | meaning |", "|---|---|---|", *lines, ""]
    )


if __name__ == "__main__":
    sys.stdout.write(page())
