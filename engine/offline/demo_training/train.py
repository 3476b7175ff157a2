"""Train the demo models: `python -m engine.offline.demo_training.train`,
for the others with `--model translate` and `--model vision`.

It trains a tokenizer and weights on generated text. The settings and the chat template in the
model folders are written by hand.

The chat model has four stages. The first makes the tokenizer and teaches the plain topics. The
second continues from its weights, and teaches tools of many kinds, thoughts and JSON that a grammar
holds. The third continues from those, and teaches to report results of all kinds and to answer
behind long prompts. The fourth repeats what the earlier ones teach. `--stage` trains one of them.
The seeing model has four stages: its tower, answers about what the tower sees, a review, counts.

One seed determines the text, its order and the initial weights. The text is the same everywhere.
The weights repeat bit for bit with the same machine, torch and two threads, elsewhere up to
rounding. A GPU is used if there is one. `make demo-eval` then evaluates the trained model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from safetensors.torch import load_file
from tokenizers import Tokenizer

from engine.checkpoint.bounded_json import read_json
from engine.models.llama import LlamaConfig
from engine.models.t5 import T5Config
from engine.offline.demo_training.agent_text import REVIEW_PARTS, AgentAuthor
from engine.offline.demo_training.chat import FOLDER, render_text
from engine.offline.demo_training.draws import SEED
from engine.offline.demo_training.evaluate import read_probes
from engine.offline.demo_training.files import TOKENIZER, WEIGHTS, copy_settings, save_weights
from engine.offline.demo_training.network import DemoModel, Example
from engine.offline.demo_training.network_t5 import DemoT5
from engine.offline.demo_training.network_vision import DemoVision
from engine.offline.demo_training.practice_text import PracticeAuthor
from engine.offline.demo_training.text import Author, held_out_of
from engine.offline.demo_training.trainer import Network, Trainer, lesson
from engine.offline.demo_training.translation import Grammar, Sentence
from engine.offline.demo_training.vision_course import (
    Vision,
    VisionCounts,
    VisionReview,
    VisionTower,
)
from engine.offline.demo_training.vocabulary import chat_tokenizer, encode, translate_tokenizer

# The context of the first two stages. The third one extends it as config.json says.
SHORT_CONTEXT = {"max_position_embeddings": 1024, "rope_scaling": None}


class Chat:
    """Training data, tokenizer and network of the demo model's first stage."""

    folder = FOLDER
    steps = 4200
    peak = 1.0  # the largest share of the full learning rates

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = LlamaConfig.from_hf(config | SHORT_CONTEXT)
        held_out = held_out_of(read_probes())
        self.author = Author(SEED + 1, held_out)
        self.tokenizer_author = Author(SEED, held_out)

    def texts(self) -> Iterator[str]:
        """Yield the texts that the tokenizer is trained on."""
        for _ in range(30_000):
            conversation = self.tokenizer_author.compose(0.5)
            yield render_text(conversation.messages, conversation.tools)

    def tokenizer(self, out: Path) -> Tokenizer:
        tokenizer = chat_tokenizer(self.texts(), self.config.vocab_size)
        tokenizer.save(str(out / TOKENIZER))
        return tokenizer

    def network(self, out: Path) -> DemoModel:
        return DemoModel(self.config)

    def example(self, tokenizer: Tokenizer, progress: float) -> Example:
        conversation = self.author.compose(progress)
        return encode(tokenizer, conversation, self.config.max_positions)


class Practice:
    """Training data of the demo model's second stage, which continues from saved weights."""

    folder = FOLDER
    steps = 4800
    peak = 0.7

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = LlamaConfig.from_hf(config | SHORT_CONTEXT)
        self.author: PracticeAuthor | AgentAuthor
        self.author = PracticeAuthor(SEED + 2, held_out_of(read_probes()))

    def tokenizer(self, out: Path) -> Tokenizer:
        return Tokenizer.from_file(str(out / TOKENIZER))

    def network(self, out: Path) -> DemoModel:
        network = DemoModel(self.config)
        weights = load_file(out / WEIGHTS)
        network.load_state_dict({name.removeprefix("model."): weights[name] for name in weights})
        return network

    def example(self, tokenizer: Tokenizer, progress: float) -> Example:
        conversation = self.author.compose()
        return encode(tokenizer, conversation, self.config.max_positions)


class Agent(Practice):
    """Training data of the demo model's third stage, with the whole context."""

    steps = 850
    peak = 0.5

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = LlamaConfig.from_hf(config)
        self.author = AgentAuthor(SEED + 3, held_out_of(read_probes()))


