"""A known spot of a picture lies in the area of the embedding whose pixels show it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from PIL import Image, ImageDraw

from server.images.processors.anyres import AnyresProcessor
from server.images.processors.processor import ImageShape, PatchGrid
from tests.server.images.processors.cases import CASES, Case, Pixels

NAMES = (
    *("idefics3", "idefics3-whole", "gemma3", "onevision", "onevision-of-several", "llava-next"),
    *("qwen2.5-vl", "qwen3-vl", "mistral3", "gemma4"),
)
SIZE = (300, 211)  # width, height
SPOTS = ((0.13, 0.3), (0.72, 0.81), (0.45, 0.07))
Area = tuple[float, float, float, float]  # left, top, right, bottom


def areas(grids: Sequence[PatchGrid]) -> dict[int, Area]:
    """Return the areas of all embeddings, by their numbers."""
    found: dict[int, Area] = {}
    for grid in grids:
        wide, high = grid.width / grid.columns, grid.height / grid.rows
        for row in range(grid.rows):
            for column in range(grid.columns):
                number = grid.first + row * (grid.columns + grid.row_end) + column
                assert number not in found
                left, top = grid.left + column * wide, grid.top + row * high
                found[number] = left, top, left + wide, top + high
    return found


def spotted(x: float, y: float) -> Image.Image:
    """Return a white picture with a dark spot around a place, given as shares of its sides."""
    picture = Image.new("RGB", SIZE, "white")
    middle, radius = (x * SIZE[0], y * SIZE[1]), 2
    box = [side + sign * radius for sign in (-1, 1) for side in middle]
    ImageDraw.Draw(picture).ellipse(box, fill="black")
    return picture


def darkest(tile: Pixels) -> tuple[float, float]:
    """Return where a tile [height, width, 3] is darkest: row and column as shares of its sides."""
    values = tile.sum(-1)
    row, column = np.unravel_index(values.argmin(), values.shape)
    return (float(row) + 0.5) / len(tile), (float(column) + 0.5) / tile.shape[1]


def embedding_in(row: float, column: float, rows: int, columns: int) -> int:
    return int(row * rows) * columns + int(column * columns)


def shown_by(case: Case, shape: ImageShape, pixels: Pixels) -> list[int]:
    """Return the embeddings that show the darkest spot, by the order of tiles and patches."""
    if isinstance(case.ours, AnyresProcessor):
        overview = embedding_in(*darkest(pixels[0]), case.ours.side, case.ours.side)
        return [overview] if shape.tiles == 1 else [overview, in_tiles(case, shape, pixels)]
    if shape.tiles == 1 and shape.rows:
        return [embedding_in(*darkest(pixels[0]), shape.rows, shape.columns)]
    side = round((shape.embeddings // shape.tiles) ** 0.5)
    tiles = range(shape.tiles) if shape.tiles == 1 else (spot_tile(pixels[:-1]), shape.tiles - 1)
    return [n * side**2 + embedding_in(*darkest(pixels[n]), side, side) for n in tiles]


def spot_tile(tiles: Pixels) -> int:
    return int(tiles.sum(-1).min(axis=(1, 2)).argmin())


def in_tiles(case: Case, shape: ImageShape, pixels: Pixels) -> int:
    """Return the embedding of LLaVA's tiles, which are joined, and lose the rows of padding."""
    assert isinstance(case.ours, AnyresProcessor)
    side, tiles = case.ours.side, pixels[1:]
    joined = tiles.reshape(shape.rows, shape.columns, *tiles.shape[1:]).swapaxes(1, 2)
    whole = joined.reshape(shape.rows * shape.height, shape.columns * shape.width, 3)
    bright = whole.sum(-1) > 0
    rows, columns = np.flatnonzero(bright.any(1)), np.flatnonzero(bright.any(0))
    inside = whole[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    grid = case.ours.grids(shape)[1]
    row, column = darkest(inside)
    width = grid.columns + 1  # a newline
    return side**2 + int(row * grid.rows) * width + int(column * grid.columns)


@pytest.mark.parametrize("name", NAMES)
def test_spot_lies_in_the_area_of_the_embedding_that_shows_it(name: str) -> None:
    case = next(each for each in CASES if each.name == name)
    for x, y in SPOTS:
        shape, pixels = case.process(spotted(x, y))
        found = areas(case.ours.grids(shape))
        for number in shown_by(case, shape, pixels):
            left, top, right, bottom = found[number]
            slack_x, slack_y = 3 / SIZE[0], 3 / SIZE[1]  # the spot may be over an edge
            assert left - slack_x <= x <= right + slack_x, (number, found[number])
            assert top - slack_y <= y <= bottom + slack_y, (number, found[number])


@pytest.mark.parametrize("name", NAMES)
def test_grids_have_all_embeddings_but_those_that_end_rows(name: str) -> None:
    case = next(each for each in CASES if each.name == name)
    shape, _ = case.process(spotted(0.5, 0.5))
    grids = case.ours.grids(shape)
    ends = sum(grid.rows * grid.row_end for grid in grids)
    if name == "onevision-of-several":
        ends = 1  # behind the only grid
    numbers = areas(grids)
    assert len(numbers) + ends == shape.embeddings
    assert max(numbers) < shape.embeddings
    if grids[0].part == "tiles":
        tiles = [grid for grid in grids if grid.part == "tiles"]
        assert sum(grid.width * grid.height for grid in tiles) == pytest.approx(1.0)
