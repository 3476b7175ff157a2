"""Experts' layers: each row has the bits of its expert's own layer."""

from __future__ import annotations

import pytest
import torch

from engine.kernels.numba.codes import has_instructions
from engine.layers.experts import (
    ExpertLinear,
    Experts,
    ExpertsShape,
    SharedExpert,
    WideRouter,
)
from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP
from engine.layers.weights.pack import pack
from engine.ops.codes import Quantization
from engine.ops.experts import ExpertGroups, combine, expert_by_expert, route, rows_by_expert
from engine.ops.kernels import Kernels, use_kernels
from engine.ops.quantize import CodesForm

pytestmark = pytest.mark.usefixtures("one_thread")
COUNT, INPUTS, OUTPUTS = 6, 64, 128
FORMS: list[tuple[Kernels, Quantization | None, torch.dtype]] = [
    ("torch", None, torch.float32),
    ("numba", None, torch.bfloat16),
    ("numba", "int8", torch.bfloat16),
    ("numba", "int4", torch.bfloat16),
]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def choices(tokens: int, per_token: int, *, most: int = COUNT) -> torch.Tensor:
    """Return different experts below `most` for each token, drawn at random."""
    order = random(tokens, most, seed=7).argsort(-1)
    return order[:, :per_token]


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize(("kernels", "kind", "dtype"), FORMS, ids=str)
def test_rows_have_the_bits_of_their_experts_own_layer(
    kernels: Kernels, kind: Quantization | None, dtype: torch.dtype, tokens: int
) -> None:
    """The naive loop: for each token and each of its experts one product of one row."""
    layer = ExpertLinear(COUNT, INPUTS, {"gate": OUTPUTS // 2, "up": OUTPUTS // 2})
    assert layer.weight is not None
    layer.weight.data = random(*layer.weight.shape).to(dtype)
    weights = layer.weight.data.split(OUTPUTS)
    alone = [pack(weight, None, kernels=kernels, quantization=kind) for weight in weights]
    use_kernels(layer, kernels)
    layer.prepack(kind)
    x = random(tokens, INPUTS, seed=1).to(dtype)
    for most in (COUNT, 3):  # with 3, half of the experts have no rows
        experts = choices(tokens, 2, most=most)
        rows = rows_by_expert(experts, COUNT)
        found = layer(x[rows.tokens], rows)
        for row, pair in zip(found, rows.pairs.tolist(), strict=True):
            multiply = alone[experts.flatten()[pair]]
            assert multiply is not None
            assert torch.equal(row, multiply(x[pair // 2 : pair // 2 + 1])[0])


@pytest.mark.skipif(not has_instructions(), reason="this CPU has no kernel for codes")
@pytest.mark.parametrize("kind", [None, "int8"])
def test_all_experts_are_multiplied_in_one_launch(kind: Quantization | None) -> None:
    layer = ExpertLinear(COUNT, INPUTS, {"": OUTPUTS})
    assert layer.weight is not None
    layer.weight.data = random(*layer.weight.shape).bfloat16()
    use_kernels(layer, "numba")
    layer.prepack(kind)
    assert layer.tensors.packed_experts is not None
    assert layer.tensors.packed_experts._together is not None


def test_threads_give_the_same_bits() -> None:
    layer = ExpertLinear(COUNT, INPUTS, {"": OUTPUTS})
    assert layer.weight is not None
    weight = random(*layer.weight.shape).bfloat16()
    x, rows = random(66, INPUTS, seed=1).bfloat16(), rows_by_expert(choices(33, 2), COUNT)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        layer = ExpertLinear(COUNT, INPUTS, {"": OUTPUTS})
        layer.weight = torch.nn.Parameter(weight)
        use_kernels(layer, "numba")
        layer.prepack()
        found += [layer(x, rows) for _ in range(10)]
    assert all(torch.equal(found[0], each) for each in found)


def test_mixture_is_the_weighted_sum_of_its_experts() -> None:
    experts = Experts(INPUTS, ExpertsShape(COUNT, 2, 48, renormalises=True), "silu")
    networks = [GatedMLP(INPUTS, 48, "silu") for _ in range(COUNT)]
    for index, (name, parameter) in enumerate(experts.named_parameters()):
        parameter.data = random(*parameter.shape, seed=index) / 8
        assert name in ("router.weight", "expert_up.weight", "expert_down.weight")
    for e, network in enumerate(networks):
        for own, stacked in ((network.up, experts.expert_up), (network.down, experts.expert_down)):
            assert stacked.weight is not None
            assert own.weight is not None
            own.weight.data = stacked.weight.data.unflatten(0, (COUNT, -1))[e]
    x = random(9, INPUTS, seed=9)
    found = experts(x)
    probabilities = experts.router(x).softmax(-1)
    for token, row in enumerate(x):
        best = probabilities[token].topk(2)
        share = best.values / best.values.sum()
        due = sum(w * networks[e](row[None])[0] for w, e in zip(share, best.indices, strict=True))
        torch.testing.assert_close(found[token], due, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_gated", [False, True])
def test_shared_expert_is_added_to_the_sum_of_the_chosen_ones(is_gated: bool) -> None:
    shape = ExpertsShape(COUNT, 2, 48, renormalises=True, shared=SharedExpert(80, is_gated))
    experts = Experts(INPUTS, shape, "silu")
    for index, parameter in enumerate(experts.parameters()):
        parameter.data = random(*parameter.shape, seed=index) / 8
    x, shared = random(9, INPUTS, seed=9), experts.shared
    assert shared is not None
    share = torch.ones(9, 1)
    if experts.shared_gate is not None:
        share = experts.shared_gate(x).sigmoid()
        assert share.min() < 0.45
        assert share.max() > 0.55
    both, added = experts(x), share * shared(x)
    experts.shared = None
    assert (experts.shared_gate is not None) == is_gated
    torch.testing.assert_close(both, experts(x) + added)


def test_route_renormalises_and_sorts_by_weight() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 0.0]])
    experts, weights = route(logits, 2, renormalises=False)
    assert experts.tolist()[0] == [1, 2]
    assert torch.allclose(weights[0], logits[0].softmax(0)[[1, 2]])
    _, whole = route(logits, 2, renormalises=True)
    assert torch.allclose(whole.sum(-1), torch.ones(2))


@pytest.mark.parametrize("best", [1, 2])
def test_route_with_groups_chooses_by_the_best_of_each_group(best: int) -> None:
    """By the definition, token by token: sigmoids, a bias for the choice, and a factor."""
    logits, bias = random(9, 12), random(12, seed=3)
    groups = ExpertGroups(4, 2, best)
    experts, weights = route(
        logits, 3, renormalises=True, is_sigmoid=True, bias=bias, groups=groups, scale=2.5
    )
    for token, row in enumerate(logits.double().sigmoid()):
        choice = row + bias.double()
        sums = [sum(sorted(choice[3 * g : 3 * g + 3].tolist())[-best:]) for g in range(4)]
        allowed = [e for e in range(12) if sums[e // 3] in sorted(sums)[-2:]]
        due = sorted(allowed, key=lambda e: -choice[e])[:3]
        assert experts[token].tolist() == due
        shares = row[due] / row[due].sum() * 2.5
        torch.testing.assert_close(weights[token].double(), shares, rtol=1e-5, atol=1e-6)


def test_route_by_sigmoids_has_the_same_bits_for_any_number_of_tokens() -> None:
    logits = random(33, 12) * 4
    together = route(logits, 3, renormalises=True, is_sigmoid=True)
    for token in range(33):
        alone = route(logits[token : token + 1], 3, renormalises=True, is_sigmoid=True)
        for one, all_of_them in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_of_them[token])


def test_wide_router_multiplies_in_fp32_in_a_model_of_bfloat16() -> None:
    router = WideRouter(64, 8, has_choice_bias=True)
    assert router.tensors.dtype == torch.float32
    assert router.weight is not None
    router.weight.data = random(8, 64)
    x = random(5, 64, seed=1).bfloat16()
    due = x.double() @ router.weight.double().T
    router.prepack("int8")
    assert router(x).dtype == torch.float32
    torch.testing.assert_close(router(x).double(), due, rtol=1e-5, atol=1e-5)


def test_codes_of_a_wide_router_are_dequantised() -> None:
    """The kernel for codes takes inputs in the model's dtype only."""
    router, plain = WideRouter(64, 8, has_choice_bias=True), Linear(64, 8)
    for layer in (router, plain):
        layer.tensors.keep_codes(CodesForm(8, has_offsets=False))
    assert router.tensors.stored_form is None
    assert plain.tensors.stored_form is not None


def test_rows_are_sorted_by_expert_and_back() -> None:
    experts = choices(17, 3)
    rows = rows_by_expert(experts, COUNT)
    counts = torch.bincount(experts.flatten(), minlength=COUNT)
    assert torch.equal(rows.starts.diff(), counts)
    assert experts.flatten()[rows.pairs].diff().min() >= 0
    y = expert_by_expert(
        torch.ones(51, 1), [lambda x, e=e: x * (e + 1) for e in range(COUNT)], rows
    )
    weights = random(17, 3)
    due = (weights * (experts + 1)).sum(-1, keepdim=True)
    torch.testing.assert_close(combine(y, rows, weights), due)
