"""What `loramux serve` does with its children, shown with children of a few lines each."""

import asyncio
import os
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from app.children import Backoff, Child
from app.clock import SystemClock
from app.processes import ProcessCommand
from app.supervisor import (
    CannotStart,
    Kept,
    Supervisor,
    api_probe,
    engine_probe,
    platform_processes,
    sign_probe,
)
from tests.engine_process import HANG_TOKEN, EngineProcess, free_tcp_address, make_request

REPOSITORY = Path(__file__).parents[2]


class Output:
    """Collects what children write, and waits for it."""

    def __init__(self):
        self.lines = []
        self._written = asyncio.Condition()
        self._tasks = set()

    def __call__(self, name, line):
        self.lines.append((name, line))
        task = asyncio.ensure_future(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self):
        async with self._written:
            self._written.notify_all()

    async def wait_for(self, text, times=1):
        async with self._written:
            await self._written.wait_for(lambda: self.count(text) >= times)

    def count(self, text):
        return sum(text in line for _, line in self.lines)

    def number_after(self, text):
        return int(next(line for _, line in self.lines if text in line).split()[-1])


@pytest.fixture
async def output():
    return Output()


def script(code, name="child", nice=0):
    return ProcessCommand(name, (sys.executable, "-c", textwrap.dedent(code)), nice)


def alive(pid):
    """A zombie that nobody has waited for counts as dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until_dead(pid):
    while alive(pid):  # noqa: ASYNC110 - the state lies in another process
        await asyncio.sleep(0.02)


FOREVER = """
    import os, time
    print("pid", os.getpid())
    time.sleep(600)
