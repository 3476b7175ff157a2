"""The image processor of a family: a picture becomes tiles of pixels, and text of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from PIL.Image import Image


class UnfitPictureError(ValueError):
    """A picture has a size that the model's image processor cannot take. The message says why."""


@dataclass(frozen=True)
class ImageShape:
    """Sizes of a processed picture: uint8 pixels [tiles, height, width, 3], RGB.

    `rows` and `columns` count tiles where a picture is cut (Idefics3, LLaVA), without its overview,
    and are 0 for a picture that is one tile. They count embeddings where a picture of any size is
    one tile (Qwen, Mistral 3, Gemma 4) and for the square of Gemma 3.
    """

    tiles: int
    height: int
    width: int
    rows: int
    columns: int
    embeddings: int  # placeholder tokens
    size: tuple[int, int]  # height and width of the picture as it was given


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """Embeddings of an image that cover a part of the picture, row by row.

    That of a row and a column is number `first + row * (columns + row_end) + column` of the image.
    """

    part: Literal["picture", "tiles", "overview"]  # a grid for all, or for a tile, or the overview
    first: int
    rows: int
    columns: int
    row_end: int = 0  # embeddings behind each row that show nothing
    left: float = 0.0  # of the covered area, as shares of the picture's width and height
    top: float = 0.0
    width: float = 1.0
    height: float = 1.0


def one_grid(shape: ImageShape) -> list[PatchGrid]:
    """Return the grid of a picture that is one tile, whose `rows` and `columns` are embeddings."""
    return [PatchGrid("picture", 0, shape.rows, shape.columns)]


class Processor(Protocol):
    """Prepares the pictures of one checkpoint. It is frozen, so that processes can share it."""

    @property
    def marker(self) -> str:
        """The text that the chat template writes for an image, e.g. "<image>"."""

    @property
    def placeholder(self) -> str:
        """The token whose embeddings are the image's, e.g. "<|image_pad|>"."""

    def process(self, picture: Image, *, alone: bool) -> tuple[ImageShape, bytes]:
        """Resize a picture in mode RGB and cut it. Raises UnfitPictureError.

        `alone` says that it is the only image of its conversation.
        """

    def expansion(self, shape: ImageShape) -> str:
        """Return the text that replaces one marker in the prompt."""

    def grids(self, shape: ImageShape) -> Sequence[PatchGrid]:
        """Return where the embeddings of a picture are on it, in their order."""
