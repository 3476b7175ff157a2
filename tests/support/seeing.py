"""Golden tests of models that see, against `transformers`: logits and greedy answers.

A family needs one line in tests/engine/models/test_answers_about_images.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.base import image_encoder, image_token_bytes, whole_image_tokens
from engine.ops.seen_tokens import SeenTokens
from engine.protocol.generate import Image
from engine.runner.model_runner import ModelRunner
from engine.vision.seen import tokens_of_text
from tests.support.driver import Driver
from tests.support.forward import Plan, chunked, forward
from tests.support.forward import whole as at_once
from tests.support.golden import TOLERANCE, VISIBLE, Case, Golden, load
from tests.support.lens import run_lens, unpacked
from tests.support.vision import IMAGE_PROCESSOR, Picture, shows, whole


@dataclass(frozen=True)
class Shown:
    """An image of a prompt, as the server gives it, and the number of its embeddings."""

    pixels: Picture
    num_tokens: int
    grid: tuple[int, int] = (0, 0)
    size: tuple[int, int] = (0, 0)

    def image(self, first: int) -> Image:
        tiles, height, width, _ = self.pixels.shape
        runs = ((first, self.num_tokens),)
        pixels = self.pixels.numpy().tobytes()
        sizes = repr((self.pixels.shape, self.grid, self.size)).encode()
        digest = hashlib.blake2b(pixels + sizes, digest_size=16).digest()
        return Image(digest, runs, pixels, (tiles, height, width), self.grid, self.size)


def prompt_with(images: Sequence[Shown], token: int) -> tuple[list[int], list[int]]:
    """Return a prompt that shows images, and the first token of each; their tokens are `token`."""
    prompt, starts = [5, 6, 7], []
    for number, image in enumerate(images):
        starts.append(len(prompt))
        prompt += [token] * image.num_tokens + [20 + number, 9]
    return [*prompt, *range(30, 41)], starts


def chunked_around(
    prompts: Sequence[list[int]], shown: Sequence[Sequence[tuple[int, torch.Tensor]]], size: int
) -> Plan:
    """Return a plan with chunks of `size` tokens, or more where they would cut an image."""
    plan: Plan = []
    for index, (prompt, images) in enumerate(zip(prompts, shown, strict=True)):
        done = turn = 0
        while done < len(prompt):
            end = min(done + size, len(prompt))
            for first, embeddings in images:
                if first < end < first + len(embeddings):
                    end = first + len(embeddings)
            plan += [[]] * (turn == len(plan))
            plan[turn] = [*plan[turn], (index, end - done)]
            done, turn = end, turn + 1
    return plan


def check_lens(
    runner: ModelRunner,
    prompt: list[int],
    images: Sequence[Image],
    embeddings: Sequence[torch.Tensor],
    logits: torch.Tensor,
) -> None:
    """Check that a lens of a prompt with images predicts what the reference's logits say."""

    def seen(images: Sequence[Image], length: int) -> Generator[None, None, SeenTokens]:
        yield None
        sees_whole = whole_image_tokens(runner.model) > 0
        return tokens_of_text(images, embeddings, length, runner.device, sees_whole=sees_whole)

    runner.embeddings_of_text = seen
    result = run_lens(runner, prompt, images=tuple(images))
    expected = logits.softmax(-1)
    for at, found in enumerate(result.predictions[:-1]):
        assert found.actual is not None
        torch.testing.assert_close(
            found.actual[0], float(expected[at, prompt[at + 1]]), **TOLERANCE
        )
    shown = [
        at for image in images for first, count in image.runs for at in range(first, first + count)
    ]
    for layer in result.attention:
        last = unpacked(layer)[:, -1]
        assert last.sum(-1).tolist() == pytest.approx([1.0] * layer.heads, abs=1e-5)
        if layer.window is None:
            assert bool((last[:, shown] > 0).all())


def check_images(
    golden: Golden,
    stories: Sequence[Sequence[Shown]],
    token: int,
    inputs: Callable[[Sequence[Shown]], dict[str, Any]],
    *,
    types: bool = False,
    processor: Mapping[str, Any] = IMAGE_PROCESSOR,
    **options: Any,
) -> None:
    """Check the logits of prompts with images, at once and in chunks.

    `stories` are the images of each prompt, and `inputs` the reference's arguments for them. The
    chunks cut images, unless the tokens of an image see all of it. With `types` the reference also
    wants the type of each token. `processor` is the config of the image processor.
    """
    (golden.folder / "preprocessor_config.json").write_text(json.dumps(processor))
    runner = load(golden.folder, **options)
    encoder = image_encoder(runner.model)
    assert encoder is not None
    prompts, shown, expected, placed = [], [], [], []
    for images in stories:
        prompt, starts = prompt_with(images, token)
        pairs = list(zip(images, starts, strict=True))
        with torch.inference_mode():
            encoded = [whole(encoder.encode(i.pixels, i.image(first))) for i, first in pairs]
            arguments = inputs(images) if images else {}
            if types and images:
                is_image = torch.tensor([prompt]) == token
                arguments["mm_token_type_ids"] = is_image.int()
            arguments["input_ids"] = torch.tensor([prompt])
            expected.append(golden.reference(**arguments).logits[0])
        placed.append(tuple(image.image(first) for image, first in pairs))
        for image, embeddings in zip(images, encoded, strict=True):
            assert embeddings.nbytes == image_token_bytes(encoder) * image.num_tokens
        prompts.append(prompt)
        shown.append(list(zip(starts, encoded, strict=True)))
    chunks = chunked(prompts, 7)
    backend = runner.backend if whole_image_tokens(runner.model) else None
    if backend is not None:
        chunks = chunked_around(prompts, shown, 7)
    for plan in (at_once(prompts), chunks):
        found = forward(runner, prompts, plan, prepare=shows(shown, backend), images=placed)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, **TOLERANCE)
    check_lens(runner, prompts[-1], placed[-1], [each for _, each in shown[-1]], expected[-1])
    (blind,) = forward(runner, prompts[-1:], at_once(prompts[-1:]))
    assert (blind - expected[-1]).abs().max() > VISIBLE, "images change nothing"


