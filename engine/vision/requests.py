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
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace

from engine.errors import RequestRejectedError, lacks_host_memory
from engine.models.base import ImageEncoder, image_token_bytes
from engine.ops.seen_tokens import SeenTokens
from engine.protocol.generate import Abort, GenerateRequest, Image
from engine.protocol.message import Message
from engine.protocol.outputs import Admission
from engine.scheduling.between import Between, Outcome, RetiredStep
from engine.scheduling.tenant_turns import TenantTurns
from engine.vision.seen import tokens_of_text
from engine.vision.store import ImageStore

log = logging.getLogger(__name__)

NO_MEMORY = "The memory was not enough to encode an image. Send smaller ones, or try later."
UNFIT = "The checkpoint's image processor does not fit its config.json."
SLICE_S = 0.02  # of encoding between two messages; the last unit of it may take longer
# Seconds of encoding for each second of a step, on a CPU while others are answered. The gaps
# between an answer's tokens shall grow to 1.5 times at most; one unit runs even if it is longer.
SHARE = 0.4
SMALL_UNIT = 64  # patches of a unit then: 1 to 3 ms of SmolVLM's tower on two cores of Zen 4


class _Encoding(NamedTuple):
    """An image that is being encoded."""

    image: Image
    units: Generator[None, int | None, torch.Tensor]


@dataclass(slots=True)
class _Spent:
    """The work of the encoder on the images of a request. Times are CLOCK_MONOTONIC seconds."""

    begin: float = 0.0  # of the first unit; 0.0: none
    seconds: float = 0.0  # of all units
    units: int = 0
    images: int = 0  # that were encoded
    ready: float = 0.0  # when all embeddings were there


