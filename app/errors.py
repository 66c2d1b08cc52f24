"""Every refusal: a stable code, a sentence that says what to do, the field that was wrong.

    AppError
    ├── InvalidRequest 400/422   ├── NotFound 404        ├── Overloaded 503
    ├── Unauthenticated 401      ├── Conflict 409        └── InternalError 500
    ├── Forbidden 403            ├── TooLarge 413
    └── RateLimited 429

On /v1 and /admin/v1 an error is OpenAI's object: {"error": {"message", "type", "param", "code"}}.
Values are clipped and never message content, keys or passwords.
"""


class AppError(Exception):
    status = 500
    type = "server_error"
    code = "internal_error"
    retryable = False

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        status: int | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_ms = retry_after_ms
        self.limit_headers: dict[str, str] = {}  # x-ratelimit-…, where the caller is known
        if code is not None:
            self.code = code
        if status is not None:
            self.status = status

    def body(self) -> dict[str, object]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def headers(self) -> dict[str, str]:
        """`Retry-After` (also in ms) where a retry can help, else `x-should-retry: false`."""
        if not self.retryable:
            return {"x-should-retry": "false"} | self.limit_headers
        wait_ms = max(1000, self.retry_after_ms or 1000)
        waits = {"Retry-After": str(-(-wait_ms // 1000)), "retry-after-ms": str(wait_ms)}
        return waits | self.limit_headers


class InvalidRequest(AppError):
    """The caller sent something that cannot be honoured; `param` names the field."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class Unauthenticated(AppError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(AppError):
    status = 403
    type = "permission_error"
    code = "forbidden"


class NotFound(AppError):
    """Also what a foreign tenant's object is: the answer must not tell the two apart."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class Conflict(AppError):
    status = 409
    type = "conflict_error"
    code = "conflict"


class TooLarge(AppError):
    status = 413
    type = "invalid_request_error"
    code = "too_large"


class RateLimited(AppError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    retryable = True


class Overloaded(AppError):
    """The platform cannot take the request now; nothing was started or billed."""

    status = 503
    type = "service_unavailable_error"
    code = "overloaded"
    retryable = True


class InternalError(AppError):
    """A fault of ours; the request id finds it in the logs."""
