"""Gemma 4 over HTTP: pictures in chats, with the processor and the template of transformers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from tests.server.images.processors.cases import pillow_12_3_order
from tests.support import web
from tests.support.serve import Server, serving
from tests.support.tiny_smolvlm import noise, png_url, write_tokenizer

pytestmark = pytest.mark.slow
ANSWER, PATCH, POOL, BUDGET = 16, 4, 3, 70
PROCESSOR = {"max_soft_tokens": BUDGET, "patch_size": PATCH, "pooling_kernel_size": POOL}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}<assistant>"
)


@pytest.fixture(scope="module", params=["vision", None])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("gemma4")
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|image>", "<|image|>", "<image|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"chat_template": TEMPLATE, "extra_special_tokens": {}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    size = tokenizer.get_vocab_size()
    text = {"vocab_size": size, "hidden_size": 64, "intermediate_size": 96}
    text |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    text |= {"global_head_dim": 32, "sliding_window": 24, "max_position_embeddings": 1024}
    text |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": size}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    vision |= {"num_attention_heads": 4, "num_key_value_heads": 4, "patch_size": PATCH}
    torch.manual_seed(4)
    config = transformers.Gemma4Config(
        text_config=text
        | {
            "initializer_range": 0.2,
            "use_bidirectional_attention": request.param,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": tokenizer.token_to_id("<end_of_utterance>"),
        },
        vision_config=vision | {"position_embedding_size": BUDGET * POOL},
        image_token_id=tokenizer.token_to_id("<|image|>"),
        tie_word_embeddings=False,
    )
    model = transformers.Gemma4ForConditionalGeneration(config).eval()
    with torch.no_grad():  # as they are made, images change no answer
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "vision" in name:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    model.generation_config.eos_token_id = config.text_config.eos_token_id
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, "--dtype", "float32", "--max-num-batched-tokens", "50") as running:
        yield running


def expected(
    folder: Path, messages: list[dict[str, Any]], pictures: list[Image.Image]
) -> tuple[list[int], list[int]]:
    """Return transformers' prompt and greedy answer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.Gemma4ForConditionalGeneration.from_pretrained(folder).eval()
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    values: dict[str, Any] = {}
    if pictures:
        # Its smallest budget has 70 embeddings, as here.
        with pillow_12_3_order():
            values = dict(Gemma4ImageProcessorPil(**PROCESSOR)(pictures, return_tensors="pt"))
        counts = values.pop("num_soft_tokens_per_image")
        before, *rest = text.split("<|image|>")
        pairs = zip(counts, rest, strict=True)
        text = before + "".join(f"<|image>{'<|image|>' * int(n)}<image|>{s}" for n, s in pairs)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    values["mm_token_type_ids"] = (ids == model.config.image_token_id).int()
    with torch.inference_mode():
        out = model.generate(input_ids=ids, do_sample=False, max_new_tokens=ANSWER, **values)
    return ids[0].tolist(), out[0, ids.shape[1] :].tolist()


def test_chats_with_pictures_of_odd_sizes_are_answered_as_by_transformers(
    server: Server, folder: Path
) -> None:
    rng = random.Random(4)
    pictures = [noise(rng, 75, 40), noise(rng, 9, 200), noise(rng, 130, 131)]
    answers = []
    for count in (0, 1, 3, 3):
        shown = pictures[:count]
        said = {"type": "text", "text": "Which?"}
        urls = [{"type": "image_url", "image_url": {"url": png_url(each)}} for each in shown]
        body = {"messages": [{"role": "user", "content": [*urls, said]}], "max_tokens": ANSWER}
        body |= {"temperature": 0, "return_token_ids": True}
        response = web.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        found = response.json()
        messages = [{"role": "user", "content": [{"type": "image"}] * count + [said]}]
        prompt, answer = expected(folder, messages, shown)
        assert found["prompt_token_ids"] == prompt
        assert found["choices"][0]["token_ids"] == answer
        answers.append(answer)
    assert len({tuple(answer) for answer in answers}) == 3, "pictures change no answer"
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
