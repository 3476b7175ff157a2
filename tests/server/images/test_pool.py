"""ImagePool: confined decoding, its cache, its errors."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import AsyncIterator

import psutil
import pytest
from PIL import Image

from engine.errors import ConfigError
from server.images import pool as pool_module
from server.images.addresses import ImageAddresses
from server.images.errors import ImageError, ImageRoomError, ImagesOverloadedError
from server.images.pool import ImageCache, ImagePool, Job, ProcessedImage
from server.images.processors.processor import ImageShape
from server.images.source import ImageSource
from tests.support.pictures import file_of, gradient
from tests.support.rig import eventually

MODULE = "tests.support.image_sandbox"
ROOM = 1000


def source(picture: Image.Image, *, is_small: bool = False) -> ImageSource:
    text = base64.b64encode(file_of(picture, "PNG")).decode()
    return ImageSource(f"data:image/png;base64,{text}", is_small=is_small)


def strip(width: int) -> ImageSource:
    """An image that the test's processor misbehaves for."""
    return source(Image.new("RGB", (width, 1)))


@pytest.fixture
async def pool() -> AsyncIterator[ImagePool]:
    made = ImagePool(MODULE, {"edge": 0}, ImageAddresses(()))
    yield made
    made.close()


async def test_image_has_the_shape_and_pixels_of_its_processor(pool: ImagePool) -> None:
    [image] = await pool.read_all([source(gradient())], ROOM)
    assert image.shape == ImageShape(1, 47, 61, 0, 0, 10, (47, 61))
    assert image.pixels == gradient().tobytes()


async def test_processes_start_with_the_first_image() -> None:
    before = set(psutil.Process().children())
    pool = ImagePool(MODULE, {"edge": 0}, ImageAddresses(()))
    try:
        assert set(psutil.Process().children()) == before
        await pool.read_all([source(gradient())], ROOM)
        assert len(set(psutil.Process().children()) - before) == 1
    finally:
        pool.close()
    assert set(psutil.Process().children()) <= before


async def test_same_image_in_the_next_turn_is_not_processed_again(pool: ImagePool) -> None:
    first = await pool.read_all([source(gradient())], ROOM)
    assert await pool.read_all([source(gradient())], ROOM) == first
    assert pool.num_processed == 1


async def test_image_with_other_options_is_another_image(pool: ImagePool) -> None:
    large = gradient(width=1024, height=100)
    [alone] = await pool.read_all([source(large)], ROOM)
    pair = await pool.read_all([source(large), source(large, is_small=True)], ROOM)
    assert [alone.shape.embeddings, *(image.shape.embeddings for image in pair)] == [10, 4, 4]
    assert pair[0].shape.size == (100, 1024)
    assert pair[1].shape.size == (50, 512)
    assert pool.num_processed == 3


async def test_requests_with_the_same_image_at_once_process_it_once(pool: ImagePool) -> None:
    reads = [pool.read_all([source(gradient())], ROOM) for _ in range(8)]
    assert len({image.pixels for [image] in await asyncio.gather(*reads)}) == 1
    assert pool.num_processed == 1


async def test_request_that_leaves_does_not_take_the_image_from_another(pool: ImagePool) -> None:
    tasks = [asyncio.create_task(pool.read_all([source(gradient())], ROOM)) for _ in range(2)]
    for _ in range(10_000):
        if pool.num_processed:
            break
        await asyncio.sleep(0.001)
    tasks[0].cancel()
    assert len(await tasks[1]) == 1
    assert pool.num_processed == 1


@pytest.mark.parametrize(
    ("width", "reason"),
    [
        (3, "The image is too thin for this model."),
        (5, "Reading the image took more than 1024 MiB of memory."),  # abort, as libraries do
        (11, "Reading the image took more than 1024 MiB of memory."),
        (7, "Reading the image took more than 0.5 s."),
        (13, "Reading the image ended with pixels of another size."),
    ],
)
async def test_image_that_cannot_be_processed_is_refused_and_the_next_one_read(
    width: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        pool_module, "LIMITS", pool_module.LIMITS._replace(seconds=0.5, first_seconds=5)
    )
    pool = ImagePool(MODULE, {"edge": 0}, ImageAddresses(()))
    try:
        for _ in range(2):
            with pytest.raises(ImageError) as error:
                await pool.read_all([source(gradient()), strip(width)], ROOM)
            assert str(error.value) == reason
            assert error.value.index == 1
        assert len(await pool.read_all([source(gradient())], ROOM)) == 1
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (ImageSource("data:image/png;base64,%%%"), "not valid base64"),
        (ImageSource(base64.b64encode(b"GIF89a").decode()), "header|unknown format"),
        (ImageSource("http://127.0.0.1/", is_address=True), "--image-hosts"),
    ],
)
async def test_error_has_the_index_of_its_image(
    broken: ImageSource, reason: str, pool: ImagePool
) -> None:
    with pytest.raises(ImageError, match=reason) as error:
        await pool.read_all([source(gradient()), source(gradient("L")), broken], ROOM)
    assert error.value.index == 2


