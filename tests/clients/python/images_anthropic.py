"""Images of anthropic's client."""

from __future__ import annotations

import io
from typing import Any

from anthropic import Anthropic
from image_cells import (
    MODEL,
    NO_IMAGE,
    TARGET,
    TOKENS,
    TOOL,
    check_more,
    check_one,
    check_refused,
    check_several,
    check_stream,
    run,
)

CLIENT = Anthropic(base_url=TARGET.url, api_key="none", max_retries=0)


def image(data: Any) -> dict[str, Any]:
    """Return a block with an image: base64, or a file that the client encodes."""
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


def fields(*data: Any) -> dict[str, Any]:
    blocks = [{"type": "text", "text": TARGET.question}, *map(image, data)]
    messages = [{"role": "user", "content": blocks}]
    return {"model": MODEL, "messages": messages}


def text_of(*data: Any) -> str:
    answer = CLIENT.messages.create(max_tokens=TOKENS, **fields(*data))
    return "".join(block.text for block in answer.content)


def one() -> None:
    check_one(text_of(TARGET.pictures[0]))
    check_one(text_of(io.BytesIO(TARGET.bytes[0])))


def stream() -> None:
    with CLIENT.messages.stream(max_tokens=TOKENS, **fields(TARGET.pictures[0])) as events:
        check_stream(events.text_stream)


def of_tool(content: Any) -> int:
    call = {"type": "tool_use", "id": "toolu_1", "name": TOOL, "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
    messages: list[Any] = [
        {"role": "user", "content": "Look!"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    return CLIENT.messages.count_tokens(model=MODEL, messages=messages).input_tokens


def count() -> None:
    counts = [
        CLIENT.messages.count_tokens(**fields(*data)).input_tokens
        for data in (TARGET.pictures[:1], TARGET.pictures)
    ]
    assert counts == TARGET.tokens, counts


run(
    "anthropic",
    one=one,
    stream=stream,
    several=lambda: check_several(text_of(*TARGET.pictures)),
    tool_result=lambda: check_more(of_tool([image(TARGET.pictures[0])]), of_tool("-")),
    count=count,
    no_image=lambda: check_refused(lambda: text_of(NO_IMAGE)),
)
