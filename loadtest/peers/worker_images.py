"""A worker for transformers: the seconds from a picture's bytes to the first token of its answer.

Each line of stdin has the base64 of a picture and a question. Processing is that of SmolVLM's image
processor, with Pillow.
"""

from __future__ import annotations

import base64
import io
import json
import sys
import time
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoTokenizer, SmolVLMForConditionalGeneration
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from loadtest.random_smolvlm import FAKE, IMAGE, OVERVIEW, PER_TILE


def shown(rows: int, columns: int) -> str:
    """Return the text of a picture that is cut into tiles."""
    tile = IMAGE * PER_TILE
    lines = [
        "".join(f"{FAKE}<row_{r}_col_{c}>{tile}" for c in range(1, columns + 1)) + "\n"
        for r in range(1, rows + 1)
    ]
    return "".join(lines) + f"\n{FAKE}{OVERVIEW}{tile}{FAKE}"


class Worker:
    def __init__(self, folder: Path) -> None:
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        settings.pop("image_processor_type")
        self._images = SmolVLMImageProcessorPil(**settings)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        load = SmolVLMForConditionalGeneration.from_pretrained
        self._model = load(folder, dtype=torch.bfloat16).eval()

    def first_token(self, data: str, question: str) -> tuple[float, int]:
        """Return (seconds, tokens of the prompt)."""
        began = time.monotonic()
        picture = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
        found = self._images([[picture]], return_tensors="pt", return_row_col_info=True)
        rows, columns = found.pop("rows")[0][0], found.pop("cols")[0][0]
        parts = [{"type": "image"}, {"type": "text", "text": question}]
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=False
        )
        text = text.replace(IMAGE, shown(rows, columns))
        inputs = self._tokenizer(text, add_special_tokens=False, return_tensors="pt")
        ids = inputs.input_ids
        with torch.inference_mode():
            values = {**found, "attention_mask": torch.ones_like(ids)}
            self._model.generate(
                input_ids=ids, do_sample=False, max_new_tokens=1, pad_token_id=0, **values
            )
        return time.monotonic() - began, ids.shape[1]


def main() -> None:
    worker = Worker(Path(json.loads(sys.stdin.readline())["model"]))
    print("{}", flush=True)
    for line in sys.stdin:
        message = json.loads(line)
        seconds, tokens = worker.first_token(message["picture"], message["question"])
        print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
