"""What goes wrong, as a client is told: an HTTP status and OpenAI's error body."""

from collections.abc import Iterator
from contextlib import contextmanager

import orjson


class SessionError(ValueError):
    """An answer other than 200.

    Attributes:
        status: the HTTP status.
        code: the same in one word, for programs.
    """

    def __init__(self, message: str, status: int, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    @property
    def body(self) -> bytes:
        """JSON in the shape that OpenAI's client shows."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return orjson.dumps({"error": {"message": str(self), "type": kind, "param": None, "code": self.code}})

    @property
    def headers(self) -> dict[str, str]:
        """OpenAI's client repeats 409 and 5xx unless it is told that this would not help."""
        return {} if self.status in (429, 503) else {"x-should-retry": "false"}


@contextmanager
def answered_with(status: int, code: str) -> Iterator[None]:
    """A ValueError inside is what the client is told, with the same text."""
    try:
        yield
    except SessionError:
        raise
    except ValueError as error:
        raise SessionError(str(error), status, code) from error
