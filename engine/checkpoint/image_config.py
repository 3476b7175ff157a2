"""How a checkpoint wants pictures prepared: processor_config.json and preprocessor_config.json.

Two processes read these files: the server resizes pictures and cuts them into tiles, the engine
scales the values of their pixels. `server` may import `engine.checkpoint`, as it does to read the
tokenizer's files, and the engine may not import `server`. So what both need is here, and uses
neither torch nor Pillow. The files are read as transformers 5.24 reads them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from engine.checkpoint.bounded_json import read_optional
from engine.checkpoint.folder import tensor_names, weights_entry
from engine.errors import ConfigError

NESTED_FILE = "processor_config.json"
FLAT_FILE = "preprocessor_config.json"
# Architectures that see, and the image processor that transformers takes where the files name none.
IMAGE_PROCESSORS = {
    "Gemma3ForConditionalGeneration": "Gemma3ImageProcessor",
    "Gemma4ForConditionalGeneration": "Gemma4ImageProcessor",
    "Idefics3ForConditionalGeneration": "Idefics3ImageProcessor",
    "LlavaNextForConditionalGeneration": "LlavaNextImageProcessor",
    "LlavaOnevisionForConditionalGeneration": "LlavaOnevisionImageProcessor",
    "Mistral3ForConditionalGeneration": "PixtralImageProcessor",
    "Qwen2VLForConditionalGeneration": "Qwen2VLImageProcessor",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2VLImageProcessor",
    "Qwen3VLForConditionalGeneration": "Qwen2VLImageProcessor",
    "Qwen3VLMoeForConditionalGeneration": "Qwen2VLImageProcessor",
    "Qwen3_5ForConditionalGeneration": "Qwen2VLImageProcessor",
    "Qwen3_5MoeForConditionalGeneration": "Qwen2VLImageProcessor",
    "SmolVLMForConditionalGeneration": "SmolVLMImageProcessor",
}
# Of these, the ones whose images the engine encodes.
SEEING = (
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
)
# Of these, the ones that are served as text models if their tower is missing.
TOWERS = {
    "Gemma3ForConditionalGeneration": "vision_tower",
    "Gemma4ForConditionalGeneration": "vision_tower",
    "Qwen3_5ForConditionalGeneration": "visual",
    "Qwen3_5MoeForConditionalGeneration": "visual",
}
HALF = (0.5, 0.5, 0.5)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF_PROCESSORS = ("Gemma3ImageProcessor", "Idefics3ImageProcessor", "SmolVLMImageProcessor")
WITHOUT_NORMALIZATION = ("Gemma4ImageProcessor",)

Colour = tuple[float, float, float]


@dataclass(frozen=True)
class ImageConfig:
    """Settings of a checkpoint's image processor, and of the processor around it.

    A setting that is null is not absent, as in transformers: a step that is null is off, and most
    other settings have no use for null. The readers raise ConfigError.
    """

    values: dict[str, Any]  # of the image processor
    file: str  # the file of `values`
    processor: dict[str, Any]  # processor_config.json, or {}

    def get(self, name: str, default: Any) -> Any:
        """Return a setting, or the default if it is absent."""
        return self.values.get(name, default)

    def flag(self, name: str, default: bool) -> bool:
        """Return a setting that is true or false. A null is false."""
        value = self.get(name, default)
        if value is None:
            return False
        if not isinstance(value, bool):
            self.refuse(name, "true and false")
        return value

    def integer(self, name: str, default: int) -> int:
        """Return a setting that is a whole number of at least one."""
        value = self.get(name, default)
        if not is_positive(value):
            self.refuse(name, "whole numbers of at least 1")
        return int(value)

    def number(self, name: str, default: float) -> float:
        """Return a setting that is a finite number."""
        value = self.get(name, default)
        if not _is_finite(value):
            self.refuse(name, "finite numbers")
        return float(value)

    def colour(self, name: str, default: Colour) -> Colour:
        """Return a setting of three numbers, for red, green and blue. One number is for all."""
        value = self.get(name, default)
        numbers = list(value) if isinstance(value, list | tuple) else [value] * 3
        if len(numbers) != 3 or not all(_is_finite(number) for number in numbers):
            self.refuse(name, "a finite number, or three of them")
        red, green, blue = (float(number) for number in numbers)
        return red, green, blue

    def refuse(self, name: str, supported: str) -> NoReturn:
        """Raise ConfigError about a setting of the image processor."""
        value = self.values.get(name)
        raise ConfigError(f"{self.file} has {name} = {value!r:.200}; supported: {supported}.")


def is_positive(value: object) -> bool:
    """Return whether a value of JSON is a whole number of at least one."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_finite(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)  # type: ignore[arg-type]


