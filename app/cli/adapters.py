"""`loramux adapters`: check offline, push and wait for the verdict, list."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Annotated, Any, BinaryIO, cast

import httpx
import msgspec
import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

from app.adapters import file_checks
from app.adapters.check_process import CheckCrashed
from app.cli import parts
from app.cli.database import settings
from app.cli.http import api, expect
from app.cli.output import JsonFlag, console, fail, print_json, print_rows, stderr
from engine.adapters.manifest import CONFIG_NAME, WEIGHTS_NAME
from engine.types import ModelDescription

app = typer.Typer(help="Check, upload and list adapters.", no_args_is_help=True)

UrlOption = Annotated[str | None, typer.Option("--url", help="The server; or LORAMUX_URL.")]
KeyOption = Annotated[str | None, typer.Option("--key", help="The key; or LORAMUX_API_KEY.")]
FolderArgument = Annotated[
    Path, typer.Argument(help="The folder that PEFT's save_pretrained made.")
]

SETTLED = ("ready", "rejected", "failed", "erased")
POLL_S = 0.3
STYLES = {"pass": "green", "warn": "yellow", "fail": "red", "skipped": "dim"}


@app.command()
def check(folder: FolderArgument, as_json: JsonFlag = False) -> None:
    """Check an adapter without a server: what an upload would be told, but for its behaviour."""
    _require_files(folder)
    configured = settings()
    work = file_checks.report(
        folder.absolute(),
        describe_base_model(),
        max_rank=configured.max_rank,
        settings=configured,
    )
    try:
        report = asyncio.run(work)
    except CheckCrashed as crash:
        fail(crash.message)
    if as_json:
        print_json(report)
    else:
        _print_groups(report["groups"])
    if report["status"] == "fail":
        raise typer.Exit(1)


def describe_base_model() -> ModelDescription:
    """The configured base model, described by the engine's own loader in a process of its own."""
    configured = settings()
    command = (
        *(sys.executable, "-P", "-m", "engine.describe"),
        f"--base-model={configured.base_model}",
        f"--data-dir={configured.data_dir}",
        f"--max-rank={configured.max_rank}",
    )
    with stderr.status("Reading the base model"):
        result = subprocess.run(command, capture_output=True, check=False)
    if result.returncode != 0:
        fail(result.stderr.decode(errors="replace").strip().splitlines()[-1])
    return msgspec.json.decode(result.stdout, type=ModelDescription)


