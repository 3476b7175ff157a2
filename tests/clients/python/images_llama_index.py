"""Images of llama-index's OpenAILike."""

from __future__ import annotations

import base64
from typing import Any

from image_cells import (
    MODEL,
    NO_IMAGE,
    TARGET,
    TOKENS,
    check_one,
    check_refused,
    check_several,
    check_stream,
    run,
)
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike

LLM = OpenAILike(
    model=MODEL,
    is_chat_model=True,
    max_tokens=TOKENS,
    context_window=1024,
    max_retries=0,
    api_base=TARGET.base_url,
    api_key="none",
)


def ask(*images: bytes) -> list[ChatMessage]:
    shown: list[Any] = [ImageBlock(image=image, image_mimetype="image/png") for image in images]
    return [ChatMessage(role="user", blocks=[TextBlock(text=TARGET.question), *shown])]


def text_of(*images: bytes) -> str | None:
    return LLM.chat(ask(*images)).message.content


run(
    "llama-index",
    one=lambda: check_one(text_of(TARGET.bytes[0])),
    stream=lambda: check_stream(
        [part.delta for part in LLM.stream_chat(ask(TARGET.bytes[0])) if part.delta]
    ),
    several=lambda: check_several(text_of(*TARGET.bytes)),
    no_image=lambda: check_refused(lambda: text_of(base64.b64decode(NO_IMAGE))),
)
