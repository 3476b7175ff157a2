"""Golden tests of models that see: logits of prompts with images, against `transformers`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from engine.models.base import Sees, SeesWhole
from engine.ops.seen_tokens import SeenTokens
from engine.protocol.generate import Image
from engine.runner.model_runner import ModelRunner
from engine.vision.seen import tokens_of_text
from tests.support.forward import Plan, chunked, forward
from tests.support.forward import whole as at_once
from tests.support.golden import TOLERANCE, VISIBLE, Golden, load
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
        digest = hashlib.blake2b(pixels, digest_size=16).digest()
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
        sees_whole = isinstance(runner.model, SeesWhole)
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
    **options: Any,
) -> None:
    """Check the logits of prompts with images, at once and in chunks.

    `stories` are the images of each prompt, and `inputs` the reference's arguments for them. The
    chunks cut images, unless the tokens of an image see all of it. With `types` the reference also
    wants the type of each token.
    """
    (golden.folder / "preprocessor_config.json").write_text(json.dumps(IMAGE_PROCESSOR))
    runner = load(golden.folder, **options)
    assert isinstance(runner.model, Sees)
    model = cast(Sees, runner.model)
    prompts, shown, expected, placed = [], [], [], []
    for images in stories:
        prompt, starts = prompt_with(images, token)
        pairs = list(zip(images, starts, strict=True))
        with torch.inference_mode():
            encoded = [whole(model.encode_image(i.pixels, i.image(first))) for i, first in pairs]
            arguments = inputs(images) if images else {}
            if types and images:
                is_image = torch.tensor([prompt]) == token
                arguments["mm_token_type_ids"] = is_image.int()
            expected.append(golden.reference(torch.tensor([prompt]), **arguments).logits[0])
        placed.append(tuple(image.image(first) for image, first in pairs))
        for image, embeddings in zip(images, encoded, strict=True):
            assert embeddings.nbytes == model.image_bytes * image.num_tokens
        prompts.append(prompt)
        shown.append(list(zip(starts, encoded, strict=True)))
    chunks = chunked(prompts, 7)
    backend = runner.backend if isinstance(model, SeesWhole) else None
    if backend is not None:
        chunks = chunked_around(prompts, shown, 7)
    for plan in (at_once(prompts), chunks):
        found = forward(runner, prompts, plan, prepare=shows(shown, backend), images=placed)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, **TOLERANCE)
    check_lens(runner, prompts[-1], placed[-1], [each for _, each in shown[-1]], expected[-1])
    (blind,) = forward(runner, prompts[-1:], at_once(prompts[-1:]))
    assert (blind - expected[-1]).abs().max() > VISIBLE, "images change nothing"
