"""A tiny Qwen3.5 with random weights, whose answers to chats with images transformers knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.server.images.processors.cases import pillow_12_3_order
from tests.support.golden import of_transformers
from tests.support.single_steps import single_stepping
from tests.support.tiny_smolvlm import TEMPLATE, write_tokenizer

PATCH, UNIT = 4, 8  # pixels of the sides of a patch, and of the square of an embedding
PLACEHOLDER = "<|image_pad|>"
AROUND = "<|vision_start|>", "<|vision_end|>"
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": PATCH,
    "merge_size": UNIT // PATCH,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 4 * UNIT**2, "longest_edge": 40 * UNIT**2},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}


def write_qwen3_5(folder: Path) -> Path:
    """Write the checkpoint into a new folder."""
    folder.mkdir()
    template = TEMPLATE.replace("<image>", PLACEHOLDER.join(AROUND))
    size = write_tokenizer(folder, template, (*AROUND, PLACEHOLDER, "<|video_pad|>"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rope = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.75}
    start, end = (tokenizer.token_to_id(each) for each in AROUND)
    config = transformers.Qwen3_5Config(
        text_config={
            "vocab_size": size,
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 1024,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "rope_parameters": rope | {"mrope_section": [2, 2, 2]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_heads": 2,
            "out_hidden_size": 48,
            "patch_size": PATCH,
            "num_position_embeddings": 49,
        },
        image_token_id=tokenizer.token_to_id(PLACEHOLDER),
        video_token_id=tokenizer.token_to_id("<|video_pad|>"),
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    of_transformers(config, folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


class Reference:
    """The same checkpoint in transformers, without batch."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.image_token: int = self._tokenizer.convert_tokens_to_ids(PLACEHOLDER)
        settings = {k: v for k, v in PROCESSOR.items() if k != "image_processor_type"}
        self._images = Qwen2VLImageProcessorPil(**settings)
        load = transformers.Qwen3_5ForConditionalGeneration.from_pretrained
        self._model = load(folder, dtype=torch.float32).eval()

    def answer(self, messages: list[dict[str, Any]], pictures: list[Image.Image], most: int) -> Any:
        """Return (prompt ids, greedy answer ids) of a chat whose pictures are in order."""
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        values: dict[str, Any] = {}
        if pictures:
            with pillow_12_3_order():
                values = dict(self._images(pictures, return_tensors="pt"))
            counts = values["image_grid_thw"].prod(1) // (UNIT // PATCH) ** 2
            before, *rest = text.split(PLACEHOLDER)
            pairs = zip(counts.tolist(), rest, strict=True)
            text = before + "".join(PLACEHOLDER * count + after for count, after in pairs)
        ids = self._tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        if pictures:
            values["mm_token_type_ids"] = (ids == self.image_token).int()
        with single_stepping(self._model), torch.inference_mode():
            out = self._model.generate(ids, do_sample=False, max_new_tokens=most, **values)
        return ids[0].tolist(), out[0, ids.shape[1] :].tolist()
