"""Makes the demo model: `python -m engine.demo.train` learns its tokenizer and its weights from
text it writes itself; the settings and the chat template in model/ are written by hand.

One seed fixes the text, the order and the first weights. The text is the same everywhere; the
weights repeat to the bit on the same machine, torch and two threads, and to rounding elsewhere.
A GPU is used where there is one. `make demo-eval` then scores what was made.
"""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import typer
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence

from engine.config import read_json
from engine.demo.chat import FOLDER, SPECIAL_TOKENS, SPOKEN, render_text
from engine.demo.evaluate import read_probes
from engine.demo.network import DemoModel
from engine.demo.text import Author, Conversation, held_out_of
from engine.models.llama import LlamaConfig

SEED = 20260
TOKENS_PER_STEP, TOKENS_PER_BATCH = 2048, 1024
MUON_LR, ADAM_LR = 0.02, 2e-3

Example = tuple[list[int], list[bool]]
Batch = list[Example]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of at most `vocab_size` pieces: all 256 bytes, every digit a token of its
    own, the special tokens as ids 0, 1 and 2."""
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


def encode(tokenizer: Tokenizer, conversation: Conversation, limit: int) -> Example:
    """Token ids of a conversation and which of them the model learns to say: the assistant's."""
    ids: list[int] = []
    learned: list[bool] = []
    for at, piece in enumerate(SPOKEN.split(render_text(*conversation))):
        ids += tokenizer.encode(piece).ids
        learned += [at % 2 == 1] * (len(ids) - len(learned))
    return ids[:limit], learned[:limit]


def lesson(author: Author, tokenizer: Tokenizer, limit: int, progress: float) -> list[Batch]:
    """About TOKENS_PER_STEP tokens that mix all topics, cut at `limit` in each conversation.

    A batch has conversations of like length, so that their rows need little padding.
    """
    drawn: Batch = []
    while sum(len(ids) for ids, _ in drawn) < TOKENS_PER_STEP:
        drawn.append(encode(tokenizer, author.compose(progress), limit))
    batches: list[Batch] = [[]]
    for example in sorted(drawn, key=lambda example: len(example[0])):
        length, rows = len(example[0]), batches[-1]
        full = (len(rows) + 1) * length > TOKENS_PER_BATCH
        if rows and (full or length > 8 + 1.2 * len(rows[0][0])):
            batches.append([])
        batches[-1].append(example)
    return batches


def learn_half(model: DemoModel, batches: list[Batch], count: int) -> float:
    """Leaves the gradients of the batches' share in the mean loss over `count` learned tokens."""
    total, device = 0.0, model.embed_tokens.weight.device
    model.zero_grad()
    for batch in batches:
        ids_BT, learned_BT = (
            pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
            for rows in zip(*batch, strict=True)
        )
        keep_BT = learned_BT[:, 1:]
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(ids_BT[:, :-1], keep_BT)
        loss = F.cross_entropy(logits.float(), ids_BT[:, 1:][keep_BT], reduction="sum") / count
        loss.backward()
        total += loss.item()
    return total


class Trainer:
    """Muon for the layers' matrices (Jordan et al., 2024), AdamW for embedding and norms.

    Two threads, each with half of a step and of the matrices: at this size twice as fast as two
    threads per operation. The twin shares the model's weights and has gradients of its own.
    """

    def __init__(self, model: DemoModel) -> None:
        self.model, self.twin = model, copy.deepcopy(model)
        for parameter, shared in zip(self.twin.parameters(), model.parameters(), strict=True):
            parameter.data = shared.data
        self.pool = ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,))
        matrices = [p for p in model.layers.parameters() if p.dim() == 2]
        others = [model.embed_tokens.weight, *(p for p in model.parameters() if p.dim() == 1)]
        muon = partial(torch.optim.Muon, lr=MUON_LR, weight_decay=0.02, momentum=0.95)
        adam = torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0)
        self.optimizers = [muon(matrices[0::2]), muon(matrices[1::2]), adam]

    def learn(self, batches: list[Batch], rate: float) -> float:
        """One update at a share of the full rates; returns the mean loss of the learned tokens."""
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


def main(steps: int = 4200, out: Path = FOLDER) -> None:
    """Train Penstock's demo model; the hand-written files of its folder are copied to OUT."""
    if out.resolve() != FOLDER.resolve():
        made = shutil.ignore_patterns("model.safetensors", "tokenizer.json")
        shutil.copytree(FOLDER, out, ignore=made, dirs_exist_ok=True)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    config = LlamaConfig.from_hf(read_json(out / "config.json"))
    held_out = held_out_of(read_probes())
    author = Author(SEED, held_out)
    texts = (render_text(*author.compose(0.5)) for _ in range(30_000))
    tokenizer = train_tokenizer(texts, config.vocab_size)
    tokenizer.save(str(out / "tokenizer.json"))
    model = DemoModel(config).to("cuda" if torch.cuda.is_available() else "cpu")
    trainer, author = Trainer(model), Author(SEED + 1, held_out)
    began, mean = time.monotonic(), 0.0
    for step in range(steps):
        batches = lesson(author, tokenizer, config.max_positions, step / steps)
        # A short rise, the full rate while rehearsing, then a fall to nothing.
        loss = trainer.learn(batches, min((step + 1) / 60, 1.0, ((1 - step / steps) / 0.88) ** 1.5))
        mean = loss if step == 0 else 0.98 * mean + 0.02 * loss
        if step % 50 == 0:
            left = (time.monotonic() - began) / (step + 1) * (steps - step - 1) / 60
            print(f"step {step}/{steps}  loss {mean:.4f}  {left:.1f} min left", flush=True)
        if step % 500 == 499 or step == steps - 1:
            state = model.state_dict().items()
            weights = {f"model.{name}": p.to("cpu", torch.bfloat16) for name, p in state}
            save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    typer.run(main)
