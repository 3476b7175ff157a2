"""Text to token ids and back, exactly as the checkpoint's own tokenizer.json does it.

Decoding is context-free per token in every family served here, up to three things: byte-level
tokens may hold parts of a character, runs of byte-fallback tokens are valid only as a whole, and
the first token may lose its leading space. `detokenizer.py` streams on that ground; a decoder for
which it does not hold (CTC, BPE with end-of-word suffixes) is refused at load.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from engine.config import read_json, refuse_pointer
from engine.errors import ConfigError

SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
# Of generation_config.json, with the least and the most that sampling knows.
SAMPLING_DEFAULTS: dict[str, tuple[type[float] | type[int], float, float]] = {
    "temperature": (float, 0, sys.float_info.max),
    "top_p": (float, 0, 1),
    "top_k": (int, -1, 2**31 - 1),
    "min_p": (float, 0, 1),
    "repetition_penalty": (float, 0.01, 100),
}
# Of transformers' GenerationConfig: what would make other answers and is not followed, each with
# the value, beside null and emptiness, by which it asks for nothing.
NOT_FOLLOWED = {
    "begin_suppress_tokens": None,
    "diversity_penalty": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "exponential_decay_length_penalty": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "max_new_tokens": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0,
    "renormalize_logits": False,
    "sequence_bias": None,
    "stop_strings": None,
    "token_healing": False,
    "top_h": None,
    "typical_p": 1,
    "watermarking_config": None,
}
BEGINNING = 2**18  # characters; of texts twice as long these are counted first, in 0.3 s of a core
LOCAL_DECODERS = {"WordPiece", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    stand_ins = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(len(rest))]
    return dict(zip(stand_ins, printable + rest, strict=True))


BYTE_ALPHABET = _byte_alphabet()


def read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def special_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token, … by name: tokenizer_config.json, then special_tokens_map.json."""
    named = read_optional(folder / "special_tokens_map.json")
    named |= read_optional(folder / "tokenizer_config.json")
    contents = {name: named.get(name) for name in SPECIAL_TOKENS}
    contents = {n: t.get("content") if isinstance(t, dict) else t for n, t in contents.items()}
    return {name: token for name, token in contents.items() if isinstance(token, str)}


