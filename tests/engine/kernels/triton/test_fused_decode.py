"""The fused decode attention against the composition of today's kernels, in the interpreter.

Slots without an owner hold NaN, and so does new memory (see `poisoned`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from engine.kernels.triton import decode_launch
from engine.kernels.triton.attention_shapes import Features
from engine.kernels.triton.decode_attention import decode_attention
from engine.kernels.triton.decode_launch import Slots, Turn, fused_decode_attention, to_fetch
from engine.kernels.triton.decode_turns import TAIL
from engine.kernels.triton.rotary import rotate
from engine.scheduling.speculation import MOST_ROWS
from tests.engine.kernels.triton.fused_decode_launches import is_fused
from tests.engine.kernels.triton.test_rotary import angles, draw
from tests.support.program_order import program_order
from tests.support.published import PUBLISHED, attention_specs
from tests.support.tolerances import check

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")


@dataclass(frozen=True)
class Case:
    """A layer, and how many keys each sequence has with its new one."""

    heads: int
    kv_heads: int
    dim: int
    lengths: tuple[int, ...] = (300, 1, 17, 90)
    block_size: int = 64
    norm: str = "none"
    width: int | None = None  # rotated dimensions; None: all of them
    pairs: bool = False
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    dtype: torch.dtype = torch.float32


@dataclass
class Step:
    """The tensors of a step. `drafted` rows have the block table of the row before them."""

    case: Case
    qkv: torch.Tensor
    turn: Turn
    slots: Slots
    features: Features
    counters: torch.Tensor

    @classmethod
    def of(cls, case: Case, drafted: Sequence[int] = ()) -> Step:
        c, count = case, len(case.lengths)
        qkv = draw(count, c.heads + 2 * c.kv_heads, c.dim, dtype=c.dtype)
        lengths = torch.tensor(c.lengths, dtype=torch.int32)
        width = max(c.lengths) // c.block_size + 1
        ids = torch.randperm(count * width, generator=torch.Generator().manual_seed(3)) + 1
        tables = ids.view(count, width).clone()
        for row in drafted:
            tables[row] = tables[row - 1]
        blocks = tables[torch.arange(count), (lengths.long() - 1) // c.block_size]
        cache = [
            draw(len(ids) + 1, c.kv_heads, c.block_size, c.dim, dtype=c.dtype, seed=seed)
            for seed in (1, 2)
        ]
        for row in range(count):  # keys that do not exist yet
            at = torch.arange(c.lengths[row] - 1, width * c.block_size)
            for each in cache:
                each[tables[row, at // c.block_size], :, at % c.block_size] = float("nan")
        width = c.dim if c.width is None else c.width
        turned = angles(count, width, c.dtype, pairs=c.pairs) if width else (None, None)
        weights = tuple(draw(c.dim, dtype=c.dtype, seed=seed) + 1 for seed in (4, 5))
        turn = Turn(*turned, pairs=c.pairs)
        if c.norm != "none":
            given = weights if c.norm == "first" else (None, None)
            turn = replace(turn, norm=c.norm, weights=given, eps=1e-6)
        sinks = draw(c.heads, dtype=c.dtype, seed=6) + 2 if c.has_sinks else None
        features = Features(c.dim**-0.5, c.window, c.softcap, sinks=sinks)
        slots = Slots(cache[0], cache[1], tables, blocks, lengths)
        return cls(case, qkv, turn, slots, features, torch.zeros(256, dtype=torch.int32))

    def alone(self, row: int, slots: Slots) -> Step:
        """Return a step of this row, over the cache of `slots`."""
        one = slice(row, row + 1)
        assert self.turn.cos is not None
        assert self.turn.sin is not None
        turn = replace(self.turn, cos=self.turn.cos[one], sin=self.turn.sin[one])
        blocks, tables = slots.token_blocks[one], slots.tables[one]
        slots = Slots(slots.keys, slots.values, tables, blocks, slots.lengths[one])
        return replace(self, qkv=self.qkv[one], turn=turn, slots=slots)

    def composed(self) -> tuple[torch.Tensor, ...]:
        """Return (result, keys, values) of the kernels for rotation and for attention."""
        case, slots, turn = self.case, self.slots, self.turn
        keys, values = slots.keys.clone(), slots.values.clone()
        offsets = (slots.lengths.long() - 1) % case.block_size
        q, k, v = self.qkv.split([case.heads, case.kv_heads, case.kv_heads], 1)
        cache = (keys, values, slots.token_blocks, offsets)
        given = {"norm": turn.norm, "weights": turn.weights, "eps": turn.eps, "pairs": turn.pairs}
        query = rotate(q, turn.cos, turn.sin, k=k, v=v, cache=cache, **given)
        out = torch.empty_like(query)
        decode_attention(out, query, keys, values, slots.tables, slots.lengths, self.features)
        return out, keys, values

    def fused(self, weights: Sequence[torch.Tensor] = ()) -> tuple[torch.Tensor, ...]:
        """Return the same of the fused kernel, on a copy of the cache."""
        slots = replace(self.slots, keys=self.slots.keys.clone(), values=self.slots.values.clone())
        heads, kv_heads = self.case.heads, self.case.kv_heads
        qk, value = self.qkv.split([heads + kv_heads, kv_heads], 1)
        out = torch.empty(len(qk), heads, self.case.dim, dtype=qk.dtype)
        fused_decode_attention(
            out, qk, value, self.turn, slots, self.features, self.counters, weights
        )
        assert not self.counters.any(), "a counter is not 0 after the launch"
        return out, slots.keys, slots.values


def equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Compare bit by bit; NaN equals NaN."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.nan_to_num(9e9), b.nan_to_num(9e9)) for a, b in pairs)


def check_against_composition(step: Step) -> None:
    due, due_keys, due_values = step.composed()
    found, keys, values = step.fused()
    check(found, due)
    check(keys.nan_to_num(9), due_keys.nan_to_num(9))
    assert torch.equal(values.nan_to_num(9), due_values.nan_to_num(9))


CASES = [
    Case(4, 2, 64, norm="first"),
    Case(3, 1, 80, norm="last", block_size=16),
    Case(6, 2, 16, width=8, pairs=True, window=40),
    Case(2, 2, 32, width=0, window=1, softcap=2.0),
    Case(17, 1, 16, has_sinks=True, window=300, lengths=(700, 2)),
    Case(4, 2, 128, norm="first", has_sinks=True, lengths=(600, 273), dtype=torch.bfloat16),
    Case(2, 1, 24, softcap=1.5, lengths=(16, 17, 272, 273, 529), dtype=torch.float16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.variants(3)
def test_fused_decode_equals_rotation_and_attention(case: Case) -> None:
    """Lengths end before, in and behind the newest keys, and have one split or several."""
    check_against_composition(Step.of(case))


SHAPES = sorted(
    {
        (spec.num_heads // spec.num_kv_heads, spec.head_dim)
        for name in PUBLISHED
        for spec in attention_specs(name)
        if is_fused(spec)
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shared", "dim"), SHAPES)
def test_fused_decode_of_published_head_sizes_equals_composition(
    shared: int, dim: int, dtype: torch.dtype
) -> None:
    check_against_composition(Step.of(Case(2 * shared, 2, dim, norm="first", dtype=dtype)))


def test_fused_decode_has_the_bits_of_each_order_of_programs() -> None:
    """Several sequences have several splits, and each order is run twice in a row."""
    step = Step.of(Case(4, 2, 16, lengths=(1100, 280, 5, 600)))
    due = step.fused()
    for seed in range(4):
        with program_order(seed) as orders:
            assert equal(step.fused(), due)
            assert equal(step.fused(), due)
        assert len(orders) == 2
        assert orders[0] != sorted(orders[0])


def test_fused_decode_bits_depend_on_no_other_sequence_and_no_number_of_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Step.of(Case(4, 2, 16, lengths=(1100, 280, 5)))
    together, *_ = step.fused()
    for programs in (1, 3, 40):
        monkeypatch.setattr(decode_launch, "PROGRAMS", programs)
        assert torch.equal(step.fused()[0], together)
    for row in range(3):
        assert torch.equal(step.alone(row, step.slots).fused()[0][0], together[row])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.variants(1)
def test_fused_decode_of_drafted_tokens_has_the_bits_of_steps_one_by_one(
    window: int | None,
) -> None:
    """Tokens of one sequence cross a block and a split in one step, in two orders of programs."""
    length, most = 16 + 256 - 3, MOST_ROWS
    assert most <= TAIL, "the newest keys have room for all drafted tokens"
    lengths = (40, *range(length, length + most))
    step = Step.of(Case(4, 2, 16, lengths=lengths, window=window), drafted=range(2, most + 1))
    found = step.fused()
    with program_order(1):
        assert equal(step.fused(), found)
    slots, out = step.slots, []
    for row in range(len(lengths)):  # each stores its key before the next one is computed
        result, keys, values = step.alone(row, slots).fused()
        slots = replace(slots, keys=keys, values=values)
        out.append(result)
    assert equal(found, (torch.cat(out), slots.keys, slots.values))


@pytest.mark.slow
def test_fused_decode_beyond_max_splits_uses_larger_splits() -> None:
    """64 splits of 256 keys and the newest 16, and one key more, which makes splits of 512."""
    most = 64 * 256 + 16
    check_against_composition(Step.of(Case(1, 1, 16, lengths=(most, most + 1), block_size=128)))


def test_programs_without_work_fetch_each_line_of_the_next_weights_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight programs have four items. The budget ends within the second weight."""
    fetched: list[int] = []

    def prefetch(self: Any, code: str, constraints: str, values: Any, *rest: Any) -> Any:
        assert code.startswith("prefetch.global.L2 ")
        fetched.extend(int(each) for each in values[0].data.ravel())
        nothing = TensorHandle(values[0].data.astype("int32"), tl.int32)
        return SimpleNamespace(get_result=lambda _: nothing)

    monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", prefetch)
    monkeypatch.setattr(decode_launch, "to_fetch", lambda given, _: to_fetch(given, 50_000))
    weights = [torch.zeros(100, 80, dtype=torch.bfloat16), torch.zeros(300, 300)]
    step = Step.of(Case(2, 2, 16, lengths=(3, 9)))
    step.fused(weights)
    due = {weights[0].data_ptr() + 128 * line for line in range(125)}
    due |= {weights[1].data_ptr() + 128 * line for line in range((50_000 - 16_000) // 128)}
    assert set(fetched) == due
    fetched.clear()
    Step.of(Case(8, 8, 16, lengths=(3, 9))).fused(weights)
    assert not fetched, "all programs have work"
