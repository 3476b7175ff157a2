"""A tiny SmolVLM with random weights, whose answers to chats with images transformers knows."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from tests.server.images.processors.cases import pillow_12_3_order

TILE, LONGEST = 24, 72  # pixels: of a tile's side, and of a picture's longer side
PER_TILE = 9  # tokens
TAGS = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
SPECIAL = [
    *("<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<global-img>", "<image>"),
    *TAGS,
]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}:"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
PROCESSOR = {
    "image_processor_type": "SmolVLMImageProcessor",
    "size": {"longest_edge": LONGEST},
    "max_image_size": {"longest_edge": TILE},
    "do_image_splitting": True,
    "resample": 1,
}


def write_tokenizer(folder: Path, template: str = TEMPLATE, more: Sequence[str] = ()) -> int:
    """Write a tokenizer with a token for each byte, and `more` special ones; return its size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL, *more])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end_of_utterance>",
        "pad_token": "<|im_start|>",
        "chat_template": template,
        "extra_special_tokens": {
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return int(tokenizer.get_vocab_size())


def write_seeing(folder: Path) -> Path:
    """Write the checkpoint into a new folder."""
    folder.mkdir()
    size = write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    torch.manual_seed(63)
    config = transformers.SmolVLMConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": size,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1024,
            "initializer_range": 0.2,
            "bos_token_id": None,
            "eos_token_id": tokenizer.token_to_id("<end_of_utterance>"),
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": TILE,
            "patch_size": 4,
            "initializer_range": 0.3,
        },
        scale_factor=2,
        image_token_id=tokenizer.token_to_id("<image>"),
        tie_word_embeddings=False,
    )
    model = transformers.SmolVLMForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = config.text_config.eos_token_id
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": PER_TILE}))
    return folder


class Reference:
    """The same checkpoint in transformers, without cache and batch."""

    def __init__(self, folder: Path) -> None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        settings = {k: v for k, v in PROCESSOR.items() if k != "image_processor_type"}
        images = SmolVLMImageProcessorPil(**settings)
        self._images = images
        self._tokenizer = tokenizer
        load = transformers.SmolVLMForConditionalGeneration.from_pretrained
        self._model = load(folder, dtype=torch.float32).eval()
        self.image_token: int = self._model.config.image_token_id

    def answer(self, messages: list[dict[str, Any]], pictures: list[Image.Image], most: int) -> Any:
        """Return (prompt ids, greedy answer ids) of a chat whose content parts are in order."""
        values: dict[str, Any] = {}
        shown: list[str] = []
        if pictures:
            found = self._values(pictures)
            rows, columns = found.pop("rows")[0], found.pop("cols")[0]
            shown = [_shown(r, c) for r, c in zip(rows, columns, strict=True)]
            values = found
        return greedy(self._model, self._tokenizer, messages, shown, values, most)

    def _values(self, pictures: list[Image.Image]) -> dict[str, Any]:
        with pillow_12_3_order():
            return dict(self._images([pictures], return_tensors="pt", return_row_col_info=True))

    def attention(self, ids: list[int], pictures: list[Image.Image]) -> torch.Tensor:
        """Return the attention weights [layers, heads, T, T] of token ids that show pictures."""
        values = self._values(pictures)
        del values["rows"], values["cols"]
        self._model.set_attn_implementation("eager")
        with torch.inference_mode():
            found = self._model(torch.tensor([ids]), output_attentions=True, **values)
        return torch.cat(found.attentions)


def greedy(
    model: Any,
    tokenizer: Any,
    messages: list[dict[str, Any]],
    shown: list[str],
    values: dict[str, Any],
    most: int,
) -> Any:
    """Return (prompt ids, greedy answer ids) of a chat.

    `shown` has the text of each image, and `values` the model's arguments for all of them.
    """
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    before, *rest = text.split("<image>")
    text = before + "".join(image + after for image, after in zip(shown, rest, strict=True))
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, do_sample=False, max_new_tokens=most, use_cache=True, **values
        )
    return ids[0].tolist(), out[0, ids.shape[1] :].tolist()


def _shown(rows: int, columns: int) -> str:
    """Return the text of an image, by the documentation of Idefics3's processor."""
    fake, tile = "<fake_token_around_image>", "<image>" * PER_TILE
    if not rows:
        return f"{fake}<global-img>{tile}{fake}"
    lines = [
        "".join(f"{fake}<row_{r}_col_{c}>{tile}" for c in range(1, columns + 1))
        for r in range(1, rows + 1)
    ]
    return "".join(line + "\n" for line in lines) + f"\n{fake}<global-img>{tile}{fake}"


def noise(rng: random.Random, width: int, height: int) -> Image.Image:
    """Return a picture of coloured squares, which resizing changes little and noise would."""
    small = Image.frombytes("RGB", (4, 3), rng.randbytes(36))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def png_url(picture: Image.Image) -> str:
    """Return a picture as a data: URL."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
