"""The wing of /v1/files and /v1/batches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from server.batch import batch_routes, file_routes
from server.batch.runner import BatchRunner
from server.batch.storage import open_storage
from server.http.api_keys import keys_of
from server.state import AppState
from server.wing import Wing


def install(app: FastAPI, spine: AppState) -> None:
    """Open the storage of --batch-dir. Raises ConfigError."""
    storage = open_storage(spine.config)
    text = "Share of the disk of --batch-dir in use, 0 to 1; 0 without this flag."
    share = storage.disk.share if storage else lambda: 0.0
    app.state.metrics.gauge("batch_disk_usage_perc", text, share)
    app.state.batches = None
    if storage is not None:
        max_body = spine.config.max_body_bytes
        room = keys_of(app).seconds_until_room
        app.state.batches = BatchRunner(storage, spine.client, max_body, room)


@asynccontextmanager
async def run(app: FastAPI) -> AsyncIterator[None]:
    """Run the stored batches."""
    batches: BatchRunner | None = app.state.batches
    if batches is None:
        yield
        return
    batches.start(app)
    try:
        yield
    finally:
        await batches.stop()
        batches.storage.folder.close()


WING = Wing((file_routes.router, batch_routes.router), install, run)
