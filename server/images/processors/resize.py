"""Resize a picture in 8 bits, one side after the other in the order of Pillow 12.3.

That is the width first, except for a strip more than 100 times as high as wide that gets lower.
Pillow up to 12.1 has no exception. Pillow 13 does the height first for most pictures that get lower
but not narrower and for some others, which changes values by tens of 255. torch's 8-bit kernels
resize the width first, as Pillow did when the models were trained. Two calls, one for each side,
give the same bytes with every version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.images.processors.processor import UnfitPictureError

if TYPE_CHECKING:
    from PIL.Image import Image

NUM_FILTERS = 6  # Pillow's: nearest, Lanczos, bilinear, bicubic, box, Hamming
STRIP_RATIO = 100  # of height to width
# Between the calls Pillow takes four bytes for a pixel. Without a limit 20,000,000 x 1 pixels that
# become 896 x 896 would take 72 GB there.
MAX_PIXELS = 2**26


def resized(picture: Image, width: int, height: int, resample: int) -> Image:
    """Return a picture in mode RGB with another size. `resample` is the number of Pillow's filter.

    Raises UnfitPictureError for a strip that is too long.
    """
    is_strip = picture.height > picture.width * STRIP_RATIO
    if is_strip and height < picture.height:
        between = (picture.width, height)
    else:
        between = (width, picture.height)
    check_size(picture, *between)
    check_size(picture, width, height)
    return picture.resize(between, resample).resize((width, height), resample)


def check_size(picture: Image, width: int, height: int) -> None:
    """Raise UnfitPictureError if a picture on the way to the model's size has no or many pixels."""
    if width < 1 or height < 1 or width * height > MAX_PIXELS:
        raise UnfitPictureError(
            f"The image of {picture.width} x {picture.height} pixels cannot be resized for this "
            f"model: a step makes {width} x {height} pixels, and 1 to {MAX_PIXELS} are possible. "
            "Send an image whose sides differ less, or a smaller one."
        )
