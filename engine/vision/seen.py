"""SeenImages: which tokens of a step show which embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.device.transfer import to_device
from engine.ops.seen_tokens import SeenTokens
from engine.protocol.generate import Image
from engine.scheduling.step import ScheduledSlice, Step, slice_of_text
from engine.vision.store import ImageStore

Indexes = npt.NDArray[np.int64]


class SeenImages:
    """Follows the rows of the runner, and finds the embeddings for each step."""

    def __init__(self, store: ImageStore, device: torch.device, *, sees_whole: bool) -> None:
        """With `sees_whole` the tokens of an image see all of it: a step has all its tokens."""
        self._store, self._device, self._sees_whole = store, device, sees_whole
        self._images: dict[int, tuple[Image, ...]] = {}  # by row

    def __call__(self, step: Step) -> SeenTokens | None:
        """Return the tokens of a step that show images; None if there are none."""
        for new in step.new_rows:
            self._images.pop(new.row, None)
            if new.images:
                self._images[new.row] = new.images
        if not self._images:
            return None
        index: list[Indexes] = []
        parts: list[torch.Tensor] = []
        first = 0
        for scheduled in step.slices:
            for image in self._images.get(scheduled.row, ()):
                for at, begin, count in _shown(image, scheduled):
                    index.append(np.arange(first + at, first + at + count))
                    embeddings = self._store.find(image.digest)
                    assert embeddings is not None, "a request's images are held until its end"
                    parts.append(embeddings[begin : begin + count])
            first += scheduled.count
        if not parts:
            return None
        columns = [np.concatenate(index)]
        if self._sees_whole:
            columns.append(self._last_keys(step.slices))
        places, *last_keys = to_device(columns, self._device)
        embeddings = parts[0] if len(parts) == 1 else torch.cat(parts)
        return SeenTokens(places, embeddings, *last_keys)

    def _last_keys(self, slices: Sequence[ScheduledSlice]) -> Indexes:
        """Return the last key that each token of a step sees."""
        return np.concatenate([last_keys(s, self._images.get(s.row, ())) for s in slices])


def tokens_of_text(
    images: Sequence[Image],
    embeddings: Sequence[torch.Tensor],
    length: int,
    device: torch.device,
    *,
    sees_whole: bool,
) -> SeenTokens:
    """Return the tokens that show images in one text of `length` tokens, apart from all rows.

    `embeddings` [N, width] are those of each image; `sees_whole` is as in SeenImages.
    """
    runs = [run for image in images for run in image.runs]
    columns = [np.concatenate([np.arange(first, first + count) for first, count in runs])]
    if sees_whole:
        columns.append(last_keys(slice_of_text(length), images))
    places, *last = to_device(columns, device)
    return SeenTokens(places, torch.cat(list(embeddings)), *last)


def last_keys(scheduled: ScheduledSlice, images: Sequence[Image]) -> Indexes:
    """Return the last key that each token of a slice sees, if it sees all of its image."""
    start, end = scheduled.start, scheduled.start + scheduled.count
    found = np.arange(start, end)
    for image in images:
        for first, count in image.runs:
            past = first + count
            assert past <= end or first >= end, "a step ends inside an image"
            found[max(first - start, 0) : max(past - start, 0)] = past - 1
    return found


def _shown(image: Image, scheduled: ScheduledSlice) -> Iterator[tuple[int, int, int]]:
    """Yield (first token of the slice, first embedding of the image, how many) for each run."""
    start, end = scheduled.start, scheduled.start + scheduled.count
    before = 0  # embeddings of earlier runs
    for first, count in image.runs:
        begin, stop = max(first, start), min(first + count, end)
        if begin < stop:
            yield begin - start, before + begin - first, stop - begin
        before += count
