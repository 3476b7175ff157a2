"""Images of langchain-openai and langchain-anthropic, in each form of their blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

PNG = "image/png"
Block = Callable[[str], dict[str, Any]]  # of a picture in base64
BLOCKS: dict[str, Block] = {
    "image_url": lambda data: {
        "type": "image_url",
        "image_url": {"url": f"data:{PNG};base64,{data}"},
    },
    "source_type": lambda data: {
        "type": "image",
        "source_type": "base64",
        "mime_type": PNG,
        "data": data,
    },
    "base64": lambda data: {"type": "image", "base64": data, "mime_type": PNG},
}


def chats() -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=TARGET.base_url, api_key="none", max_tokens=TOKENS, max_retries=0
    )


def responses() -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=TARGET.base_url,
        api_key="none",
        max_tokens=TOKENS,
        max_retries=0,
        use_responses_api=True,
    )


def messages() -> ChatAnthropic:
    return ChatAnthropic(
        model=MODEL, base_url=TARGET.url, api_key="none", max_tokens=TOKENS, max_retries=0
    )


def run_client(name: str, client: Any, block: Block) -> None:
    def ask(*pictures: str) -> list[HumanMessage]:
        parts: list[Any] = [{"type": "text", "text": TARGET.question}]
        return [HumanMessage(parts + [block(picture) for picture in pictures])]

    def of_tool(content: Any) -> int:
        call = {"name": TOOL, "args": {}, "id": "call_1", "type": "tool_call"}
        history = [
            HumanMessage("Look!"),
            AIMessage("", tool_calls=[call]),
            ToolMessage(content, tool_call_id="call_1"),
        ]
        return int(client.invoke(history).usage_metadata["input_tokens"])

    def streamed() -> None:
        check_stream([part.text for part in client.stream(ask(TARGET.pictures[0])) if part.text])

    run(
        name,
        one=lambda: check_one(client.invoke(ask(TARGET.pictures[0])).text),
        stream=streamed,
        several=lambda: check_several(client.invoke(ask(*TARGET.pictures)).text),
        tool_result=lambda: check_more(of_tool([block(TARGET.pictures[0])]), of_tool("-")),
        no_image=lambda: check_refused(lambda: client.invoke(ask(NO_IMAGE))),
    )


for style, each in BLOCKS.items():
    run_client(f"langchain-openai, chats, {style}", chats(), each)
    run_client(f"langchain-openai, Responses, {style}", responses(), each)
    run_client(f"langchain-anthropic, {style}", messages(), each)
