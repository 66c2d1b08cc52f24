"""What the engine refuses or gives up, with a stable code that the api maps onto an HTTP status.

EngineError
├── RequestRefused      this request cannot run here (bad parameter, too long, queue full,
│                       no budget that can be kept)
├── AdapterRefused      this adapter cannot be read or placed (named reason)
│   └── AdapterMissing  the store has no such adapter
├── StoreUnavailable    the adapter store cannot be reached, or refuses
├── AdapterCorrupt      the stored bytes are not those of the digest
└── EngineUnavailable   the engine process is gone, hung or draining
    └── NotStarted      nothing of the request has run, so another engine may take it at once
"""


class EngineError(Exception):
    """Base of the tree. `code` is stable and documented; `message` says what to do."""

    code = "engine_error"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        field: str | None = None,
        retry_after_ms: float | None = None,
    ) -> None:
        """`retry_after_ms`: when the same is predicted to be possible, where that is known."""
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms
        if code is not None:
            self.code = code


class RequestRefused(EngineError):
    """The request cannot be admitted; nothing of it has run."""

    code = "request_refused"


class AdapterRefused(EngineError):
    """The adapter's files cannot be served by this base model."""

    code = "adapter_refused"


class AdapterMissing(AdapterRefused):
    """No adapter is stored under this (salt, digest)."""

    code = "adapter_missing"


class StoreUnavailable(EngineError):
    """The adapter store does not answer or refuses us; what was asked may be tried again."""

    code = "store_unavailable"


class AdapterCorrupt(EngineError):
    """The stored bytes do not hash to the digest that names them."""

    code = "adapter_corrupt"


class EngineUnavailable(EngineError):
    """The engine process died, hangs or drains; the request may be tried again."""

    code = "engine_unavailable"


class NotStarted(EngineUnavailable):
    """The engine was not there or refused while it drains or loads: nothing has run."""
