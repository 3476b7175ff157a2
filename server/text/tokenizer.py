"""Convert text to token ids and back, exactly as the checkpoint's own tokenizer.json does.

In every supported family each token decodes independently of its neighbours, with three exceptions:
- a byte-level token may contain part of a character;
- a run of byte-fallback tokens is valid only as a whole;
- the first token may lose its leading space.

The streaming in `detokenizer.py` relies on this. Decoders without this property (CTC, BPE with
end-of-word suffixes) are refused at load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tokenizers

from server.text.tokenizer_errors import as_tokenizer_error

# No token spans this noncharacter in a text, and none contains it: the name of a special token with
# one inside is plain text.
BREAK = "\U0010ffff"
# `far_over` tokenises only this many characters (0.3 s of one core) of a text twice as long.
BEGINNING = 2**18


def without_breaks(text: str) -> str:
    """Return the text as the model reads it."""
    return text if text.isascii() else text.replace(BREAK, "")


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-in for each of the 256 bytes (openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    stand_ins = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(len(rest))]
    return dict(zip(stand_ins, printable + rest, strict=True))


BYTE_ALPHABET = _byte_alphabet()


class EncodedPair(NamedTuple):
    """Two texts with their special tokens, one entry for each token."""

    ids: list[int]
    texts: list[int | None]  # 0 or 1; None: a special token
    types: list[int]


@dataclass(frozen=True)
class TokenSettings:
    """The settings of tokens in the files of a checkpoint (`server.text.load_tokenizer`).

    `do_sample: false` in generation_config.json does not mean temperature 0: many checkpoints
    contain it by accident, and a client can request greedy output with temperature 0.
    """

    class_name: str | None  # in transformers
    special_tokens: dict[str, str]  # by name: bos_token, eos_token, …
    byte_level: bool  # how tokens are decoded
    eos_token_ids: tuple[int, ...]  # they end an answer (`server.text.end_tokens`)
    bos_token_id: int | None
    notes: list[str]  # for an operator: how the files were read
    defaults: dict[str, float | int]  # of sampling, in generation_config.json
    suppressed_ids: tuple[int, ...]  # never sampled, such as Marian's padding
    # The checkpoint's description of its answers (`server.text.parsers.response_template`).
    response_template: Any
    not_followed: list[str]  # other settings of a generation that would change answers


class Tokenizer:
    """The checkpoint's tokenizer. It never truncates or pads, and it is thread-safe."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenSettings) -> None:
        self._backend = backend
        self._pieces: dict[int, bytes] = {}
        self.class_name = settings.class_name
        self.special_tokens = settings.special_tokens
        self.byte_level = settings.byte_level
        self.eos_token_ids = settings.eos_token_ids
        self.bos_token_id = settings.bos_token_id
        self.notes = settings.notes
        self.defaults = settings.defaults
        self.suppressed_ids = settings.suppressed_ids
        self.response_template = settings.response_template
        self.not_followed = settings.not_followed
        added = backend.get_added_tokens_decoder()
        self.added_ids = {token.content: i for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.byte_values = self._find_byte_tokens()
        self.vocab_size: int = max([backend.get_vocab_size(), *(i + 1 for i in added)])
        first = (self.bos_token_id,) if self.bos_token_id is not None else self.eos_token_ids[:1]
        self.document_start = list(first)  # what a model has seen before the start of a text
        self._anchor = (self.encode("a", add_special_tokens=False) or [0])[-1:]
        self._anchor_length = len(self.decode(self._anchor, skip_special_tokens=False))

    def _find_byte_tokens(self) -> dict[int, int]:
        """Return the byte of each byte-fallback token <0x00> … <0xFF>, by token id."""
        decoder = self._backend.decoder
        if self.byte_level or decoder is None or b"ByteFallback" not in decoder.__getstate__():
            return {}
        names = ((form.format(b), b) for b in range(256) for form in ("<0x{:02X}>", "<0x{:02x}>"))
        ids = ((self._backend.token_to_id(name), byte) for name, byte in names)
        return {token_id: byte for token_id, byte in ids if token_id is not None}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`.

        With `add_special_tokens` the result begins with at most one BOS, even if `text` itself
        begins with BOS. Raises ValueError if `text` is not valid Unicode.
        """
        if BREAK in text:
            first, *parts = text.split(BREAK)
            ids = self.encode(first, add_special_tokens=add_special_tokens)
            for part in parts:
                ids += self.encode(part, add_special_tokens=False)
            return ids
        try:
            ids = self._encoding(text, add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(
                "The text contains a lone surrogate, which is not a character."
            ) from error
        doubled = add_special_tokens and ids[:2] == [self.bos_token_id] * 2
        return ids[1:] if doubled else ids

    @as_tokenizer_error
    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        """Encode one text as a batch, because the library's `encode` does not release the GIL."""
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    @as_tokenizer_error
    def offsets(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the character offset in `text` of each token that `encode` returns for it.

        Tokens that share one character have the same offset. A BREAK is no character.
        """
        if BREAK in text:
            first, *parts = text.split(BREAK)
            found = self.offsets(first, add_special_tokens=add_special_tokens)
            length = len(first)
            for part in parts:
                found += [length + each for each in self.offsets(part, add_special_tokens=False)]
                length += len(part)
            return found
        # encode_batch_fast has no offsets
        encoding = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        doubled = add_special_tokens and encoding.ids[:2] == [self.bos_token_id] * 2
        offsets, known = [], 0
        for start, end in encoding.offsets[doubled:]:
            # A special token has no offsets. A token that begins after `known` has lost the space
            # before it, so it begins at `known`.
            offsets.append(min(known, start) if end else known)
            known = max(known, end)
        return offsets

    def far_over(self, text: str, limit: int) -> str | None:
        """Check a very long `text` against `limit` tokens by tokenising only its start.

        Returns "N in its first M characters" if the start alone has at least twice `limit` tokens,
        else None. The factor of two allows for the cut, which may change tokens. This saves half a
        second or more of one core per MB. Raises ValueError if `text` is not valid Unicode.
        """
        chars = max(BEGINNING, 16 * limit)
        if len(text) < 2 * chars:
            return None
        count = len(self.encode(text[:chars], add_special_tokens=False))
        return f"{count} in its first {chars} characters" if count >= 2 * limit else None

    @property
    def pad_token_id(self) -> int | None:
        """The token that fills a text up to a length, or None if the checkpoint names none."""
        name = self.special_tokens.get("pad_token")
        return None if name is None else self.token_id(name)

    @property
    def added_tokens(self) -> int:
        """The number of special tokens that encoding adds to a text."""
        return self._backend.num_special_tokens_to_add(is_pair=False)

    @as_tokenizer_error
    def encode_part(
        self, text: str, most: int, *, keep_end: bool = False, add_special_tokens: bool = True
    ) -> list[int]:
        """Return the token ids of `text`, truncated to `most` ids including its special tokens.

        With `keep_end` its beginning is cut off, otherwise its end.

        Raises ValueError if `text` is not valid Unicode.
        """
        ids = self.encode(text, add_special_tokens=add_special_tokens)
        if len(ids) <= most:
            return ids
        if not add_special_tokens:
            return ids[-most:] if keep_end else ids[:most]
        encoding = self._encoding(text, False)
        side = "left" if keep_end else "right"
        encoding.truncate(most - self.added_tokens, direction=side)
        return list(self._backend.post_process(encoding).ids)

    @as_tokenizer_error
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of all `ids`; ids outside the vocabulary are skipped."""
        # Decoded as a batch, because the library's `decode` does not release the GIL.
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, entry: str) -> int | None:
        """Return the id of a token of the vocabulary, or None if there is none."""
        found: int | None = self._backend.token_to_id(entry)
        return found

    def vocabulary_entry(self, token_id: int) -> str | None:
        """Return a token as the vocabulary has it, such as "Ġis", or None for an unknown id."""
        entry: str | None = self._backend.id_to_token(token_id)
        return entry

    @as_tokenizer_error
    def encode_pair(self, first: str, second: str) -> EncodedPair:
        """Return two texts as the tokenizer joins them."""
        encoding = self._backend.encode(first, second)
        return EncodedPair(encoding.ids, encoding.sequence_ids, encoding.type_ids)

    @property
    def begins_with_bos(self) -> bool:
        """Whether encoding adds a BOS token to every text."""
        return self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    @property
    def ends_with_eos(self) -> bool:
        """Whether encoding adds an end token to every text."""
        return self.encode("")[-1:] in ([token] for token in self.eos_token_ids)

    def has(self, token_id: int) -> bool:
        """Return whether the vocabulary contains `token_id`."""
        return self._backend.id_to_token(token_id) is not None

    def continuation(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` append to a text that is not empty.

        `ids` are one token or one run of byte-fallback tokens.
        """
        return self.decode([*self._anchor, *ids], skip_special_tokens=False)[self._anchor_length :]

    def token_text(self, token_id: int) -> str:
        """Return one token as text, for logprobs; incomplete characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 bytes of one token inside a text; a special token's are its content."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make_bytes(token_id)
        return piece

    def _make_bytes(self, token_id: int) -> bytes:
        if token_id in self.byte_values:
            return bytes([self.byte_values[token_id]])
        if not self.byte_level:
            return self.continuation([token_id]).encode()
        token = self._backend.id_to_token(token_id) or ""
        if all(char in BYTE_ALPHABET for char in token):
            return bytes(BYTE_ALPHABET[char] for char in token)
        return token.encode()  # an added token with characters outside the byte alphabet
