"""From a valid body to a Plan: prompt ids, sampling parameters, limits. Ends before the 200."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
import orjson
from starlette.datastructures import Headers
from starlette.requests import Request

from engine.protocol import SamplingParams
from server.api.openai.schemas.chat import ChatBody, ChatMessage
from server.api.openai.schemas.completion import CompletionBody
from server.api.openai.schemas.generate import GenerateBody
from server.api.openai.schemas.tokenize import TokenizeBody
from server.generation.off_loop import off_loop
from server.http.errors import ApiError, invalid, unsupported
from server.state import AppState
from server.text.detokenizer import Detokenizer

MAX_PROMPT_LOGPROBS = 2**18  # log-probabilities of prompts' tokens in an answer
MAX_ANSWER_LOGPROBS = 2**22  # of its own, where it has several choices: up to 1 GB
TOKEN_ID = re.compile("0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as text, and how many characters of it come before each of its tokens."""

    text: str
    offsets: list[int]


@dataclass(frozen=True)
class PreparedRequest:
    """What one HTTP request asks of the engine, checked and tokenised."""

    model: str
    prompts: list[list[int]]
    start_token: int | None  # if any, answers begin with it, and the prompts are their sources
    params: list[SamplingParams]  # one for each prompt; choice k of it has seed + k
    body: GenerateBody
    echoes: list[Echo] | None  # ahead of each prompt's answers
    ignored: list[str]
    arrival: float
    request_id: str
    headers: Headers  # of the request, for the trace it is part of
    salt: str

    @property
    def n(self) -> int:
        return self.body.n or 1


