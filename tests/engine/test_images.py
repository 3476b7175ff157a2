"""Images in the loop: ranks, NaN, a lack of memory, and the end of the engine."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from engine.protocol.generate import GenerateRequest, Image
from engine.protocol.ready import Shutdown
from engine.vision import requests as module
from tests.support.driver import Driver
from tests.support.ranks import ranked
from tests.support.tiny_smolvlm import PER_TILE, TILE, write_seeing

FIRST = 3  # the token where the image begins
Units = Generator[None, None, torch.Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing(tmp_path_factory.mktemp("seeing") / "smolvlm")


def picture(seed: int, tiles: int = 2) -> Image:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (tiles, TILE, TILE, 3), generator=generator, dtype=torch.uint8)
    runs = tuple((FIRST + (PER_TILE + 1) * tile, PER_TILE) for tile in range(tiles))
    return Image(bytes([seed]) * 16, runs, pixels.numpy().tobytes(), (tiles, TILE, TILE))


def submit(driver: Driver, *images: Image, num_tokens: int = 8) -> int:
    """Queue a greedy request of 40 tokens that shows the images."""
    number = driver.submit(list(range(10, 50)), num_tokens)
    request = driver.inbox[-1]
    assert isinstance(request, GenerateRequest)
    driver.inbox[-1] = replace(request, images=images)
    return number


def settle(driver: Driver) -> None:
    for _ in range(300):
        driver.turn()
    driver.run()


def test_two_ranks_answer_like_one_about_images(folder: Path, tmp_path: Path) -> None:
    def answers(driver: Driver) -> list[list[int]]:
        ids = [submit(driver, picture(1)), submit(driver), submit(driver, picture(2, 3))]
        settle(driver)
        ids.append(submit(driver, picture(1), num_tokens=9))
        settle(driver)
        return [driver.tokens(number) for number in ids]

    sizes: dict[str, Any] = {"block_size": 16, "max_num_batched_tokens": 24}
    expected = answers(Driver(folder, **sizes))
    assert expected[0] != expected[1], "the image changes nothing"
    assert expected[0] != expected[2]
    with ranked(folder, tmp_path / "place", **sizes) as driver:
        assert answers(driver) == expected
        assert driver.stats.gauges["images_encoded"] == 2


@pytest.fixture
def driver(folder: Path) -> Driver:
    return Driver(folder, block_size=16)


def failing(driver: Driver, monkeypatch: pytest.MonkeyPatch, unit: Any) -> list[int]:
    """Let `unit` change the result of the next image's encoding; return a list for its count."""
    model: Any = driver.runner.model
    encode, changed = model.vision.encode, []

    def encode_once(pixels: torch.Tensor, image: Image) -> Units:
        embeddings = yield from encode(pixels, image)
        if not changed:
            changed.append(1)
            embeddings = unit(embeddings)
        return embeddings

    monkeypatch.setattr(model.vision, "encode", encode_once)
    return changed


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=["gpu", "cpu", "python"],
)
def test_image_without_memory_refuses_its_request_only(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(embeddings: torch.Tensor) -> torch.Tensor:
        raise error

    assert not failing(driver, monkeypatch, fail)
    victim, other = submit(driver, picture(1)), submit(driver, picture(2))
    text = submit(driver)
    settle(driver)
    assert driver.rejected[victim].code == "server_overloaded"
    assert "memory" in driver.rejected[victim].message
    assert driver.finish(other) == driver.finish(text) == "length"
    again = submit(driver, picture(1))
    settle(driver)
    assert driver.finish(again) == "length"


def test_other_error_of_the_encoder_ends_the_engine(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(embeddings: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a defect")

    failing(driver, monkeypatch, fail)
    submit(driver, picture(1))
    with pytest.raises(RuntimeError, match="a defect"):
        settle(driver)


def test_nan_in_an_image_ends_its_request_with_an_error_and_is_not_kept(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    healthy = [submit(driver, picture(1)), submit(driver, picture(2))]
    settle(driver)
    other = Driver(driver.config.model, block_size=16)  # type: ignore[arg-type]
    assert failing(other, monkeypatch, lambda embeddings: embeddings * float("nan")) == []
    victim, neighbour = submit(other, picture(1)), submit(other, picture(2))
    settle(other)
    assert other.finish(victim) == "error"
    assert other.tokens(victim) == [-1]
    assert other.tokens(neighbour) == driver.tokens(healthy[1])
    again = submit(other, picture(1))
    settle(other)
    assert other.tokens(again) == driver.tokens(healthy[0])


def test_engine_stops_while_an_image_is_encoded(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_S", 0.0)
    number = submit(driver, picture(1))
    driver.turn()
    assert any(part.has_work for part in driver.core.between)
    driver.inbox.append(Shutdown())  # type: ignore[arg-type]
    driver.core.run()
    assert driver.finish(number) is None


def test_abort_in_the_middle_of_an_image_leaves_nothing_held(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_S", 0.0)
    first = submit(driver, picture(1))
    driver.turn()
    driver.abort(first)
    second = submit(driver, picture(1))
    settle(driver)
    assert driver.finish(first) is None
    assert driver.finish(second) == "length"
    assert driver.stats.gauges["images_encoded"] == 1
