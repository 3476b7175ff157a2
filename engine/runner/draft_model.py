"""DraftModel: a second, smaller model that drafts the next tokens of a few sequences.

It has a ModelRunner of its own. The blocks of its KV cache are divided among a few slots, each long
enough for any sequence, so that it needs no scheduler. A slot keeps the KV of its last sequence:
the next one that begins with the same tokens computes only the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.protocol.generate import SamplingParams
from engine.protocol.sampling_parameters import PARAMETERS
from engine.runner.model_runner import ModelRunner
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import NewBlocks, NewRow, ScheduledSlice, Step


@dataclass(eq=False, slots=True)
class Slot:
    """A row of the draft model with blocks for a whole sequence."""

    row: int
    computed: list[int] = field(default_factory=list)  # tokens whose KV is in its blocks
    owner: Sequence | None = None
    used: int = 0  # the number of the call that used it last


class DraftModel:
    """Drafts for as many sequences at a time as `runner` has rows.

    It draws with the parameters and the noise of the sequence, so that a sampled token is drafted
    as often as both models agree on it. Penalties, biases and grammars are left out.
    """

    def __init__(
        self, runner: ModelRunner, max_tokens_per_call: int, *, shares_prefixes: bool
    ) -> None:
        """`max_tokens_per_call` known tokens at most are computed by a call.

        With `shares_prefixes` a sequence reuses what another one with the same salt has computed.
        """
        self._runner = runner
        self._max_tokens_per_call = max_tokens_per_call
        self._shares_prefixes = shares_prefixes
        rows = runner.rows
        self._max_length = rows.tokens.shape[1] - 1
        self._blocks_per_group = rows.block_tables.shape[2]
        self.slots = [Slot(row) for row in range(rows.padding)]
        self._calls = 0
        self.num_computed = 0  # tokens, since the start

    def __call__(self, sequence: Sequence, most: int) -> list[int]:
        """Return up to `most` tokens that may follow the known tokens of a sequence.

        There are none while the draft model lags behind by more tokens than a call computes, and
        none behind its last position.
        """
        known = sequence.tokens
        most = min(most, self._max_length - len(known))
        if most <= 0:
            return []
        slot = self._slot_of(sequence)
        self._calls += 1
        slot.used = self._calls
        # The last known token is computed in any case: the draft begins with its logits.
        start = min(_common_length(slot.computed, known), len(known) - 1)
        end = min(start + self._max_tokens_per_call, len(known))
        slot.computed = known[:end]
        self._runner.rows.set_known(slot.row, start, known[start:end])
        if end < len(known):
            self._compute(slot, start, samples=False)
            return []
        return self._draft(slot, start, most)

    def _draft(self, slot: Slot, start: int, most: int) -> list[int]:
        """Compute the tokens of a slot from `start` on, then draft one token after the other."""
        assert slot.owner is not None
        stops = slot.owner.params.stop_token_ids
        drafted: list[int] = []
        while True:
            token = self._compute(slot, start, samples=True)
            if token < 0:  # the logits are not finite, and the KV may not be either
                self._clear(slot)
                return drafted
            drafted.append(token)
            if len(drafted) == most or token in stops:
                return drafted
            start = len(slot.computed)
            slot.computed.append(token)

    def _compute(self, slot: Slot, start: int, *, samples: bool) -> int:
        """Compute the tokens of a slot from `start` on.

        Returns the token that is drawn behind them, or -1 if none can be drawn.
        """
        count = len(slot.computed) - start
        self.num_computed += count
        part = ScheduledSlice(0, 0, slot.row, start, count, samples)
        sampled = self._runner.launch(Step((part,))).wait()
        return sampled[0].token if samples else -1

    def _slot_of(self, sequence: Sequence) -> Slot:
        """Return the slot of a sequence, or give it one.

        Of the slots whose sequences do not run, it takes the one with the longest common beginning.
        """
        for slot in self.slots:
            if slot.owner is sequence:
                return slot
        idle = [slot for slot in self.slots if slot.owner is None or slot.owner.row < 0]
        if idle:
            slot = max(idle, key=lambda one: (self._num_shared(one, sequence), -one.used))
        else:
            slot = min(self.slots, key=lambda one: one.used)
        slot.computed = slot.computed[: self._num_shared(slot, sequence)]
        slot.owner = sequence
        self._open(slot, sequence)
        return slot

    def _num_shared(self, slot: Slot, sequence: Sequence) -> int:
        """Return how many computed tokens of a slot another sequence can use."""
        if slot.owner is None or not self._shares_prefixes or slot.owner.salt != sequence.salt:
            return 0
        return _common_length(slot.computed, sequence.tokens)

    def _open(self, slot: Slot, sequence: Sequence) -> None:
        """Write a sequence's sampling parameters, and the slot's blocks, to the slot's row."""
        params = _draft_params(sequence.params)
        row = NewRow(slot.row, tuple(sequence.tokens[:1]), 1, params)
        groups = range(len(self._runner.kv.groups))
        blocks = [NewBlocks(slot.row, group, 0, self._blocks_of(slot, group)) for group in groups]
        self._runner.rows.apply(Step(new_rows=(row,), new_blocks=tuple(blocks)))

    def _blocks_of(self, slot: Slot, group: int) -> tuple[int, ...]:
        number = slot.row * len(self._runner.kv.groups) + group
        first = 1 + number * self._blocks_per_group  # behind the null block
        return tuple(range(first, first + self._blocks_per_group))

    def _clear(self, slot: Slot) -> None:
        for group in range(len(self._runner.kv.groups)):
            self._runner.kv.scrub(self._blocks_of(slot, group))
        slot.computed = []


def _draft_params(params: SamplingParams) -> SamplingParams:
    """Return what a draw needs of a sequence's parameters."""
    drawn = {
        name: getattr(params, name)
        for name, parameter in PARAMETERS.items()
        if parameter.kind != "penalty"
    }
    return SamplingParams(max_tokens=1, seed=params.seed, **drawn)


def _common_length(first: list[int], second: list[int]) -> int:
    """Return the length of the common beginning of two lists."""
    low, high = 0, min(len(first), len(second))
    # Lists are compared much faster than tokens one by one.
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
