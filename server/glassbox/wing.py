"""The wing of the built-in pages and their data under /ui/api."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from fastapi import FastAPI

from engine.client.inspection import InspectedEngine
from server.glassbox import hello, pages
from server.glassbox.explain import ablate
from server.glassbox.explain import routes as explain
from server.glassbox.lens import routes as lens
from server.glassbox.model import routes as model
from server.glassbox.model.checkpoint import CheckpointFacts
from server.glassbox.model.structure import StructureReader
from server.glassbox.prompt import routes as prompt
from server.glassbox.requests import routes as requests
from server.glassbox.requests.observer import generation_recorder
from server.glassbox.requests.step_log import Recorder
from server.glassbox.state import Glassbox
from server.glassbox.watch import routes as watch
from server.glassbox.watch.live_engine import LiveEngine
from server.http.addresses import serves_ui
from server.http.api_keys import keys_of
from server.http.key_file import check_ui
from server.settings import changed_settings
from server.state import AppState
from server.wing import Wing

ROUTE_FILES = (hello, requests, lens, prompt, model, ablate, explain, watch, pages)


def install(app: FastAPI, spine: AppState) -> None:
    """Prepare what the pages ask for. Raises ConfigError."""
    check_ui(spine.config, has_keys=bool(keys_of(app)))
    engine = cast(InspectedEngine, spine.client)
    recorder = Recorder(engine.step_listeners, engine.measure_waits)
    is_served = serves_ui(spine.config)
    spine.observers.append(generation_recorder(recorder, serves_ui=is_served))
    if is_served:
        spine.banner_lines.append(lambda url: f"  pages     {url}/ui/   (or `penstock open`)")
    live = LiveEngine(engine, recorder)
    spine.viewer_counts.append(lambda: live.num_viewers)
    app.state.glassbox = Glassbox(
        engine=engine,
        recorder=recorder,
        live=live,
        structure=StructureReader(spine.folder),
        checkpoint=CheckpointFacts(spine.folder),
        changed_settings=changed_settings(spine.engine_config, spine.config),
    )


@asynccontextmanager
async def run(app: FastAPI) -> AsyncIterator[None]:
    """End the process that reads the structure of the model."""
    glassbox: Glassbox = app.state.glassbox
    try:
        yield
    finally:
        glassbox.structure.close()


WING = Wing(tuple(file.router for file in ROUTE_FILES), install, run)
