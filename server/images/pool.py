"""ImagePool: the processes that decode and process images, and the images that they made."""

from __future__ import annotations

import asyncio
import hashlib
import weakref
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from engine.client.module_command import python_module
from engine.errors import ConfigError
from server.confined.pool import ConfinedPool
from server.confined.process import ConfinedError, ConfinedProcess, Limits
from server.images.addresses import ImageAddresses
from server.images.data_url import image_bytes
from server.images.errors import (
    ImageError,
    ImageRoomError,
    ImagesOverloadedError,
    TooManyImagesError,
)
from server.images.message import Json, pack, unpack
from server.images.processors.processor import ImageShape
from server.images.source import ImageSource

# A WebP of 50 megapixels takes 900 MiB, the most of all formats, and 0.9 s of one core.
LIMITS = Limits(memory=1 << 30, seconds=10, first_seconds=10)
MAX_PROCESSES = 2  # images at the same time
CACHE_BYTES = 128 << 20  # of pixels
MAX_IMAGES = 100  # of a request
# Of the pixels of all open requests and of the cache. A file of 100 bytes may become 13 MB.
MAX_OPEN_BYTES = 1 << 30
INLINE_CHARS = 8192  # of base64, which take less time than a thread takes to start
MAX_TOKEN_BYTES = 12 << 10  # of pixels for an embedding: a tile of SmolVLM has the most


@dataclass(frozen=True)
class ProcessedImage:
    """An image for the engine to encode: uint8 pixels [tiles, height, width, 3], RGB."""

    shape: ImageShape
    pixels: bytes
    digest: bytes  # of both, which identifies the embeddings

    @classmethod
    def of(cls, shape: ImageShape, pixels: bytes) -> ProcessedImage:
        digest = hashlib.blake2b(pixels, digest_size=16)
        digest.update(repr(shape).encode())
        return cls(shape, pixels, digest.digest())


@dataclass(frozen=True)
class Job:
    """An encoded image, and what else decides about its pixels."""

    data: bytes
    alone: bool
    is_small: bool
    key: bytes


class ImageProcess:
    """A process with a checkpoint's processor."""

    def __init__(self, module: str, settings: Json) -> None:
        self._process = ConfinedProcess(python_module(module), LIMITS)
        self._process.send(pack(settings))
        self._is_ready = False

    @property
    def is_running(self) -> bool:
        return self._process.is_running

    def process(self, job: Job) -> ProcessedImage:
        """Raises ConfinedError, ImageError, ConfigError."""
        if not self._is_ready:
            head, _ = unpack(self._process.receive())
            if "error" in head:
                self.close()  # it waits for other settings
                raise ConfigError(head["error"])
            self._is_ready = True
        options = {"alone": job.alone, "is_small": job.is_small}
        head, pixels = unpack(self._process.call(pack(options, job.data)))
        if "error" in head:
            raise ImageError(head["error"])
        size = tuple(head["shape"].pop("size"))
        shape = ImageShape(**head["shape"], size=size)
        if len(pixels) != shape.tiles * shape.height * shape.width * 3:
            raise ConfinedError("ended with pixels of another size")  # the engine relies on it
        return ProcessedImage.of(shape, pixels)

    def close(self) -> None:
        self._process.close()


