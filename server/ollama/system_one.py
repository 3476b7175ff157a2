"""POST /v1/systemone: questions answered by the probabilities of their options, without a text.

Each option has a letter. The model reads the state and a question with its options, and the
probabilities of the letters as the next token are those of the options. The state comes first, so
that the prompts of all questions share its blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import exp, inf
from string import ascii_letters
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from server.generation.chat_prompt import Chat, chat_prompt
from server.generation.events import ChoiceEvents, TextDelta
from server.generation.generation import Generation
from server.generation.options import GenerationOptions
from server.generation.prepare import prepare
from server.generation.thinking import Thinking
from server.http.body import ignored_header
from server.http.disconnect import cancel_on_disconnect
from server.http.errors import unsupported
from server.http.openapi import body_schema
from server.ollama.receive import admit_and_read
from server.ollama.system_one_schemas import Option, Question, SystemOneBody, text_of
from server.state import state_of
from server.text import exact_json
from server.text.tokenizer import Tokenizer

router = APIRouter()
Json = dict[str, Any]
LETTERS = ascii_letters.swapcase()  # capitals first
BEGINNING = "Answer:"  # of the answer; the letter follows
PROMPT = """\
{state}

Question: {question}

Options:
{options}

Answer with the letter of one option."""


@router.post("/v1/systemone", openapi_extra=body_schema(SystemOneBody, task="generate"))
async def system_one(request: Request) -> Response:
    """Answer questions about a state by the probabilities of their options (System One)."""
    state = state_of(request)
    body = await admit_and_read(request, SystemOneBody, "generate")
    if state.template is None:
        raise unsupported("model", "model: System One needs a chat model, which has a template.")
    letters = letter_tokens(state.tokenizer)
    options = {name: question.answers() for name, question in body.questions.items()}
    for name, given in options.items():
        if len(given) > len(letters):
            message = f"the vocabulary has {len(letters)} letters, fewer than {len(given)} options"
            raise unsupported(f"questions.{name}.criteria", f"questions.{name}: {message}.")
    with state.client.reserve(request.state.tenant):
        prompts = [
            (await chat_prompt(state, _chat(body.state, question, options[name]))).ids
            for name, question in body.questions.items()
        ]
    prepared = prepare(
        state, request, _options(body, letters), prompts, param="state", ignored=body.ignored
    )
    with Generation(state, prepared) as generation:
        found = await cancel_on_disconnect(request.receive, generation.collect())
        usage = generation.final_usage()
    answers = {
        name: answer_of(question, options[name], _logprobs(events), letters)
        for (name, question), events in zip(body.questions.items(), found, strict=True)
    }
    counted = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
    answer = {"model": prepared.model, "answers": answers, "usage": counted}
    headers = ignored_header(body.ignored)
    return Response(exact_json.dumps(answer), media_type="application/json", headers=headers)


@lru_cache(maxsize=1)  # of the served model
def letter_tokens(tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens that write each letter after `BEGINNING`, with and without a space.

    The first letter that takes several tokens ends them.
    """
    start = tokenizer.encode(BEGINNING, add_special_tokens=False)
    found = []
    for letter in LETTERS:
        tokens: list[int] = []
        for text in (f" {letter}", letter):
            ids = tokenizer.encode(BEGINNING + text, add_special_tokens=False)
            if ids[:-1] == start:
                tokens.append(ids[-1])
        if not tokens:
            break
        found.append(tuple(tokens))
    return tuple(found)


def _chat(content: Any, question: Question, options: Sequence[Option]) -> Chat:
    """Return a question as a chat whose answer has begun; the model does not think before it."""
    lines = [f"{LETTERS[place]}. {option.text}" for place, option in enumerate(options)]
    text = PROMPT.format(
        state=text_of(content),
        question=text_of(question.instructions),
        options="\n".join(lines),
    )
    messages = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": BEGINNING},
    ]
    return Chat(
        messages=messages,
        arguments={},
        thinking=Thinking(is_on=False),
        add_generation_prompt=False,
        continue_final_message=True,
    )


def _options(body: SystemOneBody, letters: Sequence[Sequence[int]]) -> GenerationOptions:
    """Return the parameters that compute the logprobs of the letters as the next token."""
    most = max(len(question.answers()) for question in body.questions.values())
    tokens = [token for variants in letters[:most] for token in variants]
    return GenerationOptions(
        operation="chat",
        model=body.model,
        max_tokens=1,
        ignore_eos=True,  # an end token would have no logprobs
        skip_special_tokens=False,
        sampling={"temperature": 0},
        num_logprobs=len(tokens),
        logprob_token_ids=tokens,
    )


def _logprobs(answer: ChoiceEvents) -> dict[int, float]:
    """Return the logprobs of the letters' tokens."""
    for event in answer.events:
        if isinstance(event, TextDelta) and event.logprobs:
            logprobs = event.logprobs[0].logprobs
            assert logprobs is not None, "they were requested"
            return dict(logprobs.top)
    raise AssertionError("the answer has one token")


def answer_of(
    question: Question,
    options: Sequence[Option],
    logprobs: Mapping[int, float],
    letters: Sequence[Sequence[int]],
) -> Json:
    """Return the answer to a question.

    Probabilities are those of the letters, relative to their sum. `option_mass` is this sum: a
    small one shows that the model would rather write something else. `confidence` is 0 for equal
    probabilities and 1 for a certain answer.
    """
    own = [[logprobs.get(token, -inf) for token in letters[n]] for n in range(len(options))]
    highest = max(max(each) for each in own)
    weights = [sum(exp(logprob - highest) for logprob in each) for each in own]
    total = sum(weights)
    shares = [weight / total for weight in weights]
    probabilities = {option.key: share for option, share in zip(options, shares, strict=True)}
    mass = min(total * exp(highest), 1.0)
    if question.type == "noul":
        return {"type": "noul", "noul": probabilities["true"], "option_mass": mass}
    fields: Json = {
        "type": question.type,
        "probabilities": probabilities,
        "confidence": confidence(shares),
        "option_mass": mass,
    }
    if question.type == "choice":
        return fields | {"choice": max(probabilities, key=lambda key: probabilities[key])}
    expected = sum(level * share for level, share in enumerate(shares))
    legend = {option.key: option.text for option in options}
    return fields | {"score": expected, "legend": legend}


def confidence(shares: Sequence[float]) -> float:
    """Return how far the highest probability is above that of equal ones, from 0 to 1."""
    count = len(shares)
    if count == 1:
        return 1.0
    return (max(shares) * count - 1) / (count - 1)
