"""Positions of images on three axes: as transformers counts them, in all ways to serve a prompt.

The models are tiny Qwen3-VLs with random weights. tests/engine/models/test_answers_about_images.py
has chunks, prefix hits and preemptions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.protocol.generate import Image
from engine.runner.image_positions import image_positions
from engine.scheduling.step import ScheduledSlice
from tests.engine.models.test_qwen3_vl import IMAGE_TOKEN, config
from tests.support.golden import Case
from tests.support.qwen_images import shown, vision_inputs
from tests.support.seeing import Family, SeeingGolden, Shown, prompt_with

pytestmark = pytest.mark.usefixtures("one_thread")
STORIES: list[list[Shown]] = [
    [],
    [shown(3, 5, 0), shown(6, 2, 5)],
    [shown(4, 2, 1), shown(1, 1, 2), shown(2, 9, 3)],
]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> SeeingGolden:
    pytest.importorskip("transformers")
    one, other, *three = [shown(3, 5, 0), shown(3, 5, 4), *STORIES[-1]]
    case = Case("qwen3_vl", config)
    family = Family(case, IMAGE_TOKEN, one, other, three, vision_inputs, "mm_token_type_ids")
    return SeeingGolden(family, tmp_path_factory.mktemp("qwen3_vl"))


def test_captured_decodes_and_chunks_behind_images_keep_positions(seeing: SeeingGolden) -> None:
    fields: dict[str, Any] = {"max_num_batched_tokens": 24, "depth": 1, "late": True}
    driver = seeing.driver(captured=True, **fields)
    seeing.check_all(driver, turns=2)
    driver.check_static()


def test_text_between_images_is_not_replayed_from_a_graph(seeing: SeeingGolden) -> None:
    """Such a chunk shows no image, but its positions are not those of the row's last tokens."""
    fields: dict[str, Any] = {"max_num_batched_tokens": 2, "speculation": "off"}
    driver = seeing.driver(captured=True, **fields)
    seeing.check(driver, {"three": seeing.ask(driver, "three")})


def test_drafted_tokens_behind_images_keep_positions(seeing: SeeingGolden) -> None:
    driver = seeing.driver(max_num_seqs=2, speculation="ngram")
    seeing.check_all(driver)
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
    shows = tuple(each.image(first) for each, first in zip(images, starts, strict=True))
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
