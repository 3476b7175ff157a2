"""The sampler: one pipeline from logits to tokens on every device.

    logits -> adjust (penalties, biases) -> mask (grammar) -> plain cuts of single rows
           -> cut (top-k, top-p, min-p) -> draw

A step graph replays the last two stages, `draw_next`, behind the model, or on logits that the host
has adjusted. On a GPU two Triton kernels compute them. A row's token never depends on the other
rows of its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from engine.ops.kernels import Kernels
from engine.ops.sequence_rows import append
from engine.protocol.generate import SamplingParams
from engine.sampling.logits import (
    GREEDY_BELOW,
    adjust,
    adjusts_logits,
    cut,
    mask,
    needs_plain_cuts,
    plain_cuts,
)
from engine.sampling.logprobs import PendingLogprobs, gather_logprobs
from engine.sampling.noise import exponential_noise

INVALID = -1  # the token of a row whose logits are not finite
# The cuts look at this many most likely tokens first. They nearly always hold the top-p mass.
CANDIDATES = 256


class DrawParams(NamedTuple):
    """How each of R rows is drawn: tensors [R] on the logits' device."""

    temperature: torch.Tensor  # fp32; below GREEDY_BELOW the most likely token is taken
    top_k: torch.Tensor  # int32; 0 keeps all
    top_p: torch.Tensor  # fp32; 1 keeps all
    min_p: torch.Tensor  # fp32; 0 keeps all
    seeds: torch.Tensor  # int64
    positions: torch.Tensor  # int64: position of the drawn token in its sequence

    def select(self, rows: torch.Tensor) -> DrawParams:
        """Return the parameters of some rows, given as int64 indices."""
        return DrawParams(*(column.index_select(0, rows) for column in self))


class Candidates(NamedTuple):
    """The K most likely tokens of each of R rows, in descending order: tensors [R, K]."""

    rows: DrawParams
    ids: torch.Tensor  # int64
    scores: torch.Tensor  # fp32: see `tempered`
    total: torch.Tensor  # [R, 1] fp32: the logarithm of the sum of all tokens' exponentials
    stays: torch.Tensor  # bool: whether the cuts keep it

    @property
    def probs(self) -> torch.Tensor:
        """The probabilities after temperature, fp32. Not kept: drawing needs their memory."""
        return (self.scores - self.total).exp()


def sample(
    logits: torch.Tensor,
    special: Mapping[int, SamplingParams],
    history: Callable[[int], tuple[torch.Tensor, int]],
    draw: Callable[[torch.Tensor], torch.Tensor],
    masks: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, PendingLogprobs | None]:
    """Return token ids [R] int64 for logits [R, V], and the logprobs that rows request.

    `special` holds the parameters of the rows that need more than a draw: see `is_special`. Their
    `history` is their known tokens [known] int32, and how many of them are the prompt's. `masks`
    are the rows that follow a grammar, and their allowed tokens: see `mask`. `draw` computes the
    cuts and the draw of all rows: the function of that name, or the replay of a graph.

    Logits in fp32 are changed in place. Logprobs describe the model's own distribution, before any
    change, or with `final_logprobs` the one that tokens are drawn from. A row whose logits are not
    finite gets INVALID and does not affect the others.
    """
    counts = {row: params.logprobs for row, params in special.items() if params.logprobs >= 0}
    final = [row for row in counts if special[row].final_logprobs]
    raw = {
        row: torch.log_softmax(logits[row], dim=-1, dtype=torch.float32)
        for row in counts
        if row not in final
    }
    logits = _changed(logits, special, history, masks)
    raw |= {row: final_logprobs(logits[row], special[row]) for row in final}
    drawn = draw(logits)
    if not counts:
        return drawn, None
    named = {row: special[row].logprob_token_ids for row in counts}
    named = {row: tokens for row, tokens in named.items() if tokens}
    return drawn, gather_logprobs(drawn, raw, counts, named)


def changes_logits(special: Mapping[int, SamplingParams], masks: object | None) -> bool:
    """Return whether the host changes logits between the model and the draw. As `sample`."""
    if masks is not None:
        return True
    return any(adjusts_logits(p) or needs_plain_cuts(p) for p in special.values())