class Tokenizer:
    """The checkpoint's tokenizer; never truncates or pads. Safe to use from several threads.

    `suppressed_ids` are tokens the checkpoint forbids to sample: Marian's padding, for one.
    `defaults` holds the sampling defaults of generation_config.json that are present. Its
    `do_sample: false` does not mean temperature 0 here: many checkpoints carry it by accident,
    and a client that wants greedy output says temperature 0. `not_followed` are other settings of
    the checkpoint, with their values, that ought to change answers and do not.
    """

    def __init__(self, backend: tokenizers.Tokenizer, folder: Path) -> None:
        self._backend = backend
        self._pieces: dict[int, bytes] = {}
        backend.no_truncation()
        backend.no_padding()
        config = read_optional(folder / "tokenizer_config.json")
        generation = read_optional(folder / "generation_config.json")
        model = read_optional(folder / "config.json")
        named = special_tokens(folder)
        self._mark_special(list(named.values()))
        self._honour_flags(config, named)
        self.byte_level = self._is_byte_level(folder)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.byte_values = self._find_byte_tokens()
        self.vocab_size: int = max([backend.get_vocab_size(), *(i + 1 for i in added)])
        sources = (generation.get("eos_token_id"), model.get("eos_token_id"))
        self.eos_token_ids = self._token_ids(*sources, named.get("eos_token"))
        sources = (generation.get("bos_token_id"), model.get("bos_token_id"))
        self.bos_token_id = next(iter(self._token_ids(named.get("bos_token"), *sources)), None)
        self._check_vocabulary(folder, model)
        self.defaults = _sampling_defaults(generation, folder)
        self.suppressed_ids = _suppressed_ids({**model, **generation}, folder)
        self.not_followed = _not_followed(generation or model)  # as transformers chooses
        self._anchor = (self.encode("a", add_special_tokens=False) or [0])[-1:]
        self._anchor_length = len(self.decode(self._anchor, skip_special_tokens=False))

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json and, where present, the *config.json files and
        special_tokens_map.json. Raises ConfigError naming the file and the problem."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{folder} has no tokenizer.json; only that format is read. transformers makes one "
                "of many others: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
            )
        refuse_pointer(path)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"Cannot read {path}: {error}") from error
        return cls(backend, folder)

    def _check_vocabulary(self, folder: Path, model: dict[str, Any]) -> None:
        """Every token must have a row in the embedding, of which config.json tells the size; rows
        without a token are padding. Special tokens may lie beyond (Gemma 3's image token does):
        a request whose prompt holds one is refused by its id."""
        text = model.get("text_config")
        size = (text if isinstance(text, dict) else model).get("vocab_size")
        if not isinstance(size, int):
            return  # the engine refuses it
        ids = self._backend.get_vocab(with_added_tokens=True)
        beyond = {i: t for t, i in ids.items() if i >= size and i not in self.special_ids}
        if beyond:
            last = max(beyond)
            raise ConfigError(
                f"{folder / 'tokenizer.json'} has {len(beyond)} tokens beyond the {size} of "
                f"vocab_size in config.json, up to {beyond[last]!r} with id {last}: they are not "
                "of the same model."
            )
        if wrong := [i for i in self.eos_token_ids if type(i) is not int or not 0 <= i < size]:
            raise ConfigError(
                f"eos_token_id in {folder} is {wrong[0]!r}, which is not a token id below the "
                f"{size} of vocab_size in config.json."
            )

    def _mark_special(self, named: list[str]) -> None:
        """Old conversions name their special tokens only in the config files."""
        added = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        missing = [t for t in named if t not in added and self._backend.token_to_id(t) is not None]
        self._backend.add_special_tokens(
            [tokenizers.AddedToken(t, normalized=False, special=True) for t in missing]
        )

    def _honour_flags(self, config: dict[str, Any], named: dict[str, str]) -> None:
        """Checkpoints made for older fast tokenizers have add_bos_token or add_eos_token instead
        of a post-processor that adds them. Never removes what tokenizer.json adds, as
        transformers 5 does not."""
        bos, eos = named.get("bos_token"), named.get("eos_token")
        probe = self._backend.encode("").tokens
        has_bos = bos is not None and probe[:1] == [bos]
        has_eos = eos is not None and probe[has_bos:][-1:] == [eos]
        head = [bos] * (has_bos or (bos is not None and config.get("add_bos_token") is True))
        tail = [eos] * (has_eos or (eos is not None and config.get("add_eos_token") is True))
        if (len(head), len(tail)) == (has_bos, has_eos):
            return
        ids = {token: self._backend.token_to_id(token) for token in head + tail if token}
        if None in ids.values():
            raise ConfigError(f"tokenizer_config.json adds {ids}, which tokenizer.json lacks.")
        self._backend.post_processor = TemplateProcessing(
            single=[*head, "$A", *tail], pair=None, special_tokens=list(ids.items())
        )

    def _is_byte_level(self, folder: Path) -> bool:
        if self._backend.decoder is None:
            return False
        state = json.loads(self._backend.decoder.__getstate__())
        types = [part["type"] for part in state.get("decoders", [state])]
        if "ByteLevel" in types and set(types) <= {"ByteLevel", "Fuse"}:
            return True
        if unknown := set(types) - LOCAL_DECODERS:
            raise ConfigError(
                f"{folder / 'tokenizer.json'}: decoder {types} cannot be streamed because of "
                f"{sorted(unknown)}; supported are ByteLevel alone or {sorted(LOCAL_DECODERS)}."
            )
        return False

    def _find_byte_tokens(self) -> dict[int, int]:
        """Ids of the byte-fallback tokens <0x00> … <0xFF>, with their bytes."""
        decoder = self._backend.decoder
        if self.byte_level or decoder is None or b"ByteFallback" not in decoder.__getstate__():
            return {}
        names = ((form.format(b), b) for b in range(256) for form in ("<0x{:02X}>", "<0x{:02x}>"))
        ids = ((self._backend.token_to_id(name), byte) for name, byte in names)
        return {token_id: byte for token_id, byte in ids if token_id is not None}

    def _token_ids(self, *sources: int | list[int] | str | None) -> tuple[int, ...]:
        """Ids of the first source that says anything."""
        for source in sources:
            value = self._backend.token_to_id(source) if isinstance(source, str) else source
            if value is not None:
                return tuple(value) if isinstance(value, list) else (value,)
        return ()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with special tokens, it begins with one BOS at most, also where
        the text itself begins with it. Raises ValueError where `text` is not Unicode."""
        try:
            ids: list[int] = self._encoding(text, add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError("The text holds a lone surrogate, which is no character.") from error
        doubled = add_special_tokens and ids[:2] == [self.bos_token_id] * 2
        return ids[1:] if doubled else ids

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        """A batch of one: `encode` holds the GIL, and with it every other thread, to its end."""
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def offsets(self, text: str) -> list[int]:
        """How many characters of `text` come before each token of `encode(text)`; before both
        halves of a character, as many."""
        encoding = self._backend.encode_batch([text])[0]  # the fast one knows none
        doubled = encoding.ids[:2] == [self.bos_token_id] * 2
        offsets, known = [], 0
        for start, end in encoding.offsets[doubled:]:
            # A special token has no place, and one that begins later has lost a space before it.
            offsets.append(min(known, start) if end else known)
            known = max(known, end)
        return offsets

    def far_over(self, text: str, limit: int) -> str | None:
        """What says that a very long `text` has more than `limit` tokens, or None: its beginning
        alone has twice as many, more than a cut can change. The rest need not be read then, which
        takes half a second of a core and more for each MB. Raises ValueError where `text` is not
        Unicode."""
        chars = max(BEGINNING, 16 * limit)
        if len(text) < 2 * chars:
            return None
        count = len(self.encode(text[:chars], add_special_tokens=False))
        return f"{count} in its first {chars} characters" if count >= 2 * limit else None

    @property
    def added_tokens(self) -> int:
        """How many special tokens a text gets."""
        return self._backend.num_special_tokens_to_add(is_pair=False)

    def encode_start(self, text: str, most: int) -> list[int]:
        """Ids of as much of the start of `text` as fits into `most`, its special tokens included.
        Raises ValueError where `text` is not Unicode."""
        ids = self.encode(text)
        if len(ids) <= most:
            return ids
        encoding = self._encoding(text, False)
        encoding.truncate(most - self.added_tokens)
        return list(self._backend.post_process(encoding).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Whole decoding; ids outside the vocabulary count for nothing."""
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text  # decoded as a batch, because `decode` holds the GIL

    def has(self, token_id: int) -> bool:
        return self._backend.id_to_token(token_id) is not None

    def continuation(self, ids: Sequence[int]) -> str:
        """What `ids`, one token or one run of byte tokens, add to a text that has begun."""
        return self.decode([*self._anchor, *ids], skip_special_tokens=False)[self._anchor_length :]

    def token_text(self, token_id: int) -> str:
        """One token as text, for logprobs; parts of characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds inside a text; special tokens count by their content."""
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
        return token.encode()  # an added token with characters outside the alphabet


