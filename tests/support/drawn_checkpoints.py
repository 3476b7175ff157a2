"""Checkpoints whose weights are drawn when a test first needs them, so that none are committed.

Their files except the weights are in tests/data/checkpoints. Greedy answers of these models are
words of their vocabulary, and the best token leads clearly, so that rounding cannot change it.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

MADE = Path(__file__).resolve().parents[2] / "build" / "test-checkpoints"
TOKENS = 120  # of each answer
GAP = 0.01  # nats between the best token and the next one, at least
NUM_CASES = 5
EOS = 2
TOKEN_EMBEDDINGS = ("embed", "wte")
NUM_RARE = 259  # the first ids: special tokens and bytes; answers have none of them
PROMPTS = [
    "", "Once upon a time,", "Lily and Ben went to the", "Tim had a toy car. He",
    "One day, a girl found a kite.", "Then she walked to the", "They saw a boat", "A bird sang",
    "The park was", "Mia likes to swim", "Behind a stone", "He was sad", "Look at the sky",
    "Under a tree", "The box", "Sue and Max", "In the garden", "a cake", "two frogs", "It was red",
]  # fmt: skip


def made(folder: Path) -> Path:
    """Return a copy of `folder` that has weights and the reference's answers, made once.

    expected.json holds cases of prompt, prompt_ids, ids, logprobs and text: greedy answers of
    transformers in fp32, by the length of their prompts.
    """
    MADE.mkdir(parents=True, exist_ok=True)
    out = MADE / f"{folder.name}-{_digest(folder)}"
    with (MADE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of xdist need it at the same time
        if not out.is_dir():
            with tempfile.TemporaryDirectory(dir=MADE) as staging:
                new = Path(staging) / "checkpoint"
                shutil.copytree(folder, new)
                _make(new)
                os.rename(new, out)
    return out


def _digest(folder: Path) -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for file in sorted(folder.iterdir()):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _make(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    _draw(model)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would wait for each other on a busy machine
    with torch.inference_mode():
        cases = _certain_answers(model, tokenizer)
    torch.set_num_threads(threads)
    model.save_pretrained(folder)
    content = json.dumps({"cases": cases}, ensure_ascii=False)
    (folder / "expected.json").write_text(content + "\n", encoding="utf-8")


def _draw(model: torch.nn.Module) -> None:
    """Fill a model with random weights that make its answers vary."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            continue  # norms and biases stay as they are
        parameter.data = torch.randn(parameter.shape, generator=generator) * _std(name, parameter)
        if any(part in name for part in TOKEN_EMBEDDINGS):
            parameter.data[:NUM_RARE] *= 0.05


def _std(name: str, parameter: torch.Tensor) -> float:
    """Return how far weights spread: answers vary, and float32 computes logprobs to 2e-5."""
    if any(part in name for part in TOKEN_EMBEDDINGS):
        return 0.4
    if "wpe" in name:
        return 0.3
    is_output = any(part in name for part in ("o_proj", "down_proj", "c_proj"))
    return (2.0 if is_output else 1.5) * min(parameter.shape) ** -0.5


def _certain_answers(model: Any, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for prompt in PROMPTS:
        prompt_ids = tokenizer.encode(prompt).ids
        steps = list(_steps(model, prompt_ids))
        if len(steps) < TOKENS:
            continue
        ids = [token for token, _ in steps]
        found.append(
            {
                "prompt": prompt,
                "prompt_ids": prompt_ids,
                "ids": ids,
                "logprobs": [logprob for _, logprob in steps],
                "text": tokenizer.decode(ids),
            }
        )
        if len(found) == NUM_CASES:
            return sorted(found, key=lambda case: len(case["prompt_ids"]))
    raise AssertionError(f"only {len(found)} of {NUM_CASES} answers are certain")


def _steps(model: Any, prompt_ids: list[int]) -> Iterator[tuple[int, float]]:
    """Yield the tokens of a greedy answer with their logprobs, until one is not certain."""
    import torch

    # transformers 5.24 has renamed it, and warns about the old name.
    names = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in names else "past_key_values"
    unread, past = prompt_ids, None
    for _ in range(TOKENS):
        step = model(torch.tensor([unread]), use_cache=True, **{name: past})
        past = step.get(name, step.past_key_values)
        values, tokens = step.logits[0, -1].log_softmax(-1).topk(2)
        best, second = values.tolist()
        token = int(tokens[0])
        if best - second < GAP or token == EOS:
            return
        unread = [token]
        yield token, round(best, 5)
