"""`penstock serve FOLDER` with a GGUF model and its image encoder, over HTTP."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support import web
from tests.support.gguf_sidecars import write_pair
from tests.support.serve import serving
from tests.support.tiny_gguf import CONTROL, NORMAL
from tests.support.tiny_smolvlm import (
    SPECIAL,
    TEMPLATE,
    TILE,
    Reference,
    noise,
    png_url,
    write_seeing,
)

ANSWER = 8  # tokens


@pytest.mark.slow
def test_answer_about_a_picture_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = write_seeing(tmp_path / "checkpoint")
    found = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokens = [found.id_to_token(number) for number in range(found.get_vocab_size())]
    model = write_pair(
        tmp_path / "pair",
        checkpoint,
        {f"clip.vision.image_{key}": [0.5, 0.5, 0.5] for key in ("mean", "std")},
        template=TEMPLATE,
        tokens=tokens,
        token_type=[CONTROL if token in SPECIAL else NORMAL for token in tokens],
        merges=[],
        eos_token_id=found.token_to_id("<end_of_utterance>"),
    )
    image = noise(random.Random(63), 3 * TILE + 7, 2 * TILE)
    text = {"type": "text", "text": "What is it?"}
    asked = [{"role": "user", "content": [{"type": "image"}, text]}]
    _, due = Reference(checkpoint).answer(asked, [image], ANSWER)
    shown = {"type": "image_url", "image_url": {"url": png_url(image)}}
    body = {"messages": [{"role": "user", "content": [shown, text]}], "return_token_ids": True}
    body |= {"temperature": 0, "max_tokens": ANSWER}
    with serving(model.parent, "--dtype", "float32") as server:
        url = f"{server.base_url}/v1/chat/completions"
        answer = web.post(url, json=body, timeout=60).json()
        assert answer["choices"][0]["token_ids"] == due
