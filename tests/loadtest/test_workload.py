"""What a load test asks: the same for the same seed, as long as said, sharing what is said."""

from __future__ import annotations

import random
from itertools import islice, takewhile

from loadtest.workload import SYSTEM_TOKENS, Prose, Shape, workload

PROSE = Prose(tokens_per_word=1.5, overhead=6)


def words_shared(a: str, b: str) -> int:
    pairs = zip(a.split(), b.split(), strict=True)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def test_text_is_as_long_as_its_shape_says() -> None:
    rng = random.Random(0)
    for tokens in (20, 60, 300):
        words = len(PROSE.text(Shape(tokens, 1), rng).split())
        assert abs(words * 1.5 + 6 - tokens) <= 1.5


def test_prompts_of_the_same_blocks_begin_alike_and_no_others_do() -> None:
    rng = random.Random(0)
    first, second, other = (
        PROSE.text(Shape(160, 1, (name, "b"), 30), rng) for name in ("a", "a", "c")
    )
    assert 40 <= words_shared(first, second) <= 45  # two blocks of 20, and a few by chance
    assert words_shared(first, other) < 5


def test_the_mix_keeps_its_bounds_and_shares_three_system_prompts() -> None:
    mix = workload("mix")
    shapes = list(islice(mix.shapes(random.Random(0)), 2000))
    assert max(shape.prompt_tokens + shape.output_tokens for shape in shapes) <= mix.longest
    assert min(shape.output_tokens for shape in shapes) >= 4
    shared = [shape for shape in shapes if shape.blocks]
    assert 0.6 < len(shared) / len(shapes) < 0.8
    assert len({shape.blocks for shape in shared}) == 3
    assert all(shape.prompt_tokens > SYSTEM_TOKENS for shape in shared)
    assert shapes == list(islice(mix.shapes(random.Random(0)), 2000))
