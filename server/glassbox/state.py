"""Glassbox: the objects that the built-in pages use, created once by the wing's `install`."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.requests import Request

from engine.client.inspection import InspectedEngine
from server.glassbox.lens.captures import LensDesk
from server.glassbox.model.checkpoint import CheckpointFacts
from server.glassbox.model.structure import StructureReader
from server.glassbox.requests.step_log import Recorder
from server.glassbox.watch.live_engine import LiveEngine
from server.turns import Turns


@dataclass(frozen=True)
class Glassbox:
    engine: InspectedEngine
    recorder: Recorder  # of steps and requests
    live: LiveEngine  # the engine while somebody watches it
    structure: StructureReader  # of the model
    checkpoint: CheckpointFacts  # formats of the weights and first prompts
    changed_settings: list[dict[str, str]]  # flag, value and default of each
    lens: LensDesk = field(default_factory=LensDesk)
    explain_turn: Turns = field(default_factory=lambda: Turns(1))


def glassbox_of(request: Request) -> Glassbox:
    glassbox = request.app.state.glassbox
    assert isinstance(glassbox, Glassbox)
    return glassbox
