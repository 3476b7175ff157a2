"""The sampling kernels draw exactly the tokens of the reference."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

import engine.kernels.triton.draw as kernels
from engine.kernels.triton import draw_filtered
from engine.kernels.triton.noise import log_noise, noise_bits, noise_key
from engine.protocol.generate import SamplingParams
from engine.sampling import noise
from engine.sampling.sampler import INVALID, DrawParams, draw
from tests.engine.sampling.test_draw import PLAIN
from tests.engine.sampling.test_plain_path import each_cut, rows_of
from tests.engine.sampling.test_sampler import SETTINGS, VARIED, as_often_as, distribution
from tests.support.sampling import logits_of, params_of, row, sample_rows

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")


@triton.jit
def _noise_kernel(seed_ptr, position_ptr, token_ptr, bits_ptr, log_ptr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    tokens = tl.load(token_ptr + at)
    key = noise_key(tl.load(seed_ptr + row), tl.load(position_ptr + row))
    tl.store(bits_ptr + row * BLOCK + at, noise_bits(key, tokens))
    tl.store(log_ptr + row * BLOCK + at, log_noise(key, tokens))


def test_noise_kernel_has_reference_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (40,), generator=generator)
    seeds[:4] = torch.tensor([0, -1, 2**63 - 1, -(2**63)])
    positions = torch.randint(0, 2**20, (40,), generator=generator)
    tokens = torch.randint(0, 300_000, (1024,), generator=generator, dtype=torch.int32)
    bits = torch.empty(40, 1024, dtype=torch.int32)
    logs = torch.empty(40, 1024)
    _noise_kernel[(40,)](seeds, positions, tokens, bits, logs, 1024)
    assert torch.equal(bits, noise.noise_bits(seeds, positions, tokens))
    due = noise.exponential_noise(seeds, positions, tokens).log()
    torch.testing.assert_close(logs, due, rtol=1e-6, atol=1e-6)


# Vocabularies of one chunk, of several chunks of the first launch, and of several blocks of the
# second.
@pytest.mark.variants(2)
@pytest.mark.parametrize(
    ("vocabulary", "rows", "quantized"),
    [
        pytest.param(1, 8, False, id="one token"),
        pytest.param(7, 8, True, id="ties in one chunk"),
        pytest.param(2049, 16, False, id="chunks"),
        pytest.param(2049, 16, True, id="ties in chunks", marks=pytest.mark.slow),
        pytest.param(9001, 8, False, id="blocks", marks=pytest.mark.slow),
        pytest.param(9001, 8, True, id="ties in blocks"),
    ],
)
def test_draw_kernel_mixed_rows_equal_reference(
    vocabulary: int, rows: int, quantized: bool
) -> None:
    """Rows of all kinds share a batch; quantised logits tie as bf16 logits do."""
    logits = torch.stack([logits_of(vocabulary, 1.0, seed) for seed in range(rows)])
    logits = (logits * 4).round() / 4 if quantized else logits
    params = params_of(
        [row(3 + n % 5, seed=n * 2**33 - n, **PLAIN[n % len(PLAIN)]) for n in range(rows)]
    )
    before, due = logits.clone(), draw(logits, params, static=True)
    found = draw(logits, params, "triton")
    apart = draw(torch.cat([logits, logits], 1)[:, :vocabulary], params, "triton")
    alone = draw(logits[-1:], params_of_row(params, rows - 1), "triton")
    assert found.tolist() == due.tolist() == apart.tolist()
    assert alone.tolist() == due[-1:].tolist()
    assert torch.equal(logits, before)


@each_cut
def test_draw_kernel_rows_with_plain_cuts_equal_reference(name: str) -> None:
    logits = torch.stack([logits_of(2049, 1.0, seed) for seed in range(9)])
    due, _ = sample_rows(logits.clone(), rows_of(name, 9))
    found, _ = sample_rows(logits.clone(), rows_of(name, 9), kernels="triton")
    assert found.tolist() == due.tolist()


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_k": 2}, {"top_p": 0.2}, {"temperature": 0}])
def test_draw_kernel_zeros_of_both_signs_tie(params: dict[str, float]) -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0, -2.0]]).repeat(20, 1)
    rows = params_of([row(seed=n, **params) for n in range(20)])
    due = draw(logits, rows, static=True)
    assert draw(logits, rows, "triton").tolist() == due.tolist()


def params_of_row(params, row):
    return DrawParams(*(column[row : row + 1] for column in params))


LIMITS = [
    {"top_k": 1},
    {"top_k": 9},
    {"top_k": 300},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.999999},
    {"min_p": 1.0},
    {"min_p": 0.3},
    {"top_k": 50, "top_p": 0.5, "min_p": 0.01},
    {"top_k": 2, "top_p": 0.9},
    {"temperature": 0.05, "top_p": 0.9},
    {"temperature": 50.0, "top_p": 0.9},
]


@pytest.mark.variants(2)
@pytest.mark.parametrize("chunk", [pytest.param(16, marks=pytest.mark.slow), 512])
@pytest.mark.parametrize("kind", ["distinct", "ties", "one value", "masked"])
def test_draw_kernel_every_filter_threshold_equals_reference(
    kind: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threshold falls among distinct, equal and masked logits, in one chunk or many."""
    monkeypatch.setattr(kernels, "CHUNK", chunk)
    logits = torch.stack([logits_of(300, 1.5, seed) for seed in range(2 * len(LIMITS))])
    if kind == "ties":
        logits = logits.round()
    elif kind == "one value":
        logits = torch.full_like(logits, -3.25)
    elif kind == "masked":
        logits[:, ::2] = -math.inf
        logits[-len(LIMITS) :, 5:] = -math.inf
    params = params_of([row(7, seed=n, **limits) for n, limits in enumerate(LIMITS * 2)])
    due = draw(logits, params, static=True)
    assert draw(logits, params, "triton").tolist() == due.tolist()


