"""SequenceRows: the state of running sequences on the device, one row each.

The host sends the tokens and parameters of a sequence once, and its blocks when they are allocated.
The inputs of a step are gathered from the rows, and sampled tokens are appended to them, without a
round trip to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.device.transfer import to_device
from engine.ops.kernels import Kernels
from engine.protocol.generate import Explain, Image, SamplingParams
from engine.sampling.sampler import DrawParams, draw_next, is_special
from engine.scheduling.drafts import MOST_ROWS
from engine.scheduling.step import NewBlocks, NewDraft, NewRow, ScheduledSlice, Step

# Returns the positions [T], or [3, T], of all tokens of slices, from the images of rows.
PlaceImages = Callable[
    [Sequence[ScheduledSlice], Mapping[int, Sequence[Image]]], npt.NDArray[np.int64]
]


class SequenceRows:
    """State of `max_num_seqs` rows of up to `max_model_len` tokens each, and of a padding row.

    The padding row fills up captured steps. It is always a sequence of one token whose blocks are
    all the null block. So its KV goes to the null block, which is only read under a mask.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        strides: Sequence[int],
        device: torch.device,
        kernels: Kernels = "torch",
        *,
        place_images: PlaceImages | None = None,
    ) -> None:
        """`strides` has the rows of a block in each KV group, see KVGroups.

        `place_images` is for models whose images have positions on three axes.
        """
        self._strides = strides
        self.kernels: Kernels = kernels
        self.padding = max_num_seqs  # the padding row's index
        rows = max_num_seqs + 1

        def column(dtype: torch.dtype, fill: float = 0) -> torch.Tensor:
            return torch.full((rows,), fill, dtype=dtype, device=device)

        self.tokens = torch.zeros(rows, max_model_len + 1, dtype=torch.int32, device=device)
        # Entries are numbers of blocks times the group's stride. Block 0 is the null block, the
        # value of entries that are not allocated yet.
        shape = len(strides), rows, -(-max_model_len // block_size)
        self.block_tables = torch.zeros(shape, dtype=torch.int64, device=device)
        self.lengths = column(torch.int32, 1)  # known tokens, sampled ones included
        self.encoder_lengths = column(torch.int32, 1)
        self.temperature = column(torch.float32)
        self.top_k = column(torch.int32)
        self.top_p = column(torch.float32, 1)
        self.min_p = column(torch.float32)
        self.seeds = column(torch.int64)
        self.adapters = column(torch.int32)  # slots; 0: none
        # Positions less numbers of tokens, behind a row's images. None: the model has no such axes.
        self.position_shifts = column(torch.int64) if place_images else None
        self._place_images = place_images
        filters = self.temperature, self.top_k, self.top_p, self.min_p
        # A row's next token goes behind its known ones.
        self.draw_params = DrawParams(*filters, seeds=self.seeds, positions=self.lengths)
        # The same in every step of decodes: each of R sequences has one token.
        self.numbers = torch.arange(max(rows, MOST_ROWS + 1), device=device)
        self.decode_starts = self.numbers.int()
        # Columns that only the host reads.
        self.params: list[SamplingParams] = [SamplingParams(max_tokens=1)] * max_num_seqs
        self.special: set[int] = set()  # rows that need more than a draw
        self.explain: dict[int, Explain] = {}  # by row; the last owners of some rows have ended
        self.prompt_length: list[int] = [0] * max_num_seqs
        self.encoder_length: list[int] = [0] * max_num_seqs
        self.images: dict[int, tuple[Image, ...]] = {}  # by row, if their positions have axes

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def num_bytes(self) -> int:
        return sum(held.nbytes for held in vars(self).values() if isinstance(held, torch.Tensor))

    def apply(self, step: Step) -> None:
        """Write new rows, appended blocks and drafts. Must run before the step is computed."""
        if step.new_rows:
            self._write_rows(step.new_rows)
        if step.new_blocks:
            self._write_blocks(step.new_blocks)
        if step.new_drafts:
            self._write_drafts(step.new_drafts)

    def _write_rows(self, rows: Sequence[NewRow]) -> None:
        for new in rows:
            self._keep_on_host(new)
        width = self.tokens.shape[1]
        places = [np.arange(len(new.tokens)) + new.row * width for new in rows]
        tokens = [new.tokens for new in rows]
        integers = np.array([_integers(new) for new in rows], np.int64).T
        floats = np.array([_floats(new.params) for new in rows], np.float32).T
        place, known, index, *values = to_device(
            [np.concatenate(places), np.concatenate(tokens), *integers], self.device
        )
        values += to_device([*floats], self.device, np.float32)
        self.block_tables.index_fill_(1, index, 0)
        self.tokens.view(-1).index_copy_(0, place, known.int())
        columns = (
            *(self.lengths, self.encoder_lengths, self.adapters, self.top_k, self.seeds),
            *(self.temperature, self.top_p, self.min_p),
        )
        for column, value in zip(columns, values, strict=True):
            column.index_copy_(0, index, value.to(column.dtype))
        if self.position_shifts is not None:
            shifts = [sum([image.position_shift for image in new.images]) for new in rows]
            (on_device,) = to_device([shifts], self.device)
            self.position_shifts.index_copy_(0, index, on_device)

    def _keep_on_host(self, new: NewRow) -> None:
        self.params[new.row] = new.params
        if is_special(new.params):
            self.special.add(new.row)
        else:
            self.special.discard(new.row)
        if new.explain is not None:
            self.explain[new.row] = new.explain
        elif self.explain:
            self.explain.pop(new.row, None)
        self.prompt_length[new.row] = new.prompt_length
        self.encoder_length[new.row] = new.encoder_length
        self.images.pop(new.row, None)
        if new.images and self.position_shifts is not None:
            self.images[new.row] = new.images

    def _write_blocks(self, blocks: Sequence[NewBlocks]) -> None:
        _, rows, width = self.block_tables.shape
        places: list[int] = []
        values: list[int] = []
        for added in blocks:
            first = (added.group * rows + added.row) * width + added.first
            places += range(first, first + len(added.blocks))
            stride = self._strides[added.group]
            values += [block * stride for block in added.blocks]
        if places:
            place, value = to_device([places, values], self.device)
            self.block_tables.view(-1).index_copy_(0, place, value)

    def _write_drafts(self, drafts: Sequence[NewDraft]) -> None:
        width = self.tokens.shape[1]
        places: list[int] = []
        values: list[int] = []
        for draft in drafts:
            first = draft.row * width + draft.length
            places += range(first, first + len(draft.tokens))
            values += draft.tokens
        index, lengths, place, tokens = to_device(
            [[draft.row for draft in drafts], [draft.length for draft in drafts], places, values],
            self.device,
        )
        self.lengths.index_copy_(0, index, lengths.int())
        self.tokens.view(-1).index_copy_(0, place, tokens.int())

    def set_known(self, row: int, first: int, tokens: Sequence[int]) -> None:
        """Write tokens to a row from index `first` on; its known tokens end with them."""
        end = first + len(tokens)
        (values,) = to_device([tokens], self.device)
        self.tokens[row, first:end] = values.int()
        self.lengths[row] = end

    def has_own_positions(self, slices: Sequence[ScheduledSlice]) -> bool:
        """Return whether a slice begins before the end of its row's images.

        The shift of the row then is not that of all its tokens.
        """
        if not self.images:
            return False
        return any(s.row in self.images and s.start < self.images[s.row][-1].end for s in slices)

    def positions(self, numbers: torch.Tensor, token_rows: torch.Tensor) -> torch.Tensor:
        """Return the positions [T] of tokens behind the images of their rows, from their numbers.

        It uses only device tensors.
        """
        if self.position_shifts is None:
            return numbers
        return numbers + self.position_shifts.index_select(0, token_rows)

    def positions_of(self, slices: Sequence[ScheduledSlice]) -> torch.Tensor | None:
        """Return the positions [T], or [3, T], of all tokens of a step; None if `positions` does.

        There are three if one of the tokens shows an image.
        """
        if self._place_images is None or not self.has_own_positions(slices):
            return None
        found = self._place_images(slices, self.images)
        (columns,) = to_device([found.ravel()], self.device)
        return columns.view(found.shape)

    def special_params(self, slices: Sequence[ScheduledSlice]) -> dict[int, SamplingParams]:
        """Return the parameters of the slices that need more than a draw, by index."""
        if not self.special:
            return {}
        special = [(index, s.row) for index, s in enumerate(slices) if s.row in self.special]
        return {index: self.params[row] for index, row in special}

    def draw_next(
        self,
        logits: torch.Tensor,
        row_ids: torch.Tensor,
        ahead: torch.Tensor,
        *,
        static: bool,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Draw and append the next tokens [R] of `row_ids`, as `sampler.draw_next` does."""
        held = self.draw_params, self.tokens, self.padding
        return draw_next(logits, *held, row_ids, ahead, self.kernels, static=static, out=out)


def _integers(new: NewRow) -> tuple[int, ...]:
    """Return the row's index, and its integer columns in the order of `_write_rows`."""
    params = new.params
    sizes = len(new.tokens), new.encoder_length
    return new.row, *sizes, new.adapter_slot, params.top_k, params.seed


def _floats(params: SamplingParams) -> tuple[float, ...]:
    return params.temperature, params.top_p, params.min_p
