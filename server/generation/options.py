"""GenerationOptions: the parameters of a generation, independent of the API they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from server.text.wanted_grammar import WantedGrammar

Operation = Literal["chat", "text_completion"]


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """The parameters of a generation. The schema of each API converts its bodies to them."""

    operation: Operation  # `gen_ai.operation.name` of the trace
    model: str | None
    stream: bool = False
    n: int = 1  # choices per prompt
    best_of: int | None = None  # candidates per prompt, at least n; the n likeliest are returned
    priority: int = 0
    cache_salt: str = ""

    # None: the whole prompt, which must fit. -1: as many of its last tokens as fit.
    truncate_prompt_tokens: int | None = None
    keeps_start: bool = False  # the first tokens in place of the last

    # Where the answer ends.
    max_tokens: int | None = None  # None: the default, or until the context is full
    # Of models that continue the prompt: a translation ends itself.
    default_max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    # Seconds after the first token; the first line break that comes later ends the answer.
    last_line_after: float | None = None

    # Timings are returned with the end of an answer, or with all of its parts.
    timings: bool = False
    timings_per_token: bool = False
    # A stream reports each step that computes a part of a prompt.
    prompt_progress: bool = False

    omits_thoughts: bool = False  # the answer leaves the text of the thoughts out

    # How tokens become text.
    include_stop: bool = False  # the text contains the stop string or the end token
    skip_special_tokens: bool = True

    # How tokens are sampled.
    seed: int | None = None  # None or -1: random
    # Those of PARAMETERS that the request sets, by name. The checkpoint may have others.
    sampling: Mapping[str, float] = field(default_factory=dict)
    logit_bias: Mapping[str, float] = field(default_factory=dict)  # keys are token ids
    allowed_token_ids: Sequence[int] = ()  # empty: all
    bad_words: Sequence[str] = ()  # texts that are not generated
    grammar: WantedGrammar | None = None  # the answer follows it
    thought_budget: int | None = None  # most tokens of the thoughts; None: no limit

    # Alternatives per token; -1: no logprobs. As in SamplingParams.
    num_logprobs: int = -1
    logprob_token_ids: Sequence[int] = ()  # `num_logprobs` tokens, in place of the likeliest
    final_logprobs: bool = False  # of the distribution that tokens are drawn from
    num_prompt_logprobs: int = -1

    @property
    def num_candidates(self) -> int:
        """Number of answers per prompt that are generated."""
        return self.best_of or self.n
