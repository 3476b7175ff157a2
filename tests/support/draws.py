"""A reference for explained draws: a sampler in NumPy over transformers' logits.

It follows the definitions in `engine/protocol/` and shares no code with the engine but the names of
cuts, not even the noise.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from engine.protocol.generate import CUT_CODES
from tests.engine.sampling.test_plain_cuts import REFERENCES

Numbers = npt.NDArray[Any]
CLOSE = 1e-4  # decisions by less than this may fall otherwise in fp32
GOLDEN, MIX_1, MIX_2 = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35
WORD = 0xFFFFFFFF
KEPT, TOP_K, TOP_P, MIN_P, BAN = range(5)
TEXTS = (
    "A river", "The capital of France is", "Once upon a time", "1, 2, 3,", "Dear", "Why", "def f(x",
)  # fmt: skip


def mixed(h: int) -> int:
    """Murmur3's 32-bit finaliser."""
    h ^= h >> 16
    h = h * MIX_1 & WORD
    h ^= h >> 13
    h = h * MIX_2 & WORD
    return h ^ h >> 16


def luck(seed: int, position: int, token: int) -> float:
    """Return the exponential noise of one token, computed with Python's integers."""
    key = mixed((seed + position * GOLDEN) & WORD)
    key = mixed(key ^ (seed >> 32) & WORD)
    bits = mixed((token * GOLDEN & WORD) ^ key)
    bits = mixed((bits + mixed((key + GOLDEN) & WORD)) & WORD) & 0x7FFFFFFF
    uniform = np.float32(np.float32(np.float32(bits) + np.float32(0.5)) * np.float32(2.0**-31))
    return float(np.clip(-np.log1p(-uniform), np.float32(2.0**-33), np.float32(32.0)))


def softmax(logits: Numbers) -> Numbers:
    weights = np.exp(logits - logits.max())
    found: Numbers = weights / weights.sum()
    return found


def bits(probs: Numbers) -> float:
    positive = probs[probs > 0]
    return float(-(positive * np.log2(positive)).sum())


@dataclass(frozen=True)
class Draw:
    """Everything about the draw of one token; arrays are [V], by token id."""

    logits: Numbers
    raw: Numbers
    adjusted: Numbers
    tempered: Numbers
    cuts: Numbers
    is_close: Numbers  # bool: the cut is decided by less than CLOSE
    seed: int
    position: int
    is_greedy: bool

    @property
    def kept(self) -> int:
        return 1 if self.is_greedy else int((self.cuts == KEPT).sum())

    @property
    def mass(self) -> float:
        return float(self.tempered[self.cuts == KEPT].sum())

    @property
    def final(self) -> Numbers:
        kept: Numbers = np.where(self.cuts == KEPT, self.tempered, 0)
        return kept / kept.sum()

    def luck(self, token: int) -> float:
        return luck(self.seed, self.position, int(token))

    def winner(self) -> int | None:
        """Return the drawn token, or None if it wins by less than CLOSE."""
        final = self.final
        if self.is_greedy:
            return int(final.argmax())
        ids = np.flatnonzero(final)
        scores = np.array([np.log(final[i]) - np.log(self.luck(i)) for i in ids])
        order = scores.argsort()[::-1]
        if len(ids) > 1 and scores[order[0]] - scores[order[1]] < CLOSE * 10:
            return None
        return int(ids[order[0]])


