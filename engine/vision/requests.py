"""ImageRequests: requests wait here until their images are encoded.

An image is encoded in small units between the steps of the loop, so that answers that are being
written go on. Its embeddings are kept until the request ends: after a preemption its prompt is
computed again.

An image for which the memory does not suffice refuses the requests that show it. Embeddings that
are not finite go to the model, whose logits then end the request as other NaN do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from typing import NamedTuple

import numpy as np
import torch

from engine.errors import RequestRejectedError, lacks_host_memory
from engine.models.base import Sees, SeesWhole
from engine.protocol.generate import Abort, GenerateRequest, Image
from engine.protocol.message import Message
from engine.scheduling.between import Between, Outcome, RetiredStep
from engine.vision.store import ImageStore

log = logging.getLogger(__name__)

NO_MEMORY = "The memory was not enough to encode an image. Send smaller ones, or try later."
SLICE_S = 0.02  # of encoding between two messages; the last unit of it may take longer
# Seconds of encoding for each second of a step, on a CPU while others are answered. The gaps
# between an answer's tokens shall grow to 1.5 times at most; one unit runs even if it is longer.
SHARE = 0.4
SMALL_UNIT = 64  # patches of a unit then: 1 to 3 ms of SmolVLM's tower on two cores of Zen 4


class _Encoding(NamedTuple):
    """An image that is being encoded."""

    image: Image
    units: Generator[None, int | None, torch.Tensor]


class ImageRequests(Between):
    """The part of the loop that encodes images, in the order of their requests."""

    def __init__(self, model: Sees | None, store: ImageStore, device: torch.device) -> None:
        """Without a `model` requests with images are refused."""
        self._model, self._store, self._device = model, store, device
        self._waiting: dict[int, GenerateRequest] = {}  # the oldest first
        self._held: dict[int, list[tuple[bytes, int]]] = {}  # images of requests: digest, bytes
        self._encoding: _Encoding | None = None
        self._step_s = 0.0  # of the last step

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def handle(self, message: Message) -> bool:
        match message:
            case GenerateRequest() if message.images:
                self._check(message)
                self._waiting[message.id] = message
                return True
            case Abort():
                for request_id in message.ids:
                    self._forget(request_id)
        return False

    def _check(self, request: GenerateRequest) -> None:
        """Raise RequestRejectedError if a request's images can never be encoded."""
        if self._model is None:
            raise RequestRejectedError("invalid_value", "The model takes no images.")
        for image in request.images:
            tiles, height, width = image.shape
            has_pixels = len(image.pixels) == tiles * height * width * 3
            fits = image.runs and image.end <= len(request.prompt)
            if isinstance(self._model, SeesWhole):
                longest = max(count for _, count in image.runs or ((0, 0),))
                fits = fits and longest <= self._model.image_tokens
            if not has_pixels or not fits:
                raise RequestRejectedError("invalid_value", "An image does not fit its request.")
        size = sum(dict(self._sizes(request)).values())
        if size > self._store.capacity:
            raise RequestRejectedError(
                "invalid_value",
                f"The images of this request take {size >> 20} MiB when encoded; the server keeps "
                f"at most {self._store.capacity >> 20} MiB. Send fewer or smaller images.",
            )

    def _sizes(self, request: GenerateRequest) -> list[tuple[bytes, int]]:
        """Return the digests of a request's images with the bytes of their embeddings."""
        assert self._model is not None
        width = self._model.image_bytes
        return [(each.digest, each.num_tokens * width) for each in request.images]

    def work(self, *, is_quiet: bool) -> Outcome | None:
        if not self._waiting:
            return None
        slice_s, most = SLICE_S, None
        if self._device.type == "cpu" and not is_quiet:
            slice_s, most = min(SLICE_S, SHARE * self._step_s), SMALL_UNIT
        until = time.monotonic() + slice_s
        ready: list[GenerateRequest] = []
        refused: dict[int, RequestRejectedError] = {}
        while self._waiting:
            request = next(iter(self._waiting.values()))
            if request.id not in self._held:
                sizes = self._sizes(request)
                if not self._store.has_room(sizes):
                    break  # until a request ends
                self._store.hold(sizes)
                self._held[request.id] = sizes
                self._store.num_reused += sum(
                    self._store.find(each.digest) is not None for each in request.images
                )
            began = time.monotonic()
            try:
                if self._encode(request, most):
                    ready.append(self._waiting.pop(request.id))
            except Exception as error:
                if not isinstance(error, torch.OutOfMemoryError) and not lacks_host_memory(error):
                    raise
                log.warning("no memory to encode an image: %s", error)
                refused[request.id] = RequestRejectedError("server_overloaded", NO_MEMORY)
                self._forget(request.id)
            now = time.monotonic()
            unit_s = now - began
            if now + (0.0 if most is None else unit_s) >= until:
                break
        return Outcome(ready, refused)

    def _encode(self, request: GenerateRequest, most: int | None) -> bool:
        """Compute one unit, of up to `most` patches, of a request's images.

        Returns whether all are encoded.
        """
        if self._encoding is None:
            missing = (i for i in request.images if self._store.find(i.digest) is None)
            image = next(missing, None)
            if image is None:
                return True
            self._encoding = _Encoding(image, self._begin(image))
            most = None  # the work has not begun, so there is no pause to send to
        encoding = self._encoding
        try:
            with torch.inference_mode():
                encoding.units.send(most)
        except StopIteration as end:
            embeddings: torch.Tensor = end.value
            assert len(embeddings) == encoding.image.num_tokens, "places and embeddings"
            self._store.add(encoding.image.digest, embeddings)
            self._encoding = None
        return False

    def _begin(self, image: Image) -> Generator[None, int | None, torch.Tensor]:
        """Return the units of encoding an image."""
        assert self._model is not None
        tiles, height, width = image.shape
        pixels = np.frombuffer(image.pixels, dtype=np.uint8).reshape(tiles, height, width, 3)
        on_device = torch.from_numpy(pixels.copy()).to(self._device)
        return self._model.encode_image(on_device, image)

    def stepped(self, retired: RetiredStep) -> None:
        if retired.step is not None:
            self._step_s = retired.at - retired.launched_at
        for output in retired.outputs:
            if output.finish:
                self._forget(output.id, has_failed=output.finish == "error")

    def _forget(self, request_id: int, *, has_failed: bool = False) -> None:
        """Let go of a request that has ended; its image may be half encoded.

        After an error its embeddings are not kept for others: they may contain NaN.
        """
        request = self._waiting.pop(request_id, None)
        held = self._held.pop(request_id, None)
        if held is not None:
            digests = [digest for digest, _ in held]
            self._store.release(digests)
            if has_failed:
                self._store.drop(digests)
        if request is not None and held is not None:
            self._encoding = None  # it was the first that waited

    def gauges(self) -> dict[str, float]:
        """Return the counts of images that were encoded and reused, and the bytes kept."""
        store = self._store
        return {
            "images_encoded": store.num_encoded,
            "images_reused": store.num_reused,
            "image_cache_bytes": store.num_bytes,
        }
