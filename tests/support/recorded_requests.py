"""Random requests of all kinds for the demo models, to be recorded and replayed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import Any

import httpx2

Body = dict[str, Any]

TEXTS = (
    "Once upon a time",
    "What is the capital of France?",
    "Tom has 3 apples and buys 4 more. How many apples does he have?",
    "Write a short story about a dog, a cat and a long way home. The dog begins.",
    "Hello!",
    "é 日本 🙂",
)
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
OPTIONS: dict[str, list[Any]] = {
    "temperature": [0, 0.3, 1, 2],
    "top_k": [0, 1, 5, 50],
    "top_p": [0, 0.5, 0.9, 1],
    "min_p": [0, 0.05, 0.3],
    "presence_penalty": [-1, 0.5, 2],
    "frequency_penalty": [-1, 0.5, 2],
    "repetition_penalty": [0.8, 1.3],
    "ignore_eos": [True, False],
    "stop": [["e"], [" the", "Tom"], "."],
    "stop_token_ids": [[13], [300, 301]],
    "bad_words": [["the"], ["a", "dog"]],
    "logit_bias": [{"300": 5, "301": -100}, {"14": 2.5}],
    "allowed_token_ids": [[2, 300, 301, 302, 303]],
    "cache_salt": ["x", "y"],
    "priority": [-1, 3],
    "n": [2],
}
GRAMMARS: list[Body] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"regex": "[a-c]{3,9} (yes|no)"}},
    {"structured_outputs": {"choice": ["red", "green", "blue sky"]}},
    {"structured_outputs": {"grammar": 'root ::= "a" [0-9]{2,5} "."'}},
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
]


def draw(number: int) -> tuple[str, Body]:
    """Return the path and the body of request `number`; equal numbers give equal requests."""
    rng = random.Random(number)
    body: Body = {"max_tokens": rng.choice([1, 2, 9, 20, 45, 90])}
    body |= {name: rng.choice(of) for name, of in OPTIONS.items() if rng.random() < 0.15}
    if rng.random() < 0.3:
        body["min_tokens"] = rng.randint(0, body["max_tokens"])
        body.pop("allowed_token_ids", None)  # a few tokens may all end the answer
    if rng.random() < 0.5:
        body["seed"] = rng.choice([-2, 0, rng.getrandbits(64) - 2**63])
    if rng.random() < 0.15 and "allowed_token_ids" not in body:
        body |= rng.choice(GRAMMARS)
    text = " ".join(rng.choices(TEXTS, k=rng.choice([1, 1, 2, 9])))
    if rng.random() < 0.4:
        body["messages"] = [{"role": "user", "content": text}]
        if rng.random() < 0.2:
            body |= {"logprobs": True, "top_logprobs": 3}
        return "/v1/chat/completions", body
    body["prompt"] = text
    if rng.random() < 0.3:
        body["prompt"] = [rng.randrange(3, 1500) for _ in range(rng.choice([1, 17, 64, 300]))]
    if rng.random() < 0.2:
        body["logprobs"] = 2
    if rng.random() < 0.1:
        body["prompt_logprobs"] = 1
    return "/v1/completions", body


def draw_uncertain(number: int) -> tuple[str, Body]:
    """Return a request whose tokens are close calls: small changes of logits change some."""
    rng = random.Random(number)
    prompt = [rng.randrange(3, 1500) for _ in range(rng.randint(1, 40))]
    body = {"prompt": prompt, "temperature": 1.8, "seed": number, "max_tokens": 40}
    return "/v1/completions", body | {"ignore_eos": True}


async def send_all(url: str, requests: Iterable[tuple[str, Body]], at_once: int) -> None:
    """Send the requests, `at_once` at a time. Fails if one is refused."""
    waiting = iter(enumerate(requests))
    async with httpx2.AsyncClient(base_url=url, timeout=120, verify=False) as http:

        async def work() -> None:
            for number, (path, body) in waiting:
                body |= {"stream": number % 2 == 0 and "prompt_logprobs" not in body}
                answer = await http.post(path, json=body)
                assert answer.status_code == 200, (number, body, answer.text)

        await asyncio.gather(*(work() for _ in range(at_once)))
