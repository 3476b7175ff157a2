"""Step: immutable data that describes one launch, the only input from scheduler to runner."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from engine.protocol.generate import Explain, Image, SamplingParams, TokenLogprobs
from engine.protocol.outputs import PrefillChunk

# Where a slice finds the state before it, and where it leaves states, in slots of recurrent layers:
# (slot to read, ((token of the slice, slot for the state behind it), ...)).
SliceStates = tuple[int, tuple[tuple[int, int], ...]]
NO_STATES: SliceStates = 0, ()


# One is created per sequence and step. A Struct is created four times as fast as a dataclass.
class ScheduledSlice(msgspec.Struct, frozen=True, gc=False):
    """Tokens [start, start + count) of one sequence.

    `samples` is True if they include its last token, whose logits are sampled. The logits of the
    first `num_prompt_logprobs` tokens give the prompt logprobs of the token behind each of them.

    With a `draft` the token is not known, but assumed to follow the slice before this one. The
    result is valid only if that slice has sampled `draft`, and is valid itself.
    """

    id: int
    epoch: int
    row: int
    start: int
    count: int
    samples: bool
    num_prompt_logprobs: int = 0
    draft: int = -1
    adapter_slot: int = 0  # 0: no adapter
    states: SliceStates = NO_STATES


def slice_of_text(count: int) -> ScheduledSlice:
    """Return all `count` tokens of a text that is computed apart from all sequences, in row 0."""
    return ScheduledSlice(id=0, epoch=0, row=0, start=0, count=count, samples=False)


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """A text for the encoder: pooled to a vector, or the source of a sequence.

    The cross-attention KV of a source is written once to the blocks of each cross-attention KV
    group. Sequences with the same source share these blocks.
    """

    id: int
    tokens: tuple[int, ...]
    blocks: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (KV group, its blocks)
    is_pooled: bool = False  # False: a source
    skip: int = 0  # this and the next as in EmbedRequest
    second: int = 0


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence takes a row. The first `prompt_length` of its known `tokens` are the prompt."""

    row: int
    tokens: tuple[int, ...]
    prompt_length: int
    params: SamplingParams
    encoder_length: int = 0
    explain: Explain | None = None
    adapter_slot: int = 0  # 0: no adapter
    images: tuple[Image, ...] = ()  # of the prompt


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks appended to a row's block table of one KV group, starting at entry `first`."""

    row: int
    group: int
    first: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NewDraft:
    """A row has `length` known tokens, those in flight included, and assumed ones behind them.

    Sent with each draft, and once more behind it, because the row does not know what was right.
    """

    row: int
    length: int
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The KV of the first `tokens` of block `source` is copied to the new block `target`.

    Both are blocks of the KV group number `group`.
    """

    source: int
    target: int
    tokens: int
    group: int


@dataclass(frozen=True, slots=True)
class Step:
    """One launch: rows and blocks are written, then texts encoded, then slices computed."""

    slices: tuple[ScheduledSlice, ...] = ()  # decodes first, then prompt chunks
    new_rows: tuple[NewRow, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    new_drafts: tuple[NewDraft, ...] = ()
    # Newly allocated blocks. They are zeroed if attention reads masked entries, because a NaN of an
    # earlier owner would pass the mask: 0 * NaN is NaN.
    scrub: tuple[int, ...] = ()
    # All sources are read before a block is written: one may be allocated in this step, too.
    copies: tuple[BlockCopy, ...] = ()
    encoder_inputs: tuple[EncoderInput, ...] = ()
    # The slices that are prompt chunks, for metrics and traces.
    prefills: tuple[PrefillChunk, ...] = ()

    @property
    def is_decode(self) -> bool:
        """Whether there are slices and each is one token, the last of its sequence."""
        return bool(self.slices) and self.num_decode_tokens == len(self.slices)

    @property
    def num_decode_tokens(self) -> int:
        return len([1 for s in self.slices if s.count == 1 and s.samples])

    @property
    def num_tokens(self) -> int:
        """Number of tokens in slices and in encoded texts."""
        return sum([s.count for s in self.slices]) + sum(len(e.tokens) for e in self.encoder_inputs)


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """Result of one sampling slice; `token` is -1 if the logits were not finite."""

    token: int
    logprobs: TokenLogprobs | None = None
    is_cut: bool = False  # the grammar cannot go on, so the answer ends here, incomplete
