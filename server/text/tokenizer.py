"""Convert text to token ids and back, exactly as the checkpoint's own tokenizer.json does.

In every supported family each token decodes independently of its neighbours, with three exceptions:
- a byte-level token may contain part of a character;
- a run of byte-fallback tokens is valid only as a whole;
- the first token may lose its leading space.

The streaming in `detokenizer.py` relies on this. Decoders without this property (CTC, BPE with
end-of-word suffixes) are refused at load.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from engine.checkpoint.bounded_json import read_optional
from engine.checkpoint.pointer import refuse_pointer
from engine.checkpoint.tokenizer_file import check_tokenizer_file
from engine.errors import ConfigError, clipped
from server.text.end_tokens import end_tokens
from server.text.generation_config import not_followed, sampling_defaults, suppressed_ids
from server.text.infill import infill_tokens
from server.text.special_tokens import (
    add_bos,
    add_special_tokens,
    named_tokens,
    tokenizer_settings,
)
from server.text.tokenizer_errors import as_tokenizer_error
from server.text.tokenizer_trial import tokenizer_problem

# `far_over` tokenises only this many characters (0.3 s of one core) of a text twice as long.
BEGINNING = 2**18
LOCAL_DECODERS = {"WordPiece", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-in for each of the 256 bytes (openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    stand_ins = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(len(rest))]
    return dict(zip(stand_ins, printable + rest, strict=True))


BYTE_ALPHABET = _byte_alphabet()


class Tokenizer:
    """The checkpoint's tokenizer. It never truncates or pads, and it is thread-safe.

    `eos_token_ids` end an answer (`server.text.end_tokens`). `notes` tell an operator how the files
    were read. `suppressed_ids` are token ids that the checkpoint forbids to sample, such as
    Marian's padding.
    `defaults` holds the sampling defaults that generation_config.json sets. `do_sample: false` in
    that file does not mean temperature 0: many checkpoints contain it by accident, and a client can
    request greedy output with temperature 0. `not_followed` lists the checkpoint's other generation
    settings, with their values, that would change answers but that Penstock ignores. `infill` has
    the tokens for fill-in-the-middle; None: the model does not know it. `response_template` is the
    checkpoint's description of its answers (`server.text.parsers.response_template`).
    """

    def __init__(self, backend: tokenizers.Tokenizer, folder: Path) -> None:
        self._backend = backend
        self._pieces: dict[int, bytes] = {}
        backend.no_truncation()
        backend.no_padding()
        config = tokenizer_settings(folder)
        generation = read_optional(folder / "generation_config.json")
        model = read_optional(folder / "config.json")
        named = named_tokens(config)
        kind = config.get("tokenizer_class")
        self.class_name = kind if isinstance(kind, str) else None  # in transformers
        self.special_tokens = named  # by name: bos_token, eos_token, …
        add_special_tokens(backend, config, folder)
        notes = [*add_bos(backend, config)]
        self.byte_level = self._is_byte_level(folder)
        added = backend.get_added_tokens_decoder()
        self.added_ids = {token.content: i for i, token in added.items()}
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.byte_values = self._find_byte_tokens()
        self.vocab_size: int = max([backend.get_vocab_size(), *(i + 1 for i in added)])
        size = self._check_vocabulary(folder, model)
        ends = end_tokens(generation, model, self._id_of(named.get("eos_token")), size, folder)
        self.eos_token_ids = ends.ids
        self.notes = [clipped(note) for note in ([ends.note] if ends.note else []) + notes]
        self.bos_token_id = self._id_of(named.get("bos_token"))
        for source in (generation, model):
            if self.bos_token_id is None:
                given = source.get("bos_token_id")
                self.bos_token_id = next(iter(given), None) if isinstance(given, list) else given
        first = (self.bos_token_id,) if self.bos_token_id is not None else self.eos_token_ids[:1]
        self.document_start = list(first)  # what a model has seen before the start of a text
        self.defaults = sampling_defaults(generation, folder)
        self.suppressed_ids = suppressed_ids({**model, **generation}, folder)
        self.response_template: Any = config.get("response_template")
        self.not_followed = not_followed(generation or model)  # as transformers chooses
        self.infill = infill_tokens(backend)
        self._anchor = (self.encode("a", add_special_tokens=False) or [0])[-1:]
        self._anchor_length = len(self.decode(self._anchor, skip_special_tokens=False))

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and, where present, the *config.json files and
        special_tokens_map.json. Raises ConfigError naming the file and the problem."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{folder} has no tokenizer.json, the only supported format. transformers converts "
                "many others: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
            )
        refuse_pointer(path)
        check_tokenizer_file(path)
        try:
            backend = _read(path)
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"Cannot read {path}: {error}") from error
        if problem := tokenizer_problem(backend):
            raise ConfigError(f"The tokenizer in {path} {problem}.")
        return cls(backend, folder)

    def _check_vocabulary(self, folder: Path, model: dict[str, Any]) -> int | None:
        """Return vocab_size of config.json, and check that every token id lies below it.

        vocab_size is the number of rows of the token embedding; rows without a token are padding.
        A special token may have a larger id, as Gemma 3's image token does: a request whose prompt
        contains it is refused. Raises ConfigError for any other id that is too large.
        """
        text = model.get("text_config")
        size = (text if isinstance(text, dict) else model).get("vocab_size")
        if not isinstance(size, int):
            return None  # the engine refuses such a config.json
        ids = self._backend.get_vocab(with_added_tokens=True)
        beyond = {i: t for t, i in ids.items() if i >= size and i not in self.special_ids}
        if beyond:
            last = max(beyond)
            raise ConfigError(
                f"{folder / 'tokenizer.json'} has {len(beyond)} tokens beyond vocab_size = {size} "
                f"in config.json, up to {beyond[last]!r:.200} with id {last}: the two files belong "
                "to different models."
            )
        return size

    def _id_of(self, token: str | None) -> int | None:
        found: int | None = None if token is None else self._backend.token_to_id(token)
        return found

    def _is_byte_level(self, folder: Path) -> bool:
        """Return whether decoding is byte-level. Raises ConfigError if it cannot be streamed."""
        if self._backend.decoder is None:
            return False
        state = json.loads(self._backend.decoder.__getstate__())
        types = [part["type"] for part in state.get("decoders", [state])]
        if "ByteLevel" in types and set(types) <= {"ByteLevel", "Fuse"}:
            return True
        if unknown := set(types) - LOCAL_DECODERS:
            raise ConfigError(
                f"{folder / 'tokenizer.json'}: decoder {types} cannot be streamed because of "
                f"{sorted(unknown)}; supported: ByteLevel alone, or any of "
                f"{sorted(LOCAL_DECODERS)}."
            )
        return False

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
        try:
            ids: list[int] = self._encoding(text, add_special_tokens).ids
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

        Tokens that share one character have the same offset.
        """
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
        return self._id_of(self.special_tokens.get("pad_token"))

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

    def vocabulary_entry(self, token_id: int) -> str | None:
        """Return a token as the vocabulary has it, such as "Ġis", or None for an unknown id."""
        entry: str | None = self._backend.id_to_token(token_id)
        return entry

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


@as_tokenizer_error
def _read(path: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(path))
