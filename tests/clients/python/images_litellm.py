"""Images of litellm, with the APIs of OpenAI and Anthropic."""

from __future__ import annotations

from typing import Any

import litellm
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

SERVERS = {"openai": TARGET.base_url, "anthropic": TARGET.url}


def ask(provider: str, *urls: str, **fields: Any) -> Any:
    parts: list[Any] = [{"type": "text", "text": TARGET.question}]
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return litellm.completion(
        f"{provider}/{MODEL}",
        [{"role": "user", "content": parts}],
        max_tokens=TOKENS,
        api_base=SERVERS[provider],
        api_key="none",
        num_retries=0,
        **fields,
    )


def run_provider(provider: str) -> None:
    def text_of(*urls: str) -> str | None:
        return ask(provider, *urls).choices[0].message.content

    def streamed() -> None:
        chunks = ask(provider, TARGET.urls[0], stream=True)
        check_stream([text for chunk in chunks if (text := chunk.choices[0].delta.content)])

    run(
        f"litellm, {provider}/",
        one=lambda: check_one(text_of(TARGET.urls[0])),
        stream=streamed,
        several=lambda: check_several(text_of(*TARGET.urls)),
        no_image=lambda: check_refused(lambda: text_of(f"data:image/png;base64,{NO_IMAGE}")),
    )


for each in SERVERS:
    run_provider(each)
