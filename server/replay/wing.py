"""The wing of --record: the file of answers that `penstock verify` replays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from server.state import AppState
from server.wing import Wing


@asynccontextmanager
async def run(app: FastAPI) -> AsyncIterator[None]:
    """Close the file at the end."""
    spine: AppState = app.state.penstock
    try:
        yield
    finally:
        if spine.record is not None:
            await asyncio.to_thread(spine.record.close)


WING = Wing(run=run)
