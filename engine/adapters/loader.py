"""Reads adapters from the store in threads: verify, plan, build. Nothing of it is on the step path.

The engine opens an adapter by digest alone, checks its sha256 on every load, and reads safetensors
only. Whatever is wrong with a file becomes a LoadFailed of that adapter.
"""

import logging
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from engine.adapters.blob import Allocate, BlobDtype, aligned_buffer, build_blob, layout_adapter
from engine.adapters.config import check_config
from engine.adapters.loading import Loaded, LoadEvent, LoadFailed, Measured
from engine.adapters.plan import AdapterPlan, plan_adapter
from engine.adapters.safetensors_header import read_header
from engine.adapters.store import AdapterStore, StoredFiles
from engine.config import EngineConfig
from engine.errors import AdapterMissing, AdapterRefused, EngineError, StoreUnavailable
from engine.types import AdapterRef, ModelDescription

log = logging.getLogger(__name__)

WORTH_A_RETRY = (AdapterMissing, StoreUnavailable)


class StoreLoader:
    """A Loader over an AdapterStore. `measure`, `build`, `abandon` and `poll`: one thread."""

    def __init__(
        self,
        config: EngineConfig,
        store: AdapterStore,
        description: ModelDescription,
        *,
        allocate: Allocate | None = None,
    ) -> None:
        """`allocate`: see build_blob; called in the loading threads."""
        self._allocate = allocate or aligned_buffer
        self._store = store
        self._description = description
        self._max_rank = min(config.max_rank, description.max_rank)
        self._dtype: BlobDtype = (
            description.adapter_dtype if config.adapter_dtype == "auto" else config.adapter_dtype
        )
        self._threads = ThreadPoolExecutor(config.max_loads, thread_name_prefix="adapter-load")
        self._events: queue.SimpleQueue[LoadEvent] = queue.SimpleQueue()
        self._planned: dict[AdapterRef, tuple[StoredFiles, AdapterPlan]] = {}
        self._open: set[StoredFiles] = set()

    def measure(self, ref: AdapterRef) -> None:
        self._begin(ref, lambda: self._measure(ref))

    def build(self, ref: AdapterRef) -> None:
        files, plan = self._planned.pop(ref)
        self._begin(ref, lambda: self._build(ref, files, plan))

    def abandon(self, ref: AdapterRef) -> None:
        planned = self._planned.pop(ref, None)
        if planned is not None:
            self._threads.submit(self._release, planned[0])

    def poll(self) -> list[LoadEvent]:
        return [self._events.get_nowait() for _ in range(self._events.qsize())]

    def close(self) -> None:
        """Waits for the loads under way; those not begun never begin."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        for files in list(self._open):
            self._release(files)

    def _begin(self, ref: AdapterRef, load: Callable[[], LoadEvent]) -> None:
        def done(future: Future[LoadEvent]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            self._events.put(future.result() if error is None else _failure(ref, error))

        self._threads.submit(load).add_done_callback(done)

    def _measure(self, ref: AdapterRef) -> Measured:
        files = self._store.open_checked(ref)
        self._open.add(files)
        try:
            plan = self._plan(files)
            layout = layout_adapter(plan.require(), self._dtype)
        except BaseException:
            self._release(files)
            raise
        self._planned[ref] = (files, plan)
        return Measured(ref, layout.nbytes, layout.max_rank)

    def _plan(self, files: StoredFiles) -> AdapterPlan:
        judged = check_config(files.config, self._max_rank)
        if judged.config is None:
            failure = next(finding for finding in judged.findings if finding.severity == "fail")
            raise AdapterRefused(failure.message, code=failure.code, field=failure.field)
        return plan_adapter(judged.config, read_header(files.weights_path), self._description)

    def _build(self, ref: AdapterRef, files: StoredFiles, plan: AdapterPlan) -> Loaded:
        try:
            blob = build_blob(files.weights_path, plan, self._dtype, allocate=self._allocate)
            return Loaded(ref, blob)
        finally:
            self._release(files)

    def _release(self, files: StoredFiles) -> None:
        self._store.release(files)
        self._open.discard(files)


def _failure(ref: AdapterRef, error: BaseException) -> LoadFailed:
    """The reason in words that may be shown; what is not the adapter's fault is worth a retry."""
    if isinstance(error, EngineError) and error.code == "missing_file":  # gone since measured
        return LoadFailed(ref, AdapterMissing.code, error.message, True)
    if isinstance(error, EngineError):
        return LoadFailed(ref, error.code, error.message, isinstance(error, WORTH_A_RETRY))
    log.error("an adapter could not be loaded", extra={"adapter": ref.digest}, exc_info=error)
    if isinstance(error, OSError):
        return LoadFailed(ref, "adapter_unreadable", "The adapter cannot be read now.", True)
    return LoadFailed(ref, "adapter_load_failed", "The adapter could not be loaded.")
