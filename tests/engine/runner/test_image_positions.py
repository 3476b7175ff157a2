"""Positions of images on three axes: as transformers counts them, in all ways to serve a prompt.

The models are tiny Qwen3-VLs with random weights. Answers are 40 greedy tokens in fp32.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.protocol.generate import Image
from engine.runner.image_positions import image_positions
from engine.scheduling.step import ScheduledSlice
from engine.vision.requests import ImageRequests
from tests.engine.models.test_qwen3_vl import IMAGE_TOKEN, config
from tests.support.driver import Driver, part_of
from tests.support.golden import of_transformers
from tests.support.qwen_images import shown, vision_inputs
from tests.support.seeing import Shown, prompt_with
from tests.support.vision import IMAGE_PROCESSOR

pytestmark = pytest.mark.usefixtures("one_thread")
ANSWER = 40
STORIES: list[list[Shown]] = [
    [shown(3, 5, 0)],
    [],
    [shown(4, 2, 1), shown(1, 1, 2), shown(2, 9, 3)],
    [shown(3, 5, 4)],  # of the same size as the first, with other pixels
    [shown(3, 5, 0), shown(6, 2, 5)],
]


def placed(images: Sequence[Shown], starts: Sequence[int]) -> tuple[Image, ...]:
    """Return the images of a prompt as the server sends them."""
    found = []
    for each, first in zip(images, starts, strict=True):
        pixels = each.pixels.numpy().tobytes()
        digest = hashlib.blake2b(pixels, digest_size=16).digest()
        found.append(msgspec.structs.replace(each.image(first), digest=digest, pixels=pixels))
    return tuple(found)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """Return a checkpoint, and the reference's answers to the stories."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("qwen3_vl")
    reference = of_transformers(config(), folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR))
    answers = []
    for images in STORIES:
        tokens, _ = prompt_with(images, IMAGE_TOKEN)
        length = len(tokens)
        inputs = vision_inputs(images) if images else {}
        for _ in range(ANSWER):
            ids = torch.tensor([tokens])
            types = {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()} if images else {}
            with torch.inference_mode():
                logits = reference(ids, **inputs, **types).logits[0, -1]
            tokens.append(int(logits.argmax()))
        answers.append(tokens[length:])
        assert IMAGE_TOKEN not in answers[-1], "take another seed: an answer shows no image"
    return folder, answers


def ask(driver: Driver, images: Sequence[Shown]) -> int:
    prompt, starts = prompt_with(images, IMAGE_TOKEN)
    return driver.submit(prompt, ANSWER, images=placed(images, starts))


def check_answers(driver: Driver, expected: list[list[int]], turns: int = 0) -> list[int]:
    """Submit all stories, with some turns between them, and compare the answers."""
    ids = []
    for images in STORIES:
        ids.append(ask(driver, images))
        driver.turn(turns)
    driver.run()
    assert [driver.tokens(each) for each in ids] == expected
    return ids


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_num_batched_tokens": 16, "block_size": 16},
        {"depth": 1, "late": True, "max_num_batched_tokens": 16},
        {"speculation": "off", "kernels": "torch", "attention_backend": "torch"},
    ],
    ids=["plain", "chunked", "ahead", "torch"],
)
def test_answers_about_images_equal_transformers(
    served: tuple[Path, list[list[int]]], fields: dict[str, Any]
) -> None:
    folder, expected = served
    check_answers(Driver(folder, max_num_seqs=8, **fields), expected, turns=2)


def test_prefix_hits_inside_and_behind_images_keep_positions(
    served: tuple[Path, list[list[int]]],
) -> None:
    folder, expected = served
    driver = Driver(folder, max_num_seqs=8, block_size=4, attention_backend="torch")
    check_answers(driver, expected)
    ids = check_answers(driver, expected)
    hits = [driver.cached_tokens(each) for each in ids]
    assert hits[0] > 3 + 15, "the hit ends behind the image"
    assert min(hits) >= 8
    requests = part_of(driver.core, ImageRequests)
    assert requests.gauges()["images_encoded"] == 6


def test_preempted_prompts_with_images_keep_positions(
    served: tuple[Path, list[list[int]]],
) -> None:
    folder, expected = served
    fields: dict[str, Any] = {"num_gpu_blocks_override": 7, "max_model_len": 100, "block_size": 16}
    driver = Driver(folder, max_num_seqs=8, **fields)
    check_answers(driver, expected)
    assert driver.stats.preemptions > 0


def test_captured_decodes_and_chunks_behind_images_keep_positions(
    served: tuple[Path, list[list[int]]],
) -> None:
    folder, expected = served
    fields: dict[str, Any] = {"max_num_batched_tokens": 24, "block_size": 8, "depth": 1}
    driver = Driver(folder, max_num_seqs=8, captured=True, late=True, **fields)
    check_answers(driver, expected, turns=2)
    driver.check_static()


def test_text_between_images_is_not_replayed_from_a_graph(
    served: tuple[Path, list[list[int]]],
) -> None:
    """Such a chunk shows no image, but its positions are not those of the row's last tokens."""
    folder, expected = served
    images = STORIES[2]
    fields: dict[str, Any] = {"max_num_batched_tokens": 2, "block_size": 8, "speculation": "off"}
    driver = Driver(folder, max_num_seqs=2, captured=True, **fields)
    request = ask(driver, images)
    driver.run()
    assert not driver.rejected
    assert driver.tokens(request) == expected[2]


def test_drafted_tokens_behind_images_keep_positions(
    served: tuple[Path, list[list[int]]],
) -> None:
    folder, expected = served
    driver = Driver(folder, max_num_seqs=2, speculation="ngram")
    check_answers(driver, expected)
    assert driver.stats.drafts > 0


# ---- the function ----------------------------------------------------------------------------


@pytest.mark.parametrize("images", STORIES, ids=lambda images: str(len(images)))
def test_image_positions_of_any_slice_equal_transformers(images: list[Shown]) -> None:
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.Qwen3VLForConditionalGeneration(config()).model
    prompt, starts = prompt_with(images, IMAGE_TOKEN)
    ids = torch.tensor([prompt])
    grids = vision_inputs(images)["image_grid_thw"] if images else None
    types = (ids == IMAGE_TOKEN).int()
    expected, delta = model.get_rope_index(ids, types, image_grid_thw=grids)
    shows = placed(images, starts)
    assert sum(image.position_shift for image in shows) == int(delta)
    for start in range(len(prompt)):
        for end in range(start + 1, len(prompt) + 1):
            part = ScheduledSlice(0, 0, 3, start, end - start, samples=False)
            found = image_positions([part], {3: shows})
            due = expected[:, 0, start:end].numpy()
            assert np.array_equal(np.broadcast_to(found, due.shape), due)
            # A step's positions have one axis where the three do not differ.
            assert (found.ndim == 1) == bool((due == due[0]).all())


def test_image_positions_of_several_rows_follow_each_other() -> None:
    image = Image(b"", ((2, 6),), grid=(2, 3))
    parts = [
        ScheduledSlice(0, 0, 1, 9, 1, samples=True),  # a decode behind the image of another row
        ScheduledSlice(1, 0, 0, 5, 4, samples=False),  # inside an image
        ScheduledSlice(2, 0, 2, 3, 2, samples=False),  # a text
    ]
    found = image_positions(parts, {0: (image,), 1: (image,)})
    assert found.tolist() == [
        [6, 2, 2, 2, 5, 3, 4],
        [6, 3, 3, 3, 5, 3, 4],
        [6, 2, 3, 4, 5, 3, 4],
    ]
