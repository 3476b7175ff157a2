"""The training steps of the demo models: batches, gradients in two threads, optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.offline.demo_training.network import Batch, DemoModel, Example
from engine.offline.demo_training.network_t5 import DemoT5
from engine.offline.demo_training.network_vision import DemoVision, TowerTeacher

TOKENS_PER_STEP = 2048
TOKENS_PER_BATCH = 1024
MUON_LR = 0.02

Network = DemoModel | DemoT5 | DemoVision
Learner = Network | TowerTeacher


def lesson(draw: Callable[[], Example]) -> list[Batch]:
    """Return batches of about TOKENS_PER_STEP tokens in total, drawn from all topics.

    The examples of a batch have similar lengths, so that their rows need little padding.
    """
    drawn: list[Example] = []
    count = 0
    while count < TOKENS_PER_STEP:
        example = draw()
        drawn.append(example)
        count += len(example.ids)
    drawn.sort(key=lambda example: len(example.ids))
    batches: list[Batch] = []
    for example in drawn:
        if batches and fits(example, batches[-1]):
            batches[-1].append(example)
        else:
            batches.append([example])
    return batches


def fits(example: Example, batch: Batch) -> bool:
    """Whether a batch has room for one more example, which is at least as long as its others."""
    length = len(example.ids)
    shortest = len(batch[0].ids)
    padded_tokens = (len(batch) + 1) * length
    return padded_tokens <= TOKENS_PER_BATCH and length <= 8 + 1.2 * shortest


def learn_half(model: Learner, batches: list[Any], count: int) -> float:
    """Compute the gradients of the batches' part of the mean loss over `count` things learned.

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
    """Muon for the layers' matrices (Jordan et al., 2024), AdamW for all other parameters.

    Two threads each process half of the batches and half of the matrices. At this size that is
    twice as fast as two threads per operation. The twin shares the model's weights and has its own
    gradients.
    """

    def __init__(self, model: Learner) -> None:
        self.model = model
        self.twin = copy.deepcopy(model)
        for parameter, shared in self.twin_parameters():
            parameter.data = shared.data
        self.pool = ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,))
        self.optimizers = optimizers_of(model)

    def learn(self, batches: list[Batch], rate: float) -> float:
        """Update the weights with `rate` times the full learning rates.

        Returns the mean loss of the learned tokens.
        """
        return self.learn_mean(batches, sum(map(learned_tokens, batches)), rate)

    def learn_mean(self, batches: list[Any], count: int, rate: float) -> float:
        """Do the same for batches of any kind, whose losses are a sum over `count` things."""
        models = (self.model, self.twin)
        halves = (batches[0::2], batches[1::2])
        counts = (count, count)
        losses = list(self.pool.map(learn_half, models, halves, counts))
        self.merge_gradients()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * rate
        updates = [self.pool.submit(optimizer.step) for optimizer in self.optimizers]
        for update in updates:
            update.result()
        return sum(losses)

    def merge_gradients(self) -> None:
        """Add the gradients of the twin to those of the model."""
        for twin, parameter in self.twin_parameters():
            if twin.grad is None:
                continue
            if parameter.grad is None:
                parameter.grad = twin.grad
            else:
                parameter.grad.add_(twin.grad)

    def twin_parameters(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield each parameter of the twin, and the same one of the model."""
        return zip(self.twin.parameters(), self.model.parameters(), strict=True)


def learned_tokens(batch: Batch) -> int:
    """Return the number of tokens with a loss. The first token of an example is never one."""
    count = 0
    for example in batch:
        count += sum(example.learned[1:])
    return count


def optimizers_of(model: Learner) -> list[torch.optim.Optimizer]:
    """Return Muon for each half of the matrices, and AdamW for the other parameters."""
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    is_matrix = set(map(id, matrices))
    others = [parameter for parameter in model.parameters() if id(parameter) not in is_matrix]
    muon = partial(torch.optim.Muon, lr=MUON_LR, weight_decay=0.02, momentum=0.95)
    first_muon = muon(matrices[0::2])
    second_muon = muon(matrices[1::2])
    adam = torch.optim.AdamW(others, lr=model.adam_lr, betas=(0.9, 0.98), weight_decay=0.0)
    return [first_muon, second_muon, adam]