class ImageRequests(Between):
    """The part of the loop that encodes images, one request's after another.

    The tenants take turns. Within a turn, requests are in order of priority and arrival.
    """

    def __init__(
        self,
        encoder: ImageEncoder | None,
        store: ImageStore,
        device: torch.device,
        *,
        most_whole: int = 0,
        shows_grids: bool = False,
    ) -> None:
        """Without an `encoder` requests with images are refused.

        A run of an image has at most `most_whole` tokens, if one step computes it whole (not 0).
        With `shows_grids` positions count the rows and columns of an image's tokens.
        """
        self._shows_grids = shows_grids
        self._encoder, self._store, self._device = encoder, store, device
        self._most_whole = most_whole
        self._waiting: dict[int, GenerateRequest] = {}  # the oldest first
        self._turns = TenantTurns()  # of those that wait
        self._current: GenerateRequest | None = None  # whose images are encoded; it waits, too
        self._held: dict[int, list[tuple[bytes, int]]] = {}  # images of requests: digest, bytes
        self._encoding: _Encoding | None = None
        self._spent: dict[int, _Spent] = {}  # by request, until it is admitted
        self._step_s = 0.0  # of the last step

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def handle(self, message: Message) -> bool:
        match message:
            case GenerateRequest() if message.images:
                self._check(message)
                self._waiting[message.id] = message
                self._turns.join(message.tenant)
                return True
            case Abort():
                for request_id in message.ids:
                    self._forget(request_id)
        return False

    def _check(self, request: GenerateRequest) -> None:
        """Raise RequestRejectedError if a request's images can never be encoded."""
        if self._encoder is None:
            raise RequestRejectedError("invalid_value", "The model takes no images.")
        for image in request.images:
            self._check_image(image, len(request.prompt))
        size = sum(dict(self._sizes(request)).values())
        if size > self._store.capacity:
            raise RequestRejectedError(
                "invalid_value",
                f"The images of this request take {size >> 20} MiB when encoded; the server keeps "
                f"at most {self._store.capacity >> 20} MiB. Send fewer or smaller images.",
            )

    def _check_image(self, image: Image, prompt_length: int) -> None:
        """Raise RequestRejectedError if an image is not what the prompt, or the model, can show."""
        tiles, height, width = image.shape
        has_pixels = len(image.pixels) == tiles * height * width * 3
        fits = image.runs and image.end <= prompt_length
        if self._most_whole:
            longest = max(count for _, count in image.runs or ((0, 0),))
            fits = fits and longest <= self._most_whole
        if not has_pixels or not fits:
            raise RequestRejectedError("invalid_value", "An image does not fit its request.")
        rows, columns = image.grid
        is_grid = len(image.runs) == 1 and image.num_tokens == rows * columns
        if self._shows_grids and not is_grid:
            counts = ", ".join(str(count) for _, count in image.runs)
            raise RequestRejectedError(
                "invalid_value",
                f"An image has a grid of {rows} x {columns} tokens; its runs in the prompt have "
                f"{counts}. {UNFIT}",
            )

    def _sizes(self, request: GenerateRequest) -> list[tuple[bytes, int]]:
        """Return the digests of a request's images with the bytes of their embeddings."""
        assert self._encoder is not None
        width = image_token_bytes(self._encoder)
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
            request = self._current or self._take_next()
            if request is None:
                break  # until a request ends
            began = time.monotonic()
            try:
                if self._encode(request, most):
                    self._spent[request.id].ready = time.monotonic()
                    ready.append(request)
                    self._leave(request)
            except RequestRejectedError as error:
                refused[request.id] = error
                self._forget(request.id)
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

    def _take_next(self) -> GenerateRequest | None:
        """Begin with the request whose turn it is; return None if its images have no room."""
        turns = self._turns.turns(self._waiting.values())
        request = min(self._waiting.values(), key=lambda r: (r.priority, turns[r.id], r.id))
        sizes = self._sizes(request)
        if not self._store.has_room(sizes):
            return None
        self._store.hold(sizes)
        self._held[request.id] = sizes
        self._store.num_reused += sum(
            self._store.find(each.digest) is not None for each in request.images
        )
        self._spent[request.id] = _Spent()
        self._turns.count(request.tenant, request.size)
        self._current = request
        return request

    def _leave(self, request: GenerateRequest) -> None:
        """Remove a request that waits."""
        del self._waiting[request.id]
        self._turns.leave(request.tenant)
        if request is self._current:
            self._current = self._encoding = None

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
        encoding, spent = self._encoding, self._spent[request.id]
        begin = time.monotonic()
        spent.begin = spent.begin or begin
        try:
            with torch.inference_mode():
                encoding.units.send(most)
        except StopIteration as end:
            self._encoding = None
            self._keep(encoding.image, end.value)
            spent.images += 1
        spent.seconds += time.monotonic() - begin
        spent.units += 1
        return False

    def _keep(self, image: Image, embeddings: torch.Tensor) -> None:
        """Keep an image's embeddings. Raises RequestRejectedError if they are not its tokens'."""
        if len(embeddings) != image.num_tokens:
            raise RequestRejectedError(
                "invalid_value",
                f"The model made {len(embeddings)} embeddings of an image that has "
                f"{image.num_tokens} tokens in the prompt. {UNFIT}",
            )
        self._store.add(image.digest, embeddings)

    def _begin(self, image: Image) -> Generator[None, int | None, torch.Tensor]:
        """Return the units of encoding an image."""
        assert self._encoder is not None
        tiles, height, width = image.shape
        pixels = np.frombuffer(image.pixels, dtype=np.uint8).reshape(tiles, height, width, 3)
        on_device = torch.from_numpy(pixels.copy()).to(self._device)
        return self._encoder.encode(on_device, image)

    def embeddings_of_text(
        self, images: Sequence[Image], length: int
    ) -> Generator[None, int | None, SeenTokens]:
        """Yield after each unit of work, and return what shows `images` in a text of `length`.

        It is for a text apart from all requests: what is encoded here is not kept and not counted.
        """
        found: list[torch.Tensor] = []
        for image in images:
            kept = self._store.find(image.digest)
            if kept is None:
                kept = yield from self._begin(image)
            found.append(kept)
        sees_whole = self._most_whole > 0
        return tokens_of_text(images, found, length, self._device, sees_whole=sees_whole)

    def admitted(self, admission: Admission) -> Admission:
        spent = self._spent.pop(admission.id, None)
        if spent is None:
            return admission
        return replace(
            admission,
            images_encoded=spent.images,
            images_reused=len(self._held[admission.id]) - spent.images,
            images_ready=spent.ready,
            encode_begin=spent.begin,
            encode_seconds=spent.seconds,
            encode_units=spent.units,
        )

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
        self._spent.pop(request_id, None)
        request = self._waiting.get(request_id)
        if request is not None:
            self._leave(request)
        held = self._held.pop(request_id, None)
        if held is not None:
            digests = [digest for digest, _ in held]
            self._store.release(digests)
            if has_failed:
                self._store.drop(digests)

    def gauges(self) -> dict[str, float]:
        """Return the counts of images that were encoded and reused, and the bytes kept."""
        store = self._store
        return {
            "images_encoded": store.num_encoded,
            "images_reused": store.num_reused,
            "image_cache_bytes": store.num_bytes,
        }