def _sampling_defaults(generation: dict[str, Any], folder: Path) -> dict[str, float | int]:
    defaults: dict[str, float | int] = {}
    for name, (kind, least, most) in SAMPLING_DEFAULTS.items():
        value = generation.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and least <= value <= most and value == kind(value)):
            raise ConfigError(
                f"{folder / 'generation_config.json'}: {name} must be {kind.__name__}, at least "
                f"{least} and at most {most:g}, not {value!r:.40}."
            )
        defaults[name] = kind(value)
    return defaults


def _not_followed(settings: dict[str, Any]) -> list[str]:
    return [
        f"{name} {value!r:.40}"
        for name, value in settings.items()
        if name in NOT_FOLLOWED and value not in (None, [], {}, NOT_FOLLOWED[name])
    ]


def _suppressed_ids(generation: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """Single tokens of `bad_words_ids` and `suppress_tokens`; what else would change the answers
    is refused by name."""
    given = [generation.get("bad_words_ids") or [], generation.get("suppress_tokens") or []]
    entries = [entry for value in given for entry in (value if type(value) is list else [value])]
    ids: list[Any] = [e[0] if type(e) is list and len(e) == 1 else e for e in entries]
    if any(type(i) is not int or i < 0 for i in ids):
        raise ConfigError(
            f"The generation settings in {folder} have bad_words_ids or suppress_tokens that are "
            "not single token ids; longer ones are not supported."
        )
    if (first := generation.get("forced_bos_token_id")) is not None:
        raise ConfigError(
            f"The generation settings in {folder} have forced_bos_token_id = {first!r}; answers "
            "that must begin with a token are not supported."
        )
    return tuple(sorted(set(ids)))
