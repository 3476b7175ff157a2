"""`timings` of a response, with llama.cpp's names, and `metrics`, with vLLM's."""

from __future__ import annotations

from typing import Any

from server.generation.events import Timings, Usage


def timing_fields(timings: Timings) -> dict[str, Any]:
    """Return `timings` as llama.cpp's server has it: `predicted` are the generated tokens."""
    predicted = _rate_fields("predicted", timings.timed_tokens, timings.generation_ms)
    return {
        "cache_n": timings.cached_tokens,
        **_rate_fields("prompt", timings.prompt_tokens, timings.prompt_ms),
        **predicted,
        "predicted_n": timings.generated_tokens,
    }


def metrics_field(usage: Usage) -> dict[str, Any]:
    """Return `metrics` as vLLM has it, or nothing if the server does not report it.

    The rate of tokens includes the time of the prompt.
    """
    timings = usage.timings
    if timings is None:
        return {}
    metrics = {
        "queue_time_ms": round(timings.queue_ms, 3),
        "time_to_first_token_ms": round(timings.prompt_ms, 3),
        "generation_time_ms": round(timings.generation_ms, 3),
    }
    if timings.generated_tokens > 1:
        gaps = timings.generated_tokens - 1
        metrics["mean_itl_ms"] = round(timings.generation_ms / gaps, 3)
    elapsed = timings.prompt_ms + timings.generation_ms
    if elapsed:
        metrics["tokens_per_second"] = round(1000 * timings.generated_tokens / elapsed, 3)
    return {"metrics": metrics}


def _rate_fields(name: str, tokens: int, milliseconds: float) -> dict[str, Any]:
    """Return a number of tokens, their time and their rates. A rate that is unknown is 0."""
    milliseconds = round(milliseconds, 3)
    per_token = 0.0
    per_second = 0.0
    if tokens:
        per_token = milliseconds / tokens
    if milliseconds:
        per_second = 1000 * tokens / milliseconds
    return {
        f"{name}_n": tokens,
        f"{name}_ms": milliseconds,
        f"{name}_per_token_ms": per_token,
        f"{name}_per_second": per_second,
    }
