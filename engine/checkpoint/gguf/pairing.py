"""A model's GGUF file and its image encoder together, as the config of one checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.checkpoint.folder import IMAGE_ENCODER
from engine.checkpoint.gguf.header import Header, read_header
from engine.checkpoint.gguf.image_encoder import (
    ENCODERS,
    Encoder,
    check_settings,
    deep_layers,
    encoder_notes,
    is_image_encoder,
    projector_of,
    shape_of,
)
from engine.checkpoint.gguf.parts import image_encoders, is_sidecar
from engine.checkpoint.gguf.settings import NUM_DEEP, SECTIONS, architecture_of, own_settings
from engine.errors import ConfigError

Settings = Mapping[str, Any]
Config = dict[str, Any]
TEXT_TYPES = {"qwen2vl": "qwen2_5_vl_text", "qwen3vl": "qwen3_vl_text"}
AXES = 3  # of positions: time, height and width
INSTEAD = "To serve the text alone, move the file to another folder."


@dataclass(frozen=True, slots=True)
class Pair:
    """The config.json of a model, and that of its image processor. Text models have none."""

    config: Config
    processor: Config | None
    encoder: Path | None
    notes: list[str]


def encoders_beside(file: Path) -> list[Path]:
    """Return the files of image encoders in the folder of a model's file, the best first."""
    if is_sidecar(file):
        return []
    return image_encoders(each for each in file.parent.iterdir() if each.is_file())


def paired(settings: Settings, config: Config, encoders: list[Path]) -> Pair:
    """Return a model with the first of these image encoders that is its own.

    `settings` and `config` are those of the language model. Raises ConfigError if all others are
    for models of its architecture, and do not fit it.
    """
    if not encoders:
        return Pair(config, None, None, [])
    architecture = architecture_of(settings)
    if architecture not in {encoder.architecture for encoder in ENCODERS.values()}:
        note = f"{encoders[0].name} is not used: {architecture} files are served without images"
        return Pair(config, None, None, [note])
    refused: list[str] = []
    notes: list[str] = []
    for file in encoders:
        header = read_header(file)
        projector = projector_of(header.settings)
        encoder, said = ENCODERS.get(projector), f"{file.name} has the projector {projector}"
        if encoder is None or not is_image_encoder(header.settings):
            served = ", ".join(ENCODERS)
            refused.append(f"{said}, which is not served; served are {served}. {INSTEAD}")
            continue
        if encoder.architecture != architecture:
            notes.append(f"{said}, so it is for {encoder.architecture} models and not used")
            continue
        try:
            if misfit := _misfit(own_settings(settings), header, encoder):
                refused.append(f"{said} and {misfit}: it belongs to another model. {INSTEAD}")
                continue
            return _together(file, settings, config, header, encoder)
        except ConfigError as error:
            raise ConfigError(f"{said}. {error}") from error
    if refused:
        raise ConfigError(refused[0])
    return Pair(config, None, None, notes[:1])


def _misfit(own: Settings, header: Header, encoder: Encoder) -> str | None:
    """Return how the image encoder and the language model differ in a size; None if they fit."""
    width, hidden = shape_of(header, encoder.output)[encoder.axis], own["embedding_length"]
    if width != hidden:
        return f"embeddings of {width} numbers, where the model has {hidden}"
    deep = len(deep_layers(header.settings))
    if own.get(NUM_DEEP, deep) != deep:
        return f"{deep} deepstack layers, where the model has {own[NUM_DEEP]}"
    return None


def _together(
    file: Path, settings: Settings, config: Config, header: Header, encoder: Encoder
) -> Pair:
    check_settings(header.settings, encoder)
    text = dict(config)
    if encoder.architecture in TEXT_TYPES:
        text |= _with_sections(encoder.architecture, settings, config)
    of_vision, processor = encoder.config(header)
    whole = {
        "architectures": [encoder.class_name],
        **{key: config[key] for key in ("bos_token_id", "pad_token_id", "tie_word_embeddings")},
        "torch_dtype": config["torch_dtype"],
        "text_config": text,
        **of_vision,
        IMAGE_ENCODER: file.name,
    }
    note = f"{file.name} encodes images ({projector_of(header.settings)})"
    return Pair(whole, processor, file, [note, *encoder_notes(header.settings)])


def _with_sections(architecture: str, settings: Settings, config: Config) -> Config:
    """Return the rotary keys of a model whose tokens have three positions."""
    key = f"{architecture}.{SECTIONS}"
    given: Any = settings.get(key)
    is_list = isinstance(given, list) and len(given) in (AXES, AXES + 1)
    if not is_list or any(type(count) is not int for count in given) or any(given[AXES:]):
        raise ConfigError(
            f"The model's file has {key} = {given!r:.99}; it must be a list of three numbers, and "
            "a 0 behind them."
        )
    rope = {"rope_type": "default", **(config["rope_scaling"] or {}), "mrope_section": given[:AXES]}
    return {
        "model_type": TEXT_TYPES[architecture],
        "rope_parameters": rope,
        "rope_scaling": None,
    }
