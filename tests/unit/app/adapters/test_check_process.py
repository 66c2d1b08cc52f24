"""The child process of the checks: its verdicts, its limits, its end."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest

from app.adapters import check_process
from app.adapters.check_process import PACKAGE_ROOT, Bounds, CheckCrashed, Job, run_checks
from app.adapters.outcome import CheckOutcome
from tests.adapter_files import good_adapter, tiny_description

BASE = tiny_description()
BOUNDS = Bounds(memory_bytes=2 << 30, cpu_s=60, wall_s=60.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return good_adapter(BASE).write(tmp_path / "adapter")


async def check(folder: Path, bounds: Bounds = BOUNDS) -> list[CheckOutcome]:
    return [
        outcome
        async for outcome in run_checks(folder, BASE, max_rank=64, max_bytes=1 << 20, bounds=bounds)
    ]


async def test_a_good_adapter_passes_group_by_group(folder: Path) -> None:
    outcomes = await check(folder)
    assert [(o.group, o.status) for o in outcomes] == [
        ("container", "pass"),
        ("config", "pass"),
        ("coverage", "pass"),
        ("numbers", "pass"),
    ]


async def test_one_that_takes_too_long_is_stopped_and_is_no_verdict(folder: Path) -> None:
    with pytest.raises(CheckCrashed) as crash:
        await check(folder, Bounds(2 << 30, 60, wall_s=0.001))
    assert (crash.value.code, crash.value.files_fault) == ("check_timeout", False)


async def test_a_file_that_needs_more_memory_than_allowed_is_at_fault(tmp_path: Path) -> None:
    wide = tiny_description(hidden=1024, layers=4)
    folder = good_adapter(wide, rank=64).write(tmp_path / "wide")
    with pytest.raises(CheckCrashed) as crash:
        async for _ in run_checks(
            folder,
            wide,
            max_rank=64,
            max_bytes=1 << 30,
            bounds=Bounds(memory_bytes=_imports_only_bytes(), cpu_s=60, wall_s=60.0),
        ):
            pass
    assert (crash.value.code, crash.value.files_fault) == ("resource_limit", True)


def _imports_only_bytes() -> int:
    """About what the child needs before it opens a file."""
    probe = "import app.adapters.check_child, re; print(re.search(r'VmSize:\\s+(\\d+)', "
    probe += "open('/proc/self/status').read()).group(1))"
    output = subprocess.run(
        [sys.executable, "-c", probe],
        env=check_process._environment(),
        cwd=PACKAGE_ROOT,
        capture_output=True,
        check=True,
    )
    return int(output.stdout) * 1024 + (256 << 10)


@pytest.mark.parametrize(
    ("status", "code", "files_fault"),
    [
        (-11, "check_crashed", True),
        (-7, "check_crashed", True),
        (-24, "resource_limit", True),
        (-9, "check_crashed", False),
        (1, "check_crashed", False),
        (0, "check_crashed", False),
    ],
)
def test_an_exit_status_tells_the_file_s_fault_from_the_machine_s(
    status: int, code: str, files_fault: bool
) -> None:
    crash = check_process._died(status)
    assert (crash.code, crash.files_fault) == (code, files_fault)


class TestLimits:
    """The child's own `limit_self`, asked from inside."""

    @pytest.fixture
    def inside(self) -> Iterator[subprocess.Popen[bytes]]:
        code = (
            "import resource, sys\n"
            "from app.adapters.check_child import limit_self\n"
            "limit_self(1 << 30, 1)\n"
            "exec(sys.stdin.read())\n"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=check_process._environment(),
            cwd="/",
        )
        yield process
        process.kill()
        process.communicate()

    def say(self, process: subprocess.Popen[bytes], code: str) -> tuple[bytes, int]:
        output, _ = process.communicate(code.encode(), timeout=60)
        return output.strip(), process.returncode

    def test_no_byte_can_be_written_to_a_file(
        self, inside: subprocess.Popen[bytes], tmp_path: Path
    ) -> None:
        target = tmp_path / "written"
        code = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        code += (
            f"try:\n open({str(target)!r}, 'wb', 0).write(b'x')\nexcept OSError: print('refused')"
        )
        assert self.say(inside, code) == (b"refused", 0)
        assert not target.exists() or target.read_bytes() == b""

    def test_memory_ends(self, inside: subprocess.Popen[bytes]) -> None:
        code = "try:\n b'x' * (2 << 30)\nexcept MemoryError: print('refused')"
        assert self.say(inside, code) == (b"refused", 0)

    def test_processor_time_ends(self, inside: subprocess.Popen[bytes]) -> None:
        assert self.say(inside, "while True: pass")[1] == -24

    def test_limits_cannot_be_lifted_again(self, inside: subprocess.Popen[bytes]) -> None:
        code = "soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE); print(soft, hard)"
        assert self.say(inside, code)[0] == b"0 0"


def test_the_child_gets_no_secret_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAMUX_ROOT_SECRET", "not-for-children")
    assert "not-for-children" not in str(check_process._environment())
    assert not any(name.startswith("LORAMUX") for name in check_process._environment())


def test_a_child_dies_with_its_parent(folder: Path) -> None:
    """A middle process starts the child, which stops itself, and is killed."""
    job = msgspec.json.encode(asdict(Job(str(folder), BASE, 64, 1 << 20, 2 << 30, 60)))
    middle = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', "
        "'from app.adapters import check_child as c; import os, signal;'"
        "'c.run = lambda job: (print(os.getpid(), flush=True), signal.pause());'"
        "'c.main()'], stdin=subprocess.PIPE)\n"
        f"child.stdin.write({job!r}); child.stdin.close()\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", middle],
        stdout=subprocess.PIPE,
        env=check_process._environment(),
        cwd="/",
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == b""  # returns when the child, too, has let go of the pipe
    parent.stdout.close()
