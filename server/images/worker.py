"""The process that decodes the images of a checkpoint: `python -m server.images.worker`."""

from __future__ import annotations

from engine.checkpoint.image_config import ImageConfig
from server.confined.process import serve
from server.images.message import Json
from server.images.processors.processor import Processor
from server.images.processors.registry import processor_of
from server.images.sandbox import ImageSandbox


def settings_of(model: Json, config: ImageConfig, architecture: str) -> Json:
    """Return the settings of a process."""
    return {
        "model": model,
        "values": config.values,
        "file": config.file,
        "processor": config.processor,
        "architecture": architecture,
    }


def read_processor(settings: Json) -> Processor:
    """Return the processor of `settings_of`. Raises ConfigError."""
    config = ImageConfig(settings["values"], settings["file"], settings["processor"])
    return processor_of(settings["model"], config, settings["architecture"])


if __name__ == "__main__":
    serve(ImageSandbox(read_processor).handle)
