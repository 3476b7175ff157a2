"""Which file prepares the pictures of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.checkpoint.image_config import (
    IMAGE_PROCESSORS,
    ImageConfig,
    image_processor_type,
    normalization_of,
)
from server.images.processors.gemma3 import read_gemma3
from server.images.processors.gemma4 import read_gemma4
from server.images.processors.idefics3 import read_idefics3
from server.images.processors.llava import read_llava_next, read_llava_onevision
from server.images.processors.pixtral import read_pixtral
from server.images.processors.processor import Processor
from server.images.processors.qwen2_vl import read_qwen2_vl

READERS: dict[str, Callable[[ImageConfig, dict[str, Any]], Processor]] = {
    "Gemma3ImageProcessor": read_gemma3,
    "Gemma4ImageProcessor": read_gemma4,
    "Idefics3ImageProcessor": read_idefics3,
    "LlavaNextImageProcessor": read_llava_next,
    "LlavaOnevisionImageProcessor": read_llava_onevision,
    "PixtralImageProcessor": read_pixtral,
    "Qwen2VLImageProcessor": read_qwen2_vl,
    "SmolVLMImageProcessor": read_idefics3,
}


def processor_of(
    model_config: dict[str, Any], image_config: ImageConfig, architecture: str
) -> Processor:
    """Return the processor of a checkpoint with this config.json and these image settings.

    Raises ConfigError that names what is not supported, also of the settings that only the engine
    needs, so that both processes refuse the same checkpoints.
    """
    name = image_processor_type(image_config, architecture)
    expected = IMAGE_PROCESSORS[architecture]
    if READERS.get(name) is not READERS[expected]:
        image_config.refuse("image_processor_type", f"{expected} for {architecture}")
    normalization_of(image_config, architecture)
    return READERS[name](image_config, model_config)
