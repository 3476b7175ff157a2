"""LLaVA over HTTP: in LLaVA-OneVision a second image changes the tokens of the first."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.image_chats import Conversation
from tests.support.serve import Server, serving
from tests.support.tiny_llava import SQUARE, Reference, write_next, write_onevision
from tests.support.tiny_smolvlm import noise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_onevision(tmp_path_factory.mktemp("onevision") / "model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, "--dtype", "float32", "--max-num-batched-tokens", "50") as running:
        yield running


def test_second_image_of_a_conversation_makes_the_first_one_a_square(
    server: Server, reference: Reference
) -> None:
    rng = random.Random(63)
    token = reference.image_token
    first, second = noise(rng, 75, 40), noise(rng, 20, 90)
    chat = Conversation(server, reference)
    alone = chat.say("What is it?", first)
    assert alone.prompt.count(token) > 2 * SQUARE, "tiled"
    later = chat.say("Are you sure?")
    assert later.num_cached >= len(alone.prompt) - 16, "no image is new"
    both = chat.say("And this one?", second)
    assert both.prompt.count(token) == 2 * SQUARE
    assert both.num_cached < len("User:") + 16, "the first image became another"
    assert server.metric("images_encoded") == 3
    again = Conversation(server, reference)
    assert again.say("What is it?", first).answer == alone.answer
    assert again.say("Well?").num_cached
    assert server.metric("images_encoded") == 3, "both forms of the first image are kept"


@pytest.mark.parametrize("size", [(1, 1), (28, 28), (84, 84), (300, 9), (61, 100)])
@pytest.mark.slow
def test_images_of_odd_sizes_get_the_answers_of_transformers(
    server: Server, reference: Reference, size: tuple[int, int]
) -> None:
    rng = random.Random(str(size))
    lone, *rest = [noise(rng, *size) for _ in range(3)]
    turns = [Conversation(server, reference).say("One", lone)]
    turns.append(Conversation(server, reference).say("Three", lone, *rest))
    assert turns[0].answer != turns[1].answer


@pytest.mark.slow
def test_llava_next_tiles_all_images_of_a_conversation(tmp_path: Path) -> None:
    folder = write_next(tmp_path / "model")
    reference, rng = Reference(folder), random.Random(63)
    with serving(folder, "--dtype", "float32", "--max-num-batched-tokens", "50") as server:
        chat = Conversation(server, reference)
        alone = chat.say("What is it?", noise(rng, 75, 40))
        both = chat.say("And these?", noise(rng, 20, 90), noise(rng, 1, 1))
        assert both.num_cached >= len(alone.prompt) - 16, "the first image is the same"
        for size in ((28, 28), (84, 84), (300, 9), (61, 100)):
            Conversation(server, reference).say("One", noise(rng, *size))
        assert server.metric("images_encoded") == 7
