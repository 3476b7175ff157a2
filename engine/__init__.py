"""The engine's public face; free of torch, so that the API process starts fast and stays small.

`engine.client` is imported by its own name: it brings zmq and asyncio, which `--help` need not pay.
"""

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.protocol import GenerateRequest, SamplingParams

__all__ = ["EngineConfig", "EngineError", "GenerateRequest", "SamplingParams"]
