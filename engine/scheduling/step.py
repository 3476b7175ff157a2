"""Step: what one launch computes. Immutable, pure data; all the runner ever sees of scheduling."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from engine.protocol import Pooling, Prefill, SamplingParams, TokenLogprobs


# One is made for each sequence in each step: a Struct is made four times as fast as a dataclass.
class ScheduledSlice(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, start + count) of one sequence; `samples` where they reach its last token.

    The logits of its first `scores` tokens tell how likely each token after them was.
    """

    id: int
    epoch: int
    row: int
    start: int
    count: int
    samples: bool
    scores: int = 0


@dataclass(frozen=True, slots=True)
class Encode:
    """A text the encoder reads whole: to be pooled to a vector, or as the source of a sequence.

    The source's keys and values go to the blocks of each cross group, written once for all who
    share them.
    """

    id: int
    tokens: tuple[int, ...]
    pooling: Pooling | None = None  # None: a source
    blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (group, its blocks)


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence takes a row: all its known tokens, of which `prompt_length` are the prompt."""

    row: int
    tokens: tuple[int, ...]
    prompt_length: int
    params: SamplingParams
    source_length: int = 0


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks appended to a row's table of one KV group, from entry `first` on."""

    row: int
    group: int
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One launch. Rows and blocks are written, then texts encoded, then slices computed."""

    slices: tuple[ScheduledSlice, ...] = ()  # decodes first, then prompt chunks
    new_rows: tuple[NewRow, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    # Blocks just allocated, to be zeroed where attention reads what it masks: a former owner's NaN
    # passes any mask, as 0 * NaN.
    scrub: tuple[int, ...] = ()
    encodes: tuple[Encode, ...] = ()
    prefills: tuple[Prefill, ...] = ()  # which slices are chunks of prompts, for whoever watches

    @property
    def is_decode(self) -> bool:
        """Whether all it computes of its sequences is one token each, their last."""
        return bool(self.slices) and self.num_decode_tokens == len(self.slices)

    @property
    def num_decode_tokens(self) -> int:
        return len([1 for s in self.slices if s.count == 1 and s.samples])

    @property
    def num_tokens(self) -> int:
        """Of slices and of texts encoded."""
        return sum([s.count for s in self.slices]) + sum(len(e.tokens) for e in self.encodes)


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """The outcome of one sampling slice; `token` is -1 where the logits were not finite."""

    token: int
    logprobs: TokenLogprobs | None = None
