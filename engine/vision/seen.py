"""SeenImages: which tokens of a step show which embeddings."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from engine.device.transfer import to_device
from engine.ops.seen_tokens import SeenTokens
from engine.protocol.generate import Image
from engine.scheduling.step import ScheduledSlice, Step
from engine.vision.store import ImageStore


class SeenImages:
    """Follows the rows of the runner, and finds the embeddings for each step."""

    def __init__(self, store: ImageStore, device: torch.device) -> None:
        self._store, self._device = store, device
        self._images: dict[int, tuple[Image, ...]] = {}  # by row

    def __call__(self, step: Step) -> SeenTokens | None:
        """Return the tokens of a step that show images; None if there are none."""
        for new in step.new_rows:
            self._images.pop(new.row, None)
            if new.images:
                self._images[new.row] = new.images
        if not self._images:
            return None
        index: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
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
        (places,) = to_device([np.concatenate(index)], self._device)
        return SeenTokens(places, parts[0] if len(parts) == 1 else torch.cat(parts))


def _shown(image: Image, scheduled: ScheduledSlice) -> Iterator[tuple[int, int, int]]:
    """Yield (first token of the slice, first embedding of the image, how many) for each run."""
    start, end = scheduled.start, scheduled.start + scheduled.count
    before = 0  # embeddings of earlier runs
    for first, count in image.runs:
        begin, stop = max(first, start), min(first + count, end)
        if begin < stop:
            yield begin - start, before + begin - first, stop - begin
        before += count