class Review(Agent):
    """Training data of the demo model's fourth stage, most of it from the first two."""

    steps = 1500
    peak = 0.4

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.author = AgentAuthor(SEED + 4, held_out_of(read_probes()), REVIEW_PARTS)


class Translate:
    """Training data, tokenizer and network of the translating demo."""

    folder = FOLDER.with_name("translate")
    steps = 3000
    peak = 1.0

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = T5Config.from_hf(config)
        self.grammar = Grammar(SEED + 1)

    def texts(self) -> Iterator[str]:
        """Yield the texts that the tokenizer is trained on."""
        grammar = Grammar(SEED)
        for _ in range(40_000):
            sentence = grammar.sentence()
            yield sentence.english
            yield sentence.swedish

    def tokenizer(self, out: Path) -> Tokenizer:
        tokenizer = translate_tokenizer(self.texts(), self.config.vocab_size)
        tokenizer.save(str(out / TOKENIZER))
        return tokenizer

    def network(self, out: Path) -> DemoT5:
        return DemoT5(self.config)

    def example(self, tokenizer: Tokenizer, progress: float) -> Example:
        sentence = self.sentence(progress)
        source = tokenizer.encode(sentence.english).ids
        answer = tokenizer.encode(sentence.swedish).ids
        learned = [False] * len(source) + [True] * len(answer)
        return Example(source + answer, learned)

    def sentence(self, progress: float) -> Sentence:
        """Return a rehearsal, more often early in training, or else a sentence."""
        rng = self.grammar.rng
        if rng.chance((0.12 - progress) / 0.08):
            return self.grammar.rehearsal()
        sentence = self.grammar.sentence()
        if rng.chance(0.06):  # many people type without capitals
            return sentence._replace(english=sentence.english.lower())
        return sentence


Lessons = Chat | Vision | Practice | Agent | Review | Translate
Course = Lessons | VisionTower
# The stages of each model's training.
STAGES: dict[str, tuple[type[Course], ...]] = {
    "demo": (Chat, Practice, Agent, Review),
    "translate": (Translate,),
    "vision": (VisionTower, Vision, VisionReview, VisionCounts),
}


def main(
    model: str = "demo",
    steps: int | None = None,
    out: Path | None = None,
    stage: int | None = None,
) -> None:
    """Train a demo model (demo, translate or vision), in all its stages or in one.

    Its hand-written files are copied to OUT.
    """
    stages = STAGES[model]
    for course_type in stages if stage is None else stages[stage - 1 : stage]:
        folder = out or course_type.folder
        copy_settings(course_type.folder, folder)
        train(course_type, steps, folder)


def train(course_type: type[Course], steps: int | None, out: Path) -> None:
    """Train one stage, which reads and writes the weights and the tokenizer in OUT."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    course = course_type(read_json(out / "config.json"))
    steps = steps or course.steps
    tokenizer = course.tokenizer(out)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(course, VisionTower):
        course.learn(course.network(out).to(device), steps, out)
        return
    learn(course, course.network(out).to(device), tokenizer, steps, out)


def learn(course: Lessons, network: Network, tokenizer: Tokenizer, steps: int, out: Path) -> None:
    """Train for `steps` steps, and save the weights every 250 steps."""
    trainer = Trainer(network)
    began = time.monotonic()
    mean = 0.0
    for step in range(steps):
        draw = partial(course.example, tokenizer, step / steps)
        loss = trainer.learn(lesson(draw), course.peak * learning_rate(step, steps))
        mean = loss if step == 0 else 0.98 * mean + 0.02 * loss
        if step % 50 == 0:
            seconds_per_step = (time.monotonic() - began) / (step + 1)
            left = seconds_per_step * (steps - step - 1) / 60
            print(f"step {step}/{steps}  loss {mean:.4f}  {left:.1f} min left", flush=True)
        if step % 250 == 249 or step == steps - 1:
            save_weights(network, out / WEIGHTS)
            if isinstance(course, Vision) and isinstance(network, DemoVision):
                print(course.scores(network, tokenizer), flush=True)


def learning_rate(step: int, steps: int) -> float:
    """Return the share of the full learning rates that one step uses.

    It warms up briefly, keeps the full rates while rehearsing, then decays to zero.
    """
    warm_up = (step + 1) / 60
    left = 1 - step / steps
    decay = (left / 0.88) ** 1.5
    return min(warm_up, 1.0, decay)


if __name__ == "__main__":
    typer.run(main)