def message_dict(message: ChatMessage) -> dict[str, Any]:
    """A message as templates expect it: developer is system, tool arguments are objects."""
    fields: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.text,
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            fields[name] = value
    if message.tool_calls:
        fields["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return fields


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"] or "{}")
    except orjson.JSONDecodeError:
        return call  # the model wrote broken JSON; the template shows it as it was
    return {**call, "function": {**function, "arguments": arguments}}


def template_arguments(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    given = body.chat_template_kwargs
    arguments = given.model_dump(exclude_none=True) if given else {}
    if isinstance(body, ChatBody) and body.reasoning_effort is not None:
        arguments.setdefault("reasoning_effort", body.reasoning_effort)
    return arguments


def unread_arguments(state: AppState, body: ChatBody | TokenizeBody) -> list[str]:
    """Arguments the model's template never looks at: they change nothing."""
    read = state.template.variables if state.template else frozenset()
    return [name for name in template_arguments(body) if name not in read]


def render(state: AppState, body: ChatBody | TokenizeBody) -> str:
    """The prompt text of a chat; raises TemplateError or ApiError."""
    if state.template is None:
        message = "This model has no chat template; use /v1/completions or --chat-template."
        raise unsupported("messages", message)
    return state.template.render(
        [message_dict(message) for message in body.messages or ()],
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        **template_arguments(body),
    )


def source_text(body: ChatBody | TokenizeBody) -> str:
    """What an encoder–decoder without a chat template reads: the one message of the user."""
    messages = list(body.messages or ())
    if [message.role for message in messages] != ["user"]:
        roles = ", ".join(message.role for message in messages)
        message = f"This model has no chat template: it reads one user message, not {roles}."
        raise unsupported("messages", message)
    for name, asked in (
        ("add_generation_prompt", body.add_generation_prompt is False),
        ("continue_final_message", body.continue_final_message),
    ):
        if asked:
            raise unsupported(name, "This model has no chat template, so nothing is added.")
    return messages[0].text


async def chat_prompt(state: AppState, body: ChatBody | TokenizeBody, body_bytes: int) -> list[int]:
    """The prompt of a chat. `body_bytes`, the length of the request, bounds what there is to
    render: long are not only texts but tool calls, too."""
    if state.template is None and state.start_token is not None:
        text = source_text(body)
        add = isinstance(body, ChatBody) or body.add_special_tokens is not False
    else:
        text = await off_loop(body_bytes, lambda: render(state, body))
        # The template has written the special tokens: adding them again would double the BOS.
        add = isinstance(body, TokenizeBody) and bool(body.add_special_tokens)

    def work() -> list[int]:
        if isinstance(body, TokenizeBody):
            return state.tokenizer.encode(text, add_special_tokens=add)
        return encode_prompt(state, text, "messages", add=add)

    return await off_loop(len(text), work)


async def text_prompts(
    state: AppState, prompts: Sequence[str] | Sequence[list[int]]
) -> list[list[int]]:
    def work() -> list[list[int]]:
        return [encode_prompt(state, p, "prompt") if isinstance(p, str) else p for p in prompts]

    return await off_loop(sum(len(prompt) for prompt in prompts), work)


async def make_echoes(state: AppState, body: CompletionBody) -> list[Echo]:
    """The prompts as texts, of token ids as the answer's are decoded."""
    tokenizer, skip = state.tokenizer, body.skip_special_tokens is not False

    def echo(prompt: str | list[int]) -> Echo:
        if isinstance(prompt, str):
            return Echo(prompt, tokenizer.offsets(prompt) if body.logprobs is not None else [])
        text = tokenizer.decode(prompt, skip_special_tokens=skip)
        if body.logprobs is None:
            return Echo(text, [])
        push = Detokenizer(tokenizer, skip_special_tokens=skip).push
        return Echo(text, [0, *accumulate(len(push((token,))) for token in prompt[:-1])])

    prompts = body.prompts
    return await off_loop(sum(map(len, prompts)), lambda: list(map(echo, prompts)))


def prepare(
    state: AppState,
    request: Request,
    body: GenerateBody,
    prompts: list[list[int]],
    *,
    param: str,
    echoes: list[Echo] | None = None,
    ignored: Sequence[str] = (),
) -> PreparedRequest:
    """Checks everything that needs the model's facts. `param` names the prompt's field."""
    for name, wanted in (("echo", echoes), ("prompt_logprobs", body.num_prompt_logprobs >= 0)):
        if wanted and state.start_token is not None:
            raise unsupported(name, "This model's answers do not continue the prompt.")
    for prompt in prompts:
        check_token_ids(state, prompt, param)
    check_token_ids(state, body.stop_token_ids or (), "stop_token_ids")
    _check_logit_bias(state, body.logit_bias or ())
    # As in vLLM and llama.cpp -1 is none: front ends send it who want another answer each time.
    seed = secrets.randbits(63) if body.seed in (None, -1) else body.seed
    limits = [_token_limit(state, body, prompt, param) for prompt in prompts]
    _check_scores(body, sum(map(len, prompts)))
    _check_answer_scores(body, limits)
    base = _sampling(state, body, seed)
    if body.min_tokens and body.min_tokens > min(limits):
        raise invalid("min_tokens", f"min_tokens must be at most {min(limits)} here.")
    if body.min_tokens and not _leaves_a_token(state, base):
        message = "stop_token_ids hold every token there is, so that none is left to begin with."
        raise invalid("stop_token_ids", message)
    return PreparedRequest(
        model=state.model_name(body.model),
        prompts=prompts,
        start_token=state.start_token,
        params=[msgspec.structs.replace(base, max_tokens=limit) for limit in limits],
        body=body,
        echoes=echoes,
        ignored=[*body.ignored, *ignored],
        arrival=request.state.arrival,
        request_id=request.state.request_id,
        headers=request.headers,
        salt=f"{request.state.tenant}{body.cache_salt or ''}",
    )


def encode_prompt(state: AppState, text: str, param: str, *, add: bool = True) -> list[int]:
    """The ids of `text`, with special tokens if `add`. Raises a 400 where its beginning is too long
    by itself."""
    longest = state.max_length()
    if count := state.tokenizer.far_over(text, longest):
        raise too_long(longest, f"the prompt alone has {count}", param)
    return state.tokenizer.encode(text, add_special_tokens=add)


def too_long(longest: int, requested: str, param: str) -> ApiError:
    # LiteLLM looks for these words before it tries a model with a longer context.
    message = f"This model's maximum context length is {longest} tokens, but {requested}."
    return invalid(param, message, "context_length_exceeded")


def check_token_ids(state: AppState, ids: Sequence[int], param: str) -> None:
    vocab_size = state.loaded().vocab_size
    if (largest := max(ids, default=0)) >= vocab_size:
        message = f"Token id {largest} is not below the vocabulary size {vocab_size}."
        raise invalid(param, message)


def _check_logit_bias(state: AppState, keys: Iterable[str]) -> None:
    vocab_size = state.loaded().vocab_size
    for key in keys:
        # "07" would be token 7 a second time.
        if not (TOKEN_ID.fullmatch(key) and int(key) < vocab_size):
            message = f"Key {key[:32]!r} is not a token id below {vocab_size}."
            raise invalid("logit_bias", message)


def _check_scores(body: GenerateBody, tokens: int) -> None:
    """A prompt is read in a moment: what is told of it must not take gigabytes."""
    entries = tokens * (body.n or 1) * (body.num_prompt_logprobs + 1)
    if entries > MAX_PROMPT_LOGPROBS:
        name = "logprobs" if body.num_prompt_logprobs == body.num_logprobs else "prompt_logprobs"
        message = (
            f"{tokens} tokens of prompts have {entries} log-probabilities for all choices, more "
            f"than the {MAX_PROMPT_LOGPROBS} of a request."
        )
        raise invalid(name, message)


def _check_answer_scores(body: GenerateBody, limits: list[int]) -> None:
    """An answer that is not streamed is held until its end. One choice always may be: its context
    bounds it."""
    choices = len(limits) * (body.n or 1)
    entries = sum(limits) * (body.n or 1) * (body.num_logprobs + 1)
    if entries > MAX_ANSWER_LOGPROBS and choices > 1 and not body.stream:
        message = (
            f"{choices} choices of up to {max(limits)} tokens may have {entries} "
            f"log-probabilities, more than the {MAX_ANSWER_LOGPROBS} of an answer: stream it, or "
            "ask for less with max_tokens."
        )
        raise invalid("logprobs", message)


def _leaves_a_token(state: AppState, params: SamplingParams) -> bool:
    """Whether one can be drawn before `min_tokens`; vocabularies of bytes are small."""
    vocab_size = state.loaded().vocab_size
    never = (token for token, bias in params.logit_bias if bias == float("-inf"))
    return sum(token < vocab_size for token in {*never, *params.stop_token_ids}) < vocab_size


def _token_limit(state: AppState, body: GenerateBody, prompt: list[int], param: str) -> int:
    """How many tokens may be generated after `prompt`, or beside it and after a start token."""
    longest, length = state.max_length(), len(prompt)
    if not length:
        raise invalid(param, "The prompt has no tokens.")
    asked, begun, beginning = body.max_new_tokens, length, "in the prompt"
    if state.start_token is not None:
        begun, beginning = 1, "its start"
    if max(length, begun + (asked or 1)) > longest:
        requested = (
            f"you asked for {begun + asked} ({begun} {beginning}, {asked} in the answer)"
            if asked and length <= longest
            else f"the prompt alone has {length}"
        )
        if length == longest and not asked:
            requested += ", which leaves no room for one more"
        raise too_long(longest, requested, param)
    return longest - begun if asked is None else asked


def _sampling(state: AppState, body: GenerateBody, seed: int) -> SamplingParams:
    """What is absent comes from the checkpoint's generation_config.json, else from OpenAI."""

    def chosen(name: str, fallback: float) -> Any:
        value = getattr(body, name)
        return state.tokenizer.defaults.get(name, fallback) if value is None else value

    top_k, top_p = max(int(chosen("top_k", 0)), 0), float(chosen("top_p", 1.0))
    ends = () if body.ignore_eos else state.tokenizer.eos_token_ids
    bias = {int(key): float(value) for key, value in (body.logit_bias or {}).items()}
    vocab_size = state.loaded().vocab_size
    bias |= {i: float("-inf") for i in state.tokenizer.suppressed_ids if i < vocab_size}
    return SamplingParams(
        max_tokens=1,
        temperature=float(chosen("temperature", 1.0)),
        top_k=1 if top_p == 0 else top_k,  # an empty nucleus still holds the likeliest token
        top_p=top_p or 1.0,
        min_p=float(chosen("min_p", 0.0)),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=float(chosen("repetition_penalty", 1.0)),
        logit_bias=tuple(bias.items()),
        seed=seed,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(sorted({*ends, *(body.stop_token_ids or ())})),
        logprobs=body.num_logprobs,
        prompt_logprobs=body.num_prompt_logprobs,
    )
