"""The responses to a --batch-dir that cannot be written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from server.batch.folder import FULL, StoreFull
from server.http.errors import NO_RETRY, ApiError
from server.http.form import CLOSE

log = structlog.get_logger("server.batches")


@contextmanager
def storing() -> Iterator[None]:
    """Raise an ApiError for what the store raises: StoreFull or OSError.

    No client repeats the request by itself: a full disk is a 400, as a full store is.
    """
    try:
        yield
    except StoreFull as error:
        raise ApiError(400, "storage_full", str(error), headers=CLOSE) from None
    except OSError as error:
        raise storage_error(error) from error


def storage_error(error: OSError) -> ApiError:
    """Return the response to a failed operation of the file system."""
    if error.errno not in FULL:
        text = "The server cannot write to --batch-dir; the server's log has the cause."
        return ApiError(500, "storage_failed", text, headers=NO_RETRY | CLOSE)
    log.error("batch dir is on a full disk", cause=error.strerror)
    text = "The server's disk is full: delete files, or make room on the disk of --batch-dir."
    return ApiError(400, "storage_full", text, headers=CLOSE)