class ImageCache:
    """The images that were used last, up to `limit` bytes of pixels."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._images: OrderedDict[bytes, ProcessedImage] = OrderedDict()
        self.size = 0  # bytes

    def get(self, key: bytes) -> ProcessedImage | None:
        image = self._images.get(key)
        if image is not None:
            self._images.move_to_end(key)
        return image

    def put(self, key: bytes, image: ProcessedImage) -> None:
        if len(image.pixels) > self._limit or key in self._images:
            return
        self._images[key] = image
        self.size += len(image.pixels)
        while self.size > self._limit:
            _, oldest = self._images.popitem(last=False)
            self.size -= len(oldest.pixels)


class ImagePool:
    """Reads the images of requests. For one event loop.

    `module` runs an ImageSandbox, and `settings` are those of its processor. A process starts with
    the first image: most requests have none, and a start takes 0.1 s of CPU. Clients send an image
    again with every turn of a chat, so the last ones are kept.
    """

    def __init__(self, module: str, settings: Json, addresses: ImageAddresses) -> None:
        start = partial(ImageProcess, module, settings)
        self._pool = ConfinedPool(start, MAX_PROCESSES, "image")
        self._addresses = addresses
        self._slots = asyncio.Semaphore(MAX_PROCESSES)
        self._cache = ImageCache(CACHE_BYTES)
        self._running: dict[bytes, asyncio.Task[ProcessedImage]] = {}
        self._begun: set[bytes] = set()  # of them, those that have a process
        self._waiting: Counter[bytes] = Counter()  # requests, by the key of their image
        self.num_processed = 0  # images that a process was given
        self.num_bytes = 0  # of the pixels of all images that the cache or a request has

    async def read_all(self, sources: Sequence[ImageSource], room: int) -> list[ProcessedImage]:
        """Return the images of a conversation in order.

        Raises ImageError with the index of an image that cannot be read, TooManyImagesError, or
        ImageRoomError if they exceed `room`, the embeddings that fit the model's context. A tiny
        file may become megabytes of pixels, so the images behind it are not processed. Raises
        ImagesOverloadedError if the images of other requests have taken the memory.
        """
        if len(sources) > MAX_IMAGES:
            raise TooManyImagesError(
                f"The request has {len(sources)} images; the limit is {MAX_IMAGES}."
            )
        images: list[ProcessedImage] = []
        embeddings = 0
        most = max(MAX_OPEN_BYTES, CACHE_BYTES + room * MAX_TOKEN_BYTES)  # one request always fits
        for index, source in enumerate(sources):
            try:
                image = await self.read(source, alone=len(sources) == 1, most=most)
            except ImageError as error:
                raise ImageError(str(error), index) from error
            images.append(image)
            embeddings += image.shape.embeddings
            if embeddings > room:
                raise ImageRoomError(_too_long(room, index + 1, len(sources), embeddings))
        return images

    async def read(
        self, source: ImageSource, *, alone: bool, most: int = MAX_OPEN_BYTES
    ) -> ProcessedImage:
        """Return an image. `alone` says that its conversation has no other.

        Raises ImageError, or ImagesOverloadedError if there are over `most` bytes of pixels.
        """
        if source.is_address:
            data = await self._addresses.fetch(source.text)
            job = await asyncio.to_thread(_job, data, alone, source.is_small)
        else:
            job = await _data_job(source, alone)
        image = self._cache.get(job.key)
        return image if image is not None else await self._processed(job, most)

    async def _processed(self, job: Job, most: int) -> ProcessedImage:
        """Process an image once, also if several requests wait for it, or if they leave.

        An image that waits for a process leaves the queue with its last request.
        """
        task = self._running.get(job.key)
        if task is None:
            task = asyncio.create_task(self._process(job, most))
            self._running[job.key] = task
            task.add_done_callback(partial(self._ended, job.key))
        self._waiting[job.key] += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiting[job.key] -= 1
            if not self._waiting[job.key]:
                del self._waiting[job.key]
                if job.key not in self._begun:
                    task.cancel()
                    self._running.pop(job.key, None)

    async def _process(self, job: Job, most: int) -> ProcessedImage:
        """Wait for a process, and use it.

        The queue is here and not at the threads, which would hold the bytes of images that all
        requests have left.
        """
        async with self._slots:
            if self.num_bytes > most:
                raise ImagesOverloadedError(
                    f"The images of open requests have {self.num_bytes >> 20} MiB of pixels; the "
                    f"limit is {most >> 20} MiB."
                )
            self.num_processed += 1
            self._begun.add(job.key)
            image = await self._pool.in_thread(partial(self._process_here, job))
        self.num_bytes += len(image.pixels)
        weakref.finalize(image, self._forget, len(image.pixels)).atexit = False
        self._cache.put(job.key, image)
        return image

    def _ended(self, key: bytes, task: asyncio.Task[ProcessedImage]) -> None:
        if self._running.get(key) is task:
            del self._running[key]
            self._begun.discard(key)
        if not task.cancelled():
            task.exception()  # the requests that wait have it; one that left needs none

    def _forget(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes

    def _process_here(self, job: Job) -> ProcessedImage:
        try:
            with self._pool.lend() as process:
                return process.process(job)
        except ConfinedError as error:
            raise ImageError(f"Reading the image {error}.") from error

    def close(self) -> None:
        """Kill the processes. Idempotent."""
        self._pool.close()


def _too_long(room: int, first: int, count: int, embeddings: int) -> str:
    """Return the message about `first` images, of `count`, that alone exceed the context."""
    if count == 1:
        which, verb = "the image", "has"
    elif first == count:
        which, verb = f"the {count} images", "have"
    else:
        which, verb = f"the first {first} of the {count} images", "have"
    given = f"{which} alone {verb} {embeddings}"
    # The beginning is that of `context_exceeded`, which clients look for.
    return f"This model's maximum context length is {room} tokens, but {given}."


async def _data_job(source: ImageSource, alone: bool) -> Job:
    """Decode base64. Raises ImageError."""

    def decode() -> Job:
        return _job(image_bytes(source.text), alone, source.is_small)

    if len(source.text) < INLINE_CHARS:
        return decode()
    return await asyncio.to_thread(decode)


def _job(data: bytes, alone: bool, is_small: bool) -> Job:
    options = bytes((alone, is_small))
    return Job(data, alone, is_small, hashlib.blake2b(data, digest_size=16, salt=options).digest())
