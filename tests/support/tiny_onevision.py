"""A tiny LLaVA-OneVision with random weights: a lone image is tiled, and several are squares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

from tests.server.images.processors.cases import pillow_12_3_order
from tests.support.tiny_smolvlm import write_tokenizer

EDGE, PATCH = 28, 7  # pixels of the sides
PER_TILE = (EDGE // PATCH) ** 2  # tokens
SQUARE = PER_TILE + 1  # tokens of an image among several: a newline follows
SIZES = [[EDGE * rows, EDGE * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
PROCESSOR = {
    "image_processor_type": "LlavaOnevisionImageProcessor",
    "size": {"height": EDGE, "width": EDGE},
    "image_grid_pinpoints": SIZES,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def write_onevision(folder: Path) -> Path:
    """Write the checkpoint into a new folder."""
    folder.mkdir()
    size = write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    torch.manual_seed(64)
    config = transformers.LlavaOnevisionConfig(
        text_config={
            "model_type": "qwen2",
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
            "tie_word_embeddings": False,
        },
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": EDGE,
            "patch_size": PATCH,
        },
        image_grid_pinpoints=SIZES,
        image_token_index=tokenizer.token_to_id("<image>"),
        tie_word_embeddings=False,
    )
    model = transformers.LlavaOnevisionForConditionalGeneration(config).eval()
    with torch.no_grad():  # as they are made, images change no answer
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "language_model" not in name:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    model.generation_config.eos_token_id = config.text_config.eos_token_id
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "processor_config.json").write_text(json.dumps({"num_image_tokens": PER_TILE}))
    return folder


class Reference:
    """The same checkpoint in transformers, without cache and batch."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.image_token: int = self._tokenizer.convert_tokens_to_ids("<image>")
        settings = {k: v for k, v in PROCESSOR.items() if k != "image_processor_type"}
        self._images = LlavaOnevisionImageProcessorPil(**settings)
        load = transformers.LlavaOnevisionForConditionalGeneration.from_pretrained
        self._model = load(folder, dtype=torch.float32).eval()

    def answer(self, messages: list[dict[str, Any]], pictures: list[Image.Image], most: int) -> Any:
        """Return (prompt ids, greedy answer ids) of a chat whose pictures are in order."""
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        values: dict[str, Any] = {}
        if pictures:
            with pillow_12_3_order():
                values = dict(self._images([pictures], return_tensors="pt"))
            with torch.inference_mode():
                features = self._model.get_image_features(**values).pooler_output
            before, *rest = text.split("<image>")
            shown = ["<image>" * len(each) for each in features]
            text = before + "".join(s + after for s, after in zip(shown, rest, strict=True))
        ids = self._tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.inference_mode():
            out = self._model.generate(
                input_ids=ids, do_sample=False, max_new_tokens=most, use_cache=True, **values
            )
        return ids[0].tolist(), out[0, ids.shape[1] :].tolist()
