"""The work of an engine step and of a request, in seconds on a core, fitted to running servers.

Wall time contains what other processes do on the same cores, which depends on the load. CPU time
does not, so the fit holds for other loads, too. `loadtest/cores.py` simulates the sharing of cores.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import msgspec
import numpy as np

ROUNDS = 20  # of reweighting, which converges within a few


class StepTime(msgspec.Struct, frozen=True):
    """The seconds of a step on the cores of its engine's threads.

    Steps with prompt tokens run kernel by kernel. Those of few decodes are recorded, and those of
    many are not. So the seconds of steps with decodes alone are a table.
    """

    decodes: tuple[tuple[int, float], ...]  # (decodes in the step, seconds), ascending
    context_token: float  # per token of context of each decode
    prefill_step: float
    prompt: float  # per prompt that the step completes
    prefill_token: float
    attention: float  # per prompt token and token of its context

    def seconds(
        self, prompts: int, prefill_tokens: int, decode_tokens: int, context: int, attended: float
    ) -> float:
        """Return the seconds of a step that completes `prompts` prompts.

        `context` is the sum of the decodes' contexts; `attended` is that of the prompt tokens'.
        """
        reading = self.context_token * context
        if not prefill_tokens:
            return self._decodes(decode_tokens) + reading
        # Its decodes are computed together with the prompt, as those of a large batch are.
        return (
            self.prefill_step
            + self.prompt * prompts
            + self.prefill_token * prefill_tokens
            + self.attention * attended
            + self._slope(len(self.decodes) - 1) * decode_tokens
            + reading
        )

    def _decodes(self, count: int) -> float:
        counts = [known for known, _ in self.decodes]
        index = min(max(1, bisect.bisect_left(counts, count)), len(counts) - 1)
        known, seconds = self.decodes[index]
        return max(0.0, seconds + self._slope(index) * (count - known))

    def _slope(self, index: int) -> float:
        """Return the seconds of one more decode, between the entry before `index` and that one."""
        (fewer, before), (more, after) = self.decodes[index - 1 : index + 1]
        return max(0.0, (after - before) / (more - fewer))


class RequestTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The seconds that a process without a model needs for requests: the API process or a client.

    A message has the outputs of a step. `event` is per event of a stream, which may have several
    tokens. `wake` is per wake-up of the process, which had slept. `cold_wake` is what a wake-up
    takes in addition if the core had been idle, too: its caches are cold.
    """

    request: float = 0.0
    prompt_token: float = 0.0
    message: float = 0.0
    wake: float = 0.0
    cold_wake: float = 0.0
    event: float = 0.0

    def sending(self, prompt_tokens: int) -> float:
        return self.request + self.prompt_token * prompt_tokens


class Interval(msgspec.Struct, frozen=True):
    """The work of a server, or of a client, between two readings. CPU times are seconds.

    `decodes` is the number of decodes of each step, or 0 if all steps had prompt tokens alone.
    """

    decodes: int
    steps: float  # or messages to the API process; a client gets none
    wakes: float  # of the API process, or of the client
    paced: bool  # requests came with pauses, so that cores were idle before the wake-ups
    prefill: float  # prompt tokens computed, without those found in the prefix cache
    context: float  # mean number of tokens in the KV cache
    attended: float  # sum over the computed prompt tokens of their contexts
    requests: float
    tokens: float  # generated
    events: float  # with text; tokens that wait for the API process share one
    engine_cpu: float
    api_cpu: float
    channel_cpu: float  # of the threads between both, which is in neither of them


def fit_steps(intervals: Sequence[Interval], threads: int) -> StepTime:
    """Fit a StepTime to the CPU times of engines, by least squares.

    Raises ValueError if the intervals do not determine it.
    """
    counts = sorted({each.decodes for each in intervals if each.decodes})
    if len(counts) < 2 or all(each.decodes for each in intervals):
        raise ValueError(
            "Step times need intervals of prompts and of at least two numbers of decodes; "
            f"given: {sorted({each.decodes for each in intervals})}."
        )
    rows = []
    for each in intervals:
        tables = [each.steps if each.decodes == count else 0.0 for count in counts]
        if each.decodes:
            rows.append([*tables, each.steps * each.context, 0.0, 0.0, 0.0, 0.0])
        else:
            prompts = [each.steps, each.requests, each.prefill, each.attended]
            rows.append([*tables, 0.0, *prompts])
    found = balanced(rows, [each.engine_cpu / threads for each in intervals])
    table, others = found[: len(counts)], found[len(counts) :]
    return StepTime(tuple(zip(counts, table, strict=True)), *others)


def fit_requests(intervals: Sequence[Interval], cpu: Sequence[float]) -> RequestTime:
    """Fit a RequestTime to the CPU times `cpu` of a process, one for each interval."""
    rows = [
        [
            each.requests,
            each.prefill,
            each.steps,
            each.wakes,
            each.wakes * each.paced,
            each.events,
        ]
        for each in intervals
    ]
    return RequestTime(*balanced(rows, cpu))


def fit_channel(intervals: Sequence[Interval]) -> float:
    """Return the seconds of a message at each end of the channel, of the engine and API process."""
    messages = sum(each.steps + each.requests for each in intervals)
    return sum(each.channel_cpu for each in intervals) / (2 * messages)


def balanced(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Solve least squares with weights 1 / expected time, as for counts (quasi-Poisson).

    The predicted times then add up to the measured times. Terms that come out negative are set to
    0, as nothing makes work shorter.
    """
    features, wall = np.array(rows, float), np.array(seconds)
    expected = np.maximum(wall, wall.mean() / 100)
    for _ in range(ROUNDS):
        scale = 1 / np.sqrt(expected)
        found = _non_negative(features * scale[:, None], wall * scale)
        expected = np.maximum(features @ found, wall.mean() / 100)
    return [float(value) for value in found]


def _non_negative(features: np.ndarray, wall: np.ndarray) -> np.ndarray:
    """Solve least squares, dropping the most negative coefficient until none is negative."""
    kept = list(range(features.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(features[:, kept], wall, rcond=None)
        if found.min() >= 0:
            break
        del kept[int(found.argmin())]
    whole = np.zeros(features.shape[1])
    whole[kept] = found
    return whole
