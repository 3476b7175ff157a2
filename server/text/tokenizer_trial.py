"""Try a tokenizer's own programs on short texts, in a process with limits.

The normalizer, the pre-tokenizer and the decoder come with the checkpoint. Their regular
expressions may take exponential time, and a replacement may multiply a text. The process
(`python -m server.text.tokenizer_trial`) gets these three parts without the vocabulary.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from server.confined.process import ConfinedError, ConfinedProcess, Limits, serve

if TYPE_CHECKING:  # the parent has it, and the child imports it after its start
    import tokenizers

# Types of parts that hold a pattern or a text of the checkpoint. The others are the library's own.
PROGRAMS = ("Split", "Replace", "Prepend", "Precompiled")
LIMITS = Limits(memory=512 << 20, seconds=5)
# Runs of every kind of character that patterns distinguish, and ends that do not match.
RUNS = ("a", "A", "1", " ", "\n", "'", "_", ".", "<|", "é", "日", "ﷺ", "👍", "aA", "a ", "a1")
PROBES = ("a", *(run * count + end for run in RUNS for count in (1, 64) for end in ("", "b", "!")))
# A normalizer may make this many characters of each one. NFKC makes 18 of one.
MAX_GROWTH = 32


def tokenizer_problem(backend: tokenizers.Tokenizer) -> str:
    """Return what is wrong with the parts of `backend`; empty if nothing is."""
    from engine.client.module_command import python_module

    names = ("normalizer", "pre_tokenizer", "decoder")
    parts = {name: _state(getattr(backend, name)) for name in names}
    message = json.dumps(parts)
    if not any(f'"{kind}"' in message for kind in PROGRAMS):
        return ""
    process = ConfinedProcess(python_module("server.text.tokenizer_trial"), LIMITS)
    try:
        answer: dict[str, str] = json.loads(process.call(message.encode()))
    except ConfinedError as error:
        return f"{error} for short texts"
    finally:
        process.close()
    return answer["problem"]


def _state(part: Any) -> Any:
    return None if part is None else json.loads(part.__getstate__())


# ---- the child -----------------------------------------------------------------------------------


def handle(message: bytes) -> bytes:
    import tokenizers

    parts = json.loads(message)
    model = {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}
    empty: dict[str, Any] = {"version": "1.0", "added_tokens": []}
    backend = tokenizers.Tokenizer.from_str(json.dumps({**empty, **parts, "model": model}))
    try:
        problem = next(filter(None, (_problem(backend, probe) for probe in PROBES)), "")
    except BaseException as error:  # a panic is no Exception
        if isinstance(error, MemoryError):
            raise
        problem = f"fails on a short text: {error}"[:500]
    return json.dumps({"problem": problem}).encode()


def _problem(backend: tokenizers.Tokenizer, probe: str) -> str:
    if backend.normalizer is not None:
        made = len(backend.normalizer.normalize_str(probe))
        if made > MAX_GROWTH * (len(probe) + 1):
            return f"makes {made} characters of a text of {len(probe)}"
    pieces = backend.encode(probe).tokens
    if backend.decoder is not None:
        backend.decoder.decode([*pieces, probe])
    return ""


if __name__ == "__main__":
    serve(handle)
