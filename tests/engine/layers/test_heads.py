"""The weights of heads in latent attention: both products have the bits of each head alone."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.numba.linear import has_kernel
from engine.layers.latent import HeadsLinear, LatentShape
from engine.layers.weights.pack import pack
from engine.ops.kernels import Kernels, use_kernels

pytestmark = pytest.mark.usefixtures("one_thread")
HEADS, PLAIN, LATENT, VALUE = 3, 32, 128, 64
SHAPE = LatentShape(HEADS, None, LATENT, PLAIN, 16, VALUE, rotates_pairs=True)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heads_layer(kernels: Kernels, dtype: torch.dtype) -> tuple[HeadsLinear, torch.Tensor]:
    """Return a packed layer, and its weight [heads, PLAIN + VALUE, LATENT]."""
    layer = HeadsLinear(SHAPE)
    assert layer.weight is not None
    layer.weight.data = weight = random(*layer.weight.shape, seed=1).to(dtype)
    use_kernels(layer, kernels)
    layer.prepack()
    return layer, weight.unflatten(0, (HEADS, -1))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize(
    ("kernels", "dtype"), [("numba", torch.bfloat16), ("numba", torch.float32)], ids=str
)
def test_products_of_heads_have_the_bits_of_each_head_alone(
    kernels: Kernels, dtype: torch.dtype, tokens: int, threads: int
) -> None:
    """Queries are a part of wider rows, as in a model. All rows of a head are multiplied alone."""
    layer, weight = heads_layer(kernels, dtype)
    queries = random(tokens, HEADS, PLAIN + 16, seed=2).to(dtype)[..., :PLAIN]
    latents = random(tokens, HEADS, LATENT, seed=3).to(dtype)
    torch.set_num_threads(threads)
    try:
        absorbed, values = layer.absorb(queries), layer(latents)
    finally:
        torch.set_num_threads(1)
    assert absorbed.shape == (tokens, HEADS, LATENT)
    assert values.shape == (tokens, HEADS, VALUE)
    for head, own in enumerate(weight):
        keys = pack(own[:PLAIN].T.contiguous(), None, kernels=kernels)
        expand = pack(own[PLAIN:].contiguous(), None, kernels=kernels)
        assert keys is not None
        assert expand is not None
        for token in range(tokens):
            row = slice(token, token + 1)
            assert torch.equal(absorbed[row, head], keys(queries[row, head].contiguous()))
            assert torch.equal(values[row, head], expand(latents[row, head].contiguous()))


@pytest.mark.skipif(not has_kernel(torch.bfloat16), reason="this CPU has no AVX512_BF16")
def test_all_heads_are_multiplied_in_one_launch() -> None:
    layer, _ = heads_layer("numba", torch.bfloat16)
    for packed in (layer.tensors.packed_keys, layer.tensors.packed_values):
        assert packed is not None
        assert packed._together is not None
