"""A Scheduler with a simulated device, which executes every step and checks every answer.

The KV of a token is a tag: a hash of all tokens up to it and of the tenant's salt. The next token
is a function of the last tag, so the answer to each request is known in advance. A block that is
shared wrongly, reused too early, written twice or never written shows up as a wrong tag.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from engine.errors import RequestRejectedError
from engine.protocol.embed import EmbedOutput, EmbedRequest
from engine.protocol.generate import (
    FinishReason,
    GenerateRequest,
    Image,
    SamplingParams,
    TokenLogprobs,
)
from engine.protocol.outputs import TokenOutput
from engine.protocol.ready import KVGroup
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence as Record
from engine.scheduling.state_slots import StateSlots, least_slots
from engine.scheduling.step import EncoderInput, NewDraft, SampledToken, ScheduledSlice, Step
from engine.speculative.ngram import ngram_drafter

VOCAB = 11
WHOLE_TOKENS = 5  # of the longest image that one step must compute
Outputs = list[tuple[int, FinishReason | None]]


def extend(tag: int, token: int) -> int:
    return hash((tag, token))  # hashes of integers are equal in all processes


def next_token(tag: int) -> int:
    return (tag >> 8) % VOCAB


def tags_of(
    salt: str,
    tokens: Iterable[int],
    source: Sequence[int] = (),
    adapter: int = 0,
    images: Sequence[Image] = (),
) -> list[int]:
    """Return the tags of `tokens`. Their KV depends on all of `source`, if there is one.

    That of a token which shows an image depends on the image.
    """
    tag, tags = zlib.crc32(salt.encode()), []
    if adapter:
        tag = extend(tag, -adapter)
    if source:
        tag = extend(tag, hash(tuple(source)))
    for position, token in enumerate(tokens):
        tag = extend(tag, token)
        for image in images:
            if image.overlaps(position, position + 1):
                tag = extend(tag, zlib.crc32(image.digest))
        tags.append(tag)
    return tags


def prompt_logprobs_of(tags: list[int], start: int, end: int) -> list[TokenLogprobs]:
    """Return the prompt logprobs computed from the logits of tokens [start, end)."""
    return [TokenLogprobs(float(tag % 2**31)) for tag in tags[start + 1 : end + 1]]


def answer(request: GenerateRequest, fails_at: int | None) -> Outputs:
    """Return the outputs that `request` must get; its answer token `fails_at` is an error."""
    outputs: Outputs = []
    tags = tags_of(
        request.salt, request.prompt, request.encoder_prompt, request.adapter, request.images
    )
    tag, params = tags[-1], request.params
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
    """Executes steps in launch order, from the data in the steps alone."""

    def __init__(
        self, block_size: int, groups: Sequence[KVGroup], *, has_states: bool = False
    ) -> None:
        self.block_size = block_size
        self.has_states = has_states
        self.groups = groups
        self.requests: dict[int, tuple[GenerateRequest, int | None]] = {}
        self._tokens: dict[int, list[int]] = {}  # row -> tokens
        self._tags: dict[int, list[int]] = {}  # row -> tag of each token
        self._tables: dict[int, list[list[int]]] = {}  # row -> block table of each KV group
        self._kv: dict[int, list[int | None]] = {}  # block -> tag of each slot
        self._drafted: dict[int, range] = {}  # row -> positions of the last draft
        self._states: dict[int, int] = {}  # slot -> tag of the last token of its state
        self._own_groups = [n for n, group in enumerate(groups) if not group.is_cross]

    def execute(self, step: Step) -> list[SampledToken]:
        copies = {copy.target: self._kv[copy.source][: copy.tokens] for copy in step.copies}
        for target, tags in copies.items():
            assert None not in tags, "KV is copied before it is computed"
            self._kv[target] = [*tags, *[None] * (self.block_size - len(tags))]
        for new in step.new_drafts:
            self._set_draft(new)
        for block in step.scrub:
            self._kv[block] = [None] * self.block_size
        self._take_rows(step)
        for encode in step.encoder_inputs:
            self._encode(encode)
        for slice_ in step.slices:  # a layer stores the keys of all tokens before it attends
            self._write(slice_)
        if self.has_states:
            self._advance_states(step.slices)
        sampled = [(s, self._sample(s)) for s in step.slices if self._read(s) and s.samples]
        for slice_, result in sampled:
            self._append(slice_.row, slice_.start + slice_.count, result.token)
        return [result for _, result in sampled]

    def _advance_states(self, slices: Sequence[ScheduledSlice]) -> None:
        """Compute the states of all runs at once: none may write what another one reads."""
        runs: list[list[ScheduledSlice]] = []
        for slice_ in slices:
            if slice_.draft < 0:
                runs.append([])
            runs[-1].append(slice_)
        written: dict[int, int] = {}
        for run in runs:
            first, tags = run[0], self._tags[run[0].row]
            if first.start:
                slot, _ = first.states
                assert slot, "a state in the middle of a sequence is not read"
                assert self._states.get(slot) == tags[first.start - 1], "wrong or missing state"
            own = [(slot, tags[s.start + place]) for s in run for place, slot in s.states[1]]
            slots = [slot for slot, _ in own]
            assert 0 not in slots, "slot 0 is written"
            assert len(set(slots)) == len(slots), "a run writes a slot twice"
            assert written.keys().isdisjoint(slots), "two runs write a slot"
            written |= dict(own)
        for run in runs:
            own_slots = {slot for s in run for _, slot in s.states[1]}
            read, _ = run[0].states
            assert read not in written or read in own_slots, "a run writes what another one reads"
        self._states |= written

    def _set_draft(self, new: NewDraft) -> None:
        """Cut a row to its known tokens, and put assumed ones behind them.

        The KV of tokens that were assumed wrongly must be written again before it is read.
        """
        tokens, tags = self._tokens[new.row], self._tags[new.row]
        assert len(tokens) >= new.length, "a row lacks known tokens"
        for position in self._drafted.pop(new.row, ()):
            for group in self._own_groups if position >= new.length - 1 else ():
                block, offset = self._slot(new.row, group, position)
                block[offset] = None
        del tokens[new.length :], tags[new.length :]
        for token in new.tokens:
            self._append(new.row, len(tokens), token)
        self._drafted[new.row] = range(new.length, len(tokens))

    def _append(self, row: int, position: int, token: int) -> None:
        """Put a token at `position`, where an assumed one may be."""
        tokens, tags = self._tokens[row], self._tags[row]
        tokens[position : position + 1] = [token]
        tags[position : position + 1] = [extend(tags[position - 1], token)]

    def _take_rows(self, step: Step) -> None:
        for new in step.new_rows:
            self._drafted.pop(new.row, None)
            request = next(self.requests[s.id][0] for s in step.slices if s.row == new.row)
            assert new.encoder_length == len(request.encoder_prompt)
            self._tokens[new.row] = list(new.tokens)
            self._tags[new.row] = tags_of(
                request.salt, new.tokens, request.encoder_prompt, request.adapter, new.images
            )
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

    def _encode(self, encode: EncoderInput) -> None:
        """Write a source's KV. Each tag depends on the whole source, as encoder states do."""
        for group, blocks in encode.blocks:
            assert self.groups[group].is_cross
            tags = self._source_tags(encode.id)
            assert len(blocks) == -(-len(tags) // self.block_size)
            for position, tag in enumerate(tags):
                block = self._kv[blocks[position // self.block_size]]
                assert block[position % self.block_size] is None, "a source is written twice"
                block[position % self.block_size] = tag

    def _source_tags(self, request_id: int) -> list[int]:
        request, _ = self.requests[request_id]
        return tags_of(request.salt, request.encoder_prompt, request.encoder_prompt)

    def _write(self, slice_: ScheduledSlice) -> None:
        for group in self._own_groups:
            for position in range(slice_.start, slice_.start + slice_.count):
                block, offset = self._slot(slice_.row, group, position)
                assert block[offset] is None, "a slot is written twice: shared, or not scrubbed"
                block[offset] = self._tags[slice_.row][position] + group

    def _read(self, slice_: ScheduledSlice) -> bool:
        for number, group in enumerate(self.groups):
            if group.is_cross:
                for position, tag in enumerate(self._source_tags(slice_.id)):
                    block, offset = self._slot(slice_.row, number, position)
                    assert block[offset] == tag, "wrong or missing KV of a source"
                continue
            first = max(0, slice_.start - group.window + 1) if group.window else 0
            for position in range(first, slice_.start + slice_.count):
                block, offset = self._slot(slice_.row, number, position)
                tag = self._tags[slice_.row][position] + number
                assert block[offset] == tag, "wrong or missing KV"
        return True

    def prompt_logprobs(self, step: Step) -> list[list[TokenLogprobs]]:
        """Return the prompt logprobs of the slices that compute some; call it after `execute`."""
        scoring = [s for s in step.slices if s.num_prompt_logprobs]
        for slice_ in scoring:
            prompt = self.requests[slice_.id][0].prompt
            assert slice_.num_prompt_logprobs <= slice_.count
            assert slice_.start + slice_.num_prompt_logprobs < len(prompt), (
                "a prompt logprob of an answer token"
            )
        return [
            prompt_logprobs_of(self._tags[s.row], s.start, s.start + s.num_prompt_logprobs)
            for s in scoring
        ]

    def _sample(self, slice_: ScheduledSlice) -> SampledToken:
        end = slice_.start + slice_.count
        drafted = self._drafted.get(slice_.row, range(end, end))
        known = len(self._tokens[slice_.row])
        assert end == known or end in drafted, "a known token is sampled again"
        request, fails_at = self.requests[slice_.id]
        failed = end - len(request.prompt) == fails_at
        return SampledToken(-1 if failed else next_token(self._tags[slice_.row][end - 1]))


class Simulation:
    """Runs Scheduler and Device in the loop of EngineCore and checks all outputs."""

    def __init__(
        self, *, depth: int = 0, drafts: Literal["none", "ngram", "right"] = "none", **limits: Any
    ) -> None:
        """With `drafts` "right" most drafted tokens are those that the device will sample."""
        drafters = {"none": None, "ngram": ngram_drafter(), "right": self._mostly_right}
        self.scheduler = Scheduler(hash_key=b"penstock", drafter=drafters[drafts], **limits)
        tables = self.scheduler.tables
        has_states = tables.states is not None
        self.device = Device(tables.block_size, tables.groups, has_states=has_states)
        self.depth = depth
        self.in_flight: deque[Step] = deque()
        self.outputs: dict[int, Outputs] = {}
        self.expected: dict[int, Outputs] = {}  # for every accepted request
        self.aborted: set[int] = set()
        self.admitted: dict[int, int] = {}  # id -> prompt tokens found in the cache
        self.most_preemptions = 0  # of a single request
        self.texts: dict[int, list[int]] = {}  # tokens of the texts to embed
        self.vectors: dict[int, bytes] = {}
        self.slots: dict[int, int] = {}  # slot -> the adapter that is written there
        self._loads: list[tuple[int, int, int]] = []  # (turn of its end, adapter, slot)
        self._turns = 0
        self._ids = 0
        self._work = 0

    def _mostly_right(self, sequence: Record, most: int) -> list[int]:
        """Draft tokens of the known answer, a quarter of them replaced."""
        due = [token for token, _ in self.expected[sequence.id]][sequence.num_outputs :]
        rng = random.Random(sequence.id * 1000 + len(due))
        return [rng.choice((max(token, 0),) * 3 + (1,)) for token in due[:most]]

    @property
    def live(self) -> list[int]:
        return [*self.scheduler.sequences, *(self.texts.keys() - self.vectors - self.aborted)]

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        priority: int = 0,
        salt: str = "",
        source: Sequence[int] = (),
        stops: tuple[int, ...] = (),
        min_tokens: int = 0,
        fails_at: int | None = None,
        prompt_logprobs: bool = False,
        adapter: int = 0,
        tenant: str = "",
        images: Sequence[Image] = (),
    ) -> int | None:
        """Add a request; return its id, or None if it was refused. Check that this is correct."""
        self._ids += 1
        params = SamplingParams(max_tokens, stop_token_ids=stops, min_tokens=min_tokens)
        params = replace(params, prompt_logprobs=prompt_logprobs - 1)
        request = GenerateRequest(
            self._ids,
            prompt,
            params,
            0.0,
            priority=priority,
            salt=salt,
            tenant=tenant,
            encoder_prompt=list(source),
            adapter=adapter,
            images=tuple(images),
        )
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
        self._work += len(prompt) + len(source) + max_tokens + adapter
        self.check()
        return request.id

    def embed(self, tokens: list[int], priority: int = 0, tenant: str = "") -> int:
        self._ids += 1
        self.scheduler.add(EmbedRequest(self._ids, tokens, 0.0, priority, tenant))
        self.texts[self._ids] = tokens
        self._work += 1
        return self._ids

    def _refusal(self, request: GenerateRequest) -> str | None:
        scheduler = self.scheduler
        total = len(request.prompt) + request.params.max_tokens
        source = len(request.encoder_prompt)
        blocks = scheduler.tables.max_blocks(total - 1, source)
        if max(total, source) > scheduler.max_model_len or blocks > scheduler.pool.num_blocks:
            return "context_length_exceeded"
        return None

    def abort(self, *ids: int) -> None:
        self.scheduler.abort(ids)
        self.aborted.update(ids)
        self.check()

    def turn(self) -> None:
        """Run the loop body once, as EngineCore.turn does."""
        scheduler = self.scheduler
        self._finish_loads()
        oldest = next((s for s in scheduler.running[:1] if s.num_uncomputed), None)
        step = scheduler.schedule()
        for adapter, slot in scheduler.adapters.take_wanted().items():
            self._loads.append((self._turns + adapter % 3, adapter, slot))
        if step:
            self._inspect(step)
            self.in_flight.append(step)
        if oldest:
            assert step, "the oldest sequence waits without a reason"
            assert oldest.id in {s.id for s in step.slices}, "the oldest sequence does not advance"
        waits = self.in_flight or self._loads
        assert step or waits or not scheduler.has_work, "there is work, but nothing runs"
        self._note_admissions({e.id for e in step.encoder_inputs} if step else set())
        if self.in_flight and (len(self.in_flight) > self.depth or not step):
            self._retire(self.in_flight.popleft())
        self.check()

    def _finish_loads(self) -> None:
        self._turns += 1
        for load in [load for load in self._loads if load[0] <= self._turns]:
            self._loads.remove(load)
            _, adapter, slot = load
            self.scheduler.adapters.place(adapter, slot)
            self.slots[slot] = adapter

    def _inspect(self, step: Step) -> None:
        for scheduled in step.slices:
            wanted = self.device.requests[scheduled.id][0].adapter
            assert self.slots.get(scheduled.adapter_slot, 0) == wanted, "another adapter"
        assert step.slices or step.encoder_inputs, "an empty step"
        image_tokens = self.scheduler.image_tokens
        most = self.scheduler.max_num_batched_tokens + image_tokens
        assert sum(s.count for s in step.slices) <= most, "budget"
        for scheduled in step.slices if image_tokens else ():
            end = scheduled.start + scheduled.count
            for image in self.device.requests[scheduled.id][0].images:
                for first, count in image.runs:
                    assert not first < end < first + count, "a step ends inside an image"
        for is_pooled in (False, True):
            lengths = [len(e.tokens) for e in step.encoder_inputs if e.is_pooled == is_pooled]
            budget = self.scheduler.max_num_encoder_tokens
            assert len(lengths) < 2 or sum(lengths) <= budget, "the encoder's budget"
        assert all(s.count > 0 for s in step.slices)
        known = [s for s in step.slices if s.draft < 0]
        for values in ([s.id for s in known], [s.row for s in known]):
            assert len(set(values)) == len(values), "a sequence occurs twice in a step"
        long = [s.count > 1 for s in step.slices]
        assert long == sorted(long), "decodes come first"

    def _note_admissions(self, encoded: set[int]) -> None:
        for admission in self.scheduler.waiting.take_admissions(0.0):
            assert admission.id not in self.admitted, "admitted twice"
            self.admitted[admission.id] = admission.cached_tokens
            if admission.id in self.texts:
                continue
            request, _ = self.device.requests[admission.id]
            cached = admission.cached_tokens
            if admission.id not in encoded:
                cached -= len(request.encoder_prompt)
            assert 0 <= cached < len(request.prompt)
            tables = self.scheduler.tables
            assert cached % tables.block_size % (tables.part_size or tables.block_size) == 0

    def _retire(self, step: Step) -> None:
        self.most_preemptions = max(
            [self.most_preemptions, *(s.epoch for s in self.scheduler.sequences.values())]
        )
        vectors = [
            EmbedOutput(e.id, bytes(t % 256 for t in e.tokens))
            for e in step.encoder_inputs
            if e.is_pooled
        ]
        for vector in self.scheduler.embeds.retire(vectors):
            assert vector.id not in self.aborted | self.vectors.keys()
            assert vector.vector == bytes(t % 256 for t in self.texts[vector.id])
            self.vectors[vector.id] = vector.vector
        results = self.device.execute(step)
        for output in self.scheduler.retire(step, results, self.device.prompt_logprobs(step)):
            assert output.id not in self.aborted, "an aborted request got a token"
            got, due = self.outputs[output.id], self.expected[output.id]
            self._check_prompt_logprobs(output, first=not got)
            assert len(got) < len(due), "a token after the end"
            got.append((output.token, output.finish))
            assert got[-1] == due[len(got) - 1], f"request {output.id} got {got}, due {due}"

    def _check_prompt_logprobs(self, output: TokenOutput, *, first: bool) -> None:
        """Check that the first token brings each prompt logprob once, despite recomputation."""
        request, _ = self.device.requests[output.id]
        due = []
        if first and request.params.prompt_logprobs >= 0:
            source, adapter = request.encoder_prompt, request.adapter
            tags = tags_of(request.salt, request.prompt, source, adapter, request.images)
            due = prompt_logprobs_of(tags, 0, len(tags))
        assert list(output.prompt_logprobs) == due, "wrong prompt logprobs"

    def drain(self) -> None:
        """Run until idle; check that every request that was not aborted has its whole answer."""
        # The limit detects livelocks. It is generous, because preempted requests start over.
        for _ in range(20 * self._work + 100):
            if not (self.scheduler.has_work or self.in_flight):
                break
            self.turn()
        assert not self.scheduler.has_work, f"livelock: {self.live} do not end"
        for request_id, due in self.expected.items():
            if request_id not in self.aborted:
                assert self.outputs[request_id] == due, f"request {request_id} is incomplete"
        assert self.texts.keys() <= self.vectors.keys() | self.aborted, "a text has no vector"
        pool = self.scheduler.pool
        assert pool.num_held == 0
        assert pool.num_available == pool.num_blocks

    def check(self) -> None:
        self.scheduler.check()


def random_traffic(seed: int, operations: int = 60) -> Simulation:
    """Run requests, steps and aborts in random order with random small limits."""
    rng = random.Random(seed)
    block_size, num_blocks = rng.choice((1, 2, 3, 4)), rng.randint(3, 12)
    capacity = block_size * num_blocks
    windows = rng.choice(((None,), (None,), (None, rng.randint(1, 9)), (5, 2), (1, None, None)))
    cross = [KVGroup(1, is_cross=True)] * (rng.random() < 0.3)
    groups = [KVGroup(1, window) for window in windows]
    depth = rng.choice((0, 1, 1, 2))
    all_groups = [*cross, *groups] if rng.random() < 0.5 else [*groups, *cross]
    encoder_tokens = rng.choice((1, 7, 100))
    longest = rng.choice((capacity + 1, capacity // 2 + 2))
    most, budget = rng.choice((1, 2, 4, 8)), rng.choice((1, 2, 5, 8, 32))
    caches = rng.random() < 0.8
    states = None
    if seed % 2 and not cross:
        count = least_slots(most) + random.Random(seed + 10**8).choice((0, 1, 8, 60))
        states = StateSlots(count, most, block_size, keeps_edges=caches)
    shown = random.Random(seed + 10**9) if seed % 3 == 2 else None
    # The images are long, and computed whole.
    whole = seed % 6 == 2
    simulation = Simulation(
        depth=depth,
        image_tokens=WHOLE_TOKENS * whole,
        num_blocks=num_blocks * (len(groups) + len(cross)),
        groups=all_groups,
        max_num_encoder_tokens=encoder_tokens,
        block_size=block_size,
        max_model_len=longest,
        max_num_seqs=most,
        max_num_batched_tokens=budget,
        prefix_caching=caches,
        part_size=rng.choice((0, 1, 1, 2)),
        context_cost=seed % 3 / 2,
        drafts=("none", "ngram", "right")[seed % 5 % 3],
        num_adapter_slots=seed % 3 + 1,
        states=states,
    )
    num_adapters = 0 if cross else seed % 4 * 2
    chosen, tenants = random.Random(seed + 10**6), random.Random(seed + 10**7)
    names = ("", "aab", "abc")[seed % 3] or [""]
    stem = [rng.randrange(VOCAB) for _ in range(capacity)]  # common prefix of prompts
    for _ in range(operations):
        action = rng.random()
        if action < 0.35:
            adapter = max(0, chosen.randint(-1, num_adapters))
            tenant = tenants.choice(names)
            _add(simulation, rng, stem, bool(cross), adapter, tenant, shown)
        elif action < 0.36:
            text = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 2))]
            simulation.embed(text, tenant=tenants.choice(names))
        elif action < 0.40 and simulation.live:
            # Unknown and finished ids must be ignored.
            simulation.abort(rng.choice(simulation.live), *([10**6] if action < 0.38 else []))
        else:
            simulation.turn()
    simulation.drain()
    return simulation


def _add(
    simulation: Simulation,
    rng: random.Random,
    stem: list[int],
    cross: bool,
    adapter: int,
    tenant: str,
    shown: random.Random | None,
) -> None:
    shared = rng.randint(0, len(stem) // 2)
    own = [rng.randrange(VOCAB) for _ in range(rng.randint(0 if shared else 1, 4))]
    prompt = stem[:shared] + own
    simulation.add(
        prompt,
        max_tokens=rng.randint(1, max(1, len(stem) * 2 // 3)),
        priority=rng.choice((0, 0, 0, 0, 1, -1)),
        salt=rng.choice(("", "", "", "tenant")),
        source=stem[: rng.randint(1, len(stem) // 2 + 1)] if cross else (),
        stops=rng.choice(((), (3,), (3, 5))),
        min_tokens=rng.choice((0, 0, 3)),
        fails_at=rng.choice((None, None, None, None, None, 0, 2)),
        prompt_logprobs=rng.random() < 0.2,
        adapter=adapter,
        tenant=tenant,
        images=_images(shown, len(prompt), simulation.scheduler.image_tokens) if shown else (),
    )


def _images(rng: random.Random, length: int, whole_tokens: int) -> list[Image]:
    """Return up to two images in a prompt of `length` tokens; they differ in nothing but pixels."""
    digests = [b"cat", b"dog"]
    if whole_tokens:
        runs = [(1, whole_tokens), (whole_tokens + 2, 2)]
        return [Image(rng.choice(digests), (run,)) for run in runs if sum(run) <= length]
    if length < 3 or rng.random() < 0.3:
        return []
    first = Image(rng.choice(digests), ((1, 2),))
    if length < 6 or rng.random() < 0.5:
        return [first]
    return [first, Image(rng.choice(digests), ((3, 1), (5, 1)))]
