#!/usr/bin/env bash
# transformers 5.24.0 does not read a null in preprocessor_config.json as an absent setting. A step
# that is null is off, where an absent one is on: no resizing, no rescaling, no normalization, no
# splitting into tiles. Other settings that are null raise an error when the first image arrives.
# Gemma3Processor ignores `do_pan_and_scan` in that file: its class has the value false, which it
# passes to the image processor. The image processor alone obeys the file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 Pillow==13.0.0
"$folder/venv/bin/python" - 2> "$folder/log" <<'PYTHON' || { cat "$folder/log"; exit 1; }
import sys

import transformers
from PIL import Image
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

picture = Image.new("RGB", (900, 300), (255, 0, 0))
steps = ("do_resize", "do_rescale", "do_normalize")
small = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}


def pixels(kind, **settings):
    return kind(**settings)(picture, return_tensors="np")["pixel_values"]


absent = pixels(Gemma3ImageProcessorPil)
null = pixels(Gemma3ImageProcessorPil, **dict.fromkeys(steps))
try:
    pixels(Gemma3ImageProcessorPil, image_mean=None)
    error = None
except ValueError as caught:
    error = str(caught)
names = {"boi_token": "<b>", "eoi_token": "<e>", "image_token": "<i>"}
backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate("abc \n")}, merges=[]))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, extra_special_tokens=names)
crops = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
image_processor = Gemma3ImageProcessorPil(**crops)
whole = Gemma3Processor(image_processor, tokenizer, image_seq_length=1)
found = {
    "absent: shape and largest value": [absent.shape, float(absent.max())],
    "null: shape and largest value": [null.shape, float(null.max())],
    "tiles of Idefics3: absent, null": [
        pixels(Idefics3ImageProcessorPil, **small).shape[1],
        pixels(Idefics3ImageProcessorPil, **small, do_image_splitting=None).shape[1],
    ],
    "image_mean null is an error": error is not None,
    "pictures with pan and scan in the file: image processor, Gemma3Processor": [
        len(image_processor(picture, return_tensors="np")["pixel_values"]),
        len(whole(images=picture, text="<b>")["pixel_values"]),
    ],
}
print("transformers", transformers.__version__)
for name, value in found.items():
    print(f"{name}: {value}")
expected = [[(1, 3, 224, 224), 1.0], [(1, 3, 300, 900), 255.0], [3, 1], True, [4, 1]]
sys.exit(list(found.values()) != expected)
PYTHON
