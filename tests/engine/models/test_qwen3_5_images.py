"""Qwen3.5 with images: transformers' answers, wherever states and keys of a prompt come from.

The models are tiny with random weights. Answers are 40 greedy tokens in fp32.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.vision.requests import ImageRequests
from tests.engine.models.test_qwen3_5 import IMAGE_TOKEN, seeing
from tests.support.driver import Driver, part_of
from tests.support.golden import edit_checkpoint, of_transformers
from tests.support.prediction_heads import add_head
from tests.support.qwen_images import shown, vision_inputs
from tests.support.seeing import ANSWER, Shown, prompt_with
from tests.support.single_steps import single_stepping
from tests.support.vision import IMAGE_PROCESSOR, picture

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL: dict[str, Any] = {"max_num_seqs": 8, "state_memory_bytes": 2**21, "block_size": 16}
KINDS = ["linear_attention", "full_attention"]
Served = tuple[Path, list[list[int]]]
STORIES: list[list[Shown]] = [
    [shown(3, 5, 0)],
    [],
    [shown(4, 2, 1), shown(1, 1, 2), shown(2, 9, 3)],
    [shown(3, 5, 4)],  # of the same size as the first, with other pixels
    [shown(3, 5, 0), shown(6, 2, 5)],
]


def ask(driver: Driver, images: Sequence[Shown]) -> int:
    prompt, starts = prompt_with(images, IMAGE_TOKEN)
    placed = [each.image(first) for each, first in zip(images, starts, strict=True)]
    return driver.submit(prompt, ANSWER, images=placed)


def check_answers(driver: Driver, expected: list[list[int]], turns: int = 0) -> None:
    """Submit all stories, with some turns between them, and compare the answers."""
    ids = []
    for images in STORIES:
        ids.append(ask(driver, images))
        driver.turn(turns)
    driver.run()
    assert [driver.tokens(each) for each in ids] == expected


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Served:
    """Return a checkpoint with a prediction head, and the reference's answers to the stories."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("qwen3_5")
    reference = of_transformers(seeing(num_hidden_layers=2, layer_types=KINDS), folder)
    edit_checkpoint(folder, add_head)
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR))
    answers = []
    for images in STORIES:
        ids = torch.tensor([prompt_with(images, IMAGE_TOKEN)[0]])
        inputs = vision_inputs(images) if images else {}
        inputs |= {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()} if images else {}
        with single_stepping(reference):
            found = reference.generate(ids, do_sample=False, max_new_tokens=ANSWER, **inputs)
        answers.append(found[0, ids.shape[1] :].tolist())
        assert IMAGE_TOKEN not in answers[-1], "take another seed: an answer shows no image"
    assert answers[0] != answers[3], "the pictures of equal size change the answer"
    return folder, answers


CAPTURED = {"depth": 1, "late": True, "captured": True}


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_batched_tokens": 16},
        {"speculation": "mtp", "max_num_batched_tokens": 16},
        pytest.param(CAPTURED | {"max_num_batched_tokens": 24}, marks=pytest.mark.slow),
    ],
    ids=["chunked", "drafted", "captured"],
)
def test_answers_about_images_equal_transformers(served: Served, fields: dict[str, Any]) -> None:
    folder, expected = served
    driver = Driver(folder, **(SMALL | fields))
    check_answers(driver, expected, turns=2)
    assert driver.stats.drafts > 0
    if "captured" in fields:
        driver.check_static()


def test_states_behind_images_are_reused_for_the_same_images_only(served: Served) -> None:
    folder, expected = served
    driver = Driver(folder, **(SMALL | {"block_size": 4, "attention_backend": "torch"}))
    one, *_, other, _ = STORIES  # both show one picture of 15 tokens, behind 3 others
    found = []
    for images, answer in ((one, 0), (one, 0), (other, 3), (one, 0)):
        request = ask(driver, images)
        driver.run()
        assert driver.tokens(request) == expected[answer]
        found.append(driver.cached_tokens(request))
    assert found[0] == found[2] == 0, "the first block shows another picture"
    assert found[1] == found[3] > 3 + 15, "the hit ends behind the image"
    assert part_of(driver.core, ImageRequests).gauges()["images_encoded"] == 2


def test_preempted_prompts_with_images_keep_states(served: Served) -> None:
    folder, expected = served
    fields: dict[str, Any] = {"num_gpu_blocks_override": 7, "max_model_len": 100}
    driver = Driver(folder, **(SMALL | fields))
    check_answers(driver, expected)
    assert driver.stats.preemptions > 0


def test_images_that_contradict_their_tokens_are_refused_and_others_answered(
    served: Served,
) -> None:
    """Only a checkpoint whose files contradict each other can make such requests."""
    folder, expected = served
    driver = Driver(folder, **SMALL)
    good = shown(3, 5, 0)
    refused = {}
    for wrong, said in (
        (replace(good, grid=(5, 5)), "a grid of 5 x 5 tokens; its runs in the prompt have 15."),
        (replace(shown(4, 5, 0), num_tokens=15, grid=(3, 5)), "made 20 embeddings of an image"),
        (Shown(picture((1, 36, 61)), 15, (3, 5)), "36 x 61 pixels, and the model reads multiples"),
    ):
        refused[ask(driver, [good, wrong])] = said
    split = msgspec.structs.replace(good.image(3), runs=((3, 7), (11, 8)))
    refused[driver.submit([IMAGE_TOKEN] * 20, 1, images=[split])] = (
        "a grid of 3 x 5 tokens; its runs in the prompt have 7, 8."
    )
    request = ask(driver, STORIES[0])
    driver.run()
    assert driver.tokens(request) == expected[0]
    assert driver.rejected.keys() == refused.keys()
    for number, said in refused.items():
        assert driver.rejected[number].code == "invalid_value"
        assert said in driver.rejected[number].message
