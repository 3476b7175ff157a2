"""All messages of the channel between the two processes, by direction."""

from __future__ import annotations

from engine.adapter_messages import AdapterLoaded, LoadAdapter, UnloadAdapter
from engine.lens_messages import LensRequest, LensResult
from engine.protocol import (
    Abort,
    CacheLookup,
    EmbedRequest,
    Explained,
    Fatal,
    GenerateRequest,
    Notice,
    Progress,
    Ready,
    Rejected,
    Shutdown,
    StepOutputs,
)
from engine.watch_messages import Blocks, MeasureWaits, StepTrace, StepWaits, Watch

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
