"""`loramux config`: is this configuration safe, and what may be better."""

import typer

from app.cli.database import settings
from app.cli.output import JsonFlag, console, fail, print_json
from app.config_check import check as find_problems

app = typer.Typer(help="Check the configuration.", no_args_is_help=True)


@app.callback()
def config() -> None:
    """Check the configuration."""


@app.command()
def check(as_json: JsonFlag = False) -> None:
    """Say what is unsafe; exit status 1 when the start would be refused."""
    problems = find_problems(settings())
    refused = [problem for problem in problems if problem.severity == "refuse"]
    if as_json:
        print_json({"ok": not refused, "problems": [problem.as_dict() for problem in problems]})
        if refused:
            raise typer.Exit(1)
        return
    for problem in problems:
        console.print(
            f"{problem.severity}  {problem.message} ({problem.code})",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if refused:
        fail(f"{len(refused)} of these would stop the start")
    console.print("The configuration is safe." if not problems else "Nothing stops the start.")
