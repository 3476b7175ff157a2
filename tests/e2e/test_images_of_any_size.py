"""Qwen3.5 over HTTP: tokens of an image by its size, positions on three axes, and states."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.image_chats import Conversation
from tests.support.serve import serving
from tests.support.tiny_qwen3_5 import Reference, write_qwen3_5
from tests.support.tiny_smolvlm import noise


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_5(tmp_path_factory.mktemp("qwen3_5") / "model")


@pytest.mark.slow
def test_conversation_with_images_of_odd_sizes_gets_the_answers_of_transformers(
    folder: Path,
) -> None:
    rng = random.Random(35)
    reference = Reference(folder)
    token = reference.image_token
    flags = ("--dtype", "float32", "--max-num-batched-tokens", "20", "--block-size", "16")
    with serving(folder, *flags) as server:
        chat = Conversation(server, reference)
        chat.say("Hello")
        first = chat.say("What is it?", noise(rng, 75, 40))
        assert first.prompt.count(token) == 32  # of 4 rows x 8 columns
        later = chat.say("And these?", noise(rng, 1, 1), noise(rng, 9, 300))
        assert later.num_cached >= len(first.prompt) - 16, "states behind an image are reused"
        other = Conversation(server, reference)
        other.say("Hello")
        changed = other.say("What is it?", noise(rng, 75, 40))
        assert changed.prompt == first.prompt
        assert changed.answer != first.answer
        assert changed.num_cached <= first.prompt.index(token)
        server.wait_idle()
        assert server.metric("images_encoded") == 4