class DrawOracle:
    """Explains answers of a checkpoint by the parameters of /v1/completions."""

    def __init__(self, folder: Path) -> None:
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(folder, dtype=torch.float32).eval()
        end = self._model.generation_config.eos_token_id
        self._ends = [end] if isinstance(end, int) else list(end or [])
        self._defaults = self._model.generation_config.to_diff_dict()

    @torch.inference_mode()
    def explain(self, prompt: list[int], answer: list[int], body: dict[str, Any]) -> list[Draw]:
        """Return the draw of each token of `answer`."""
        ids = torch.tensor([[*prompt, *answer]])
        logits = self._model(ids).logits[0, len(prompt) - 1 : -1].double().numpy()
        body = {**self._sampling_defaults(), **body}
        return [self._draw(row, prompt, answer[:index], body) for index, row in enumerate(logits)]

    def _sampling_defaults(self) -> dict[str, Any]:
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return {name: self._defaults[name] for name in names if name in self._defaults}

    def _draw(
        self, logits: Numbers, prompt: list[int], before: list[int], body: dict[str, Any]
    ) -> Draw:
        adjusted = self._adjusted(logits.copy(), prompt, before, body)
        temperature = body.get("temperature", 1.0)
        is_greedy = temperature == 0
        if is_greedy:
            tempered = np.zeros_like(adjusted)
            tempered[adjusted.argmax()] = 1
            cuts = np.where(np.isinf(adjusted), BAN, KEPT)
            is_close = np.zeros(len(cuts), bool)
        else:
            tempered = softmax(adjusted / temperature)
            cuts, is_close = self._cuts(tempered, body)
            cuts[np.isinf(adjusted)] = BAN
        return Draw(
            logits,
            softmax(logits),
            softmax(adjusted),
            tempered,
            cuts,
            is_close,
            body.get("seed", 0),
            len(prompt) + len(before),
            is_greedy,
        )

    def _adjusted(
        self, logits: Numbers, prompt: list[int], before: list[int], body: dict[str, Any]
    ) -> Numbers:
        repetition = body.get("repetition_penalty", 1.0)
        for token in {*prompt, *before}:
            logits[token] *= repetition if logits[token] < 0 else 1 / repetition
        for token in set(before):
            logits[token] -= body.get("presence_penalty", 0.0)
            logits[token] -= body.get("frequency_penalty", 0.0) * before.count(token)
        for token, bias in body.get("logit_bias", {}).items():
            logits[int(token)] += bias
        if allowed := body.get("allowed_token_ids"):
            others = np.setdiff1d(np.arange(len(logits)), allowed)
            logits[others] = -np.inf
        if len(before) < body.get("min_tokens", 0):
            ends = [] if body.get("ignore_eos") else self._ends
            logits[[*ends, *body.get("stop_token_ids", [])]] = -np.inf
        return logits

    def _cuts(self, probs: Numbers, body: dict[str, Any]) -> tuple[Numbers, Numbers]:
        """Return what removes each token, and whether that is a close decision."""
        top_k, top_p, min_p = (
            body.get(n, d) for n, d in (("top_k", 0), ("top_p", 1), ("min_p", 0))
        )
        cuts, is_close = np.full(len(probs), KEPT), np.zeros(len(probs), bool)
        self._cut_plainly("top_n_sigma", probs, body, cuts, is_close)
        order = np.argsort(np.where(cuts == KEPT, -probs, 0), kind="stable")
        length = top_k if top_k > 0 else len(probs)
        for rank, token in enumerate(order):
            if rank >= length and cuts[token] == KEPT:
                cuts[token] = TOP_K
            is_close[token] |= abs(rank - length + 0.5) < 8 and self._ties(
                probs, order, rank, length
            )
        self._cut_plainly("typical_p", probs, body, cuts, is_close)
        left = [token for token in order if cuts[token] == KEPT]
        mass, before = probs[left].sum(), 0.0
        for token in left:
            limits = (top_p * mass - before, probs[token] - min_p * probs[left[0]])
            if token != left[0] and top_p < 1 and limits[0] <= 0:
                cuts[token] = TOP_P
            elif token != left[0] and limits[1] < 0:
                cuts[token] = MIN_P
            is_close[token] |= (top_p < 1 and abs(limits[0]) < CLOSE) or (
                min_p > 0 and abs(limits[1]) < CLOSE
            )
            before += probs[token]
        return cuts, is_close

    def _cut_plainly(
        self, name: str, probs: Numbers, body: dict[str, Any], cuts: Numbers, is_close: Numbers
    ) -> None:
        """Write to `cuts` and `is_close` what one of the cuts that need all tokens removes."""
        if name not in body:
            return
        with np.errstate(divide="ignore"):
            scores = np.log(np.where(cuts == KEPT, probs, 0))
        kept, less, more = (
            REFERENCES[name](scores, body[name] + near) for near in (0, -CLOSE, CLOSE)
        )
        is_close |= less != more
        cuts[(cuts == KEPT) & ~kept] = CUT_CODES.index(name)

    def _ties(self, probs: Numbers, order: Numbers, rank: int, length: int) -> bool:
        """Whether a token could change sides with one beyond the last that top-k keeps."""
        other = order[min(length if rank < length else length - 1, len(order) - 1)]
        return bool(abs(probs[order[rank]] - probs[other]) < CLOSE * probs[other])


def random_body(rng: random.Random) -> dict[str, Any]:
    """Return a request to /v1/completions with random sampling parameters."""
    body: dict[str, Any] = {
        "prompt": rng.choice(TEXTS),
        "seed": rng.randrange(-(2**63), 2**63),
        "max_tokens": rng.randrange(1, 40),
        "temperature": rng.choice([0, 0.2, 0.7, 1.0, 1.6]),
        "ignore_eos": rng.random() < 0.3,
    }
    if rng.random() < 0.5:
        body["top_k"] = rng.choice([1, 3, 40, 300, 1000])
    if rng.random() < 0.5:
        body["top_p"] = rng.choice([0.1, 0.5, 0.9, 0.999])
    if rng.random() < 0.3:
        body["min_p"] = rng.choice([0.01, 0.1, 0.5])
    if rng.random() < 0.2:
        body["top_n_sigma"] = rng.choice([0.5, 1.5, 4.0])
    if rng.random() < 0.2:
        body["typical_p"] = rng.choice([0.2, 0.7, 0.95])
    for name in ("presence_penalty", "frequency_penalty"):
        if rng.random() < 0.3:
            body[name] = round(rng.uniform(-1, 2), 2)
    if rng.random() < 0.3:
        body["repetition_penalty"] = round(rng.uniform(0.7, 1.5), 2)
    if rng.random() < 0.3:
        body["logit_bias"] = {str(rng.randrange(2000)): rng.uniform(-9, 9) for _ in range(5)}
    if rng.random() < 0.4:
        body["min_tokens"] = rng.randrange(body["max_tokens"] + 1)
    if rng.random() < 0.2:
        body["stop_token_ids"] = [rng.randrange(2000) for _ in range(3)]
    if rng.random() < 0.2:
        body["allowed_token_ids"] = [rng.randrange(2000) for _ in range(20)]
    return body
