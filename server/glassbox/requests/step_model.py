"""The step model: how long a step takes, given what it computes for which requests.

A step takes D = a + b * prefill + c * decode + d * context: a constant (reading the weights), then
prompt tokens, decoded tokens, and pairs of a query and a key. The coefficients are >= 0, and
fitted to the recorded steps by least squares. D leaves out the time that a step waited for a core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from server.glassbox.requests.step_log import RecordedStep

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
FEATURES = 4  # constant, prefill, decode, context
# A step that took this many times as long as the model says was stalled by something else.
STALL = 3.0
MAX_STALLS = 0.05  # share of the steps that may be left out of the fit as stalls
MOST_WAITING = 0.95  # share of a step that is left out of the fit as waiting
TIE = 1e-12  # of the sum of squares: a coefficient must improve the fit by more


@dataclass(frozen=True, slots=True)
class StepModel:
    """Seconds that a step takes: `constant`, and for each token or pair of query and key.

    `r2` is the share of the variance that the model explains, None without steps.
    """

    constant: float
    prefill: float
    decode: float
    context: float
    num_steps: int  # that it was fitted to
    num_stalls: int  # left out
    r2: float | None


@dataclass(frozen=True, slots=True)
class Members:
    """The requests in some steps: one entry of each array for each request and step."""

    step: Ints  # index of the step
    id: Ints
    prefill: Ints  # tokens
    decode: Ints  # tokens
    context: Ints  # pairs of query and key

    def cost(self, model: StepModel) -> Floats:
        """Return the seconds that each entry adds to its step."""
        costs: Floats = (
            model.prefill * self.prefill + model.decode * self.decode + model.context * self.context
        )
        return costs


def members_of(steps: Sequence[RecordedStep]) -> Members:
    """Return who computed what in these steps. A request may have two entries in a step."""
    chunks: list[tuple[int, int, float, int]] = []  # step, id, prefill tokens, pairs
    for index, step in enumerate(steps):
        for chunk in step.chunks:
            pairs = chunk.count * chunk.start + chunk.count * (chunk.count + 1) // 2
            chunks.append((index, chunk.id, chunk.count, pairs))
        for place, encoded_id in enumerate(step.encoded_ids):
            each, rest = divmod(step.encoded_tokens, len(step.encoded_ids))
            chunks.append((index, encoded_id, each + (place < rest), 0))
    table = np.array(chunks, np.int64).reshape(-1, 4)
    lengths = [len(step.decode_ids) for step in steps]
    decodes = sum(lengths)
    ids = np.empty(decodes, np.int64)
    contexts = np.empty(decodes, np.int64)
    at = 0
    for step, length in zip(steps, lengths, strict=True):
        ids[at : at + length] = step.decode_ids
        contexts[at : at + length] = step.contexts
        at += length
    none, one = np.zeros(len(table), np.int64), np.ones(decodes, np.int64)
    return Members(
        step=np.concatenate([table[:, 0], np.repeat(np.arange(len(steps)), lengths)]),
        id=np.concatenate([table[:, 1], ids]),
        prefill=np.concatenate([table[:, 2], 0 * one]),
        decode=np.concatenate([none, one]),
        context=np.concatenate([table[:, 3], contexts]),
    )


def durations(steps: Sequence[RecordedStep]) -> Floats:
    """Return the seconds that each step took, more than 0."""
    seconds = np.array([step.end - step.begin for step in steps], np.float64)
    return np.maximum(seconds, 1e-9)


def waits_of(steps: Sequence[RecordedStep], excess: Floats) -> Floats:
    """Return the seconds that each step waited for a core.

    Threads wait for each other, so a step took longer by the longest wait of a thread at least, and
    by the sum of all if no two threads waited at once. `excess` is what each step took beyond its
    work; the value between the two that is nearest to it is returned.
    """
    longest = np.array([step.longest_wait for step in steps], np.float64)
    total = np.array([step.total_wait for step in steps], np.float64)
    within: Floats = np.minimum(np.clip(excess, longest, total), durations(steps))
    return within


def fit(steps: Sequence[RecordedStep]) -> StepModel:
    """Fit the model to these steps."""
    if not steps:
        return StepModel(0.0, 0.0, 0.0, 0.0, 0, 0, None)
    members = members_of(steps)
    features = np.ones((len(steps), FEATURES))
    for column, amounts in enumerate((members.prefill, members.decode, members.context), 1):
        features[:, column] = np.bincount(members.step, amounts, len(steps))
    wall = durations(steps)
    # The longest wait of a thread is the least that the step waited. A step that mostly waited says
    # little about its work, so it has less weight.
    weights = 1 - np.minimum(waits_of(steps, np.zeros(len(steps))) / wall, MOST_WAITING)
    seconds = wall * weights
    is_usable = _without_stalls(features, seconds)
    features, seconds, weights = features[is_usable], seconds[is_usable], weights[is_usable]
    weighted = nnls(features * weights[:, None], seconds * weights)
    constant, prefill, decode, context = weighted.tolist()
    residual = seconds - features @ np.array([constant, prefill, decode, context])
    error = float(residual**2 @ weights**2)
    mean = np.average(seconds, weights=weights**2)
    spread = float(((seconds - mean) ** 2) @ weights**2)
    r2 = 1 - error / spread if spread > TIE * float(seconds**2 @ weights**2) else 1.0
    left_out = len(steps) - len(seconds)
    return StepModel(constant, prefill, decode, context, len(seconds), left_out, r2)


def _without_stalls(features: Floats, seconds: Floats) -> np.ndarray[tuple[int], np.dtype[np.bool]]:
    """Return which steps to fit the model to.

    One stall of a second would outweigh hundreds of steps. So a first fit minimises relative
    errors; a stall has at most 1, and finds the steps that took far longer.
    """
    relative = nnls(features / seconds[:, None], np.ones(len(seconds)))
    ratio = seconds / np.maximum(features @ relative, 1e-9)
    most = int(MAX_STALLS * len(seconds))
    is_usable = np.ones(len(seconds), np.bool)
    if most:
        longest = np.argsort(ratio)[-most:]
        is_usable[longest[ratio[longest] > STALL]] = False
    return is_usable


def nnls(features: Floats, target: Floats) -> Floats:
    """Return the coefficients >= 0 with the least squares of `features @ result - target`.

    `features` [rows, columns], `target` [rows]. The optimum is the plain least squares solution on
    the columns with positive coefficients. So with few columns, all sets of columns are tried. Of
    sets that fit as well as another, the smallest and first is taken: if each step decodes one
    token, the constant has all of its time.
    """
    columns = features.shape[1]
    scale = np.linalg.norm(features, axis=0)
    scale[scale == 0] = 1.0
    q, r = np.linalg.qr(features / scale)
    projected = q.T @ target
    total = float(target @ target)
    outside = total - float(projected @ projected)  # no coefficients reach it
    best = np.zeros(columns)
    least = total
    for size in range(1, columns + 1):
        for chosen in combinations(range(columns), size):
            part = r[:, chosen]
            found = np.linalg.lstsq(part, projected, rcond=None)[0]
            if (found < 0).any():
                continue
            error = float(((part @ found - projected) ** 2).sum()) + outside
            if error < least - TIE * total:
                least = error
                best = np.zeros(columns)
                best[list(chosen)] = found
    result: Floats = best / scale
    return result
