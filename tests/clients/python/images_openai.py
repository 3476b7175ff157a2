"""Images of openai's client, in chats and in Responses."""

from __future__ import annotations

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
from openai import OpenAI

CLIENT = OpenAI(base_url=TARGET.base_url, api_key="none", max_retries=0)
CALL = {"type": "function", "id": "call_1", "function": {"name": TOOL, "arguments": "{}"}}


def shown(*urls: str) -> list[Any]:
    """Return the messages of a chat; the last image has a detail."""
    parts: list[Any] = [{"type": "text", "text": TARGET.question}]
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts[-1]["image_url"]["detail"] = "high"
    return [{"role": "user", "content": parts}]


def chat(*urls: str, **fields: Any) -> Any:
    return CLIENT.chat.completions.create(
        model=MODEL, max_tokens=TOKENS, messages=shown(*urls), **fields
    )


def text_of(*urls: str) -> Any:
    return chat(*urls).choices[0].message.content


def streamed() -> None:
    chunks = chat(TARGET.urls[0], stream=True)
    check_stream([text for chunk in chunks if (text := chunk.choices[0].delta.content)])


def of_tool(content: Any) -> int:
    """Return the length of a prompt in which a tool returned `content`."""
    answer = CLIENT.chat.completions.create(
        model=MODEL,
        max_tokens=TOKENS,
        messages=[
            {"role": "user", "content": "Look!"},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": content},
        ],
    )
    return int(answer.usage.prompt_tokens)


run(
    "openai, chats",
    one=lambda: check_one(text_of(TARGET.urls[0])),
    stream=streamed,
    several=lambda: check_several(text_of(*TARGET.urls)),
    tool_result=lambda: check_more(
        of_tool([{"type": "image_url", "image_url": {"url": TARGET.urls[0]}}]), of_tool("-")
    ),
    no_image=lambda: check_refused(lambda: chat(f"data:image/png;base64,{NO_IMAGE}")),
)


def inputs(*urls: str) -> list[Any]:
    parts: list[Any] = [{"type": "input_text", "text": TARGET.question}]
    parts += [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
    return [{"role": "user", "content": parts}]


def respond(*urls: str) -> Any:
    return CLIENT.responses.create(model=MODEL, max_output_tokens=TOKENS, input=inputs(*urls))


def respond_streamed() -> None:
    fields: dict[str, Any] = {"model": MODEL, "max_output_tokens": TOKENS}
    with CLIENT.responses.stream(**fields, input=inputs(TARGET.urls[0])) as events:
        check_stream([each.delta for each in events if each.type == "response.output_text.delta"])


def of_call(output: Any) -> int:
    answer = CLIENT.responses.create(
        model=MODEL,
        max_output_tokens=TOKENS,
        input=[
            {"role": "user", "content": "Look!"},
            {"type": "function_call", "call_id": "call_1", "name": TOOL, "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": output},
        ],
    )
    return int(answer.usage.input_tokens)


def counted(*urls: str) -> int:
    counts = CLIENT.responses.input_tokens.count(model=MODEL, input=inputs(*urls))
    return int(counts.input_tokens)


def count() -> None:
    assert [counted(TARGET.urls[0]), counted(*TARGET.urls)] == TARGET.tokens


run(
    "openai, Responses",
    one=lambda: check_one(respond(TARGET.urls[0]).output_text),
    stream=respond_streamed,
    several=lambda: check_several(respond(*TARGET.urls).output_text),
    tool_result=lambda: check_more(
        of_call([{"type": "input_image", "image_url": TARGET.urls[0]}]), of_call("-")
    ),
    count=count,
    no_image=lambda: check_refused(lambda: respond(f"data:image/png;base64,{NO_IMAGE}")),
)
