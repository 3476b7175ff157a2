"""Cut a picture into square tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image


def cut(picture: Image, edge: int) -> list[bytes]:
    """Return the pixels of the square tiles, row by row: [edge, edge, 3] each.

    The sides of the picture must be multiples of `edge`.
    """
    tiles = []
    for top in range(0, picture.height, edge):
        for left in range(0, picture.width, edge):
            box = (left, top, left + edge, top + edge)
            tiles.append(picture.crop(box).tobytes())
    return tiles
