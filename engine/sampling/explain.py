"""Explain how the tokens of a past answer were drawn, by the functions that have drawn them.

Logits depend on the tokens before them alone, and noise on (seed, position, token). So the draw of
a known token can be repeated at any time, with everything that led to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch

from engine.device.transfer import HostCopy
from engine.protocol import (
    CUT_BAN,
    CUT_GRAMMAR,
    CUT_MIN_P,
    CUT_TOP_K,
    CUT_TOP_P,
    KEPT,
    Candidate,
    Explain,
    Explained,
    ExplainedToken,
)
from engine.sampling.logits import adjust, adjusts_logits, cut, mask
from engine.sampling.noise import exponential_noise
from engine.sampling.sampler import (
    GREEDY_BELOW,
    Candidates,
    DrawParams,
    deciding_candidates,
    tempered,
)

MAX_BANNED = 8  # banned tokens that are returned with a drawn one
NUM_OWN = 2  # the answer's token and the one drawn now
CHUNK = 1 << 21  # logits that are looked at together: about ten tensors as large exist at a time
LN_2 = math.log(2)

Draw = Callable[[torch.Tensor, DrawParams], torch.Tensor]


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """A part of an answer, and the tokens before it."""

    tokens: torch.Tensor  # int32 [known]: the prompt's and the answer's, but the last to explain
    first: int  # index in the answer of the first token to explain
    count: int  # tokens to explain
    explain: Explain

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.count + 1 - self.first

    @property
    def answer(self) -> list[int]:
        """The tokens to explain."""
        return self.explain.answer[self.first : self.first + self.count]

    @property
    def is_greedy(self) -> bool:
        return self.explain.params.temperature < GREEDY_BELOW

    def history(self, row: int) -> torch.Tensor:
        """Return the tokens before the one of a row."""
        return self.tokens[: self.prompt_length + self.first + row]


class PendingExplanation:
    """Explanations of R tokens, on their way to the host."""

    def __init__(
        self, request_id: int, known: KnownTokens, columns: Mapping[str, torch.Tensor]
    ) -> None:
        """`columns` are those of `_columns`."""
        self._id = request_id
        self._known = known
        self._names = tuple(columns)
        self._copy = HostCopy(list(columns.values()), known.tokens.device)

    def read(self) -> Explained:
        """Wait for the device, and return the message."""
        columns = [tensor.tolist() for tensor in self._copy.wait()]
        rows = [dict(zip(self._names, row, strict=True)) for row in zip(*columns, strict=True)]
        return Explained(self._id, self._known.first, list(map(self._token, rows)))

    def _token(self, row: dict[str, Any]) -> ExplainedToken:
        candidates = _listed(row, self._known.explain.num_candidates)
        return ExplainedToken(
            row["drawn"],
            row["rank"],
            row["entropy"],
            row["final_entropy"],
            row["kept"],
            row["mass"],
            tuple(candidates),
        )


def _listed(row: Mapping[str, Any], num_candidates: int) -> Iterable[Candidate]:
    """Return the candidates of one token: see ExplainedToken."""
    lucks = row.get("luck", repeat(None))
    columns = (row[name] for name in ("ids", "logit", "raw", "adjusted", "tempered", "cut"))
    found = [Candidate(*entry) for entry in zip(*columns, lucks, strict=False)]
    count = min(num_candidates, (len(found) - NUM_OWN) // 2)
    likely = [one for one in found[:count] if one.cut < CUT_BAN]
    banned = [one for one in found[count : 2 * count] if one.cut >= CUT_BAN]
    unique: dict[int, Candidate] = {}
    for one in (*likely, *banned[:MAX_BANNED], *found[2 * count :]):
        unique.setdefault(one.id, one)
    return unique.values()


def explain(
    request_id: int,
    known: KnownTokens,
    logits: torch.Tensor,
    draw: Draw,
    allowed: torch.Tensor | None = None,
) -> PendingExplanation:
    """Explain R tokens from the model's logits [R, V] of each of them.

    `draw` is the sampler's function of that name. `allowed` [R, ceil(V / 32)] int32 are the tokens
    that a grammar allows, as for `mask`.
    """
    parts = []
    size = max(1, CHUNK // logits.shape[1])
    for row in range(0, len(logits), size):
        words = None if allowed is None else allowed[row : row + size]
        parts.append(_columns(known, row, logits[row : row + size].float(), draw, words))
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return PendingExplanation(request_id, known, columns)


def _columns(
    known: KnownTokens,
    first_row: int,
    logits: torch.Tensor,
    draw: Draw,
    allowed: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Return what is sent of each row, as tensors [R] and [R, candidates]."""
    num_candidates = min(known.explain.num_candidates, logits.shape[1])
    rows = _draw_params(known, first_row, len(logits), logits.device)
    adjusted, is_allowed = _adjusted(known, first_row, logits, allowed)
    drawn = draw(adjusted, rows)
    final = _final(adjusted, rows, is_greedy=known.is_greedy)
    sent = torch.tensor(known.answer[first_row : first_row + len(logits)], device=logits.device)
    own = torch.stack([sent, drawn.clamp(min=0)], dim=1)
    likely = final["scores"].topk(num_candidates, dim=-1).indices
    ids = torch.cat([likely, logits.topk(num_candidates, dim=-1).indices, own], dim=1)
    raw = torch.softmax(logits, dim=-1)
    cuts = final["cuts"].masked_fill(adjusted == float("-inf"), CUT_BAN)
    if is_allowed is not None:
        cuts.masked_fill_(~is_allowed, CUT_GRAMMAR)
    columns = {
        "drawn": drawn,
        "rank": 1 + (logits > logits.gather(1, sent[:, None])).sum(dim=1),
        "entropy": _bits(raw),
        "final_entropy": final["entropy"],
        "kept": final["kept"],
        "mass": final["mass"],
        "ids": ids,
        "logit": logits.gather(1, ids),
        "raw": raw.gather(1, ids),
        "adjusted": torch.softmax(adjusted, dim=-1).gather(1, ids),
        "tempered": final["probs"].gather(1, ids),
        "cut": cuts.gather(1, ids),
    }
    if not known.is_greedy:
        columns["luck"] = exponential_noise(rows.seeds, rows.positions, ids)
    return columns


