"""Keys and values as codes by definition, in NumPy, and runs over caches of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from engine.attention.backend import AttentionBackend
from engine.ops.kv_codes import LARGEST, from_codes, to_codes
from tests.support.paged import PagedRun, Sequences

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def e4m3_numbers() -> np.ndarray:
    """Return the numbers of the codes 0 to 0x7E: sign, 4 bits of exponent, 3 of fraction."""
    found = []
    for code in range(0x7F):
        exponent, fraction = code >> 3, code & 7
        found.append((1 + fraction / 8) * 2.0 ** (exponent - 7) if exponent else fraction / 512)
    return np.array(found, np.float32)


def nearest_e4m3(numbers: np.ndarray) -> np.ndarray:
    """Return the nearest code of each number; of two, the even one."""
    distances = np.abs(np.abs(numbers)[..., None].astype(np.float64) - e4m3_numbers())
    best = distances.min(-1, keepdims=True)
    is_odd = np.arange(0x7F) % 2
    chosen = np.where(distances == best, is_odd, 2).argmin(-1)
    return (chosen + 0x80 * np.signbit(numbers)).astype(np.uint8)


def by_definition(numbers: np.ndarray, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes as bytes, and the scales, of finite numbers [..., D] fp32."""
    inverse = np.float32(1 / LARGEST[dtype])
    scales = np.abs(numbers).max(-1) * inverse
    limit = np.float32(LARGEST[dtype])
    divisors = np.where(scales > 0, scales, np.float32(1))
    quotients = (numbers / divisors[..., None]).clip(-limit, limit)
    if dtype == torch.int8:
        return np.rint(quotients).astype(np.int8).view(np.uint8), scales
    return nearest_e4m3(quotients), scales


def heads(dtype: torch.dtype) -> torch.Tensor:
    """Return heads [60, 2, 16] of many sizes: zeros, ties between codes, and tiny numbers."""
    numbers = torch.randn(60, 2, 16, generator=torch.Generator().manual_seed(0))
    numbers *= 10.0 ** torch.arange(-30, 30).view(-1, 1, 1)
    numbers[1] = 0
    numbers[2, 0] = torch.arange(16) / 2 + 0.25
    numbers[3, 0] = torch.tensor([127.0, 0.5, 1.5, -2.5, 448.0, *(i / 1024 for i in range(11))])
    numbers[4, 1] = torch.tensor([448.0, *((2 * i + 1) / 1024 for i in range(15))])
    numbers[5, 0, 3] = -0.0
    return numbers.to(dtype)


def as_bytes(stored: torch.Tensor) -> np.ndarray:
    return stored.contiguous().view(torch.uint8).numpy()


def check_stored(
    run: PagedRun, keys: torch.Tensor, values: torch.Tensor, codes: torch.dtype
) -> None:
    """Check bit by bit that the first block of a run holds keys and values [T, Hkv, D] as codes."""
    kv, block = run.cache.layers[0], run.tables[0][0]
    key_blocks = kv.keys[block]
    if run.backend.transposes_keys:
        heads, size, dim = key_blocks.shape
        key_blocks = key_blocks.view(heads, dim, size).transpose(1, 2)
    parts = (
        (key_blocks, kv.key_scales, keys),
        (kv.values[block], kv.value_scales, values),
    )
    for found, scales, given in parts:
        assert scales is not None
        due, due_scales = by_definition(given.float().numpy(), codes)
        count = len(given)
        assert np.array_equal(scales[block, :, :count].T.numpy(), due_scales)
        assert np.array_equal(as_bytes(found[:, :count].transpose(0, 1)), due)


def as_stored(sequences: Sequences, codes: torch.dtype) -> Sequences:
    """Return the sequences with the keys and values that the cache holds, in fp32."""

    def stored(numbers: torch.Tensor) -> torch.Tensor:
        back = torch.empty_like(numbers, dtype=torch.float32)
        from_codes(*to_codes(numbers, codes), back)
        return back

    keys, values = ([stored(x) for x in part] for part in (sequences.keys, sequences.values))
    width = sequences.spec.value_dim
    if width is not None:
        values = [key[..., :width] for key in keys]
    return replace(sequences, keys=keys, values=values)


def check_close(found: list[torch.Tensor], due: list[torch.Tensor]) -> None:
    for one, other in zip(found, due, strict=True):
        limit = TOLERANCE[one.dtype]
        torch.testing.assert_close(one.double(), other.double(), rtol=limit, atol=limit)


def attend_to_source(
    sequences: Sequences, backend: AttentionBackend, codes: torch.dtype
) -> torch.Tensor:
    """Store the keys of the only sequence as those of a source, and attend to them."""
    run = PagedRun(sequences, 16, backend=backend, kv_dtype=codes)
    (count,) = sequences.lengths
    layout = run.layout([(0, 0, count)])
    lengths = torch.tensor([count], dtype=torch.int32)
    group = replace(layout.groups[0], key_lens=[count], key_lengths=lengths)
    plan = backend.plan(replace(layout, groups=[group]))
    kv = run.cache.layers[0]
    plan.store(kv, sequences.keys[0], sequences.values[0])
    return plan.attend(sequences.spec, kv, sequences.queries[0], None, None)
