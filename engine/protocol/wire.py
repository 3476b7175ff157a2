"""All messages of the channel between the two processes, by direction."""

from __future__ import annotations

from engine.protocol.adapters import AdapterLoaded, LoadAdapter, UnloadAdapter
from engine.protocol.embed import EmbedRequest
from engine.protocol.failure import Fatal, Notice
from engine.protocol.generate import Abort, CacheLookup, Explained, GenerateRequest
from engine.protocol.lens import LensRequest, LensResult
from engine.protocol.outputs import Rejected, StepOutputs
from engine.protocol.ready import Progress, Ready, Shutdown
from engine.protocol.watch import Blocks, MeasureWaits, StepTrace, StepWaits, Watch

ToEngine = (
    GenerateRequest
    | EmbedRequest
    | CacheLookup
    | LensRequest
    | LoadAdapter
    | UnloadAdapter
    | Abort
    | Watch
    | MeasureWaits
    | Shutdown
)
FromEngine = (
    Progress
    | Ready
    | StepOutputs
    | LensResult
    | AdapterLoaded
    | Explained
    | StepTrace
    | StepWaits
    | Blocks
    | Rejected
    | Notice
    | Fatal
)
