"""Batch invariance: a token's logits have the same bits in any batch and any schedule.

Matmul kernels may sum in a different order for each shape, so all comparisons are bitwise. Inputs
often cancel: the exact result is zero, and only rounding errors remain. They show the order of
summation, which rounding to bf16 would hide otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.attention.spec import AttentionSpec
from engine.attention.torch.batching import SPLIT
from engine.device.facts import onednn_has_matmul
from engine.layers.linear import Linear
from engine.layers.mlp import ACTIVATIONS
from engine.ops.gated import gelu, gelu_tanh, gelu_tanh_mul, relu_squared, sigmoid, silu, silu_mul
from engine.ops.kernels import Kernels
from engine.ops.norm import layer_norm, rms_norm
from engine.ops.rotary import apply_rotary
from engine.ops.softcap import softcap
from engine.runner.model_runner import ModelRunner
from tests.support.driver import tiny_llama
from tests.support.forward import Plan, chunked, forward, whole
from tests.support.golden import load
from tests.support.paged import PagedRun, Sequences, random_sequences

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(
        not torch.backends.mkldnn.is_available(), reason="batch invariance needs oneDNN's matmul"
    ),
]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
COUNTS = (1, 2, 3, 4, 5, 7, 8, 16, 31, 33, 64, 100)


def cancelling(rows: int, size: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [rows, size] and w [columns, size] whose products are zero up to rounding."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(size, generator=generator)
    x = torch.randn(rows, size // 2, generator=generator)
    w = torch.randn(columns, size // 2, generator=generator)
    return torch.cat([x, -x], -1)[:, order], torch.cat([w, w], -1)[:, order]


# ---- operations ------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize(
    "sizes",
    [(24, 1), (12, 3), (64, 97), (576, 960), (1536, 97), (1536, 1536), (2048, 512), (4096, 128)],
    ids=str,
)
def test_linear_rows_in_any_batch_are_bitwise_equal(
    sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    """The weight is packed if oneDNN supports the dtype on this CPU, as in the engine."""
    x, weight = (tensor.to(dtype) for tensor in cancelling(128, *sizes))
    linear = Linear(*sizes)
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if onednn_has_matmul(x.device, dtype):
        linear.prepack()
    together = linear(x)
    assert together.any(), "all products are exactly zero"
    for count in COUNTS:
        for first in (0, 128 - count):
            part = linear(x[first : first + count].clone())
            assert torch.equal(part, together[first : first + count]), f"{count} rows"


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@dtypes
@pytest.mark.parametrize("number", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 6))])
@pytest.mark.parametrize("size", [50, 2730, 4864])
def test_activations_in_many_threads_are_bitwise_equal(
    size: int, number: int, dtype: torch.dtype, threads: Callable[[int], None]
) -> None:
    """Each thread computes a piece of the elements, which may begin and end inside a token."""
    x = torch.randn(64, 2 * size, generator=torch.Generator().manual_seed(0)).to(dtype)
    operations = {
        "silu_mul": partial(silu_mul, kernels="torch"),
        "silu": silu,
        "gelu_tanh_mul": partial(gelu_tanh_mul, kernels="torch"),
        "gelu_tanh": gelu_tanh,
        "gelu": gelu,
        "relu_squared": partial(relu_squared, kernels="torch"),
        "sigmoid": sigmoid,
        "softcap": partial(softcap, cap=2.0, kernels="torch"),
    }
    for name, operation in operations.items():
        together = operation(x)
        threads(number)
        for count in (*range(1, 24), 64):
            assert torch.equal(operation(x[:count].clone()), together[:count]), (name, count)
        threads(1)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_of_each_bf16_value_is_bitwise_equal(name: str) -> None:
    """Other instructions compute the end of a thread's piece that is shorter than a vector."""
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    values = values[values.isfinite()]
    activation = partial(ACTIVATIONS[name], kernels="torch")
    together = activation(values)
    ends = torch.cat([activation(end.clone()) for end in values.split(15)])
    assert torch.equal(ends, together), values[ends != together]


