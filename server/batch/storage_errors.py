"""The responses to a --batch-dir that cannot be written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from server.batch.folder import StoreFull, needs_room
from server.batch.form import CLOSE
from server.http.errors import NO_RETRY, ApiError

log = structlog.get_logger("server.batches")


@contextmanager
def storing() -> Iterator[None]:
    """Raise an ApiError for what the store raises: StoreFull or OSError.

    No client repeats the request by itself: a full disk is a 400, as a full store is.
    """
    try:
        with needs_room():
            yield
    except StoreFull as error:
        if error.__cause__ is not None:  # the disk is full, not a limit reached
            log.error("batch dir is on a full disk", cause=str(error.__cause__))
        raise ApiError(400, "storage_full", str(error), headers=CLOSE) from None
    except OSError as error:
        text = "The server cannot write to --batch-dir; the server's log has the cause."
        raise ApiError(500, "storage_failed", text, headers=NO_RETRY | CLOSE) from error
