"""The pairs of texts of a request to a cross-encoder as token ids, and the scores of their logits.

A query's prompt, if the checkpoint has a default one, stands in front of the first texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.checkpoint.sentence_head import HeadActivation
from server.generation.embedding import Vectors
from server.generation.embedding_state import EmbeddingState
from server.generation.limits import check_token_ids
from server.generation.off_loop import off_loop
from server.generation.texts import EncodedText, encode_texts, too_long, truncation
from server.http.errors import invalid, unsupported
from server.state import AppState
from server.text.chat_pair import ChatPair
from server.text.pair_template import PairTemplate, cut


@dataclass(frozen=True)
class Side:
    """One side of the pairs.

    `prompt` names the checkpoint's prompt of vectors of these texts; None: the default one.
    """

    field: str  # of the request
    texts: Sequence[str]
    prompt: str | None = None

    def name(self, index: int) -> str:
        """Return the name of a text for an error; the only text may be in all pairs."""
        return self.field if len(self.texts) == 1 else f"{self.field}.{index}"


@dataclass(frozen=True)
class PairLimits:
    """Where a request allows pairs to be cut; by default nowhere.

    `pair` is the request's truncate_prompt_tokens. `second` is the most tokens of a second text.
    """

    pair: int | None = None
    second: int | None = None
    keep_end: bool = False


async def encode_pairs(
    state: AppState, own: EmbeddingState, first: Side, second: Side, limits: PairLimits
) -> list[EncodedText]:
    """Return the token ids of each pair; `first` may have one text for all.

    Raises a 400 ApiError if a pair is too long and must not be cut.
    """
    assert own.pairs is not None, "only models with a head read pairs"
    if isinstance(own.pairs, ChatPair):
        return await _encode_chats(state, own, own.pairs, first, second, limits)
    return await _encode_joined(
        state, own.pairs, first, second, limits, own.sentence.standard_prompt
    )


async def _encode_chats(
    state: AppState,
    own: EmbeddingState,
    chat: ChatPair,
    first: Side,
    second: Side,
    limits: PairLimits,
) -> list[EncodedText]:
    """Return the token ids of pairs by a chat template, which has the prompt.

    Raises a 400 ApiError if the limits would cut one: the template's own text must stay whole.
    """
    queries = list(first.texts) * (len(second.texts) if len(first.texts) == 1 else 1)
    texts = [chat.text(*pair) for pair in zip(queries, second.texts, strict=True)]
    pairs = await encode_texts(
        state, own.sentence, texts, None, second.field, add_special_tokens=False
    )
    longest = truncation(state, limits.pair, 0)
    if longest is not None:
        lengths = [len(pair.ids) for pair in pairs]
        _check_whole("truncate_prompt_tokens", lengths, longest)
    if limits.second is not None:
        lengths = await off_loop(
            sum(map(len, second.texts)),
            lambda: [len(_ids(state, text, second.field, is_cut=True)) for text in second.texts],
        )
        _check_whole("max_tokens_per_doc", lengths, limits.second)
    return pairs


def _check_whole(param: str, lengths: Sequence[int], most: int) -> None:
    """Raise a 400 ApiError if one of these texts of a chat template would be cut to `most`."""
    if max(lengths) > most:
        message = f"Pairs that a chat template writes are not cut: {max(lengths)} tokens to {most}."
        raise unsupported(param, message)


async def _encode_joined(
    state: AppState,
    template: PairTemplate,
    first: Side,
    second: Side,
    limits: PairLimits,
    prompt: str,
) -> list[EncodedText]:
    """Return the token ids of pairs that the tokenizer joins."""
    longest = state.max_length()
    if longest <= template.added_tokens:
        message = f"Pairs need more than {template.added_tokens} tokens; texts have up to {longest}"
        raise invalid(second.field, f"{message} here.")
    most = truncation(state, limits.pair, template.added_tokens)

    def encode() -> list[EncodedText]:
        queries = [
            _ids(state, prompt + text, first.name(n), is_cut=most is not None)
            for n, text in enumerate(first.texts)
        ]
        is_cut = most is not None or limits.second is not None
        pairs = []
        for n, text in enumerate(second.texts):
            ids = _ids(state, text, second.name(n), is_cut=is_cut)
            if limits.second is not None:
                ids = cut(ids, limits.second, keep_end=limits.keep_end)
            one = queries[n if len(queries) > 1 else 0]
            if most is not None:
                one, ids = template.fit(one, ids, most, keep_end=limits.keep_end)
            pairs.append(EncodedText(template.join(one, ids), second=template.second(one)))
        return pairs

    size = sum(map(len, first.texts)) + sum(map(len, second.texts))
    pairs = await off_loop(size, encode)
    for n, pair in enumerate(pairs):
        check_token_ids(state, pair.ids, second.name(n))
        if len(pair.ids) > longest:
            raise too_long(state, str(len(pair.ids)), second.name(n), "pair of texts")
    return pairs


def _ids(state: AppState, text: str, param: str, *, is_cut: bool) -> list[int]:
    """Return the token ids of a text without special tokens."""
    count = None if is_cut else state.tokenizer.far_over(text, state.max_length())
    if count:
        raise too_long(state, count, param)
    return state.tokenizer.encode(text, add_special_tokens=False)


def activated(logits: Vectors, activation: HeadActivation) -> Vectors:
    """Return `activation` of each row of logits [N, labels], computed in double precision."""
    numbers = logits.astype(np.float64)
    if activation == "Softmax":
        powers = np.exp(numbers - numbers.max(1, keepdims=True))
        numbers = powers / powers.sum(1, keepdims=True)
    elif activation == "Sigmoid":
        powers = np.exp(-np.abs(numbers))
        numbers = np.where(numbers >= 0, 1, powers) / (1 + powers)
    return numbers.astype(np.float32)