async def test_images_beyond_the_context_are_refused_before_the_rest_is_processed(
    pool: ImagePool,
) -> None:
    sources = [source(Image.new("RGB", (20, 20), (shade, 0, 0))) for shade in range(9)]
    assert len(await pool.read_all(sources[:3], 12)) == 3
    with pytest.raises(ImageRoomError) as error:
        await pool.read_all(sources, 12)
    assert str(error.value) == (
        "This model's maximum context length is 12 tokens, but the first 4 of the 9 images alone "
        "have 16."
    )
    assert pool.num_processed == 4


@pytest.mark.parametrize("most_inline", [0, 10**6])
async def test_image_in_many_requests_is_hashed_once(
    pool: ImagePool, monkeypatch: pytest.MonkeyPatch, most_inline: int
) -> None:
    """Hashing the 13 MB of 17 tiles takes 14 ms, which a thousand requests would repeat."""
    monkeypatch.setattr(pool_module, "INLINE_CHARS", most_inline)
    found = [await pool.read_all([source(gradient())], ROOM) for _ in range(3)]
    digests = [image.digest for [image] in found]
    assert len(digests[0]) == 16
    assert all(digest is digests[0] for digest in digests)
    [other] = await pool.read_all([strip(20)], ROOM)
    assert other.digest != digests[0]


async def test_more_images_than_the_limit_are_refused(pool: ImagePool) -> None:
    with pytest.raises(ImageError, match="has 101 images; the limit is 100"):
        await pool.read_all([source(gradient())] * 101, 10**6)
    assert pool.num_processed == 0


async def test_settings_that_the_processor_refuses_raise_config_error() -> None:
    pool = ImagePool(MODULE, {}, ImageAddresses(()))
    try:
        for _ in range(2):
            with pytest.raises(ConfigError, match="no edge"):
                await pool.read_all([source(gradient())], ROOM)
    finally:
        pool.close()


def image_of(size: int) -> ProcessedImage:
    return ProcessedImage.of(ImageShape(1, 1, size, 0, 0, 1, (1, size)), bytes(size))


def test_cache_drops_the_image_that_was_used_least_recently() -> None:
    cache = ImageCache(10)
    for name in (b"a", b"b", b"c"):
        cache.put(name, image_of(3))
    assert cache.get(b"a") is not None
    cache.put(b"d", image_of(4))
    assert [cache.get(name) is not None for name in (b"a", b"b", b"c", b"d")] == [
        True, False, True, True,
    ]  # fmt: skip
    assert cache.size == 10
    cache.put(b"d", image_of(4))  # processed twice, by two requests
    assert cache.size == 10


def test_cache_does_not_take_an_image_above_its_limit() -> None:
    cache = ImageCache(10)
    cache.put(b"a", image_of(10))
    cache.put(b"b", image_of(11))
    assert cache.get(b"a") is not None
    assert cache.get(b"b") is None


async def test_image_that_all_requests_have_left_leaves_the_queue(
    pool: ImagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes are busy; images behind them are read by a request that stays alone."""
    gate = threading.Event()
    process = pool._process_here

    def slow(job: Job) -> ProcessedImage:
        gate.wait(20)
        return process(job)

    monkeypatch.setattr(pool, "_process_here", slow)
    reads = [asyncio.create_task(pool.read_all([strip(20 + n)], ROOM)) for n in range(6)]
    await eventually(lambda: len(pool._waiting) == 6, "all images are in the queue")
    for read in (reads[0], *reads[2:5]):  # one has a process, and three wait
        read.cancel()
    await asyncio.wait([reads[0], *reads[2:5]])
    assert len(pool._running) == 3, "a process that has begun is used to its end"
    gate.set()
    for read in (reads[1], reads[5]):
        assert len(await read) == 1
    assert len(await pool.read_all([strip(20)], ROOM)) == 1
    assert pool.num_processed == 3
    assert not pool._running
    assert not pool._begun


async def test_pixels_of_open_requests_are_bounded(
    pool: ImagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of eight pictures has 12,288 bytes, and four of them are over the limit."""
    monkeypatch.setattr(pool_module, "MAX_OPEN_BYTES", 40_000)
    monkeypatch.setattr(pool_module, "MAX_TOKEN_BYTES", 3072)  # a picture has 4 tokens or 10
    monkeypatch.setattr(pool_module, "CACHE_BYTES", 0)
    pool._cache = ImageCache(0)
    pictures = [source(Image.new("RGB", (64, 64), (n, 0, 0))) for n in range(8)]
    held = [await pool.read_all([picture], 10) for picture in pictures[:4]]
    await eventually(lambda: pool.num_bytes == 4 * 12_288, "four pictures are open")
    with pytest.raises(ImagesOverloadedError, match="0 MiB"):
        await pool.read_all([pictures[4]], 10)
    held.pop()
    await eventually(lambda: pool.num_bytes == 3 * 12_288, "the room is given back")
    assert len(await pool.read_all([pictures[4]], 10)) == 1
    del held
    await eventually(lambda: pool.num_bytes == 0, "requests that end give the room back")
    whole = await pool.read_all(pictures, 1000)  # one request that fits the context is read
    assert pool.num_bytes == len(whole) * 12_288
