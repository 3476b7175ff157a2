"""Explain how the tokens of a past answer were drawn, by the functions that have drawn them.

Logits depend on the tokens before them alone, and noise on (seed, position, token). So the draw of
a known token can be repeated at any time, with everything that led to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from engine.device.transfer import HostCopy
from engine.protocol.generate import (
    CUT_BAN,
    CUT_CODES,
    CUT_GRAMMAR,
    CUT_MIN_P,
    CUT_TOP_K,
    CUT_TOP_P,
    KEPT,
    Explain,
    Explained,
)
from engine.sampling.logits import (
    GREEDY_BELOW,
    adjust,
    adjusts_logits,
    cut,
    mask,
    needs_plain_cuts,
    plain_cuts,
)
from engine.sampling.noise import exponential_noise
from engine.sampling.sampler import (
    Candidates,
    Draw,
    DrawParams,
    deciding_candidates,
    tempered,
)

MAX_BANNED = 8  # banned tokens that are returned with a drawn one
BANS = (CUT_BAN, CUT_GRAMMAR)
NUM_OWN = 2  # the answer's token and the one drawn now
CHUNK = 1 << 21  # logits that are looked at together: about ten tensors as large exist at a time
LN_2 = math.log(2)
# Fields of Explained that have an entry for each candidate.
CANDIDATE_COLUMNS = {"ids", "logits", "raw", "adjusted", "tempered", "cuts", "lucks"}


class PendingExplanation:
    """How some tokens of a past answer were drawn, on its way to the host.

    `tokens` int32 [known] are those of the prompt and of the answer, up to the one before the last
    to explain. `first` is the index in the answer of the first one.
    """

    def __init__(
        self,
        request_id: int,
        explain: Explain,
        tokens: torch.Tensor,
        prompt_length: int,
        first: int,
    ) -> None:
        self._id = request_id
        self._explain = explain
        self._params = explain.params
        self._tokens = tokens
        self._prompt_length = prompt_length
        self._first = first
        self._is_greedy = explain.params.temperature < GREEDY_BELOW

    def launch(self, logits: torch.Tensor, draw: Draw, allowed: torch.Tensor | None = None) -> None:
        """Compute the explanations of R tokens from the model's logits [R, V] of each of them.

        `draw` is the sampler's function of that name. `allowed` [R, ceil(V / 32)] int32 are the
        tokens that a grammar allows, as for `mask`.
        """
        size = max(1, CHUNK // logits.shape[1])
        parts = []
        for row in range(0, len(logits), size):
            words = None if allowed is None else allowed[row : row + size].to(logits.device)
            rows = logits[row : row + size].float()
            parts.append(self._columns(self._first + row, rows, draw, words))
        columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        self._names = tuple(columns)
        self._copy = HostCopy(list(columns.values()), logits.device)

    def read(self) -> list[Explained]:
        """Wait for the device, and return the messages."""
        columns = [tensor.tolist() for tensor in self._copy.wait()]
        messages = []
        for index, values in enumerate(zip(*columns, strict=True), self._first):
            row = dict(zip(self._names, values, strict=True))
            messages.append(self._message(index, row))
        return messages

    def _message(self, index: int, row: dict[str, Any]) -> Explained:
        places = _listed(row["ids"], row["cuts"], self._explain.num_candidates)
        for name in CANDIDATE_COLUMNS & row.keys():
            row[name] = [row[name][place] for place in places]
        return Explained(id=self._id, index=index, **({"lucks": []} | row))

    def _columns(
        self, index: int, logits: torch.Tensor, draw: Draw, allowed: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Return the fields of Explained, as tensors [R] and [R, candidates].

        `index` is that of the first token in the answer.
        """
        num_candidates = min(self._explain.num_candidates, logits.shape[1])
        rows = self._draw_params(index, len(logits), logits.device)
        adjusted = self._adjusted(index, logits)
        before = adjusted
        if allowed is not None:
            adjusted = adjusted.clone()
            mask(adjusted, torch.arange(len(logits), device=logits.device), allowed)
        narrowed, plain = self._narrowed(adjusted)
        drawn = draw(narrowed, rows)
        final = _final(adjusted, rows, narrowed, plain, is_greedy=self._is_greedy)
        sent = torch.tensor(self._explain.answer[index : index + len(logits)], device=drawn.device)
        own = torch.stack([sent, drawn.clamp(min=0)], dim=1)
        likely = final["scores"].topk(num_candidates, dim=-1).indices
        likely_to_model = logits.topk(num_candidates, dim=-1).indices
        ids = torch.cat([likely, likely_to_model, own], dim=1)
        raw = torch.softmax(logits, dim=-1)
        adjusted_probs = torch.softmax(adjusted, dim=-1)
        sent_logits = logits.gather(1, sent[:, None])
        is_banned = before == float("-inf")
        is_forbidden = adjusted == float("-inf")
        is_forced = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
        if allowed is not None:
            is_forced = (~is_forbidden).sum(dim=1) == 1
        cuts = final["cuts"].masked_fill(is_forbidden, CUT_GRAMMAR)
        cuts.masked_fill_(is_forbidden & is_banned, CUT_BAN)
        columns = {
            "drawn": drawn,
            "rank": 1 + (logits > sent_logits).sum(dim=1),
            "entropy": _bits(raw),
            "final_entropy": final["entropy"],
            "kept": final["kept"],
            "mass": final["mass"],
            "ids": ids,
            "logits": logits.gather(1, ids),
            "raw": raw.gather(1, ids),
            "adjusted": adjusted_probs.gather(1, ids),
            "tempered": final["probs"].gather(1, ids),
            "cuts": cuts.gather(1, ids),
            "is_forced": is_forced,
        }
        if not self._is_greedy:
            columns["lucks"] = exponential_noise(rows.seeds, rows.positions, ids)
        return columns

    def _draw_params(self, index: int, count: int, device: torch.device) -> DrawParams:
        """Return how `count` tokens of the answer were drawn."""
        params = self._params

        def column(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((count,), value, dtype=dtype, device=device)

        first = self._prompt_length + index
        return DrawParams(
            temperature=column(params.temperature, torch.float32),
            top_k=column(params.top_k, torch.int32),
            top_p=column(params.top_p, torch.float32),
            min_p=column(params.min_p, torch.float32),
            seeds=column(params.seed, torch.int64),
            positions=torch.arange(first, first + count, device=device),
        )

    def _adjusted(self, index: int, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits after penalties, biases and bans."""
        if not adjusts_logits(self._params):
            return logits
        adjusted = logits.clone()
        for position, values in enumerate(adjusted, self._prompt_length + index):
            adjust(values, self._params, self._tokens[:position], self._prompt_length)
        return adjusted

    def _narrowed(self, adjusted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the logits [R, V] after the plain cuts, and by what [R, V] uint8 each was removed.

        The second is None if the answer has no such cuts.
        """
        if not needs_plain_cuts(self._params):
            return adjusted, None
        narrowed = adjusted.clone()
        codes = torch.full(adjusted.shape, KEPT, dtype=torch.uint8, device=adjusted.device)
        for logits, code in zip(narrowed, codes, strict=True):
            for name, removed in plain_cuts(logits, self._params):
                logits.masked_fill_(removed, float("-inf"))
                code.masked_fill_(removed, CUT_CODES.index(name))
        return narrowed, codes


def _listed(ids: Sequence[int], cuts: Sequence[int], num_candidates: int) -> list[int]:
    """Return the places in `_columns` of the candidates of one token: see Explained."""
    count = min(num_candidates, (len(ids) - NUM_OWN) // 2)
    likely = [place for place in range(count) if cuts[place] not in BANS]
    banned = [place for place in range(count, 2 * count) if cuts[place] in BANS]
    unique: dict[int, int] = {}
    for place in (*likely, *banned[:MAX_BANNED], *range(2 * count, len(ids))):
        unique.setdefault(ids[place], place)
    return list(unique.values())


def _final(
    adjusted: torch.Tensor,
    rows: DrawParams,
    narrowed: torch.Tensor,
    plain: torch.Tensor | None,
    *,
    is_greedy: bool,
) -> dict[str, torch.Tensor]:
    """Return the distributions [R, V] that R tokens are drawn from, and what the cuts do to them.

    `narrowed` and `plain` are those of `_narrowed`. `scores` [R, V] order the candidates. `probs`
    [R, V] are after temperature, before the cuts. `cuts` [R, V] uint8 say what removes each token.
    `kept` [R] tokens can be drawn; their probability is `mass` [R], and `entropy` [R] that of their
    distribution in bits.
    """
    cuts = torch.full(adjusted.shape, KEPT, dtype=torch.uint8, device=adjusted.device)
    one = torch.ones(len(adjusted), device=adjusted.device)
    final = {"scores": adjusted, "cuts": cuts, "mass": one}
    if is_greedy:
        best = adjusted.argmax(dim=-1, keepdim=True)
        final["probs"] = torch.zeros_like(adjusted).scatter_(1, best, 1.0)
        return final | {"kept": one.long(), "entropy": torch.zeros_like(one)}
    scores = final["scores"] = tempered(adjusted, rows)
    probs = final["probs"] = torch.softmax(scores, dim=-1)
    if _has_cuts(rows):
        for waiting, candidates in deciding_candidates(tempered(narrowed, rows), rows):
            _write_cuts(cuts, waiting, candidates)
    if plain is not None:
        cuts.copy_(torch.where(plain > KEPT, plain, cuts))
    is_kept = (scores > float("-inf")) & (cuts == KEPT)
    final["kept"] = is_kept.sum(dim=1)
    if plain is not None or _has_cuts(rows):
        probs = probs * is_kept
        final["mass"] = probs.sum(dim=1)
        probs = probs / final["mass"][:, None]
    final["entropy"] = _bits(probs)
    return final


def _bits(probs: torch.Tensor) -> torch.Tensor:
    """Return the entropy [R] of distributions [R, N]."""
    return torch.special.entr(probs).sum(dim=1) / LN_2


def _has_cuts(rows: DrawParams) -> bool:
    return bool(((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)).any())


def _write_cuts(cuts: torch.Tensor, waiting: torch.Tensor, candidates: Candidates) -> None:
    """Write to `cuts` [R, V] what removes the tokens of the rows `waiting`, by their candidates."""
    rows, probs = candidates.rows, candidates.probs
    no_top_p, no_min_p = torch.ones_like(rows.top_p), torch.zeros_like(rows.min_p)
    within_k = cut(probs, rows.top_k, no_top_p, no_min_p)
    within_p = cut(probs, rows.top_k, rows.top_p, no_min_p)
    found = torch.full_like(candidates.ids, CUT_MIN_P, dtype=torch.uint8)
    found.masked_fill_(~within_p, CUT_TOP_P)
    found.masked_fill_(~within_k, CUT_TOP_K)
    found.masked_fill_(candidates.stays, KEPT)
    # Less likely tokens than the candidates are removed like the last of these.
    in_rows = found[:, -1:].repeat(1, cuts.shape[1])
    in_rows.scatter_(1, candidates.ids, found)
    cuts.index_copy_(0, waiting, in_rows)
