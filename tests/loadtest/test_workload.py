"""Workloads: the same seed repeats them, and lengths and shared prefixes are as specified."""

from __future__ import annotations

import json
import random
from itertools import islice, takewhile
from pathlib import Path

import pytest

from loadtest.errors import BenchError
from loadtest.workload import SYSTEM_TOKENS, Prose, Scale, Shape, Workload, workload
from tests.support.reference_data import located, reference

PROSE = Prose(tokens_per_word=1.5, overhead=6)


def words_shared(a: str, b: str) -> int:
    pairs = zip(a.split(), b.split(), strict=True)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


def test_prose_text_has_the_length_of_its_shape() -> None:
    rng = random.Random(0)
    for tokens in (20, 60, 300):
        words = len(PROSE.text(Shape(tokens, 1), rng).split())
        assert abs(words * 1.5 + 6 - tokens) <= 1.5


def test_prose_prompts_share_a_prefix_only_for_equal_blocks() -> None:
    rng = random.Random(0)
    first, second, other = (
        PROSE.text(Shape(160, 1, (name, "b"), 30), rng) for name in ("a", "a", "c")
    )
    assert 40 <= words_shared(first, second) <= 45  # two blocks of 20, and a few by chance
    assert words_shared(first, other) < 5


def test_mix_keeps_its_bounds_and_shares_three_system_prompts() -> None:
    mix = workload("mix", Scale(), 1024)
    shapes = list(islice(mix.shapes(random.Random(0)), 2000))
    assert max(shape.prompt_tokens + shape.output_tokens for shape in shapes) <= mix.longest
    assert min(shape.output_tokens for shape in shapes) >= 4
    shared = [shape for shape in shapes if shape.blocks]
    assert 0.6 < len(shared) / len(shapes) < 0.8
    assert len({shape.blocks for shape in shared}) == 3
    assert all(shape.prompt_tokens > SYSTEM_TOKENS for shape in shared)
    assert shapes == list(islice(mix.shapes(random.Random(0)), 2000))


def test_trace_with_one_timestamp_has_no_gaps(tmp_path: Path) -> None:
    line = {"timestamp": 27000, "input_length": 40, "output_length": 4, "hash_ids": [1]}
    (tmp_path / "t.jsonl").write_text(f"{json.dumps(line)}\n" * 3)
    assert workload(str(tmp_path / "t.jsonl"), Scale(), 1024).gaps is None


# Arrivals in bursts; prompts of 13 blocks, which share the first one; one is too long.
OWN_MOONCAKE = [
    {
        "timestamp": 3000 * (number // 4),
        "input_length": 90_000 if number == 50 else 6500 + 10 * number,
        "output_length": 200 + number,
        "hash_ids": [0, *range(100 * number + 1, 100 * number + 13)],
    }
    for number in range(200)
]
OWN_AZURE = [
    f"2026-01-01 00:{second // 60:02}:{second % 60:02}.5000000,{4000 + second},{second % 90 + 1}"
    for second in [*range(100), *range(1000, 1100)]
]


def own_trace(folder: Path, name: str) -> Path:
    """Write one of the traces above, as the published ones are written."""
    file = folder / name
    if file.suffix == ".csv":
        file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *OWN_AZURE]))
    else:
        file.write_text("".join(f"{json.dumps(line)}\n" for line in OWN_MOONCAKE))
    return file


def trace(folder: Path, name: str, scale: Scale, longest: int | None) -> Workload:
    file = located(name) if name.startswith("traces/") else own_trace(folder, name)
    return workload(str(file), scale, longest)


MOONCAKE = "traces/conversation_trace.jsonl"


@pytest.mark.parametrize(
    ("name", "first_lengths", "count"),
    [("own.jsonl", (6500, 200), 200), reference(MOONCAKE, (6758, 500), 12000)],
)
def test_mooncake_trace_keeps_lengths_arrivals_and_shared_prefixes(
    tmp_path: Path, name: str, first_lengths: tuple[int, int], count: int
) -> None:
    mooncake = trace(tmp_path, name, Scale(0.05, 0.1), 2000)
    assert mooncake.gaps is not None
    first, second, third = islice(mooncake.shapes(random.Random(0)), 3)
    prompt, output = first_lengths
    assert (first.prompt_tokens, first.output_tokens) == (round(prompt * 0.05), output // 10)
    assert first.blocks[0] == second.blocks[0] == third.blocks[0]  # hash 0
    assert not set(first.blocks[1:]) & set(second.blocks[1:])
    one, two = (PROSE.text(shape, random.Random(1)) for shape in (first, second))
    block = round(512 * 0.05 / 1.5)
    assert block <= words_shared(one, two) < block + 4
    gaps = list(islice(mooncake.gaps(), count - mooncake.left_out))
    assert 0.9 < sum(gaps) / len(gaps) < 1.1
    assert mooncake.left_out > 0
    other = next(mooncake.shapes(random.Random(5)))
    assert other.prompt_tokens == first.prompt_tokens
    assert other.blocks != first.blocks  # otherwise a second run would hit the first one's prefixes


@pytest.mark.parametrize(
    ("name", "lengths", "count"),
    [
        ("own.csv", [(4000, 1), (4001, 2)], 200),
        reference("traces/AzureLLMInferenceTrace_code.csv", [(4808, 10), (3180, 8)], 8000),
    ],
)
def test_azure_trace_keeps_lengths_and_bursts(
    tmp_path: Path, name: str, lengths: list[tuple[int, int]], count: int
) -> None:
    azure = trace(tmp_path, name, Scale(), None)
    assert azure.gaps is not None
    shapes = islice(azure.shapes(random.Random(0)), 2)
    assert [(shape.prompt_tokens, shape.output_tokens) for shape in shapes] == lengths
    gaps = list(islice(azure.gaps(), count))
    assert max(gaps) > 50  # the largest of 8000 Poisson gaps is about 9


@pytest.mark.parametrize("name", ["own.jsonl", reference(MOONCAKE)])
def test_trace_that_exceeds_context_raises_with_median_length(tmp_path: Path, name: str) -> None:
    with pytest.raises(
        BenchError, match=r"fit in 10 tokens; the median request has \d+.*--length-scale"
    ):
        trace(tmp_path, name, Scale(), 10)


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        ('{"question": "How many?", "answer": "3"}', "How many?"),
        ('{"question_id": 1, "turns": ["First.", "Then."]}', "First."),
        ('{"prompt": "Say it."}', "Say it."),
    ],
)
def test_file_of_prompts_is_sent_unchanged(line: str, prompt: str, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(line + "\n")
    shape = next(workload(str(tmp_path / "p.jsonl"), Scale(), 1024).shapes(random.Random(0)))
    assert PROSE.text(shape, random.Random(0)) == prompt


@pytest.mark.parametrize("line", ["[1]", "5", "[" * 99999, '{"a":' * 99999], ids=lambda s: s[:9])
def test_file_of_other_json_raises_bench_error(tmp_path: Path, line: str) -> None:
    (tmp_path / "odd.jsonl").write_text(line)
    with pytest.raises(BenchError, match="is neither a trace of Mooncake or Azure nor"):
        workload(str(tmp_path / "odd.jsonl"), Scale(), 1024)
