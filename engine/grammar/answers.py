"""The answers that follow a grammar, and what the process of the grammar knows of each."""

from __future__ import annotations

from engine.errors import RequestRejectedError
from engine.grammar.compiler import UNUSABLE, GrammarProcess
from engine.grammar.messages import Advance, Allowed, Try
from engine.protocol.generate import GenerateRequest


class FollowedAnswer:
    """An answer that is being generated. Positions are those of its sequence."""

    def __init__(self, request: GenerateRequest, process: GrammarProcess) -> None:
        self.request = request
        self.process = process
        self.allowed: Allowed | None = None  # behind the last token; None: not known yet
        self.draft_masks: list[bytes] = []
        self._base = len(request.prompt)
        self._tokens: list[int] = []
        self._num_sent = 0  # tokens that the process has
        self._num_right = 0  # of them, those that have not changed since
        self._serial = 0  # of the last message; its answer repeats it
        self._awaited = 0  # serial of the message whose answer becomes `allowed`
        self._tried = -1  # serial of the last draft

    @property
    def num_tokens(self) -> int:
        return self._base + len(self._tokens)

    @property
    def is_trying(self) -> bool:
        """Whether the masks of a draft are missing."""
        return self._tried >= 0

    @property
    def mask(self) -> bytes:
        """The mask behind the last token; b"" if the grammar cannot go on."""
        return self.allowed.masks[-1] if self.allowed is not None else b""

    @property
    def refusal(self) -> RequestRejectedError | None:
        """Why the answer cannot go on."""
        if self.allowed is not None and self.allowed.problem:
            problem = self.allowed.problem.split("\n")[0].rstrip(".")
            param = self.process.grammar.param
            return RequestRejectedError("invalid_grammar", f"{UNUSABLE}: {problem}.", param)
        return self.process.refusal

    def knows(self, num_tokens: int) -> bool:
        """Return whether all tokens of the sequence have been accepted."""
        return num_tokens <= self.num_tokens

    def accept(self, position: int, token: int) -> None:
        """Take the token at `position`, unless it is known."""
        if position == self.num_tokens and token >= 0:
            self._tokens.append(token)

    def move_to(self, num_tokens: int) -> None:
        """Go back to an earlier state: a preempted sequence samples its lost tokens again."""
        count = num_tokens - self._base
        assert count <= len(self._tokens), "a sampled token was not accepted"
        del self._tokens[count:]
        self._num_right = min(self._num_right, count)

    def sync(self) -> None:
        """Have the mask behind the last token computed."""
        if self._num_right == self._num_sent and self._is_steady(self._tokens[self._num_sent :]):
            return
        rollback, new = self._num_sent - self._num_right, self._tokens[self._num_right :]
        self._num_sent = self._num_right = len(self._tokens)
        self._advance(rollback, new)

    def _advance(self, rollback: int, tokens: list[int], *, each: bool = False) -> None:
        self._serial += 1
        self._awaited, self._tried, self.allowed = self._serial, -1, None
        self.process.send(Advance(self.request.id, self._serial, rollback, tokens, each))

    def _is_steady(self, tokens: list[int]) -> bool:
        """Return whether the last mask also holds behind tokens that the process does not have."""
        if not tokens:
            return True
        allowed = self.allowed
        if allowed is None or len(tokens) > allowed.steady:
            return False
        return not any(token in allowed.changing for token in tokens)

    def try_draft(self, tokens: list[int]) -> None:
        """Have the masks behind the tokens of a draft computed."""
        if self.allowed is not None and self.allowed.steady:
            self._try_steady(tokens)
            return
        self._serial += 1
        self._tried, self.draft_masks = self._serial, []
        self.process.send(Try(self.request.id, self._serial, tokens))

    def _try_steady(self, draft: list[int]) -> None:
        """Take the masks behind the tokens of a draft where the last mask holds."""
        self._tried, self.draft_masks = -1, []
        new = self._tokens[self._num_sent :]
        for token in draft:
            new.append(token)
            if not self._is_steady(new) or not self.mask[token // 8] >> token % 8 & 1:
                return
            self.draft_masks.append(self.mask)

    def give_up_draft(self) -> None:
        self._tried = -1

    def take(self, message: Allowed) -> None:
        """Take a message of the process; those to older questions are ignored."""
        if message.serial == self._tried:
            self.draft_masks, self._tried = message.masks, -1
        elif message.serial == self._awaited:
            self.allowed = message


class ReplayedAnswer(FollowedAnswer):
    """A past answer that is explained. Its masks are computed ahead, for one step at a time."""

    def __init__(self, request: GenerateRequest, process: GrammarProcess) -> None:
        super().__init__(request, process)
        assert request.explain is not None
        self._answer = request.explain.answer
        self._max_per_step = request.explain.max_per_step
        self._first = 0  # index of the first mask

    def knows(self, num_tokens: int) -> bool:
        return True

    def take(self, message: Allowed) -> None:
        if not self._serial:  # the process has begun the answer
            self.request_masks(0)
            return
        super().take(message)

    def covers(self, indices: range) -> bool:
        """Return whether the masks before these tokens of the answer are known, or requested."""
        return self._first <= indices.start and indices.stop - 1 <= self._num_sent

    def request_masks(self, first: int) -> None:
        """Have the masks before the next tokens computed, from index `first` on."""
        if first >= len(self._answer):
            return
        self._first = min(first, self._num_sent)
        rollback = self._num_sent - self._first
        self._num_sent = min(first + self._max_per_step, len(self._answer))
        self._advance(rollback, self._answer[self._first : self._num_sent], each=True)

    def mask_before(self, index: int) -> bytes:
        """Return the mask before a token; b"" if the grammar could not go on."""
        if self.allowed is None:
            return b""
        return self.allowed.masks[index - self._first]