def read_image_config(folder: Path) -> ImageConfig | None:
    """Return the settings in a checkpoint's folder, or None if no file has any.

    `image_processor` in processor_config.json, as save_pretrained writes it today, silences all of
    preprocessor_config.json, even where it holds nothing but a type. Raises ConfigError for a file
    that is not a JSON object.
    """
    processor = read_optional(folder / NESTED_FILE)
    nested = processor.get("image_processor")
    if nested is not None:
        if not isinstance(nested, dict):
            raise ConfigError(f"{folder / NESTED_FILE}: image_processor must be an object.")
        return ImageConfig(nested, NESTED_FILE, processor)
    if not (folder / FLAT_FILE).is_file():
        return None
    return ImageConfig(read_optional(folder / FLAT_FILE), FLAT_FILE, processor)


def missing_tower(model: dict[str, Any], folder: Path) -> str | None:
    """Return what a checkpoint lacks to see, if it is served as a text model then; else None.

    `model` is its config.json. Raises ConfigError for a damaged index or file of weights.
    """
    names = model.get("architectures")
    architecture = names[0] if isinstance(names, list) and names else None
    if not isinstance(architecture, str) or architecture not in TOWERS:
        return None
    if model.get("vision_config") is None:
        return "config.json has no vision_config"
    tower, tensors = TOWERS[architecture], tensor_names(folder)
    if not tensors or any(name.removeprefix("model.").startswith(tower) for name in tensors):
        return None
    file = weights_entry(model, {path.name for path in folder.iterdir()})
    return f"{file} has no tensors of {tower}"


def image_processor_type(config: ImageConfig, architecture: str) -> str:
    """Return the name of the image processor's class, without the suffix of a backend.

    Raises ConfigError for an architecture without images.
    """
    if architecture not in IMAGE_PROCESSORS:
        names = ", ".join(IMAGE_PROCESSORS)
        raise ConfigError(f"{architecture} takes no images here. Architectures that do: {names}.")
    name = config.get("image_processor_type", None)
    if name is None:
        return IMAGE_PROCESSORS[architecture]
    if not isinstance(name, str):
        config.refuse("image_processor_type", "names of classes")
    return name.removesuffix("Fast").removesuffix("Pil")


@dataclass(frozen=True)
class Normalization:
    """How an 8-bit value `v` of a colour becomes an input: (fp32(v * scale) - mean) / std in fp32.

    transformers multiplies in fp64 and rounds the product to fp32 before it subtracts.
    """

    scale: float
    mean: Colour
    std: Colour


def normalization_of(config: ImageConfig, architecture: str) -> Normalization:
    """Return the scale, mean and deviation of a checkpoint. Raises ConfigError."""
    name = image_processor_type(config, architecture)
    is_half = name in HALF_PROCESSORS
    mean, std = (HALF, HALF) if is_half else (CLIP_MEAN, CLIP_STD)
    return read_normalization(config, mean, std, normalizes=name not in WITHOUT_NORMALIZATION)


def read_normalization(
    config: ImageConfig, mean: Colour, std: Colour, *, normalizes: bool = True
) -> Normalization:
    """Return the scale, mean and deviation; `mean` and `std` are the defaults of the class.

    Raises ConfigError for values that are no numbers, or a deviation of 0.
    """
    scale = config.number("rescale_factor", 1 / 255) if config.flag("do_rescale", True) else 1.0
    if not config.flag("do_normalize", normalizes):
        return Normalization(scale, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    mean, std = config.colour("image_mean", mean), config.colour("image_std", std)
    if 0.0 in std:
        config.refuse("image_std", "numbers other than 0")
    return Normalization(scale, mean, std)
