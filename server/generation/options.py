"""GenerationOptions: the parameters of a generation, independent of the API they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from server.generation.grammar import WantedGrammar

Operation = Literal["chat", "text_completion"]


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The parameters of a generation. The schema of each API converts its bodies to them.

    Where a sampling parameter is None, the checkpoint's generation_config.json has the value.
    """

    operation: Operation  # `gen_ai.operation.name` of the trace
    model: str | None
    stream: bool
    n: int  # choices per prompt
    priority: int
    cache_salt: str

    # Where the answer ends.
    max_tokens: int | None  # None: the default, or until the context is full
    default_max_tokens: int | None  # of models that continue the prompt: a translation ends itself
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool

    # How tokens become text.
    include_stop: bool  # the text contains the stop string or the end token
    skip_special_tokens: bool

    # How tokens are sampled.
    seed: int | None  # None or -1: random
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[str, float]  # keys are token ids
    allowed_token_ids: Sequence[int]  # empty: all
    grammar: WantedGrammar | None  # the answer follows it

    # Alternatives per token; -1: no logprobs. As in SamplingParams.
    num_logprobs: int
    num_prompt_logprobs: int