@dtypes
@pytest.mark.parametrize("kernels", ["torch", "numba"])
@pytest.mark.parametrize("size", [64, 576, 1536])
def test_row_wise_ops_in_any_batch_are_bitwise_equal(
    size: int, kernels: Kernels, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(128, size, generator=generator).mul(3).to(dtype)
    weight = torch.randn(size, generator=generator).to(dtype)
    angles = torch.randn(2, 128, 1, 64, generator=generator).to(dtype)
    operations = {
        "head_norm": lambda rows: rms_norm(
            x[rows].view(-1, size // 32, 32)[:, 1:], weight[:32], 1e-6, kernels=kernels
        ),
        "offset_head_norm": lambda rows: rms_norm(
            x[rows].view(-1, size // 32, 32)[:, 1:], weight[:32], 1e-6, offset=True, kernels=kernels
        ),
        "rms_norm": lambda rows: rms_norm(x[rows], weight, 1e-5, kernels=kernels),
        "offset_rms_norm": lambda rows: rms_norm(
            x[rows], weight, 1e-6, offset=True, kernels=kernels
        ),
        "layer_norm": lambda rows: layer_norm(x[rows], weight, weight, 1e-5, kernels=kernels),
        "silu_mul": lambda rows: silu_mul(x[rows], kernels=kernels),
        "gelu_tanh_mul": lambda rows: gelu_tanh_mul(x[rows], kernels=kernels),
        "softcap": lambda rows: softcap(x[rows], 2.0, kernels=kernels),
        "gelu_tanh": lambda rows: gelu_tanh(x[rows]),
        "relu_squared": lambda rows: relu_squared(x[rows], kernels=kernels),
        "gates": lambda rows: sigmoid(x[rows, :3]),  # a few elements per token
        "weightless_norm": lambda rows: rms_norm(
            x[rows].view(-1, size // 32, 32), None, 1e-6, kernels=kernels
        ),
        "rotary": lambda rows: apply_rotary(
            x[rows].view(-1, size // 64, 64), angles[0, rows], angles[1, rows], kernels=kernels
        ),
    }
    for name, operation in operations.items():
        together = operation(torch.arange(128))
        for count in COUNTS:
            for first in (0, 128 - count):
                rows = torch.arange(first, first + count)
                assert torch.equal(operation(rows), together[rows]), f"{name} of {count} rows"


# ---- attention -------------------------------------------------------------------------------

SPECS = {
    "one-head": AttentionSpec(1, 1, 64, scale=0.125),  # one row per head
    "narrow": AttentionSpec(2, 2, 32, scale=0.2),  # the smallest head_dim of the fused kernel
    "toy": AttentionSpec(1, 1, 8, scale=0.5, softcap=2.0),
    "gqa-3": AttentionSpec(6, 2, 80, scale=0.1, window=50),
    "mqa-5": AttentionSpec(5, 1, 8, scale=0.5),
    "gqa-4": AttentionSpec(8, 2, 64, scale=0.125),
}


def noisy_scores(sequences: Sequences) -> Sequences:
    """Return sequences whose scores are only rounding errors, scaled up."""
    spec = sequences.spec

    def mirrored(tensors: list[torch.Tensor], sign: int) -> list[torch.Tensor]:
        order = torch.randperm(spec.head_dim, generator=torch.Generator().manual_seed(0))
        halves = (tensor.chunk(2, -1)[0] for tensor in tensors)
        return [torch.cat([half, sign * half], -1)[..., order] for half in halves]

    return Sequences(
        replace(spec, scale=3e6),
        mirrored(sequences.queries, -1),
        mirrored(sequences.keys, 1),
        sequences.values,
    )


def noisy_values(sequences: Sequences) -> Sequences:
    """Return sequences with equal weights, where values of 12 keys sum to zero up to rounding."""
    values = []
    for tensor in sequences.values:
        value = tensor.clone()
        for twelve in value.split(12):
            if len(twelve) == 12:
                twelve[6:] = -twelve[:6]
        values.append(value)
    queries = [torch.zeros_like(query) for query in sequences.queries]
    return replace(sequences, queries=queries, values=values)


@pytest.mark.variants(8)
@dtypes
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("block_size", [pytest.param(16, marks=pytest.mark.slow), 64])
@pytest.mark.parametrize("kind", ["random", "scores", "values"])
def test_attention_in_any_batch_or_chunk_is_bitwise_equal(
    spec: AttentionSpec, block_size: int, kind: str, dtype: torch.dtype
) -> None:
    longest = 147 if block_size == 16 else 131
    lengths = [1, block_size - 1, 2 * block_size, longest]
    sequences = random_sequences(spec, lengths, dtype)
    if kind == "scores":
        sequences = noisy_scores(sequences)
    elif kind == "values":
        sequences = noisy_values(sequences)
    together = PagedRun(sequences, block_size).whole()
    for index, due in enumerate(together):  # alone, not in a batch with other lengths
        alone = Sequences(
            sequences.spec,
            *([part[index]] for part in (sequences.queries, sequences.keys, sequences.values)),
        )
        assert torch.equal(PagedRun(alone, block_size).whole()[0], due)
    for size in (1, 5, block_size):
        outputs = PagedRun(sequences, block_size).chunked(size)
        for found, due in zip(outputs, together, strict=True):
            assert torch.equal(found, due), f"chunks of {size}"


@pytest.mark.variants(5)
@dtypes
@pytest.mark.parametrize("window", [30, 300, 600])
@pytest.mark.parametrize("kind", [noisy_scores, noisy_values])
def test_window_over_many_splits_is_bitwise_equal(
    window: int, kind: Callable[[Sequences], Sequences], dtype: torch.dtype
) -> None:
    """The number of splits skipped before the window differs between steps; the bits do not."""
    lengths = [5 * SPLIT + 9, 90]
    spec = AttentionSpec(4, 2, 64, scale=0.125, window=window)
    sequences = kind(random_sequences(spec, lengths, dtype))
    together = PagedRun(sequences, 64).whole()
    for outputs in (PagedRun(sequences, 64).chunked(100), PagedRun(sequences, 16).chunked(333)):
        for output, due in zip(outputs, together, strict=True):
            assert torch.equal(output, due)
    run = PagedRun(sequences, 64)
    run.step([(i, 0, n - 5) for i, n in enumerate(lengths)])
    for back in range(5, 0, -1):
        run.step([(i, n - back, 1) for i, n in enumerate(lengths)])
    for output, due in zip(run.outputs, together, strict=True):
        assert torch.equal(output, due)


def test_window_larger_than_16_splits_is_bitwise_equal() -> None:
    """Above 16 splits, a plain sum pairs them by index, so that leading zeros change the bits."""
    length = 20 * SPLIT
    sequences = random_sequences(
        AttentionSpec(1, 1, 64, scale=0.02, window=17 * SPLIT), [length], torch.float32
    )
    answers = [PagedRun(sequences, 64).chunked(size)[0] for size in (512, 1100)]
    assert torch.equal(*answers)


@dtypes
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("kind", ["scores", pytest.param("values", marks=pytest.mark.slow)])
@pytest.mark.variants(3)
def test_attention_over_many_splits_is_bitwise_equal(
    spec: AttentionSpec, kind: str, dtype: torch.dtype
) -> None:
    """Lengths below and above a split, decoded together and alone, in one chunk and in several."""
    lengths = [20, SPLIT - 3, SPLIT, SPLIT + 1, 5 * SPLIT + 40]
    sequences = random_sequences(spec, lengths, dtype)
    sequences = noisy_scores(sequences) if kind == "scores" else noisy_values(sequences)
    together = PagedRun(sequences, 64).whole()
    for index, due in enumerate(together):
        run = PagedRun(sequences, 64)
        length = lengths[index]
        for start in range(0, length - 3, 150):
            run.step([(index, start, min(150, length - 3 - start))])
        for position in range(length - 3, length):
            run.step([(index, position, 1)])
        assert torch.equal(run.outputs[index], due), f"{length} keys alone"
    run = PagedRun(sequences, 64)
    run.step([(i, 0, n - 3) for i, n in enumerate(lengths)])
    for back in (3, 2, 1):
        run.step([(i, n - back, 1) for i, n in enumerate(lengths)])
    for found, due in zip(run.outputs, together, strict=True):
        assert torch.equal(found, due), "decodes of different lengths in one step"


# ---- a whole model ---------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[24, 8], ids=["mha", "gqa-3"])
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_thread: None
) -> Path:
    """A model so wide that a single row uses another matmul kernel than many rows."""
    return tiny_llama(
        tmp_path_factory.mktemp("wide"),
        hidden_size=1536,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=24,
        num_key_value_heads=request.param,
    )


@pytest.fixture(scope="module", params=["float32", "bfloat16", "bfloat16-numba"])
def runner(folder: Path, request: pytest.FixtureRequest) -> ModelRunner:
    dtype, _, backend = request.param.partition("-")
    return load(folder, dtype=dtype, max_num_seqs=33, attention_backend=backend or "torch")


def prompts() -> list[list[int]]:
    """Return the prompt under test, and 32 others: some are shorter and one is longer."""
    generator = torch.Generator().manual_seed(3)
    lengths = [70, *torch.randint(1, 60, (30,), generator=generator).tolist(), 1, 90]
    return [torch.randint(600, (n,), generator=generator).tolist() for n in lengths]


def as_decode_of_33(texts: list[list[int]]) -> Plan:
    """Prefill all but the last token of each, then decode the 33 last tokens in one step."""
    before = [(i, len(text) - 1) for i, text in enumerate(texts) if len(text) > 1]
    return [before, [(i, 1) for i in range(len(texts))]]


def among_changing_neighbours(texts: list[list[int]]) -> Plan:
    """Compute the prompt under test in uneven chunks, with other decodes or prefills each step."""
    plan: Plan = []
    left = [len(text) for text in texts]
    for turn, count in enumerate((1, 17, 3, 1, 1, 30, 2, 14, 1)):
        step = [(0, count)]
        for other in range(1 + turn, len(texts), 3):
            part = min(left[other], 1 if (other + turn) % 2 else 9)
            if part:
                step.append((other, part))
                left[other] -= part
        plan.append(step)
    return plan


@pytest.mark.variants(1)
def test_model_logits_in_any_batch_or_chunk_are_bitwise_equal(runner: ModelRunner) -> None:
    texts = prompts()
    (alone,) = forward(runner, texts[:1], whole(texts[:1]))
    plans = {
        "in a batch of 33": whole(texts),
        "as decodes of 33": as_decode_of_33(texts),
        "among changing neighbours": among_changing_neighbours(texts),
    }
    for name, plan in plans.items():
        assert torch.equal(forward(runner, texts, plan)[0], alone), name
    for size in (1, 3, 16, 33):
        (found,) = forward(runner, texts[:1], chunked(texts[:1], size))
        assert torch.equal(found, alone), f"in chunks of {size}"


def test_model_logits_of_short_and_long_sequence_are_bitwise_equal(runner: ModelRunner) -> None:
    """One sequence has one block and the other has many: the padded block table has no effect."""
    texts = prompts()[-2:]
    short, long = (forward(runner, [text], whole([text]))[0] for text in texts)
    together = forward(runner, texts, as_decode_of_33(texts))
    assert torch.equal(together[0], short)
    assert torch.equal(together[1], long)