def _changed(
    logits: torch.Tensor,
    special: Mapping[int, SamplingParams],
    history: Callable[[int], tuple[torch.Tensor, int]],
    masks: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Return the logits after penalties, biases, masks and plain cuts. As `sample`."""
    adjusted = [row for row, params in special.items() if adjusts_logits(params)]
    narrowed = [row for row, params in special.items() if needs_plain_cuts(params)]
    if adjusted or narrowed:
        logits = logits.float()
    for row in adjusted:
        tokens, prompt_length = history(row)
        adjust(logits[row], special[row], tokens, prompt_length)
    if masks is not None:
        mask(logits, *masks)
    for row in narrowed:
        for _, removed in plain_cuts(logits[row], special[row]):
            logits[row].masked_fill_(removed, float("-inf"))
    return logits


def is_special(params: SamplingParams) -> bool:
    """Whether a row needs more than a draw: adjusted logits, other cuts, or logprobs."""
    return params.logprobs >= 0 or adjusts_logits(params) or needs_plain_cuts(params)


Draw = Callable[[torch.Tensor, DrawParams], torch.Tensor]


def draw(
    logits: torch.Tensor, rows: DrawParams, kernels: Kernels = "torch", *, static: bool = False
) -> torch.Tensor:
    """Return tokens [R] int64 for logits [R, V], which stay unchanged.

    Temperatures, cuts and noise are computed in fp32. Equally likely tokens rank by their id. With
    `static` nothing is read on the host, so that the call can be captured; it then looks at the
    whole vocabulary.
    """
    if kernels == "triton":
        from engine.kernels.triton.draw import draw_tokens

        return draw_tokens(logits.float(), rows, GREEDY_BELOW, INVALID)
    if kernels == "numba":
        from engine.kernels.numba.draw import draw_tokens as draw_on_cpu

        return draw_on_cpu(logits.float(), *rows, GREEDY_BELOW, INVALID)
    highest, tokens = logits.max(dim=-1)
    if static:
        scores = tempered(logits, rows)
        drawn = _drawn(_candidates(scores, rows, logits.shape[1]))
        tokens = torch.where(rows.temperature < GREEDY_BELOW, tokens, drawn)
    else:
        sampled = (rows.temperature >= GREEDY_BELOW).nonzero().flatten()
        if len(sampled):
            drawn = _draw_sampled(logits.index_select(0, sampled), rows.select(sampled))
            tokens.index_copy_(0, sampled, drawn)
    # A NaN anywhere in a row is its maximum. Single values of -inf are legal: they mask tokens.
    return tokens.masked_fill_(~torch.isfinite(highest), INVALID)


def draw_next(
    logits: torch.Tensor,
    rows: DrawParams,
    tokens: torch.Tensor,
    padding: int,
    row_ids: torch.Tensor,
    ahead: torch.Tensor,
    kernels: Kernels = "torch",
    *,
    static: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw the next token of each of `row_ids` [R] int64 from `logits` [R, V], and append it.

    Of a row's next token but `ahead` [R] int64, if as many tokens are drafted: see `append`. `rows`
    and `tokens` [N, L] int32 are those of all N rows; positions are their numbers of known tokens,
    int32, and grow. Return the tokens [R] int64, in `out` if it is given. Those of the row
    `padding` have no meaning. For `static` see `draw`.
    """
    if kernels == "triton":
        from engine.kernels.triton.draw import Appended, draw_tokens

        appended = Appended(row_ids, ahead, tokens, padding)
        return draw_tokens(logits.float(), rows, GREEDY_BELOW, INVALID, appended, out)
    if kernels == "numba":
        from engine.kernels.numba.sequence_rows import draw_params

        params = DrawParams(*draw_params(row_ids, ahead, *rows))
    else:
        params = rows.select(row_ids)
        params = params._replace(positions=params.positions + ahead)
    drawn = draw(logits, params, kernels, static=static)
    at, held = params.positions, rows.positions
    append(row_ids, at, ahead, drawn, tokens, held, padding, kernels=kernels)
    return drawn if out is None else out.copy_(drawn)


def final_logprobs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the logprobs [V] fp32 that a token is drawn by, for adjusted logits [V].

    They are those after temperature and cuts; a token that is never drawn has -inf.
    """
    found = torch.full_like(logits, float("-inf"), dtype=torch.float32)
    if params.temperature < GREEDY_BELOW:
        found[logits.argmax()] = 0.0
        return found
    rows = DrawParams(
        logits.new_tensor([params.temperature], dtype=torch.float32),
        logits.new_tensor([params.top_k], dtype=torch.int32),
        logits.new_tensor([params.top_p], dtype=torch.float32),
        logits.new_tensor([params.min_p], dtype=torch.float32),
        logits.new_zeros(1, dtype=torch.int64),
        logits.new_zeros(1, dtype=torch.int64),
    )
    *_, (_, last) = deciding_candidates(tempered(logits[None], rows), rows)
    kept = last.scores[0].masked_fill(~last.stays[0], float("-inf"))
    return found.index_copy_(0, last.ids[0], torch.log_softmax(kept, dim=-1))


def tempered(logits: torch.Tensor, rows: DrawParams) -> torch.Tensor:
    """Return the scores [R, V] that rows are drawn by, in fp32: logits over temperature."""
    return logits.float() / rows.temperature.clamp(min=GREEDY_BELOW)[:, None]


def _draw_sampled(logits: torch.Tensor, rows: DrawParams) -> torch.Tensor:
    """Draw rows with a temperature. Rows without cuts need no sorting."""
    scores = tempered(logits, rows)
    is_cut = (rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0)
    cut_rows = is_cut.nonzero().flatten()
    if len(cut_rows) == len(scores):
        return _draw_cut(scores, rows)
    vocabulary = torch.arange(scores.shape[1], device=scores.device)
    noise = exponential_noise(rows.seeds, rows.positions, vocabulary).log_()
    tokens = (scores - noise).argmax(dim=-1)
    if len(cut_rows):
        drawn = _draw_cut(scores.index_select(0, cut_rows), rows.select(cut_rows))
        tokens.index_copy_(0, cut_rows, drawn)
    return tokens


def _draw_cut(scores: torch.Tensor, rows: DrawParams) -> torch.Tensor:
    """Draw rows with cuts among their most likely tokens, as many as decide each row's cuts.

    Only rows that need more candidates are repeated with more. The number of candidates decides
    the order of ties, so it must not depend on the other rows.
    """
    tokens = torch.empty_like(rows.seeds)
    for waiting, candidates in deciding_candidates(scores, rows):
        tokens[waiting] = _drawn(candidates)
        del candidates  # their memory is needed for the next ones
    return tokens


def deciding_candidates(
    scores: torch.Tensor, rows: DrawParams
) -> Iterator[tuple[torch.Tensor, Candidates]]:
    """Yield indices of rows, and candidates of these rows: with each pair more of fewer rows.

    The last candidates of a row decide its cuts.
    """
    waiting = torch.arange(len(scores), device=scores.device)
    count = min(CANDIDATES, scores.shape[1])
    while len(waiting):
        found = _candidates(scores, rows, count)
        # top-p is a share of the mass of the top-k tokens, which takes all of them to compute.
        undecided = found.stays[:, -1] | ((rows.top_k > count) & (rows.top_p < 1))
        yield waiting, found
        del found
        if count == scores.shape[1]:
            return
        again = undecided.nonzero().flatten()
        scores, rows = scores.index_select(0, again), rows.select(again)
        waiting = waiting.index_select(0, again)
        count = min(count * 16, scores.shape[1])


def _candidates(scores: torch.Tensor, rows: DrawParams, count: int) -> Candidates:
    """Return the `count` most likely tokens of each row, and which of them the cuts keep."""
    total = torch.logsumexp(scores, dim=-1, keepdim=True)
    if count == scores.shape[1]:
        best, ids = scores.sort(dim=-1, descending=True, stable=True)
    else:
        best, ids = scores.topk(count, dim=-1)
    stays = cut((best - total).exp(), rows.top_k, rows.top_p, rows.min_p)
    return Candidates(rows, ids, best, total, stays)


def _drawn(candidates: Candidates) -> torch.Tensor:
    """Draw a token [R] among the candidates that stay."""
    rows = candidates.rows
    noise = exponential_noise(rows.seeds, rows.positions, candidates.ids).log_()
    scores = (candidates.scores - noise).masked_fill_(~candidates.stays, float("-inf"))
    winner = scores.argmax(dim=-1, keepdim=True)
    return candidates.ids.gather(1, winner).squeeze(1)
