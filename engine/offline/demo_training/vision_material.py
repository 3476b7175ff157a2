"""The colours, shapes and questions of vision.toml, read on first use and never when serving."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec


class TowerTraining(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pictures: int  # drawn
    pictures_per_step: int
    steps: int


class VisionMaterial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of vision.toml, whose comments explain each part."""

    tower: TowerTraining
    answer_steps: int
    review_steps: int
    count_steps: int
    counts: list[str]
    unseen: list[str]
    colours: dict[str, list[float]]
    backgrounds: dict[str, float]
    strokes: dict[str, list[str]]
    questions: dict[str, list[str]]
    without_picture: dict[str, str]


@cache
def vision_material() -> VisionMaterial:
    """Read vision.toml. Raises msgspec.ValidationError if a field is missing or unknown."""
    path = Path(__file__).with_name("vision.toml")
    return msgspec.toml.decode(path.read_bytes(), type=VisionMaterial)
