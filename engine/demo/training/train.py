"""Train the demo models: `python -m engine.demo.training.train`,
for the translator with `--model translate`.

It trains a tokenizer and weights on generated text. The settings and the chat template in the
model folders are written by hand.

One seed determines the text, its order and the initial weights. The text is the same everywhere.
The weights repeat bit for bit with the same machine, torch and two threads, elsewhere up to
rounding. A GPU is used if there is one. `make demo-eval` then evaluates the trained model.
"""

from __future__ import annotations

import copy
import shutil
import string
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from torch import nn

from engine.checkpoint.folder import read_json
from engine.demo.training.chat import FOLDER, SPECIAL_TOKENS, SPOKEN, render_text
from engine.demo.training.evaluate import read_probes
from engine.demo.training.network import Batch, DemoModel, Example
from engine.demo.training.network_t5 import DemoT5
from engine.demo.training.text import Author, Conversation, held_out_of
from engine.demo.training.translation import Grammar
from engine.models.llama import LlamaConfig
from engine.models.t5 import T5Config

SEED = 20260
TOKENS_PER_STEP, TOKENS_PER_BATCH = 2048, 1024
MUON_LR = 0.02

Network = DemoModel | DemoT5


def chat_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer of at most `vocab_size` tokens.

    It contains all 256 bytes, every digit is its own token, and ids 0, 1 and 2 are special tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=8,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def translate_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer of T5's form: word pieces, the first with a space; </s> ends every text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.NFC()
    marks = pre_tokenizers.Punctuation("isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), marks])
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "</s>", "<unk>"],
        initial_alphabet=[*string.ascii_letters, *"åäöÅÄÖéü", *string.digits, *"▁.,!?'-"],
        min_frequency=8,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer


def encode(tokenizer: Tokenizer, conversation: Conversation, limit: int) -> Example:
    """Return the token ids of a conversation, and a mask of the assistant's, which are learned."""
    ids: list[int] = []
    learned: list[bool] = []
    for at, piece in enumerate(SPOKEN.split(render_text(*conversation))):
        ids += tokenizer.encode(piece).ids
        learned += [at % 2 == 1] * (len(ids) - len(learned))
    return ids[:limit], learned[:limit]


def lesson(draw: Callable[[], Example]) -> list[Batch]:
    """Return batches of about TOKENS_PER_STEP tokens in total, drawn from all topics.

    The examples of a batch have similar lengths, so that their rows need little padding.
    """
    drawn: Batch = []
    while sum(len(ids) for ids, _ in drawn) < TOKENS_PER_STEP:
        drawn.append(draw())
    batches: list[Batch] = [[]]
    for example in sorted(drawn, key=lambda example: len(example[0])):
        length, rows = len(example[0]), batches[-1]
        full = (len(rows) + 1) * length > TOKENS_PER_BATCH
        if rows and (full or length > 8 + 1.2 * len(rows[0][0])):
            batches.append([])
        batches[-1].append(example)
    return batches


def learn_half(model: Network, batches: list[Batch], count: int) -> float:
    """Compute the gradients of the batches' part of the mean loss over `count` learned tokens.

    Returns that part of the mean loss.
    """
    total = 0.0
    model.zero_grad()
    for batch in batches:
        loss = model.loss(batch) / count
        loss.backward()
        total += loss.item()
    return total