@pytest.mark.variants(2)
@pytest.mark.parametrize(
    ("limits", "likely", "most"),
    [
        ({"top_k": 20}, True, 3),
        ({"top_p": 0.95}, True, 4),
        ({"top_k": 20, "top_p": 0.95}, True, 5),
        ({"min_p": 0.1}, True, 3),
        ({"top_p": 0.95}, False, 20),
    ],
)
def test_draw_kernel_search_reads_few_chunks(
    limits: dict[str, float], likely: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filtered rows read at most `most` times the vocabulary, the first launch included.

    With `likely` three tokens have nearly all of the mass, as in most answers. Otherwise top-p
    keeps most tokens, and reads more.
    """
    chunks, size = 64, 64
    reads = []
    load = kernels.load_logits

    def counting(*arguments):
        reads.append(arguments)
        return load(*arguments)

    monkeypatch.setattr(kernels, "CHUNK", size)
    for module in (kernels, draw_filtered):
        monkeypatch.setattr(module, "load_logits", counting)
    logits = logits_of(chunks * size, 3.0, 1)[None]
    if likely:
        logits[0, [5, 700, 3000]] = 24.0
    params = params_of([row(7, seed=1, **limits)])
    due = draw(logits, params, static=True)
    assert draw(logits, params, "triton").tolist() == due.tolist()
    assert chunks < len(reads) <= most * chunks


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf], ids=str)
def test_draw_kernel_non_finite_row_leaves_other_rows_unchanged(broken: float) -> None:
    logits = torch.stack([logits_of(100, 1.0, seed) for seed in range(2 * len(PLAIN))])
    params = params_of([row(seed=n, **setting) for n, setting in enumerate(PLAIN * 2)])
    due = draw(logits, params, static=True)
    logits[::2, 77 if broken != -math.inf else slice(None)] = broken
    due[::2] = INVALID
    assert draw(logits, params, "triton").tolist() == due.tolist()


@pytest.mark.slow  # the tests above compare draws with the reference, whose frequencies are tested
@pytest.mark.parametrize("name", ["temperature", "top-k", "top-p", "min-p"])
def test_draw_kernel_frequencies_match_distribution(name: str) -> None:
    setting, draws = SETTINGS[name], 150 if name == "temperature" else 400
    logits, params = logits_of(32), SamplingParams(max_tokens=64, **SETTINGS[name])
    rows = params_of([row(seed=s, **setting) for s in range(draws)])
    drawn = draw(logits.repeat(draws, 1), rows, "triton")
    as_often_as(distribution(logits, params, [0], 1), drawn)


def test_sample_with_kernels_equals_reference() -> None:
    """A batch with penalties, which no captured step samples, draws the same tokens."""
    logits = torch.stack([logits_of(200, 1.0, seed) for seed in range(len(VARIED))])
    rows = [row(5, seed=n, **setting) for n, setting in enumerate(VARIED)]
    due, _ = sample_rows(logits.clone(), rows)
    found, _ = sample_rows(logits.clone(), rows, kernels="triton")
    assert found.tolist() == due.tolist()