def _draw_params(
    known: KnownTokens, first_row: int, count: int, device: torch.device
) -> DrawParams:
    """Return how `count` tokens of the answer were drawn, from row `first_row` on."""
    params = known.explain.params

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((count,), value, dtype=dtype, device=device)

    first = known.prompt_length + known.first + first_row
    return DrawParams(
        temperature=column(params.temperature, torch.float32),
        top_k=column(params.top_k, torch.int32),
        top_p=column(params.top_p, torch.float32),
        min_p=column(params.min_p, torch.float32),
        seeds=column(params.seed, torch.int64),
        positions=torch.arange(first, first + count, device=device),
    )


def _adjusted(
    known: KnownTokens, first_row: int, logits: torch.Tensor, allowed: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the logits after penalties, biases, bans and the grammar, and its allowed tokens."""
    params = known.explain.params
    if not adjusts_logits(params) and allowed is None:
        return logits, None
    adjusted = logits.clone()
    if adjusts_logits(params):
        for row, values in enumerate(adjusted, first_row):
            adjust(values, params, known.history(row), known.prompt_length)
    if allowed is None:
        return adjusted, None
    rows = torch.arange(len(logits), device=logits.device)
    masked = torch.zeros_like(logits)
    for target in (adjusted, masked):
        mask(target, rows, allowed)
    return adjusted, masked == 0


def _final(adjusted: torch.Tensor, rows: DrawParams, *, is_greedy: bool) -> dict[str, torch.Tensor]:
    """Return the distributions [R, V] that R tokens are drawn from, and what the cuts do to them.

    `scores` [R, V] order the candidates. `probs` [R, V] are after temperature, before the cuts.
    `cuts` [R, V] uint8 say what removes each token. `kept` [R] tokens can be drawn; their
    probability is `mass` [R], and `entropy` [R] that of their distribution in bits.
    """
    cuts = torch.full(adjusted.shape, KEPT, dtype=torch.uint8, device=adjusted.device)
    one = torch.ones(len(adjusted), device=adjusted.device)
    final = {"scores": adjusted, "cuts": cuts, "mass": one}
    if is_greedy:
        best = adjusted.argmax(dim=-1, keepdim=True)
        final["probs"] = torch.zeros_like(adjusted).scatter_(1, best, 1.0)
        return final | {"kept": one.long(), "entropy": torch.zeros_like(one)}
    scores = final["scores"] = tempered(adjusted, rows)
    final["probs"] = torch.softmax(scores, dim=-1)
    final["kept"] = (scores > float("-inf")).sum(dim=1)
    final["entropy"] = _bits(final["probs"])
    if _has_cuts(rows):
        for waiting, candidates in deciding_candidates(scores, rows):
            _write_cuts(final, waiting, candidates)
    return final


def _bits(probs: torch.Tensor) -> torch.Tensor:
    """Return the entropy [R] of distributions [R, N]."""
    return torch.special.entr(probs).sum(dim=1) / LN_2


def _has_cuts(rows: DrawParams) -> bool:
    return bool(((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)).any())


def _write_cuts(
    final: Mapping[str, torch.Tensor], waiting: torch.Tensor, candidates: Candidates
) -> None:
    """Write what the cuts keep of the rows `waiting`, as their candidates decide."""
    rows, probs, stays = candidates.rows, candidates.probs, candidates.stays
    no_top_p, no_min_p = torch.ones_like(rows.top_p), torch.zeros_like(rows.min_p)
    within_k = cut(probs, rows.top_k, no_top_p, no_min_p)
    within_p = cut(probs, rows.top_k, rows.top_p, no_min_p)
    cuts = torch.full_like(candidates.ids, CUT_MIN_P, dtype=torch.uint8)
    cuts.masked_fill_(~within_p, CUT_TOP_P)
    cuts.masked_fill_(~within_k, CUT_TOP_K)
    cuts.masked_fill_(stays, KEPT)
    # Less likely tokens than the candidates are removed like the last of these.
    all_cuts = cuts[:, -1:].repeat(1, final["cuts"].shape[1]).scatter_(1, candidates.ids, cuts)
    final["cuts"].index_copy_(0, waiting, all_cuts)
    stays = stays & (candidates.scores > float("-inf"))
    kept_probs = probs * stays
    mass = kept_probs.sum(dim=1)
    entropy = _bits(kept_probs / mass[:, None])
    final["kept"].index_copy_(0, waiting, stays.sum(dim=1))
    final["mass"].index_copy_(0, waiting, mass)
    final["entropy"].index_copy_(0, waiting, entropy)
