"""Processors of transformers that write an image's text into a prompt, with a tiny tokenizer.

Some need a processor of videos, which needs torchvision, and are made without their constructor.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.server.images.processors.cases import Case

NAMED = {
    "gemma3": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
    "gemma4": {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"},
    "pixtral": {},
    "idefics3": {},
    "smolvlm": {},
    "llava_next": {},
    "llava_onevision": {},
    "qwen2_vl": {},
    "qwen3_vl": {},
}
SPECIAL = [
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<video>"),
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>", "<|image>", "<image|>"),
    *("<|image|>", "<|image_pad|>", "<|video_pad|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
]


@functools.cache
def tokenizer_of(family: str) -> Any:
    """Return a tokenizer of characters in which two newlines merge, as in large vocabularies."""
    vocabulary = {chr(i): i for i in range(128)} | {"\n\n": 128}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("\n", "\n")]))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, extra_special_tokens=NAMED[family]
    )
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL, "pad_token": "\x00"})
    return tokenizer


def family_of(case: Case) -> str:
    return {
        "Idefics3ForConditionalGeneration": "idefics3",
        "SmolVLMForConditionalGeneration": "smolvlm",
        "Gemma3ForConditionalGeneration": "gemma3",
        "Gemma4ForConditionalGeneration": "gemma4",
        "LlavaNextForConditionalGeneration": "llava_next",
        "LlavaOnevisionForConditionalGeneration": "llava_onevision",
        "Mistral3ForConditionalGeneration": "pixtral",
        "Qwen2_5_VLForConditionalGeneration": "qwen2_vl",
        "Qwen3VLForConditionalGeneration": "qwen3_vl",
    }[case.architecture]


def processor_class(family: str) -> Any:
    name = f"transformers.models.{family}.processing_{family}"
    with pytest.MonkeyPatch.context() as patch:
        if family == "pixtral":  # it imports one function from the class of torchvision
            module = "transformers.models.pixtral.image_processing"
            pil = importlib.import_module(f"{module}_pil_pixtral")
            patch.setitem(sys.modules, f"{module}_pixtral", pil)
        module_of_family = importlib.import_module(name)
    [found] = module_of_family.__all__
    return getattr(module_of_family, found)


@functools.cache
def reference_prompt(case: Case) -> Any:
    """Return transformers' processor of text and pictures."""
    family = family_of(case)
    kind = processor_class(family)
    tokenizer = tokenizer_of(family)
    image_processor = case.reference(**case.values)
    if family in ("idefics3", "gemma3", "llava_next"):
        return kind(image_processor, tokenizer, **_constructor(case, family))
    found = object.__new__(kind)
    settings = {
        "image_processor": image_processor,
        "tokenizer": tokenizer,
        "chat_template": None,
        **_attributes(case, family),
    }
    for name, value in settings.items():
        setattr(found, name, value)
    for name in ("image_token", "video_token"):
        if text := getattr(found, name, None):
            setattr(found, f"{name}_id", tokenizer.convert_tokens_to_ids(text))
    return found


def _constructor(case: Case, family: str) -> dict[str, Any]:
    if family == "llava_next":
        default = {"num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
        return {**case.processor, **default}
    return case.processor


def _attributes(case: Case, family: str) -> dict[str, Any]:
    return {
        "smolvlm": {
            **case.processor,
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "video_token": "<video>",
        },
        "gemma4": {
            **NAMED["gemma4"],
            **dict.fromkeys(("video_token", "audio_token"), None),
            **dict.fromkeys(("boa_token", "eoa_token"), "<audio>"),
        },
        "pixtral": {
            **case.processor,
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
        "llava_onevision": {
            **case.processor,
            "image_token": "<image>",
            "video_token": "<video>",
            "vision_aspect_ratio": "anyres_max_9",
        },
        "qwen2_vl": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
        "qwen3_vl": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    }[family]
