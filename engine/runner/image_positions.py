"""Positions of tokens in prompts that show images, on the axes of time, height and width (MRoPE).

They are a function of the row's images and the token's number. A token of text has the position
behind the one before it, on all axes. The tokens of an image share the position of time; its rows
count on from there along the height, and its columns along the width. The token behind an image
goes on after the largest of these. So an image takes `max(rows, columns)` positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from engine.protocol.generate import Image
from engine.scheduling.step import ScheduledSlice

Numbers = npt.NDArray[np.int64]


def image_positions(
    slices: Sequence[ScheduledSlice], images: Mapping[int, Sequence[Image]]
) -> Numbers:
    """Return the positions [3, T] of all tokens of the slices, from the images of their rows.

    They are [T] if the axes do not differ.
    """
    parts = [_of_slice(s.start, s.start + s.count, images.get(s.row, ())) for s in slices]
    found = np.concatenate(parts, axis=1)
    is_text = bool((found == found[0]).all())
    return found[0] if is_text else found


def _of_slice(start: int, end: int, images: Sequence[Image]) -> Numbers:
    """Return the positions [3, T] of the tokens [start, end) of a prompt with these images."""
    found = np.tile(np.arange(start, end), (3, 1))
    shift = 0
    for image in images:
        rows, columns = image.grid
        first, count = image.runs[0]
        assert (len(image.runs), count) == (1, rows * columns), "an image is one grid of tokens"
        begin, stop = max(first, start), min(first + count, end)
        if begin < stop:
            within = np.arange(begin - first, stop - first)
            offsets = np.stack((np.zeros_like(within), within // columns, within % columns))
            found[:, begin - start : stop - start] = first + shift + offsets
        shift += image.position_shift
        found[:, max(first + count - start, 0) :] = (
            np.arange(max(first + count, start), end) + shift
        )
    return found
