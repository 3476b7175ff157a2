"""Pictures in a prompt, as the model's image encoder reads them."""

from __future__ import annotations

from engine.protocol.message import Record


class ImagePlace(Record, frozen=True):
    """Which tokens of a prompt show an image. Their embeddings are those of the image.

    `digest` identifies the embeddings: images with equal ones are encoded once.
    """

    digest: bytes  # 16 bytes: BLAKE2b of all that the encoder reads
    runs: tuple[tuple[int, int], ...]  # (first token, count), in the order of the prompt
    # Rows and columns of the embeddings, for models with positions in three dimensions.
    grid: tuple[int, int] = (0, 0)

    @property
    def num_tokens(self) -> int:
        """Number of embeddings."""
        return sum(count for _, count in self.runs)

    @property
    def start(self) -> int:
        """The first token that shows the image."""
        return self.runs[0][0]

    @property
    def end(self) -> int:
        """The first token behind the image."""
        first, count = self.runs[-1]
        return first + count

    def overlaps(self, start: int, end: int) -> bool:
        """Return whether one of the tokens [start, end) shows the image."""
        return any(first < end and start < first + count for first, count in self.runs)


class Image(Record, frozen=True):
    """A picture that is resized and cut into tiles of equal size; one tile is the whole picture."""

    place: ImagePlace
    pixels: bytes  # uint8 [tiles, height, width, 3], RGB
    shape: tuple[int, int, int]  # tiles, height and width in pixels
    # Rows and columns of the tiles without an overview of the picture; (0, 0): one tile.
    tile_grid: tuple[int, int] = (0, 0)
    size: tuple[int, int] = (0, 0)  # height and width of the picture before it was resized