class Trainer:
    """Muon for the layers' matrices (Jordan et al., 2024), AdamW for the embedding and norms.

    Two threads each process half of the batches and half of the matrices. At this size that is
    twice as fast as two threads per operation. The twin shares the model's weights and has its own
    gradients.
    """

    def __init__(self, model: Network) -> None:
        self.model, self.twin = model, copy.deepcopy(model)
        for parameter, shared in zip(self.twin.parameters(), model.parameters(), strict=True):
            parameter.data = shared.data
        self.pool = ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,))
        matrices = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
        others = [m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.RMSNorm)]
        muon = partial(torch.optim.Muon, lr=MUON_LR, weight_decay=0.02, momentum=0.95)
        adam = torch.optim.AdamW(others, lr=model.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
        self.optimizers = [muon(matrices[0::2]), muon(matrices[1::2]), adam]

    def learn(self, batches: list[Batch], rate: float) -> float:
        """Update the weights with `rate` times the full learning rates.

        Returns the mean loss of the learned tokens.
        """
        count = sum(sum(marks[1:]) for batch in batches for _, marks in batch)
        halves = (batches[0::2], batches[1::2])
        losses = list(self.pool.map(learn_half, (self.model, self.twin), halves, (count, count)))
        for mine, other in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            if other.grad is not None:
                mine.grad = other.grad if mine.grad is None else mine.grad.add_(other.grad)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * rate
        list(self.pool.map(lambda optimizer: optimizer.step(), self.optimizers))
        return sum(losses)


class Chat:
    """Training data, tokenizer and network of the demo model."""

    folder = FOLDER
    steps = 4200
    tokenizer = staticmethod(chat_tokenizer)

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = LlamaConfig.from_hf(config)
        held_out = held_out_of(read_probes())
        self.author, self.rehearsed = Author(SEED + 1, held_out), Author(SEED, held_out)

    def texts(self) -> Iterator[str]:
        return (render_text(*self.rehearsed.compose(0.5)) for _ in range(30_000))

    def network(self) -> DemoModel:
        return DemoModel(self.config)

    def example(self, tokenizer: Tokenizer, progress: float) -> Example:
        return encode(tokenizer, self.author.compose(progress), self.config.max_positions)


class Translate:
    """Training data, tokenizer and network of the translating demo."""

    folder = FOLDER.with_name("translate")
    steps = 3000
    tokenizer = staticmethod(translate_tokenizer)

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = T5Config.from_hf(config)
        self.grammar = Grammar(SEED + 1)

    def texts(self) -> Iterator[str]:
        rehearsed = Grammar(SEED)
        for _ in range(40_000):
            yield from rehearsed.sentence()[1:]

    def network(self) -> DemoT5:
        return DemoT5(self.config)

    def example(self, tokenizer: Tokenizer, progress: float) -> Example:
        rehearses = self.grammar.chance((0.12 - progress) / 0.08)
        draw = self.grammar.rehearsal if rehearses else self.grammar.sentence
        _, english, swedish = draw()
        if not rehearses and self.grammar.chance(0.06):
            english = english.lower()  # as many people type
        source, answer = tokenizer.encode(english).ids, tokenizer.encode(swedish).ids
        return source + answer, [False] * len(source) + [True] * len(answer)


COURSES: dict[str, type[Chat] | type[Translate]] = {"demo": Chat, "translate": Translate}


def main(model: str = "demo", steps: int | None = None, out: Path | None = None) -> None:
    """Train a demo model (demo or translate), and copy its hand-written files to OUT."""
    kind = COURSES[model]
    out = out or kind.folder
    if out.resolve() != kind.folder.resolve():
        made = shutil.ignore_patterns("model.safetensors", "tokenizer.json")
        shutil.copytree(kind.folder, out, ignore=made, dirs_exist_ok=True)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    course = kind(read_json(out / "config.json"))
    tokenizer = course.tokenizer(course.texts(), course.config.vocab_size)
    tokenizer.save(str(out / "tokenizer.json"))
    network = course.network().to("cuda" if torch.cuda.is_available() else "cpu")
    learn(course, network, tokenizer, steps or course.steps, out)


def learn(
    course: Chat | Translate, network: Network, tokenizer: Tokenizer, steps: int, out: Path
) -> None:
    """Train for `steps` steps, and save the weights every 500 steps."""
    trainer, began, mean = Trainer(network), time.monotonic(), 0.0
    for step in range(steps):
        batches = lesson(partial(course.example, tokenizer, step / steps))
        # Warm up briefly, keep the full rate while rehearsing, then decay to zero.
        loss = trainer.learn(batches, min((step + 1) / 60, 1.0, ((1 - step / steps) / 0.88) ** 1.5))
        mean = loss if step == 0 else 0.98 * mean + 0.02 * loss
        if step % 50 == 0:
            left = (time.monotonic() - began) / (step + 1) * (steps - step - 1) / 60
            print(f"step {step}/{steps}  loss {mean:.4f}  {left:.1f} min left", flush=True)
        if step % 500 == 499 or step == steps - 1:
            tensors = network.checkpoint().items()
            weights = {name: tensor.to("cpu", torch.bfloat16) for name, tensor in tensors}
            save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    typer.run(main)
