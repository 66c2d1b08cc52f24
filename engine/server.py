"""The engine process: a step loop in the main thread, all sockets in an I/O thread.

client ──> IoThread ──commands──> StepLoop ──> EngineCore.step()
client <── IoThread <───mail───── StepLoop
"""

import logging
import secrets
from collections.abc import Callable

from engine.clock import Clock, SystemClock
from engine.errors import EngineError
from engine.io_thread import IoThread, ServerOptions
from engine.ipc import IpcLock, ipc_path
from engine.journal import Journal
from engine.registration import Registrar, Registration, advertised
from engine.step_loop import Core, Drain, StepLoop, TellStatus
from engine.types import ModelDescription

__all__ = ["Core", "EngineServer", "ServerOptions"]

_log = logging.getLogger(__name__)


class EngineServer:
    """Listens at once, loads, warms up, then serves until `stop`."""

    def __init__(self, options: ServerOptions, clock: Clock | None = None) -> None:
        """Takes the address and reads the journal back. Raises EngineError subclasses."""
        self._options = options
        self._clock = clock or SystemClock()
        self.engine_id = secrets.token_hex(8)
        if options.registry_url:
            advertised(options.listen, options.advertise)  # refuses what nobody could reach
        path = ipc_path(options.listen)
        self._lock = IpcLock(path) if path is not None else None
        self._journal = Journal(options.journal_path, self._clock)
        try:
            self._io = IoThread(options, self.engine_id, self._journal, self._clock)
        except EngineError:
            self._give_back()
            raise
        self._loop: StepLoop | None = None
        self._registrar: Registrar | None = None
        self._stopping = False

    def serve(self, load: Callable[[], tuple[Core, ModelDescription]]) -> None:
        """Runs in the calling thread until a drain is over."""
        self._io.start()
        try:
            core, description = load()
            loop = StepLoop(core, self.engine_id, self._io.post, self._clock)
            loop.warm_up()
            self._loop = loop
            if self._stopping:
                return
            self._io.ready(loop, description)
            _log.info("engine %s is ready on %s", self.engine_id, self._options.listen)
            self._register(loop, description)
            loop.run(self._options.drain_ms)
        finally:
            if self._registrar is not None:
                self._registrar.close()
            self._io.close()
            self._give_back()

    def stop(self) -> None:
        """Drains; safe in a signal handler."""
        self._stopping = True
        if self._registrar is not None:
            self._registrar.withdraw()
        if self._loop is not None:
            self._loop.commands.put(Drain())

    def _register(self, loop: StepLoop, description: ModelDescription) -> None:
        options = self._options
        if not options.registry_url:
            return
        line = Registration(
            engine_id=self.engine_id,
            address=advertised(options.listen, options.advertise),
            base_model=description.name,
            base_digest=description.base_digest,
            public_key=options.curve.pair.public if options.curve is not None else None,
        )
        self._registrar = Registrar(
            options.registry_url,
            line,
            options.lease_ms,
            lambda tell: loop.commands.put(TellStatus(tell)),
        )
        self._registrar.start()

    def _give_back(self) -> None:
        self._journal.close()
        if self._lock is not None:
            self._lock.release()
