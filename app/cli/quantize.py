"""`loramux quantize`: rounds a checkpoint's linears to 4 bits, in a process that may import numpy
and the engine's loader; this one shows how far it is."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from app.cli.output import JsonFlag, console, fail, print_json, stderr


def quantize(
    source: Annotated[
        Path, typer.Argument(help="A Hugging Face folder in F32, F16 or BF16, sharded or not.")
    ],
    target: Annotated[Path, typer.Argument(help="The folder to write.")],
    group_size: Annotated[
        Literal["32", "64", "128"], typer.Option(help="Columns that share a scale and a zero.")
    ] = "32",
    symmetric: Annotated[
        bool, typer.Option("--symmetric", help="Scales alone, no zeros: smaller, less exact.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a checkpoint folder that is there.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Round a checkpoint's linears to int4, for this engine and any that reads compressed-tensors.

    Embedding, head, norms and biases stay as they are.
    """
    command = [sys.executable, "-P", "-m", "engine.quantize", "--group-size", group_size]
    command += ["--symmetric"] * symmetric + ["--force"] * force
    result = _run([*command, "--", str(source), str(target)])
    if as_json:
        print_json(result)
        return
    before, after = (result[f"{name}_bytes"] / 2**20 for name in ("source", "target"))
    for line in (
        f"{target} is written: {result['linears']} linears at {result['bits_per_weight']:.2f} bits",
        f"weights  {before:.1f} MiB before, {after:.1f} MiB after ({after / before:.0%})",
        f"error    {result['mean_error']:.2%} of a weight matrix on average, at most "
        f"{result['largest_error']:.2%} ({result['largest_error_module']})",
    ):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _run(command: list[str]) -> dict[str, Any]:
    """The result; the reason of a refusal ends the command."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    result: dict[str, Any] | None = None
    with (
        tempfile.TemporaryFile("w+") as said,
        Progress(*columns, TimeRemainingColumn(), console=stderr, transient=True) as progress,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as process,
    ):
        assert process.stdout is not None
        task = progress.add_task("reading", total=None)
        for line in process.stdout:
            told = json.loads(line)
            if "result" in told:
                result = told["result"]
            else:
                progress.update(
                    task,
                    completed=told["done"],
                    total=told["total"],
                    description=told["module"] or "writing",
                )
        status = process.wait()
        said.seek(0)
        reason = said.read().strip()
    if result is None:
        fail(reason.splitlines()[-1] if reason else f"engine.quantize ended with status {status}")
    return result
