"""Convert a stream of token ids to text. The streamed text equals the text of decoding all ids.

A byte-level token is a string of bytes, so an incremental UTF-8 decoder is enough. The other
families decode token by token. Only a run of byte-fallback tokens is held until it ends, because
one invalid byte turns the whole run into U+FFFD (tokenizers, decoders/byte_fallback.rs). Each token
is processed once, even in long runs of invalid bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from server.text.marks import NO_MARKS, Marks, without_marks
from server.text.tokenizer import Tokenizer


class Detokenizer:
    """Streaming text of one sequence. `push` never returns part of a character.

    The texts returned by `push` and `flush` together equal `tokenizer.decode` of all ids. With
    `continues` the ids follow a prompt, so the leading space that `decode` strips is kept. The
    tokens of `marks` become their marks, also if they are special.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        continues: bool = False,
        marks: Marks = NO_MARKS,
    ) -> None:
        self._tokenizer = tokenizer
        self._marks = marks.by_id
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run: list[int] = []  # byte-fallback tokens of a run that has not ended
        self._begun = continues

    def push(self, token_id: int) -> str:
        """Return the text that later tokens cannot change.

        An unfinished character or run of byte-fallback tokens at the end is held back.
        """
        if not self._marks:
            return self._decode(token_id)
        mark = self._marks.get(token_id)
        if mark is None:
            return without_marks(self._decode(token_id))
        text = self.flush() + mark
        self._begun = True
        return text

    def _decode(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        tokenizer = self._tokenizer
        if tokenizer.byte_level:
            return self._utf8.decode(tokenizer.token_bytes(token_id))
        if token_id in tokenizer.byte_values:
            self._run.append(token_id)
            return ""
        if self._begun and not self._run:
            return tokenizer.token_bytes(token_id).decode()
        if tokenizer.has(token_id):
            return self._end_run() + self._segment([token_id])
        return ""

    def flush(self) -> str:
        """Return the text still held back at the end; unfinished characters become U+FFFD."""
        text = self._end_run() + self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return without_marks(text) if self._marks else text

    def _end_run(self) -> str:
        run, self._run = self._run, []
        return self._segment(run) if run else ""

    def _segment(self, ids: list[int]) -> str:
        if self._begun:
            return self._tokenizer.continuation(ids)
        self._begun = True
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def token_texts(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token; their join is the text of all.

    A character of several tokens is in the text of its last one.
    """
    texts = [detokenizer.push(token) for token in ids]
    rest = detokenizer.flush()
    return [*texts[:-1], texts[-1] + rest] if texts else []
