"""Tiny LLaVA-NeXT and LLaVA-OneVision with random weights, and their answers in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

from tests.server.images.processors.cases import pillow_12_3_order
from tests.support.tiny_smolvlm import greedy, write_tokenizer

EDGE, PATCH = 28, 7  # pixels of the sides
PER_TILE = (EDGE // PATCH) ** 2  # tokens
SQUARE = PER_TILE + 1  # tokens of an image among several: a newline follows
SIZES = [[EDGE * rows, EDGE * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]
PROCESSOR: dict[str, Any] = {
    "size": {"height": EDGE, "width": EDGE},
    "image_grid_pinpoints": SIZES,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


PROCESSORS = {
    "LlavaNextImageProcessor": LlavaNextImageProcessorPil,
    "LlavaOnevisionImageProcessor": LlavaOnevisionImageProcessorPil,
}


def write_onevision(folder: Path) -> Path:
    """Write a LLaVA-OneVision into a new folder: a lone image is tiled, and several are squares."""
    image_processor = PROCESSOR | {"image_processor_type": "LlavaOnevisionImageProcessor"}
    processor = {"num_image_tokens": PER_TILE}
    return _write(folder, "LlavaOnevision", "siglip_vision_model", image_processor, processor)


def write_next(folder: Path) -> Path:
    """Write a LLaVA-NeXT into a new folder: all images are tiled."""
    image_processor = PROCESSOR | {"image_processor_type": "LlavaNextImageProcessor"}
    image_processor |= {"size": {"shortest_edge": EDGE}, "crop_size": PROCESSOR["size"]}
    processor = {"patch_size": PATCH}
    return _write(folder, "LlavaNext", "clip_vision_model", image_processor, processor)


def _write(
    folder: Path,
    kind: str,
    tower: str,
    image_processor: dict[str, Any],
    processor: dict[str, Any],
) -> Path:
    folder.mkdir()
    size = write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    torch.manual_seed(64)
    config = getattr(transformers, f"{kind}Config")(
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
            "model_type": tower,
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
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    with torch.no_grad():  # as they are made, images change no answer
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "language_model" not in name:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    model.generation_config.eos_token_id = config.text_config.eos_token_id
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(image_processor))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


class Reference:
    """The same checkpoint in transformers, without cache and batch."""

    def __init__(self, folder: Path) -> None:
        architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        kind = settings.pop("image_processor_type")
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.image_token: int = self._tokenizer.convert_tokens_to_ids("<image>")
        self._images = PROCESSORS[kind](**settings)
        load = getattr(transformers, architecture).from_pretrained
        self._model = load(folder, dtype=torch.float32).eval()

    def answer(self, messages: list[dict[str, Any]], pictures: list[Image.Image], most: int) -> Any:
        """Return (prompt ids, greedy answer ids) of a chat whose pictures are in order."""
        values: dict[str, Any] = {}
        shown: list[str] = []
        if pictures:
            with pillow_12_3_order():
                values = dict(self._images([pictures], return_tensors="pt"))
            with torch.inference_mode():
                features = self._model.get_image_features(**values).pooler_output
            shown = ["<image>" * len(each) for each in features]
        return greedy(self._model, self._tokenizer, messages, shown, values, most)