# ---- greedy answers --------------------------------------------------------------------------

ANSWER = 40
BLOCK = 16  # tokens of a block: images begin and end inside blocks
BEFORE = 3  # tokens of a prompt before its first image


@dataclass(frozen=True, eq=False)  # compared by identity, as the key of a cache
class Family:
    """A model that sees, and the images of its prompts.

    `other` has the size of `one` and other pixels. `inputs` are the reference's arguments for the
    images of a prompt, and `types` its argument that is 1 at the tokens of images.
    """

    case: Case
    token: int
    one: Shown
    other: Shown
    three: Sequence[Shown]
    inputs: Callable[[Sequence[Shown]], dict[str, Any]]
    types: str | None = None
    kv_groups: int = 1

    @property
    def stories(self) -> dict[str, Sequence[Shown]]:
        """Return the images of each prompt."""
        return {
            "one": [self.one],
            "none": [],
            "three": self.three,
            "other": [self.other],
            "first two": self.three[:2],
        }


class SeeingGolden:
    """The stories of a family for drivers of its checkpoint, and the reference's answers."""

    def __init__(self, family: Family, folder: Path) -> None:
        self.family, self.golden = family, Golden(family.case, folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR))
        self._prompts = {
            name: prompt_with(images, family.token) for name, images in family.stories.items()
        }
        self._checked: dict[str, list[int]] = {}

    def driver(self, block_size: int = BLOCK, **fields: Any) -> Driver:
        """Return a driver whose cache holds the longest story, and half as many tokens more."""
        longest = max(len(prompt) for prompt, _ in self._prompts.values()) + ANSWER
        blocks = 3 * longest // (2 * block_size) * self.family.kv_groups
        return self.golden.driver(
            block_size=block_size,
            max_model_len=longest,
            num_gpu_blocks_override=blocks,
            **fields,
        )

    def ask(self, driver: Driver, story: str) -> int:
        prompt, starts = self._prompts[story]
        pairs = zip(self.family.stories[story], starts, strict=True)
        images = [image.image(first) for image, first in pairs]
        return driver.submit(prompt, ANSWER, images=images)

    def check(self, driver: Driver, requests: Mapping[str, int]) -> None:
        """Run until all requests have ended. Check that their answers are the reference's."""
        driver.run()
        assert not driver.rejected
        for story, request in requests.items():
            answer = driver.tokens(request)
            if story not in self._checked:
                self._check_greedy(story, answer)
                self._checked[story] = answer
            assert answer == self._checked[story], f"images of the prompt: {story}"

    def _check_greedy(self, story: str, answer: list[int]) -> None:
        """Check that each token is the reference's likeliest one behind those before it."""
        family, images = self.family, self.family.stories[story]
        prompt, _ = self._prompts[story]
        assert len(answer) == ANSWER
        assert family.token not in answer, "take other pictures: an answer has an image's token"
        assert len(set(answer)) > 5, "take other pictures: an answer repeats itself"
        tokens = torch.tensor([[*prompt, *answer[:-1]]])
        inputs = family.inputs(images) if images else {}
        if images and family.types:
            inputs[family.types] = (tokens == family.token).long()
        with torch.inference_mode():
            logits = self.golden.reference(tokens, **inputs).logits[0, len(prompt) - 1 :]
        assert answer == logits.argmax(-1).tolist(), f"images of the prompt: {story}"

    def check_all(self, driver: Driver, turns: int = 0, preemptions: int = 0) -> dict[str, int]:
        """Check all stories in one batch, with some turns between them; return their requests.

        The sequence that began last is preempted now and then.
        """
        requests = {}
        for story in self._prompts:
            requests[story] = self.ask(driver, story)
            driver.turn(turns)
        scheduler = driver.core.scheduler
        for _ in range(preemptions):
            driver.turn(5)
            if scheduler.running:
                scheduler._preempt(scheduler.running[-1])
        self.check(driver, requests)
        return requests

    def check_hits(self, driver: Driver) -> int:
        """Check the hits of an empty prompt cache: the same image, another one, and one more image.

        Return how many tokens of the last prompt were found.
        """
        size = driver.core.facts.block_size
        self.check(driver, {"one": self.ask(driver, "one")})
        requests = {story: self.ask(driver, story) for story in ("one", "other")}
        self.check(driver, requests)
        most = len(self._prompts["one"][0]) - 1
        assert driver.cached_tokens(requests["one"]) == most // size * size
        assert driver.cached_tokens(requests["other"]) <= BEFORE
        assert driver.stats.gauges["images_encoded"] == 2
        self.check(driver, {"three": self.ask(driver, "three")})
        request = self.ask(driver, "first two")
        self.check(driver, {"first two": request})
        shared = self._prompts["three"][1][2]  # the third image stands where the text goes on
        found = driver.cached_tokens(request)
        assert found == shared // size * size
        return found

    def is_inside(self, count: int) -> bool:
        """Return whether the first `count` tokens of the story "first two" end inside an image."""
        pairs = zip(self._prompts["first two"][1], self.family.three[:2], strict=True)
        return any(first < count < first + image.num_tokens for first, image in pairs)
