"""A Scheduler with a device that is not there: every step is executed and every answer foreseen.

The KV of a token is a tag of all tokens up to it (and of the tenant's salt), and the next token is
a function of the last tag. So whatever a request must answer is known beforehand, and a block that
is shared wrongly, reused too early, written twice or never written shows as a wrong tag.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from engine.errors import RequestRejectedError
from engine.protocol import FinishReason, GenerateRequest, KVGroup, SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import SampledToken, ScheduledSlice, Step

VOCAB = 11
Outputs = list[tuple[int, FinishReason | None]]


def extend(tag: int, token: int) -> int:
    return hash((tag, token))  # of integers: the same in every process


def next_token(tag: int) -> int:
    return (tag >> 8) % VOCAB


def tags_of(salt: str, tokens: Iterable[int]) -> list[int]:
    tag, tags = zlib.crc32(salt.encode()), []
    for token in tokens:
        tag = extend(tag, token)
        tags.append(tag)
    return tags


def answer(request: GenerateRequest, fails_at: int | None) -> Outputs:
    """What this request must get when nothing goes wrong around it."""
    outputs: Outputs = []
    tag, params = tags_of(request.salt, request.prompt)[-1], request.params
    for count in range(1, params.max_tokens + 1):
        if count - 1 == fails_at:
            return [*outputs, (-1, "error")]
        token = next_token(tag)
        tag = extend(tag, token)
        stops = token in params.stop_token_ids and count >= params.min_tokens
        last = "stop" if stops else "length" if count == params.max_tokens else None
        outputs.append((token, last))
        if last:
            break
    return outputs


class Device:
    """Executes steps in the order they were launched, knowing nothing but the steps."""

    def __init__(self, block_size: int, groups: Sequence[KVGroup]) -> None:
        self.block_size = block_size
        self.groups = groups
        self.requests: dict[int, tuple[GenerateRequest, int | None]] = {}
        self._tokens: dict[int, list[int]] = {}  # by row, like the three below
        self._tags: dict[int, list[int]] = {}
        self._tables: dict[int, list[list[int]]] = {}  # of each KV group
        self._kv: dict[int, list[int | None]] = {}  # block -> tag of each slot

    def execute(self, step: Step) -> list[SampledToken]:
        for block in step.scrub:
            self._kv[block] = [None] * self.block_size
        self._take_rows(step)
        for slice_ in step.slices:  # a layer stores the keys of all tokens before it attends
            self._write(slice_)
        return [self._sample(s) for s in step.slices if self._read(s) and s.samples]

    def _take_rows(self, step: Step) -> None:
        for new in step.new_rows:
            salt = next(self.requests[s.id][0].salt for s in step.slices if s.row == new.row)
            self._tokens[new.row] = list(new.tokens)
            self._tags[new.row] = tags_of(salt, new.tokens)
            self._tables[new.row] = [[] for _ in self.groups]
        for added in step.new_blocks:
            table = self._tables[added.row][added.group]
            assert added.first == len(table), "a table has a gap"
            table += added.blocks

    def _slot(self, row: int, group: int, position: int) -> tuple[list[int | None], int]:
        index, offset = divmod(position, self.block_size)
        block = self._tables[row][group][index]
        assert block, "the null block was handed out"
        return self._kv[block], offset

    def _write(self, slice_: ScheduledSlice) -> None:
        for group in range(len(self.groups)):
            for position in range(slice_.start, slice_.start + slice_.count):
                block, offset = self._slot(slice_.row, group, position)
                assert block[offset] is None, "a slot is written twice: shared, or not scrubbed"
                block[offset] = self._tags[slice_.row][position] + group

    def _read(self, slice_: ScheduledSlice) -> bool:
        for number, group in enumerate(self.groups):
            first = max(0, slice_.start - group.window + 1) if group.window else 0
            for position in range(first, slice_.start + slice_.count):
                block, offset = self._slot(slice_.row, number, position)
                tag = self._tags[slice_.row][position] + number
                assert block[offset] == tag, "foreign or missing KV"
        return True

    def _sample(self, slice_: ScheduledSlice) -> SampledToken:
        tokens, tags = self._tokens[slice_.row], self._tags[slice_.row]
        end = slice_.start + slice_.count
        assert end == len(tokens), "a token is sampled that is known already"
        request, fails_at = self.requests[slice_.id]
        failed = end - len(request.prompt) == fails_at
        token = -1 if failed else next_token(tags[-1])
        tokens.append(token)
        tags.append(extend(tags[-1], token))
        return SampledToken(token)


class Simulation:
    """Scheduler and Device under the loop of EngineCore, with a book of what must come out."""

    def __init__(self, *, depth: int = 0, **limits: Any) -> None:
        self.scheduler = Scheduler(hash_key=b"penstock", **limits)
        self.device = Device(self.scheduler.block_size, self.scheduler.tables.groups)
        self.depth = depth
        self.in_flight: deque[Step] = deque()
        self.outputs: dict[int, Outputs] = {}
        self.expected: dict[int, Outputs] = {}  # of every accepted request
        self.aborted: set[int] = set()
        self.admitted: dict[int, int] = {}  # id -> prompt tokens found in the cache
        self.most_preemptions = 0  # of one request
        self._ids = 0
        self._work = 0

    @property
    def live(self) -> list[int]:
        return list(self.scheduler.sequences)

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        priority: int = 0,
        salt: str = "",
        stops: tuple[int, ...] = (),
        min_tokens: int = 0,
        fails_at: int | None = None,
    ) -> int | None:
        """The id of the request, or None where it was refused, which must have been right."""
        self._ids += 1
        params = SamplingParams(max_tokens, stop_token_ids=stops, min_tokens=min_tokens)
        request = GenerateRequest(self._ids, prompt, params, 0.0, priority, salt)
        self.device.requests[request.id] = (request, fails_at)
        before, due, code = self.scheduler.stats(), self._refusal(request), None
        try:
            self.scheduler.add(request)
        except RequestRejectedError as error:
            code = error.code
        assert code == due
        if code:
            assert self.scheduler.stats() == before
            return None
        self.expected[request.id] = answer(request, fails_at)
        self.outputs[request.id] = []
        self._work += len(prompt) + max_tokens
        self.check()
        return request.id

    def _refusal(self, request: GenerateRequest) -> str | None:
        scheduler = self.scheduler
        total = len(request.prompt) + request.params.max_tokens
        blocks = scheduler.tables.most_blocks(total - 1)
        if total > scheduler.max_model_len or blocks > scheduler.pool.num_blocks:
            return "context_length_exceeded"
        queued = [s for s in scheduler.waiting if s.id not in self.admitted]
        tokens = sum(s.prompt_length for s in queued) + len(request.prompt)
        full = len(queued) >= scheduler.max_num_queued_reqs
        if queued and (full or tokens > scheduler.max_num_queued_tokens):
            return "server_overloaded"
        return None

    def abort(self, *ids: int) -> None:
        self.scheduler.abort(ids)
        self.aborted.update(ids)
        self.check()

    def turn(self) -> None:
        """One pass of the loop, as in EngineCore.turn."""
        scheduler = self.scheduler
        oldest = next((s for s in scheduler.running[:1] if s.num_uncomputed), None)
        step = scheduler.schedule()
        if step:
            self._inspect(step)
            self.in_flight.append(step)
        if oldest:
            assert step, "the oldest waits for nothing"
            assert oldest.id in {s.id for s in step.slices}, "the oldest does not advance"
        assert step or self.in_flight or not scheduler.has_work, "work is left and nothing runs"
        self._note_admissions()
        if self.in_flight and (len(self.in_flight) > self.depth or not step):
            self._retire(self.in_flight.popleft())
        self.check()

    def _inspect(self, step: Step) -> None:
        assert 0 < step.num_tokens <= self.scheduler.max_num_batched_tokens, "budget"
        assert all(s.count > 0 for s in step.slices)
        for values in ([s.id for s in step.slices], [s.row for s in step.slices]):
            assert len(set(values)) == len(values), "a sequence is twice in a step"
        long = [s.count > 1 for s in step.slices]
        assert long == sorted(long), "decodes come first"

    def _note_admissions(self) -> None:
        for admission in self.scheduler.take_admissions(0.0):
            assert admission.id not in self.admitted, "admitted twice"
            self.admitted[admission.id] = admission.cached_tokens
            request, _ = self.device.requests[admission.id]
            assert admission.cached_tokens < len(request.prompt)
            assert admission.cached_tokens % self.scheduler.block_size == 0

    def _retire(self, step: Step) -> None:
        self.most_preemptions = max(
            [self.most_preemptions, *(s.epoch for s in self.scheduler.sequences.values())]
        )
        results = self.device.execute(step)
        for output in self.scheduler.retire(step, results):
            assert output.id not in self.aborted, "an aborted request got a token"
            got, due = self.outputs[output.id], self.expected[output.id]
            assert len(got) < len(due), "a token after the end"
            got.append((output.token, output.finish))
            assert got[-1] == due[len(got) - 1], f"request {output.id} got {got}, due {due}"

    def drain(self) -> None:
        """Run until idle, within a bound: everything not aborted has its whole answer."""
        # A preempted request starts over, so the bound is generous; a livelock has none.
        for _ in range(20 * self._work + 100):
            if not (self.scheduler.has_work or self.in_flight):
                break
            self.turn()
        assert not self.scheduler.has_work, f"livelock: {self.live} never end"
        for request_id, due in self.expected.items():
            if request_id not in self.aborted:
                assert self.outputs[request_id] == due, f"request {request_id} has no end"
        pool = self.scheduler.pool
        assert pool.num_held == 0
        assert pool.num_available == pool.num_blocks

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.check()
        queued = [s.prompt_length for s in scheduler.waiting if not s.admitted]
        assert len(queued) <= scheduler.max_num_queued_reqs
        assert len(queued) <= 1 or sum(queued) <= scheduler.max_num_queued_tokens


def random_traffic(seed: int, operations: int = 60) -> Simulation:
    """Requests, steps and aborts in a random order on a random small machine."""
    rng = random.Random(seed)
    block_size, num_blocks = rng.choice((1, 2, 3, 4)), rng.randint(3, 12)
    capacity = block_size * num_blocks
    windows = rng.choice(((None,), (None,), (None, rng.randint(1, 9)), (5, 2), (1, None, None)))
    simulation = Simulation(
        depth=rng.choice((0, 1, 1, 2)),
        num_blocks=num_blocks * len(windows),
        groups=[KVGroup(1, window) for window in windows],
        block_size=block_size,
        max_model_len=rng.choice((capacity + 1, capacity // 2 + 2)),
        max_num_seqs=rng.choice((1, 2, 4, 8)),
        max_num_batched_tokens=rng.choice((1, 2, 5, 8, 32)),
        max_num_queued_reqs=rng.choice((1, 3, 1000)),
        max_num_queued_tokens=rng.choice((capacity, 3 * capacity, 10**6)),
        prefix_caching=rng.random() < 0.8,
    )
    stem = [rng.randrange(VOCAB) for _ in range(capacity)]  # what prompts share
    for _ in range(operations):
        action = rng.random()
        if action < 0.35:
            _add(simulation, rng, stem)
        elif action < 0.40 and simulation.live:
            # Ids that are unknown or done are harmless.
            simulation.abort(rng.choice(simulation.live), *([10**6] if action < 0.36 else []))
        else:
            simulation.turn()
    simulation.drain()
    return simulation


def _add(simulation: Simulation, rng: random.Random, stem: list[int]) -> None:
    shared = rng.randint(0, len(stem) // 2)
    own = [rng.randrange(VOCAB) for _ in range(rng.randint(0 if shared else 1, 4))]
    simulation.add(
        stem[:shared] + own,
        max_tokens=rng.randint(1, max(1, len(stem) * 2 // 3)),
        priority=rng.choice((0, 0, 0, 0, 1, -1)),
        salt=rng.choice(("", "", "", "tenant")),
        stops=rng.choice(((), (3,), (3, 5))),
        min_tokens=rng.choice((0, 0, 3)),
        fails_at=rng.choice((None, None, None, None, None, 0, 2)),
    )
