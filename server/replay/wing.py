"""The wing of --record: the file of answers that `penstock verify` replays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from server.replay.record_file import RecordFile
from server.replay.recording import answer_recorder
from server.state import AppState
from server.wing import Wing


def install(app: FastAPI, spine: AppState) -> None:
    """Open the file if --record names one. Raises ConfigError."""
    file = RecordFile(spine.config.record) if spine.config.record else None
    if file is not None:
        spine.observers.append(answer_recorder(file, spine))
        line = f"  record    on: the tokens of all prompts and answers go to {spine.config.record}"
        spine.banner_lines.append(lambda url: line)
    app.state.record = file


@asynccontextmanager
async def run(app: FastAPI) -> AsyncIterator[None]:
    """Close the file at the end."""
    file: RecordFile | None = app.state.record
    try:
        yield
    finally:
        if file is not None:
            await asyncio.to_thread(file.close)


WING = Wing(install=install, run=run)
