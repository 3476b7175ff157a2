"""Public names of the engine. They import no torch, so the API process starts fast and stays small.

`engine.client.client` is not re-exported: it imports zmq and asyncio, which `--help` does not need.
"""

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.protocol.generate import GenerateRequest, SamplingParams

__all__ = ["EngineConfig", "EngineError", "GenerateRequest", "SamplingParams"]