"""


class TestBackoff:
    def test_pauses_double_up_to_a_bound(self):
        backoff = Backoff()
        assert [backoff.after(0.1) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]

    def test_a_process_that_held_out_starts_over(self):
        backoff = Backoff()
        for _ in range(5):
            backoff.after(1.0)
        assert backoff.after(60.0) == 0.5
        assert backoff.after(1.0) == 1.0


class TestChild:
    async def test_its_lines_come_with_its_name(self, output):
        child = await Child.start(script("print('one\\ntwo', end='')"), output)
        assert await child.wait() == 0
        assert output.lines == [("child", "one"), ("child", "two")]

    async def test_a_line_without_end_is_cut(self, output):
        child = await Child.start(script("print('x' * 100_000)"), output)
        await child.wait()
        assert "".join(line for _, line in output.lines) == "x" * 100_000
        assert max(len(line) for _, line in output.lines) <= 64 * 1024 + 8 * 1024

    async def test_niceness_is_added(self, output):
        child = await Child.start(script("import os; print('nice', os.nice(0))", nice=3), output)
        await child.wait()
        assert output.number_after("nice") == os.nice(0) + 3

    async def test_what_it_leaves_behind_is_ended(self, output):
        code = """
            import subprocess, sys
            left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            print("left", left.pid)
        """
        child = await Child.start(script(code), output)
        await child.wait()
        await until_dead(output.number_after("left"))

    async def test_it_dies_with_a_parent_that_is_killed(self, output):
        code = """
            import asyncio, sys
            from app.children import Child
            from app.processes import ProcessCommand
            async def main():
                say = lambda name, line: print(line)
                code = "import os, time; print('pid', os.getpid()); time.sleep(600)"
                child = await Child.start(ProcessCommand("x", (sys.executable, "-c", code)), say)
                await child.wait()
            asyncio.run(main())
        """
        parent = await Child.start(script(code), output)
        await output.wait_for("pid")
        grandchild = output.number_after("pid")
        assert alive(grandchild)
        os.kill(parent.pid, signal.SIGKILL)
        await until_dead(grandchild)
        assert await parent.wait() == -signal.SIGKILL


class TestSupervisor:
    async def test_a_child_that_dies_is_started_again(self, output):
        supervisor = Supervisor([Kept(script(FOREVER))], output)
        running = asyncio.create_task(supervisor.run())
        await output.wait_for("pid")
        os.kill(output.number_after("pid"), signal.SIGKILL)
        await output.wait_for("pid", times=2)
        assert output.count("ended with signal SIGKILL") == 1
        supervisor.stop()
        await running

    async def test_stop_ends_every_child_in_its_own_way(self, output):
        code = """
            import signal, sys, time
            def leave(*_):
                print("goodbye")
                sys.exit(0)
            signal.signal(signal.SIGTERM, leave)
            print("up")
            time.sleep(600)
        """
        supervisor = Supervisor([Kept(script(code, "a")), Kept(script(code, "b"))], output)
        running = asyncio.create_task(supervisor.run())
        await output.wait_for("up", times=2)
        supervisor.stop()
        await running
        assert sorted(name for name, line in output.lines if line == "goodbye") == ["a", "b"]

    async def test_a_child_that_ignores_the_signal_is_killed(self, output):
        code = """
            import os, signal, time
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("pid", os.getpid())
            time.sleep(600)
        """
        supervisor = Supervisor([Kept(script(code))], output, grace_s=0.3)
        running = asyncio.create_task(supervisor.run())
        await output.wait_for("pid")
        supervisor.stop()
        await running
        assert not alive(output.number_after("pid"))

    async def test_a_child_that_never_comes_up_ends_everything(self, output, monkeypatch):
        monkeypatch.setattr(Backoff, "FIRST_S", 0.01)

        async def never(kept):
            await asyncio.Event().wait()
            return ""

        broken = Kept(script("raise SystemExit(1)", "broken"), never)
        fine = Kept(script(FOREVER, "fine"))
        with pytest.raises(CannotStart, match="broken could not start"):
            await Supervisor([fine, broken], output).run()
        assert broken.restarts == 4
        assert not alive(output.number_after("pid"))

    async def test_a_child_that_says_it_cannot_start_is_not_tried_again(self, output):
        async def never(kept):
            await asyncio.Event().wait()
            return ""

        broken = Kept(script("raise SystemExit(2)"), never)
        with pytest.raises(CannotStart, match="exit status 2"):
            await Supervisor([broken], output).run()
        assert broken.restarts == 0


def engine_command(engine):
    argv = (sys.executable, "-m", "tests.engine_process", engine.address)
    return ProcessCommand("engine", (*argv, str(engine.folder / "journal"), "5", "2000"))


class TestEngineProbe:
    @pytest.fixture
    async def kept(self, tmp_path, output, monkeypatch):
        """A supervised engine, ready."""
        monkeypatch.chdir(REPOSITORY)
        engine = EngineProcess(tmp_path)
        probe = engine_probe(engine.address, SystemClock(), hang_s=1.0, start_s=60.0)
        kept = Kept(engine_command(engine), probe)
        supervisor = Supervisor([kept], output)
        running = asyncio.create_task(supervisor.run())
        await kept.ready.wait()
        yield kept, engine.address
        supervisor.stop()
        await running

    async def test_an_engine_that_stands_still_in_a_step_is_replaced(self, kept, output):
        from engine.client import EngineClient
        from engine.errors import EngineUnavailable

        engine, address = kept
        client = EngineClient(address)
        await client.start()
        first = (await client.status()).engine_id
        with pytest.raises(EngineUnavailable):
            async for _ in client.generate(make_request("r", first_token=HANG_TOKEN)):
                pass
        await output.wait_for("hangs in a step")
        await client.describe()
        assert client.engine_id != first
        assert engine.restarts == 1
        await client.close()

    async def test_an_engine_that_is_stopped_is_replaced(self, kept, output):
        engine, _ = kept
        os.kill(engine.child.pid, signal.SIGSTOP)
        await output.wait_for("gives no sign of life")
        while engine.restarts == 0:  # noqa: ASYNC110 - the supervisor counts it
            await asyncio.sleep(0.02)


class TestApiProbe:
    async def test_an_api_that_answers_is_ready_and_one_that_hangs_is_replaced(self, output):
        port = free_tcp_address().rsplit(":", 1)[1]
        code = f"""
            import os, signal
            from http.server import BaseHTTPRequestHandler, HTTPServer
            class Healthy(BaseHTTPRequestHandler):
                def do_GET(self):
                    self.send_response(200)
                    self.end_headers()
                def log_message(self, *_):
                    pass
            print("pid", os.getpid())
            HTTPServer(("127.0.0.1", {port}), Healthy).serve_forever()
        """
        probe = api_probe(f"http://127.0.0.1:{port}", SystemClock(), hang_s=1.0, start_s=60.0)
        kept = Kept(script(code, "api"), probe)
        supervisor = Supervisor([kept], output)
        running = asyncio.create_task(supervisor.run())
        await kept.ready.wait()
        os.kill(output.number_after("pid"), signal.SIGSTOP)
        await output.wait_for("does not answer")
        await output.wait_for("pid", times=2)
        supervisor.stop()
        await running


class TestSignsOfLife:
    """Worker and beat are watched by the file that their loop touches."""

    TOUCHING = """
        import os, pathlib, time
        print("pid", os.getpid())
        while True:
            pathlib.Path({sign!r}).touch()
            time.sleep(0.05)
    """

    async def test_a_loop_that_stands_still_is_replaced(self, output, tmp_path):
        sign = tmp_path / "worker.alive"
        probe = sign_probe(sign, SystemClock(), hang_s=0.4, start_s=60.0)
        code = self.TOUCHING.format(sign=str(sign))
        kept = Kept(script(code, "worker"), probe, optional=True)
        supervisor = Supervisor([kept], output)
        running = asyncio.create_task(supervisor.run())
        await output.wait_for("pid")
        while not sign.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.02)
        first = output.number_after("pid")
        os.kill(first, signal.SIGSTOP)
        await output.wait_for("worker gives no sign of life")
        await output.wait_for("pid", times=2)
        assert not alive(first)
        supervisor.stop()
        await running

    async def test_one_that_never_gives_a_sign_does_not_end_the_platform(self, output, tmp_path):
        probe = sign_probe(tmp_path / "never", SystemClock(), hang_s=1.0, start_s=0.1)
        kept = Kept(script(FOREVER, "worker"), probe, optional=True)
        supervisor = Supervisor([kept], output)
        running = asyncio.create_task(supervisor.run())
        await output.wait_for("worker gives no sign of life")
        assert not running.done()
        supervisor.stop()
        await running

    def test_serve_watches_both_and_their_limits_are_settings(self, settings):
        kept = {k.name: k for k in platform_processes(settings, SystemClock())}
        assert kept["worker"].probe is not None
        assert kept["beat"].probe is not None
        assert kept["worker"].optional
