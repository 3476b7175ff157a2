"""A slow reference for the answer to a request.

It computes whole sequences in fp32 without a cache, and applies each parameter as defined in
`engine/protocol/` and vLLM's documentation. It shares only the noise with the code under test,
because the noise defines the meaning of a seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from engine.sampling.noise import exponential_noise

Body = dict[str, Any]
CLOSE = 2e-4  # largest difference between the reference's and the engine's logits
MASS = 1e-3  # the same for sums of probabilities


@dataclass(frozen=True)
class Expected:
    """The fields that the tokens of one choice determine."""

    text: str
    finish: str
    offsets: list[int]  # characters before each token that has logprobs


class Oracle:
    """The reference for a checkpoint whose tokenizer has byte tokens <0x00> ... <0xFF>."""

    def __init__(self, folder: Path) -> None:
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(folder, dtype=torch.float32).eval()
        end = self._model.generation_config.eos_token_id
        self._ends = {end} if isinstance(end, int) else set(end)
        self.vocab_size: int = self._model.config.vocab_size
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {i for i, token in added.items() if token.special}
        names = {f"<0x{byte:02X}>": byte for byte in range(256)}
        ids = {self._tokenizer.token_to_id(name): byte for name, byte in names.items()}
        self._bytes = {i: byte for i, byte in ids.items() if i is not None}

    # ---- text --------------------------------------------------------------------------------

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids[1:] if special and ids[:2] == [1, 1] else ids

    def decode(self, ids: list[int], body: Body) -> str:
        skip = body.get("skip_special_tokens") is not False
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip)
        return text

    def continuation(self, ids: list[int], body: Body) -> str:
        """Return the text of an answer.

        It is decoded after another token, because a decoder strips the space before the first word.
        """
        anchor = self.encode("a", special=False)
        return self.decode(anchor + ids, body)[len(self.decode(anchor, body)) :]

    def certain(self, ids: list[int], body: Body) -> str:
        """Return the part of the text that no later token can change.

        Trailing byte tokens are excluded: the next byte can make their sequence invalid.
        """
        skipped = self._special if body.get("skip_special_tokens") is not False else set()
        shown = [i for i in ids if i not in skipped]
        whole = list(dropwhile(self._bytes.__contains__, reversed(shown)))
        return self.continuation(whole[::-1], body)

    def token(self, token_id: int) -> bytes:
        if token_id in self._bytes:
            return bytes([self._bytes[token_id]])
        return str(self._tokenizer.id_to_token(token_id)).replace("\u2581", " ").encode()

    # ---- numbers -----------------------------------------------------------------------------

    @torch.inference_mode()
    def logits(self, prompt: list[int], ids: list[int]) -> torch.Tensor:
        """Return the logits that each of `ids` was sampled from, [len(ids), vocab_size]."""
        out = self._model(torch.tensor([prompt + ids[:-1]]), use_cache=False).logits[0]
        return out[len(prompt) - 1 :].double()

    def stop_ids(self, body: Body) -> set[int]:
        ends = set() if body.get("ignore_eos") else self._ends
        return ends | set(body.get("stop_token_ids") or ())

    def _adjusted(
        self, logits: torch.Tensor, body: Body, prompt: list[int], answer: list[int]
    ) -> torch.Tensor:
        x, repetition = logits.clone(), body.get("repetition_penalty", 1.0)
        seen = list({*prompt, *answer})
        x[seen] = torch.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
        counts = torch.tensor(answer, dtype=torch.long).bincount(minlength=len(x))
        x -= body.get("presence_penalty", 0.0) * (counts > 0)
        x -= body.get("frequency_penalty", 0.0) * counts
        for key, bias in body.get("logit_bias", {}).items():
            x[int(key)] += bias
        if len(answer) < body.get("min_tokens", 0):
            x[list(self.stop_ids(body))] = -torch.inf
        return x

    @staticmethod
    def _kept(scores: torch.Tensor, body: Body, slack: float) -> torch.Tensor:
        """Return a mask of the tokens that top-k, top-p and min-p keep.

        A positive `slack` also keeps tokens within the rounding error of a limit; a negative one
        drops them.
        """
        probs = scores.softmax(-1)
        sorted_probs, order = probs.sort(descending=True)
        top_k = body.get("top_k", 0)
        if 0 < top_k < len(scores):
            kept = scores >= scores[order[top_k - 1]] - slack
            if slack < 0:  # only tokens that are kept even if the next one is a little likelier
                kept = scores > scores[order[top_k]] - slack
            sorted_probs = sorted_probs * (torch.arange(len(scores)) < top_k)
        else:
            kept = torch.ones_like(scores, dtype=torch.bool)
        if (top_p := body.get("top_p", 1.0)) < 1:
            before = torch.empty_like(scores)
            before[order] = (sorted_probs.cumsum(0) - sorted_probs) / sorted_probs.sum()
            kept &= before < top_p + (MASS if slack > 0 else -MASS)
        kept &= scores.exp() >= body.get("min_p", 0.0) * scores.max().exp() * (1 - slack)
        kept[scores >= scores.max() - max(slack, 0)] = True
        return kept & scores.isfinite()

    def candidates(
        self, body: Body, prompt: list[int], answer: list[int], logits: torch.Tensor, index: int
    ) -> set[int]:
        """Return the tokens that may follow `answer` in choice `index`.

        There are several if they differ by less than the rounding error.
        """
        adjusted = self._adjusted(logits, body, prompt, answer)
        temperature = body["temperature"]
        if not temperature:
            return set((adjusted >= adjusted.max() - CLOSE).nonzero().flatten().tolist())
        scores = adjusted / temperature
        scores -= scores.max()  # relative to the most likely token, so that exp() cannot overflow
        slack = CLOSE / temperature + CLOSE
        seed = (body["seed"] + index + 2**63) % 2**64 - 2**63
        place = torch.tensor([len(prompt) + len(answer)])
        noise = exponential_noise(torch.tensor([seed]), place, torch.arange(len(scores)))[0]
        marks = scores - noise.double().log()
        surely, maybe = self._kept(scores, body, -slack), self._kept(scores, body, slack)
        best = marks.masked_fill(~surely, -torch.inf).max()
        return set((maybe & (marks >= best - slack)).nonzero().flatten().tolist())

    # ---- one choice --------------------------------------------------------------------------

    def read(
        self, body: Body, prompt: list[int], ids: list[int], index: int, limit: int
    ) -> tuple[Expected, torch.Tensor]:
        """Assert that each of `ids` is a correct next token and that they end where they must.

        Returns the expected fields and the logprobs, [len(ids), vocab_size].
        """
        logits, finish, text = self.logits(prompt, ids), "", ""
        offsets: list[int] = []
        for count, token in enumerate(ids, 1):
            assert not finish, f"{finish} after {count - 1} tokens, and yet there are {ids}"
            known = ids[: count - 1]
            allowed = self.candidates(body, prompt, known, logits[count - 1], index)
            assert token in allowed, f"token {count - 1} is {token}, not in {sorted(allowed)[:9]}"
            if token in self.stop_ids(body) and count >= body.get("min_tokens", 0):
                finish = "stop"
            elif count == limit:
                finish = "length"
            shown = ids[:count]
            if finish == "stop" and not body.get("include_stop_str_in_output"):
                shown = known
            if len(shown) == count:
                offsets.append(len(self.certain(known, body)))
            text = (self.continuation if finish else self.certain)(shown, body)
            if (cut := self._cut(text, ids, body, count)) is not None:
                finish, text = "stop", text[:cut]
        assert finish, f"ended too early, after {ids}"
        return Expected(text, finish, offsets), logits.log_softmax(-1)

    def _cut(self, text: str, ids: list[int], body: Body, count: int) -> int | None:
        """Return the length at which a stop string ends the text, or None.

        A stop string counts only if it ends after the first min_tokens tokens.
        """
        early = min(count, body.get("min_tokens", 0))
        free = len(self.certain(ids[:early], body)) if count > early else len(text)
        for end in range(free + 1, len(text) + 1):
            hits = [stop for stop in body.get("stop", []) if text[:end].endswith(stop)]
            if hits:
                return end if body.get("include_stop_str_in_output") else end - max(map(len, hits))
        return None
