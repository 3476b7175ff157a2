"""The stages of the seeing demo's training: its tower, then answers about what the tower sees."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tokenizers import Tokenizer

from engine.models.idefics3 import Idefics3Config
from engine.models.vision.idefics3 import Idefics3VisionConfig
from engine.offline.demo_training.chat import FOLDER, SPECIAL_TOKENS, template
from engine.offline.demo_training.draws import SEED
from engine.offline.demo_training.files import TOKENIZER, WEIGHTS, save_weights
from engine.offline.demo_training.network import Example
from engine.offline.demo_training.network_vision import DemoVision
from engine.offline.demo_training.pictures import tile
from engine.offline.demo_training.tower import learn_tower
from engine.offline.demo_training.vision_material import vision_material
from engine.offline.demo_training.vision_text import PROBES, Looker, Talk, probe_talk
from engine.offline.demo_training.vocabulary import chat_tokenizer, encode_text

# Kinds of scenes in the last stage: most have several things, which take longer to learn.
CROWDED = {"single": 8, "several": 30, "mixed": 52, "digit": 10}
HELD_OUT = range(10_000, 10_040)  # seeds
IMAGE, IMAGE_ENDS = "<image>", "<fake_token_around_image>"


class VisionCourse:
    """The seeing demo's settings, which both stages of its training share."""

    folder = FOLDER.with_name("vision")

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = Idefics3Config.from_hf(
            config["text_config"],
            vision=Idefics3VisionConfig.from_hf(config, config["text_config"]["hidden_size"]),
        )
        self.image_token = config["image_token_id"]
        tower = self.config.vision.tower
        tokens = (tower.side // self.config.vision.scale) ** 2
        self.shown = f"{IMAGE_ENDS}<global-img>{IMAGE * tokens}{IMAGE_ENDS}"

    def rendered(self, messages: list[dict[str, Any]]) -> str:
        return template(self.folder).render(messages=messages)


class VisionTower(VisionCourse):
    """Tokenizer and network of the first stage, which trains the tower on the labels of patches."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.steps = vision_material().tower.steps

    def tokenizer(self, out: Path) -> Tokenizer:
        looker = Looker(SEED)
        texts = (self.rendered(looker.talk(paints=False).messages) for _ in range(10_000))
        special = (*SPECIAL_TOKENS, IMAGE, IMAGE_ENDS, "<global-img>")
        tokenizer = chat_tokenizer(texts, self.config.vocab_size, special)
        tokenizer.save(str(out / TOKENIZER))
        return tokenizer

    def network(self, out: Path) -> DemoVision:
        return DemoVision(self.config, self.image_token)

    def learn(self, network: DemoVision, steps: int, out: Path) -> None:
        """Train the tower, and save all weights."""
        save = partial(save_weights, network, out / WEIGHTS)
        learn_tower(network.vision_model, SEED + 2, steps, save)


class Vision(VisionCourse):
    """Training data and network of the second stage, which continues from saved weights."""

    peak = 1.0

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.steps = vision_material().answer_steps
        self.looker = Looker(SEED + 1)

    def tokenizer(self, out: Path) -> Tokenizer:
        return Tokenizer.from_file(str(out / TOKENIZER))

    def network(self, out: Path) -> DemoVision:
        network = DemoVision(self.config, self.image_token)
        network.read(load_file(out / WEIGHTS))
        return network

    def example(self, tokenizer: Tokenizer, progress: float) -> Example:
        return self.encoded(tokenizer, self.looker.talk())

    def scores(self, network: DemoVision, tokenizer: Tokenizer) -> str:
        """Return the shares of right answers about pictures that are not probes, by topic."""
        shares = []
        for topic in PROBES:
            talks = [probe_talk(topic, seed) for seed in HELD_OUT]
            right = [network.is_answered(self.encoded(tokenizer, talk)) for talk in talks]
            shares.append(f"{topic} {sum(right) / len(right):.2f}")
        return "  ".join(shares)

    def encoded(self, tokenizer: Tokenizer, talk: Talk) -> Example:
        text = self.rendered(talk.messages).replace(IMAGE, self.shown)
        example = encode_text(tokenizer, text)
        return example._replace(pictures=tuple(tile(p.image) for p in talk.pictures))


class VisionReview(Vision):
    """Training data of the third stage, which continues with more things in each picture."""

    peak = 0.6

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.steps = vision_material().review_steps
        self.looker = Looker(SEED + 3, CROWDED)


class VisionCounts(Vision):
    """Training data of the fourth stage, which counts in about half of its questions."""

    peak = 0.6

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.steps = vision_material().count_steps
        self.looker = Looker(SEED + 4, CROWDED, counts=0.4)
