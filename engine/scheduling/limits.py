"""Requests that can never run are rejected when they arrive, with the limit they exceed."""

from __future__ import annotations

from engine.errors import RequestRejectedError
from engine.protocol.embed import EmbedRequest
from engine.protocol.generate import GenerateRequest
from engine.scheduling.block_tables import BlockTables


def check_generation(request: GenerateRequest, tables: BlockTables, max_model_len: int) -> None:
    """Raises RequestRejectedError if the model or its KV cache can never hold `request`."""
    length, wanted = len(request.prompt), request.params.max_tokens
    encoder_length = len(request.encoder_prompt)
    if not tables.groups or bool(encoder_length) != bool(tables.cross_groups):
        raise RequestRejectedError(
            "invalid_value",
            "The model cannot run this request: an encoder does not generate, an "
            "encoder-decoder needs an encoder prompt, and a decoder takes none.",
        )
    if not length or wanted < 1:
        raise RequestRejectedError(
            "invalid_value",
            f"A request needs at least one prompt token and one new token; it has {length} "
            f"prompt tokens and max_tokens {wanted}.",
        )
    if max(length + wanted, encoder_length) > max_model_len:
        raise RequestRejectedError(
            "context_length_exceeded",
            f"{encoder_length or length} prompt tokens and {wanted} new tokens exceed the "
            f"context of {max_model_len} tokens. Shorten the prompt or lower max_tokens.",
        )
    # The last token's KV is never needed.
    needed = tables.max_blocks(length + wanted - 1, encoder_length)
    if needed > tables.pool.num_blocks:
        raise RequestRejectedError(
            "context_length_exceeded",
            f"{length} prompt tokens and {wanted} new tokens need {needed} KV blocks of "
            f"{tables.block_size} tokens; there are {tables.pool.num_blocks}. Shorten the request.",
        )


def check_embedding(request: EmbedRequest, max_model_len: int) -> None:
    """Raises RequestRejectedError if the text is empty or longer than `max_model_len` tokens."""
    if not 0 < len(request.tokens) <= max_model_len:
        raise RequestRejectedError(
            "context_length_exceeded",
            f"The text has {len(request.tokens)} tokens; supported: 1 to {max_model_len}.",
        )
