"""The texts of an embedding request as token ids, with the prompt in front of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from engine.checkpoint.sentence import SentenceConfig
from server.generation.limits import check_token_ids, context_exceeded
from server.generation.off_loop import off_loop
from server.http.errors import ApiError, invalid, unsupported
from server.state import AppState

Texts = Sequence[str | list[int] | list[int | str]]  # texts, their token ids, or both
WHOLE_CONTEXT = -1  # value of truncate_prompt_tokens
# LangChain sends token ids of OpenAI's models by default: docs/embedding-clients.md.
OF_ANOTHER_MODEL = (
    "Send texts, or ids of this model's tokenizer. LangChain's OpenAIEmbeddings sends texts with "
    "check_embedding_ctx_length=False."
)


class EncodedText(NamedTuple):
    """The token ids of a text, or of a pair of texts."""

    ids: list[int]
    skip: int = 0  # tokens of the prompt that are read, but not pooled
    second: int = 0  # the first token of the other text; 0: not a pair


async def encode_texts(
    state: AppState,
    sentence: SentenceConfig,
    texts: Texts,
    truncate: int | None,
    param: str,
    *,
    keep_end: bool = False,
    add_special_tokens: bool = True,
    prompt: str = "",
) -> list[EncodedText]:
    """Return the token ids of each text, with special tokens unless `add_special_tokens` is false.

    `prompt` is put in front of each text. Given ids are returned as they are, without the prompt.

    `truncate` is the request's truncate_prompt_tokens, and `param` names the field of the texts.
    With `keep_end` a text that is too long loses its beginning.
    Raises a 400 ApiError if a text is too long and must not be truncated, or if nothing of it is
    pooled.
    """
    added = state.tokenizer.added_tokens if add_special_tokens else 0
    limit = truncation(state, truncate, added)
    names = [param] if len(texts) == 1 else [f"{param}.{index}" for index in range(len(texts))]
    named = list(zip(texts, names, strict=True))
    token_lists = await off_loop(
        sum(map(len, texts)),
        lambda: [
            _encode(state, prompt, text, limit, name, keep_end, add_special_tokens)
            for text, name in named
        ],
    )
    for ids, name in zip(token_lists, names, strict=True):
        check_token_ids(state, ids, name, advice=OF_ANOTHER_MODEL)
        if len(ids) > state.max_length():
            raise too_long(state, str(len(ids)), name)
    if not prompt or sentence.pooler.includes_prompt:
        return [EncodedText(ids) for ids in token_lists]
    skip = _prompt_tokens(state, prompt, add_special_tokens)

    def cut(text: str, ids: list[int]) -> int:
        """Return how many tokens a text has lost at its beginning."""
        if not keep_end or len(ids) != limit:
            return 0
        whole = state.tokenizer.encode(prompt + text, add_special_tokens=add_special_tokens)
        return len(whole) - len(ids)

    return [
        EncodedText(ids, _skipped(state, ids, skip, cut(text, ids), name))
        if isinstance(text, str)
        else EncodedText(ids)
        for ids, (text, name) in zip(token_lists, named, strict=True)
    ]


def _prompt_tokens(state: AppState, prompt: str, add_special_tokens: bool) -> int:
    """Return how many tokens a prompt takes, as sentence-transformers counts them.

    That is the length of the prompt alone, with the start token, and without an end token.
    """
    ids = state.tokenizer.encode_part(
        prompt, state.max_length(), add_special_tokens=add_special_tokens
    )
    return len(ids) - (ids[-1] in state.tokenizer.special_ids)


def _skipped(state: AppState, ids: list[int], skip: int, cut: int, param: str) -> int:
    """Return how many tokens of `skip` are left behind a `cut`, which spares the start token.

    Raises a 400 ApiError if the text has no further token.
    """
    if cut:
        skip = max(skip - cut, int(ids[0] in state.tokenizer.special_ids))
    if skip >= len(ids):
        message = (
            f"The text has {len(ids)} tokens with its prompt, and the prompt alone has {skip}, "
            "which are not pooled: nothing is left."
        )
        raise invalid(param, message)
    return skip


async def padded(state: AppState, texts: Sequence[EncodedText]) -> list[EncodedText]:
    """Append padding tokens to each text up to the model's limit, also after a truncation.

    The model attends to them as to other tokens, as in vLLM (vllm/renderers/params.py).
    Raises a 400 ApiError if the checkpoint has no padding token.
    """
    pad = state.tokenizer.pad_token_id
    if pad is None:
        raise unsupported("padding", "The checkpoint's tokenizer names no pad_token.")
    length = state.max_length()
    return await off_loop(
        length * len(texts),
        lambda: [text._replace(ids=text.ids + [pad] * (length - len(text.ids))) for text in texts],
    )


def truncation(state: AppState, given: int | None, added: int) -> int | None:
    """Return the number of tokens to keep of each text; None keeps all.

    `added` is the number of special tokens that a text gets.
    """
    longest = state.max_length()
    if given is None:
        return None
    if given == WHOLE_CONTEXT:
        return longest
    if not added < given <= longest:
        message = f"must be -1, or above {added} and at most {longest} here, not {given}"
        advice = "Please request a smaller truncation size." if given > longest else ""
        text = f"truncate_prompt_tokens {message}. {advice}".rstrip()
        raise invalid("truncate_prompt_tokens", text)
    return given


def _encode(
    state: AppState,
    prompt: str,
    text: str | list[int] | list[int | str],
    limit: int | None,
    param: str,
    keep_end: bool,
    add_special_tokens: bool,
) -> list[int]:
    if not isinstance(text, str):
        ids = _joined(state, text, param)
        return ids[-limit:] if keep_end and limit else ids[:limit]
    text = prompt + text
    if limit is not None:
        return state.tokenizer.encode_part(
            text, limit, keep_end=keep_end, add_special_tokens=add_special_tokens
        )
    count = state.tokenizer.far_over(text, state.max_length())
    if count:
        raise too_long(state, count, param)
    return state.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _joined(state: AppState, pieces: list[int] | list[int | str], param: str) -> list[int]:
    """Return token ids among which texts may be; those get no special tokens."""
    if set(map(type, pieces)) == {int}:  # perhaps a million
        return cast("list[int]", pieces)
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, int):
            ids.append(piece)
            continue
        count = state.tokenizer.far_over(piece, state.max_length())
        if count:
            raise too_long(state, count, param)
        ids += state.tokenizer.encode(piece, add_special_tokens=False)
    return ids


def too_long(state: AppState, count: str, param: str, kind: str = "text") -> ApiError:
    """Return the error for a text, or a pair of them, of `count` tokens."""
    # The second sentence is vLLM's.
    advice = (
        "Please reduce the length of the input prompt, or have its end cut off with "
        "truncate_prompt_tokens"
    )
    return context_exceeded(state.max_length(), f"this {kind} has {count}. {advice}", param)