@app.command()
def push(
    folder: FolderArgument,
    name: Annotated[str, typer.Option(help="What callers put in `model`.")],
    url: UrlOption = None,
    key: KeyOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Upload an adapter and wait for the verdict: exit status 0 when it is ready.

    A large one that was broken off goes on where it stopped when the command is given again.
    """
    _require_files(folder)
    with api(url, key) as client, _progress() as progress:
        version = wait_for_verdict(client, send(client, folder, name, progress), progress)
    if as_json:
        print_json(version)
    elif version["state"] == "ready":
        console.print(f"{name}@v{version['version']} is ready: loramux chat --model {name}")
    else:
        _print_groups(version["report"]["checks"] if version["report"] else [])
        stderr.print(escape(version["reason"] or f"the version is {version['state']}"))
    if version["state"] != "ready":
        raise typer.Exit(1)


def push_all(url: str | None, key: str, folders: list[Path]) -> None:
    """Uploads folders under their own names, then waits until each is ready; ends on a refusal."""
    with api(url, key) as client, _progress() as progress:
        sent = [send(client, folder, folder.name, progress) for folder in folders]
        for version in sent:
            settled = wait_for_verdict(client, version, progress)
            if settled["state"] != "ready":
                fail(f"{settled['adapter']} is {settled['state']}: {settled['reason']}")


@app.command("list")
def list_(url: UrlOption = None, key: KeyOption = None, as_json: JsonFlag = False) -> None:
    """List your adapters with their newest version."""
    with api(url, key) as client:
        adapters = list(_all_adapters(client))
    if as_json:
        print_json(adapters)
        return
    print_rows(
        [_row(adapter) for adapter in adapters],
        ("name", "live", "newest", "state", "rank", "size_mib"),
        as_json=False,
        empty="There is no adapter yet: loramux adapters push FOLDER --name NAME",
    )


# --------------------------------------------------------------------------- upload


def send(client: httpx.Client, folder: Path, name: str, progress: Progress) -> dict[str, Any]:
    """Uploads both files; the bar follows what was read. Returns the version object.

    Large adapters go in parts, so that a broken line costs one part and not all.
    """
    total = sum((folder / file).stat().st_size for file in (CONFIG_NAME, WEIGHTS_NAME))
    if total > parts.IN_PARTS_FROM_BYTES:
        return parts.send_in_parts(client, folder, name, progress)
    task = progress.add_task(f"{name}: sending", total=total)
    with ExitStack() as stack:
        files = {}
        for file in (CONFIG_NAME, WEIGHTS_NAME):
            opened = stack.enter_context((folder / file).open("rb"))
            counted = cast(IO[bytes], Counted(opened, lambda n: progress.advance(task, n)))
            files[file] = (file, counted, "application/octet-stream")
        response = client.post("/v1/adapters", data={"name": name}, files=files)
    version: dict[str, Any] = expect(response, 200, 202)
    progress.update(task, completed=total)
    return version


class Counted:
    """A file that tells how much of it was read."""

    def __init__(self, file: BinaryIO, told: Any) -> None:
        self._file = file
        self._told = told

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._told(len(data))
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def wait_for_verdict(
    client: httpx.Client, version: dict[str, Any], progress: Progress
) -> dict[str, Any]:
    """Asks until the version is settled; the bar counts the five check groups."""
    path = f"/v1/adapters/{version['adapter']}/versions/{version['version']}"
    task = progress.add_task(f"{version['adapter']}: waiting for a worker", total=5)
    while True:
        version = expect(client.get(path))
        report = version["report"] or {}
        done = len(report.get("checks", []))
        progress.update(
            task, completed=done, description=f"{version['adapter']}: {version['state']}"
        )
        if version["state"] in SETTLED:
            progress.update(task, completed=5)
            return version
        time.sleep(POLL_S)


def _progress() -> Progress:
    bar = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    return Progress(*bar, console=stderr, transient=True)


def _require_files(folder: Path) -> None:
    if not folder.is_dir():
        fail(f"{folder} is no folder; name the one that PEFT's save_pretrained wrote")
    if (folder / "adapter_model.bin").is_file() and not (folder / WEIGHTS_NAME).is_file():
        fail(
            f"{folder} holds adapter_model.bin, a pickle, which is never opened; save the adapter "
            "again with save_pretrained(..., safe_serialization=True)"
        )
    for file in (CONFIG_NAME, WEIGHTS_NAME):
        if not (folder / file).is_file():
            fail(f"{folder} has no {file}; name the folder that PEFT's save_pretrained wrote")


# --------------------------------------------------------------------------- output


def _print_groups(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        name = group.get("group") or group.get("name")
        style = STYLES.get(group["status"], "")
        console.print(f"[{style}]{group['status']:>8}[/]  {name}")
        for found in group["findings"]:
            console.print(f"          [bold]{found['code']}[/]  {escape(found['message'])}")


def _all_adapters(client: httpx.Client) -> Iterator[dict[str, Any]]:
    after = None
    while True:
        query = {"limit": "100"} | ({"after": after} if after else {})
        page = expect(client.get("/v1/adapters", params=query))
        yield from page["data"]
        if not page["has_more"]:
            return
        after = page["last_id"]


def _row(adapter: dict[str, Any]) -> dict[str, Any]:
    newest = max(adapter["versions"], key=lambda version: version["version"])
    live = [alias["targets"] for alias in adapter["aliases"] if alias["alias"] == "live"]
    nbytes = newest["config_bytes"] + newest["weights_bytes"]
    return {
        "name": adapter["name"],
        "live": ", ".join(f"v{target['version']}" for target in live[0]) if live else None,
        "newest": f"v{newest['version']}",
        "state": newest["state"],
        "rank": newest["rank"],
        "size_mib": f"{nbytes / 2**20:.1f}",
    }
