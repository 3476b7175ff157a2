"""LLaVA-NeXT and LLaVA-OneVision: an overview, then tiles of the best fitting of several sizes.

The picture is resized into that size, padded with black on both sides, and cut. LLaVA-OneVision
does so for a picture that is alone in its conversation. Of several, each is one padded square.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.images.processors.processor import ImageShape, PatchGrid
from server.images.processors.resize import check_size, resized
from server.images.processors.tiles import cut

if TYPE_CHECKING:
    from PIL.Image import Image

Size = tuple[int, int]  # height and width


@dataclass(frozen=True)
class AnyresProcessor:
    """Square tiles of `edge` pixels with `side` x `side` embeddings each, the overview first."""

    edge: int
    side: int
    sizes: tuple[Size, ...]  # of the tiles together, in pixels
    resample: int
    max_tiles: int | None  # limits the embeddings to those of this number of tiles
    # Colour of the padding of one picture among several; None: such pictures are tiled too.
    background: tuple[int, int, int] | None
    marker: str = "<image>"
    placeholder: str = "<image>"

    def process(self, picture: Image, *, alone: bool) -> tuple[ImageShape, bytes]:
        """Resize and cut. Raises UnfitPictureError for a strip that is too long."""
        size = (picture.height, picture.width)
        if self.background is not None and not alone:
            square = _padded(picture, max(size), max(size), self.background)
            tile = resized(square, self.edge, self.edge, self.resample).tobytes()
            embeddings = self.side**2 + 1  # a newline
            return ImageShape(1, self.edge, self.edge, 0, 0, embeddings, size), tile
        target = best_size(size, self.sizes)
        overview = resized(picture, self.edge, self.edge, self.resample).tobytes()
        height, width = _fitted(size, target)
        fitted = resized(picture, width, height, self.resample)
        tiles = [overview, *cut(_padded(fitted, *target, (0, 0, 0)), self.edge)]
        rows, columns = target[0] // self.edge, target[1] // self.edge
        tile_rows, tile_columns = self._tile_grid(size, rows, columns)
        embeddings = self.side**2 + tile_rows * (tile_columns + 1)  # a newline behind each row
        shape = ImageShape(len(tiles), self.edge, self.edge, rows, columns, embeddings, size)
        return shape, b"".join(tiles)

    def _tile_grid(self, size: Size, rows: int, columns: int) -> Size:
        """Return the rows and columns of embeddings of the tiles without padding."""
        height, width = self.side * rows, self.side * columns
        if size[1] / size[0] > width / height:
            real = int(round(size[0] * (width / size[1]), 7))
            height -= (height - real) // 2 * 2
        else:
            real = int(round(size[1] * (height / size[0]), 7))
            width -= (width - real) // 2 * 2
        if self.max_tiles is not None:
            ratio = math.sqrt(height * width / (self.max_tiles * self.side**2))
            if ratio > 1.1:
                height, width = int(height // ratio), int(width // ratio)
        return height, width

    def expansion(self, shape: ImageShape) -> str:
        """Return the placeholders."""
        return self.placeholder * shape.embeddings

    def grids(self, shape: ImageShape) -> Sequence[PatchGrid]:
        """Return the overview and one grid for all tiles, which has nothing of their padding.

        A picture among several has padding, so its grid is larger than the picture.
        """
        height, width = shape.size
        if not shape.rows:
            long = max(height, width)
            square = PatchGrid(
                "picture",
                first=0,
                rows=self.side,
                columns=self.side,
                left=-(long - width) / 2 / width,
                top=-(long - height) / 2 / height,
                width=long / width,
                height=long / height,
            )
            return [square]
        rows, columns = self._tile_grid(shape.size, shape.rows, shape.columns)
        overview = PatchGrid("overview", 0, self.side, self.side)
        return [overview, PatchGrid("tiles", self.side**2, rows, columns, row_end=1)]


def best_size(size: Size, sizes: tuple[Size, ...]) -> Size:
    """Return the size that keeps most pixels of a picture, and of those the smallest one."""
    best = sizes[0]
    most, least_waste = 0, math.inf
    for height, width in sizes:
        scale = min(width / size[1], height / size[0])
        pixels = int(size[1] * scale) * int(size[0] * scale)
        used = min(pixels, size[0] * size[1])
        waste = height * width - used
        if used > most or (used == most and waste < least_waste):
            best, most, least_waste = (height, width), used, waste
    return best


def _fitted(size: Size, target: Size) -> Size:
    """Return the largest size with the proportions of `size` within `target`."""
    scale_height, scale_width = target[0] / size[0], target[1] / size[1]
    if scale_width < scale_height:
        return min(math.ceil(size[0] * scale_width), target[0]), target[1]
    return target[0], min(math.ceil(size[1] * scale_height), target[1])


def _padded(picture: Image, height: int, width: int, colour: tuple[int, int, int]) -> Image:
    """Return a picture in the middle of a larger one."""
    if picture.size == (width, height):
        return picture
    check_size(picture, width, height)
    from PIL import Image  # only where pictures are processed

    whole = Image.new("RGB", (width, height), colour)
    whole.paste(picture, ((width - picture.width) // 2, (height - picture.height) // 2))
    return whole
