"""Which steps are captured as graphs: the shapes, and their order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.scheduling.drafts import MOST_ROWS

DECODE_SIZES = (*range(1, 9), *range(16, 65, 8), *range(80, 257, 16), *range(288, 513, 32))
AT_START = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
CHUNK_TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
DECODES_WITH_CHUNKS = (0, 8, 32, 64, 128, 256)


class GraphShape(NamedTuple):
    """The number of decodes of a captured step and the tokens of its prompt chunks."""

    decodes: int
    chunk_tokens: int = 0  # 0: a step of decodes alone
    has_adapters: bool = False  # whether its tokens may use adapters


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return the captured decode batch sizes, ascending. A larger batch runs kernel by kernel.

    Drafted tokens are decodes too, so that few sequences may have MOST_ROWS.
    """
    return _up_to(DECODE_SIZES, max(max_num_seqs, MOST_ROWS))


def mixed_shapes(max_num_seqs: int, max_num_batched_tokens: int) -> list[GraphShape]:
    """Return every captured shape with prompt chunks, the largest last."""
    decodes = _up_to(DECODES_WITH_CHUNKS, max_num_seqs - 1)  # a chunk is another sequence's
    chunks = _up_to(CHUNK_TOKENS, max_num_batched_tokens)
    return [GraphShape(count, tokens) for tokens in chunks for count in decodes]


def _up_to(sizes: Sequence[int], limit: int) -> list[int]:
    most = min(limit, sizes[-1])
    return [size for size in sizes if size < most] + [most]


def with_variants(shapes: Iterable[GraphShape], *, has_adapters: bool) -> list[GraphShape]:
    """Return the shapes, and before them those of steps with adapters, if the model takes some."""
    plain = list(shapes)
    if not has_adapters:
        return plain
    return [shape._replace(has_adapters=True) for shape in plain] + plain
