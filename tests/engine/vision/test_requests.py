"""ImageRequests: requests wait until their images are encoded, each image once."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import cast

import pytest
import torch

from engine.errors import RequestRejectedError
from engine.protocol.generate import Abort, GenerateRequest, Image, SamplingParams
from engine.protocol.outputs import Admission, EngineStats, TokenOutput
from engine.scheduling.between import RetiredStep
from engine.scheduling.step import Step
from engine.vision import requests as module
from engine.vision.requests import ImageRequests
from engine.vision.store import ImageStore

CPU = torch.device("cpu")


class FourUnits:
    """Encodes an image in four units; its embeddings are the value of its first pixel."""

    dtype, width = torch.float32, 1

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.sizes: list[int | None] = []  # that the pauses were sent

    def encode(
        self, pixels: torch.Tensor, image: Image
    ) -> Generator[None, int | None, torch.Tensor]:
        self.begun.append(image.digest)
        for _ in range(4):
            self.sizes.append((yield))
        return torch.full((image.num_tokens, 1), float(pixels.flatten()[0]))


def picture(name: bytes, start: int = 1, count: int = 2, value: int = 7) -> Image:
    return Image(name, ((start, count),), bytes([value]) * 12, (1, 2, 2))


def request(number: int, *images: Image, tenant: str = "", priority: int = 0) -> GenerateRequest:
    prompt, params = [1] * 9, SamplingParams(4)
    return GenerateRequest(
        number, prompt, params, 0.0, priority=priority, tenant=tenant, images=images
    )


def finish(part: ImageRequests, number: int) -> None:
    part.stepped(RetiredStep(0.0, EngineStats(), outputs=[TokenOutput(number, 1, "stop")]))


def drain(part: ImageRequests) -> list[int]:
    ready = []
    for _ in range(100):
        outcome = part.work(is_quiet=False)
        ready += [each.id for each in outcome.ready] if outcome else []
    return ready


def admitted(part: ImageRequests, number: int) -> Admission:
    return part.admitted(Admission(number, 0.0, 0))


@pytest.fixture
def model() -> FourUnits:
    return FourUnits()


@pytest.fixture
def store() -> ImageStore:
    return ImageStore(40)  # ten tokens


@pytest.fixture
def part(model: FourUnits, store: ImageStore) -> ImageRequests:
    return ImageRequests(model, store, CPU)


def test_request_with_images_waits_until_all_are_encoded(
    part: ImageRequests, model: FourUnits, store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_S", 0.0)  # one unit between two steps
    assert not part.handle(request(1)), "a request without images goes on"
    assert part.handle(request(2, picture(b"a"), picture(b"b", 4)))
    assert part.has_work
    turns = 0
    while part.has_work:
        outcome = part.work(is_quiet=False)
        turns += 1
        assert outcome is not None
    assert [each.id for each in outcome.ready] == [2]
    assert turns >= 8
    assert model.begun == [b"a", b"b"]
    assert store.find(b"a") is not None


def test_units_are_small_and_short_only_while_others_are_answered(
    part: ImageRequests, model: FourUnits, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("engine.vision.requests.time.monotonic", lambda: now[0])

    def slow(request: GenerateRequest, most: int | None) -> bool:
        now[0] += 0.003  # of each unit
        return encode(request, most)

    encode = part._encode
    monkeypatch.setattr(part, "_encode", slow)
    step = RetiredStep(0.02, EngineStats(), cast(Step, object()), launched_at=0.0)
    part.stepped(step)  # of 20 ms: 8 ms of encoding follow it
    part.handle(request(1, picture(b"a")))
    part.work(is_quiet=False)
    assert now[0] == pytest.approx(0.006), "a third unit would take too long"
    assert model.sizes == [module.SMALL_UNIT]
    part.work(is_quiet=True)
    assert model.sizes[1:] == [None] * 3
    assert not part.has_work


def test_image_of_several_requests_is_encoded_once(part: ImageRequests, model: FourUnits) -> None:
    part.handle(request(1, picture(b"a")))
    part.handle(request(2, picture(b"a", 5)))
    assert drain(part) == [1, 2]
    assert model.begun == [b"a"]
    assert part.gauges()["images_encoded"] == 1
    assert part.gauges()["images_reused"] == 1
    finish(part, 1)
    finish(part, 2)
    part.handle(request(3, picture(b"a")))
    assert drain(part) == [3], "the embeddings outlive their requests"
    assert model.begun == [b"a"]


def test_request_waits_for_room_that_running_ones_hold(
    part: ImageRequests, model: FourUnits, store: ImageStore
) -> None:
    part.handle(request(1, picture(b"a", count=6)))
    part.handle(request(2, picture(b"b", count=6)))
    assert drain(part) == [1]
    assert model.begun == [b"a"]
    finish(part, 1)
    assert drain(part) == [2]
    assert store.find(b"a") is None, "its room was needed"
    store.check()


def test_aborted_request_frees_its_images_even_while_one_is_encoded(
    part: ImageRequests, model: FourUnits, store: ImageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_S", 0.0)
    part.handle(request(1, picture(b"a", count=6)))
    part.work(is_quiet=False)
    part.handle(Abort([1, 77]))
    assert not part.has_work
    store.check()
    assert store.has_room([(b"b", 40)])
    monkeypatch.setattr(module, "SLICE_S", 1.0)
    part.handle(request(2, picture(b"b", count=6)))
    assert drain(part) == [2]
    assert model.begun == [b"a", b"b"]


def test_abort_of_a_waiting_request_leaves_the_first_one_alone(
    part: ImageRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_S", 0.0)
    part.handle(request(1, picture(b"a")))
    part.handle(request(2, picture(b"b")))
    part.work(is_quiet=False)
    part.handle(Abort([2]))
    assert drain(part) == [1]


def test_tenants_take_turns_and_a_begun_request_is_finished(
    part: ImageRequests, model: FourUnits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE_S", 0.0)
    for number, tenant in enumerate("aaaab"):
        part.handle(request(number, picture(bytes([number]), count=1), tenant=tenant))
        part.work(is_quiet=False)  # the first one has begun before others come
    part.handle(request(5, picture(bytes([5]), count=1), tenant="b"))
    part.handle(request(6, picture(bytes([6]), count=1), tenant="a", priority=-1))
    part.handle(Abort([3]))
    assert drain(part) == [0, 6, 4, 1, 5, 2]
    assert [name for [name] in model.begun] == [0, 6, 4, 1, 5, 2]
    assert not part.has_work


def test_requests_that_can_never_run_are_rejected(part: ImageRequests) -> None:
    with pytest.raises(RequestRejectedError, match="at most 0 MiB"):
        part.handle(request(1, picture(b"a", count=5), picture(b"b", count=6)))
    with pytest.raises(RequestRejectedError, match="does not fit"):
        part.handle(request(1, picture(b"a", start=8)))
    blind = ImageRequests(None, ImageStore(0), CPU)
    with pytest.raises(RequestRejectedError, match="takes no images"):
        blind.handle(request(1, picture(b"a")))


def test_admission_says_what_the_encoder_spent(part: ImageRequests) -> None:
    part.handle(request(1, picture(b"a")))
    part.handle(request(2, picture(b"a"), picture(b"b", 4)))
    part.handle(request(3, picture(b"b")))
    before = time.monotonic()
    assert drain(part) == [1, 2, 3]
    first, second, third = (admitted(part, number) for number in (1, 2, 3))
    assert (first.images_encoded, first.images_reused, first.encode_units) == (1, 0, 5)
    assert (second.images_encoded, second.images_reused, second.encode_units) == (1, 1, 5)
    assert (third.images_encoded, third.images_reused, third.encode_units) == (0, 1, 0)
    assert (third.encode_begin, third.encode_seconds) == (0.0, 0.0)
    for one in (first, second):
        assert before <= one.encode_begin <= one.images_ready - one.encode_seconds
    assert first.images_ready <= second.encode_begin
    assert second.images_ready <= third.images_ready
    assert admitted(part, 2) == Admission(2, 0.0, 0), "it is said once"
    assert admitted(part, 9) == Admission(9, 0.0, 0)


def test_text_apart_takes_kept_embeddings_and_keeps_none(
    part: ImageRequests, model: FourUnits, store: ImageStore
) -> None:
    part.handle(request(1, picture(b"a", value=3)))
    drain(part)
    images = [picture(b"a", 2, value=3), picture(b"b", 5, value=4)]
    units = part.embeddings_of_text(images, 9)
    pieces = []
    while True:
        try:
            pieces.append(next(units))
        except StopIteration as end:
            seen = end.value
            break
    assert len(pieces) == 4, "only the second image is encoded"
    assert seen.index.tolist() == [2, 3, 5, 6]
    assert seen.embeddings.flatten().tolist() == [3.0, 3.0, 4.0, 4.0]
    assert seen.last_keys is None
    assert store.find(b"b") is None
    assert part.gauges()["images_encoded"] == 1
