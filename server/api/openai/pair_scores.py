"""Scores of pairs of texts, for /v1/score, /v1/rerank and Cohere's /v2/rerank."""

from __future__ import annotations

from starlette.requests import Request

from server.api.openai.schemas.embedding import EncoderBody
from server.api.openai.vectors import Usage, embed_tokens
from server.generation.embedding import Vectors, finished, similarities
from server.generation.embedding_state import embedding_state_of
from server.generation.pairs import PairLimits, Side, activated, encode_pairs
from server.generation.texts import encode_texts
from server.http.errors import unsupported
from server.state import state_of


async def pair_scores(
    request: Request,
    body: EncoderBody,
    first: Side,
    second: Side,
    limits: PairLimits,
    raw_field: str | None = None,
) -> tuple[Vectors, Usage]:
    """Return the score [N] of each pair of texts, and the usage; `first` may be one for all.

    A model with a head reads a pair as one text. Of other models the score is the similarity of
    the vectors of the texts, each encoded once. `raw_field` names the field of a request that asks
    for logits; None: there is none.
    """
    own = embedding_state_of(request)
    if own.pairs is not None:
        return await _head_scores(request, body, first, second, limits, raw_field)
    if raw_field is not None:
        message = "The model's scores are similarities of vectors, which have no activation."
        raise unsupported(raw_field, message)
    return await _similarities(request, body, first, second, limits)


async def _head_scores(
    request: Request,
    body: EncoderBody,
    first: Side,
    second: Side,
    limits: PairLimits,
    raw_field: str | None,
) -> tuple[Vectors, Usage]:
    state, own = state_of(request), embedding_state_of(request)
    assert own.sentence.head is not None
    with state.client.reserve(request.state.tenant):
        pairs = await encode_pairs(state, own, first, second, limits)
    logits, usage = await embed_tokens(request, body, pairs)
    activation = own.sentence.head.of_scores if raw_field is None else "Identity"
    return activated(logits, activation)[:, 0], usage


async def _similarities(
    request: Request, body: EncoderBody, first: Side, second: Side, limits: PairLimits
) -> tuple[Vectors, Usage]:
    state, sentence = state_of(request), embedding_state_of(request).sentence
    most_of_second = limits.pair
    if limits.second is not None:
        most_of_second = min(limits.second + state.tokenizer.added_tokens, state.max_length())
    with state.client.reserve(request.state.tenant):
        one, other = [
            await encode_texts(
                state,
                sentence,
                side.texts,
                most,
                side.field,
                keep_end=limits.keep_end,
                prompt=sentence.prompts[side.prompt] if side.prompt else sentence.standard_prompt,
            )
            for side, most in ((first, limits.pair), (second, most_of_second))
        ]
    vectors, usage = await embed_tokens(request, body, one + other)
    vectors = finished(vectors, sentence)
    return similarities(vectors[: len(one)], vectors[len(one) :], sentence.similarity), usage
