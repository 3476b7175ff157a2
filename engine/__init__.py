"""The engine's public face; free of torch, so that the API process starts fast and stays small."""

from engine.client import EngineClient, OutputStream, ProcessClient
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.protocol import GenerateRequest, SamplingParams

__all__ = [
    "EngineClient",
    "EngineConfig",
    "EngineError",
    "GenerateRequest",
    "OutputStream",
    "ProcessClient",
    "SamplingParams",
]
