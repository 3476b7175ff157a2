"""Wing: a feature that `server.app` mounts, and that goes with its folder, its line and its tests.

A wing imports the spine, which every request passes, and no other wing. The spine imports no wing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from fastapi import APIRouter, FastAPI

from server.state import AppState


def keep_nothing(app: FastAPI, spine: AppState) -> None:
    """Install a wing without state."""


@asynccontextmanager
async def run_nothing(app: FastAPI) -> AsyncIterator[None]:
    """Run a wing that does nothing by itself."""
    yield


@dataclass(frozen=True)
class Wing:
    """The routes of a feature, its state, and what it does while the server runs.

    `install` checks the settings and puts the state of the wing on `app.state`. It raises
    ConfigError. `run` is entered when the engine has been started, and left before it is stopped.
    """

    routers: Sequence[APIRouter] = ()
    install: Callable[[FastAPI, AppState], None] = keep_nothing
    run: Callable[[FastAPI], AbstractAsyncContextManager[None]] = run_nothing
