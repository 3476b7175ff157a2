"""Idefics3 and SmolVLM: a picture becomes rows of square tiles, then an overview of one tile.

The longest edge is resized first, then each side up to whole tiles, and that again to the overview:
each step in 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from engine.checkpoint.image_config import NESTED_FILE, ImageConfig
from engine.errors import ConfigError
from server.images.processors.processor import ImageShape, PatchGrid
from server.images.processors.resize import resized
from server.images.processors.settings import (
    check_equal,
    check_settings,
    edge_of,
    model_integer,
    processor_integer,
    resample_of,
    vision_of,
)
from server.images.processors.tiles import cut

if TYPE_CHECKING:
    from PIL.Image import Image

LANCZOS = 1
MAX_EDGE = 4096  # of transformers: a larger size.longest_edge has no effect
FAKE = "<fake_token_around_image>"


@dataclass(frozen=True)
class Idefics3Processor:
    """Square tiles of `edge` pixels, row by row, and the overview last."""

    longest_edge: int
    edge: int
    is_split: bool
    resample: int
    tile_embeddings: int
    marker: str = "<image>"
    placeholder: str = "<image>"

    def process(self, picture: Image, *, alone: bool) -> tuple[ImageShape, bytes]:
        """Resize and cut. A picture that fits one tile has no overview."""
        width, height = self._first_size(picture.width, picture.height)
        whole = resized(picture, width, height, self.resample)
        if not self.is_split:
            whole = resized(whole, self.edge, self.edge, self.resample)
        else:
            width, height = self._size_of_tiles(width, height)
            whole = resized(whole, width, height, self.resample)
        tiles = cut(whole, self.edge)
        rows, columns = whole.height // self.edge, whole.width // self.edge
        if len(tiles) == 1:
            rows, columns = 0, 0
        else:
            tiles.append(resized(whole, self.edge, self.edge, self.resample).tobytes())
        embeddings = len(tiles) * self.tile_embeddings
        size = (picture.height, picture.width)
        shape = ImageShape(len(tiles), self.edge, self.edge, rows, columns, embeddings, size)
        return shape, b"".join(tiles)

    def _first_size(self, width: int, height: int) -> tuple[int, int]:
        """Return the size with the longest edge at its limit; the other one becomes even."""
        ratio = width / height
        edge = self.longest_edge
        if width >= height:
            width, height = edge, _even(int(edge / ratio))
        else:
            width, height = _even(int(edge * ratio)), edge
        return _limited(max(width, 1), max(height, 1))

    def _size_of_tiles(self, width: int, height: int) -> tuple[int, int]:
        """Return the size with both sides rounded up to whole tiles, the longer one first."""
        ratio = width / height
        if width >= height:
            width = _round_up(width, self.edge)
            height = _round_up(int(width / ratio), self.edge)
        else:
            height = _round_up(height, self.edge)
            width = _round_up(int(height * ratio), self.edge)
        return width, height

    def expansion(self, shape: ImageShape) -> str:
        """Return a line for each row of tiles, an empty line, and the overview."""
        tile = self.placeholder * self.tile_embeddings
        lines = []
        for row in range(1, shape.rows + 1):
            columns = range(1, shape.columns + 1)
            lines += [f"{FAKE}<row_{row}_col_{column}>{tile}" for column in columns]
            lines.append("\n")
        before = "\n" if lines else ""
        return f"{''.join(lines)}{before}{FAKE}<global-img>{tile}{FAKE}"

    def grids(self, shape: ImageShape) -> Sequence[PatchGrid]:
        """Return a grid for each tile, and the overview. The picture was stretched to the tiles."""
        side = math.isqrt(self.tile_embeddings)
        found: list[PatchGrid] = []
        for row in range(shape.rows):
            for column in range(shape.columns):
                tile = PatchGrid(
                    "tiles",
                    first=len(found) * self.tile_embeddings,
                    rows=side,
                    columns=side,
                    left=column / shape.columns,
                    top=row / shape.rows,
                    width=1 / shape.columns,
                    height=1 / shape.rows,
                )
                found.append(tile)
        part: Literal["overview", "picture"] = "overview" if found else "picture"
        found.append(PatchGrid(part, len(found) * self.tile_embeddings, side, side))
        return found


def _even(side: int) -> int:
    return side + side % 2


def _round_up(side: int, edge: int) -> int:
    return math.ceil(side / edge) * edge


def _limited(width: int, height: int) -> tuple[int, int]:
    ratio = width / height
    if width >= height and width > MAX_EDGE:
        width, height = MAX_EDGE, int(MAX_EDGE / ratio)
    elif height > width and height > MAX_EDGE:
        width, height = int(MAX_EDGE * ratio), MAX_EDGE
    return max(width, 1), max(height, 1)


def read_idefics3(config: ImageConfig, model: dict[str, Any]) -> Idefics3Processor:
    """Read the settings. Raises ConfigError."""
    check_settings(config, "do_image_splitting")
    longest_edge = _longest_edge(config, "size", 4 * 364)
    edge = _longest_edge(config, "max_image_size", 364)
    side = edge // model_integer(vision_of(model), "patch_size", 32)
    factor = model_integer(model, "scale_factor", 2)
    if side % factor or not side:
        raise ConfigError(
            f"{config.file} has max_image_size = {edge}, which makes tiles of {side} x {side} "
            f"patches: config.json's scale_factor = {factor} must divide {side}."
        )
    of_model = (side // factor) ** 2
    given = processor_integer(config, "image_seq_len", 169)
    check_equal(NESTED_FILE, "image_seq_len", given, "(patches / scale_factor)²", of_model)
    is_split = config.flag("do_image_splitting", True)
    return Idefics3Processor(
        longest_edge, edge, is_split, resample_of(config, LANCZOS), tile_embeddings=given
    )


def _longest_edge(config: ImageConfig, name: str, default: int) -> int:
    value = config.get(name, {"longest_edge": default})
    if not isinstance(value, dict) or value.keys() != {"longest_edge"}:
        config.refuse(name, '{"longest_edge": n}')
    return edge_of(config, name, default, "longest_edge")
