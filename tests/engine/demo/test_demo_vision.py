"""The shipped model that sees: small, equal to transformers, and its probes are not trained on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer

from engine.checkpoint.bounded_json import read_json
from engine.checkpoint.folder import model_folder
from engine.checkpoint.image_config import read_image_config
from engine.offline.demo_training import vision_course
from engine.offline.demo_training.draws import SEED, Draws
from engine.offline.demo_training.evaluate import read_probes
from engine.offline.demo_training.files import TOKENIZER, WEIGHTS, copy_settings
from engine.offline.demo_training.network import Example
from engine.offline.demo_training.network_vision import DemoVision, TowerTeacher
from engine.offline.demo_training.pictures import (
    KINDS,
    LABELS,
    MOST_SHAPES,
    NAMES,
    SHAPES,
    TILE,
    Group,
    Scene,
    draw_scene,
    is_unseen,
    labels,
    paint,
    tile,
)
from engine.offline.demo_training.tower import Album
from engine.offline.demo_training.train import main
from engine.offline.demo_training.trainer import Trainer
from engine.offline.demo_training.vision_course import Vision
from engine.offline.demo_training.vision_material import vision_material
from engine.offline.demo_training.vision_text import (
    Looker,
    ask,
    fitting,
    probe_picture,
    probe_scene,
    probes,
)
from server.images.processors.registry import processor_of
from tests.support.golden import TOLERANCE

pytestmark = pytest.mark.usefixtures("one_thread")
FOLDER = model_folder("demo-vision")
SIZES = ((64, 64), (200, 150), (150, 201), (40, 99), (320, 192), (7, 5))


def course() -> Vision:
    return Vision(read_json(FOLDER / "config.json"))


def example() -> Example:
    """Return a chat about two pictures, as the training has it."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    drawn = course()
    while True:
        found = drawn.example(tokenizer, 0.0)
        if len(found.pictures) == 2:
            return found


def test_vision_folder_is_below_12_mb() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 12e6


def test_tile_equals_the_servers_processor() -> None:
    config = read_image_config(FOLDER)
    assert config is not None
    model = read_json(FOLDER / "config.json")
    processor = processor_of(model, config, model["architectures"][0])
    for number, (width, height) in enumerate(SIZES):
        small = Image.frombytes("RGB", (4, 3), Draws(number).randbytes(36))
        picture = small.resize((width, height), Image.Resampling.BICUBIC)
        shape, pixels = processor.process(picture, alone=True)
        assert (shape.height, shape.width) == (TILE, TILE)
        assert tile(picture) == pixels


def test_training_network_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    load = transformers.Idefics3ForConditionalGeneration.from_pretrained
    reference = load(FOLDER, dtype=torch.float32).eval()
    network = course().network(FOLDER)
    weights = dict(reference.state_dict())
    del weights["lm_head.weight"]
    shapes = {name: tensor.shape for name, tensor in network.checkpoint().items()}
    assert shapes == {name: tensor.shape for name, tensor in weights.items()}
    network.read(weights)
    talk = example()
    ids_BT = torch.tensor([talk.ids])
    tiles = network.tiles(b"".join(talk.pictures))
    pixels = tiles[None].permute(0, 1, 4, 2, 3).float() / 127.5 - 1
    with torch.inference_mode():
        expected = reference(input_ids=ids_BT, pixel_values=pixels).logits[0]
        states_NPC = network.vision_model(tiles)
        x_BTC = network.shown(network.text_model.embed_tokens(ids_BT), ids_BT, states_NPC)
        found = network.text_model.decode(x_BTC, torch.ones_like(ids_BT, dtype=torch.bool))
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_training_example_learns_the_answers_only() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    talk = example()
    learned = [id_ for id_, is_learned in zip(talk.ids, talk.learned, strict=True) if is_learned]
    text = tokenizer.decode(learned, skip_special_tokens=False)
    assert text.count("<|im_end|>") == text.count(".<|im_end|>") >= 4
    assert "?" not in text
    image = course().image_token
    assert image not in learned
    assert talk.ids.count(image) == 2 * 16


def test_committed_probes_equal_those_drawn() -> None:
    assert read_probes("demo-vision") == probes()


def test_training_scenes_have_no_held_out_pair_and_probes_of_it_do() -> None:
    rng = Draws(5)
    for _ in range(2000):
        assert not any(map(is_unseen, draw_scene(rng).groups))
    for asked in read_probes("demo-vision"):
        groups = probe_scene(Draws(asked["picture"]), asked["topic"]).groups
        assert any(map(is_unseen, groups)) == (asked["topic"] == "new_pair")
    pairs = [f"{colour} {name}" for colour in vision_material().colours for name in SHAPES]
    assert set(vision_material().unseen) < set(pairs)


def test_training_draws_no_picture_of_a_probe() -> None:
    looker = Looker(SEED + 1)
    seen = {tile(p.image) for _ in range(60) for p in looker.talk().pictures}
    asked = {tile(probe_picture(p["topic"], p["picture"])) for p in read_probes("demo-vision")}
    assert len(seen) > 55
    assert len(asked) == len(read_probes("demo-vision"))
    assert seen.isdisjoint(asked)


@pytest.mark.parametrize("kind", KINDS)
def test_scenes_have_at_most_five_shapes_none_of_the_backgrounds_colour(kind: str) -> None:
    rng = Draws(9)
    for _ in range(200):
        scene = draw_scene(rng, kind)
        assert 1 <= sum(group.number for group in scene.groups) <= MOST_SHAPES
        assert scene.background not in {group.colour for group in scene.groups}
        assert scene.is_digit == (kind == "digit")


def test_picture_of_a_scene_has_its_colours() -> None:
    """The background is the picture's most frequent colour, and red things have red pixels."""
    rng = Draws(3)
    scene = Scene((Group("circle", "red", 1),), "white")
    for _ in range(20):
        pixels = list(paint(rng, scene).image.get_flattened_data())
        white = sum(min(pixel) > 200 for pixel in pixels)
        red = sum(pixel[0] > 150 and max(pixel[1:]) < 100 for pixel in pixels)
        assert white > 0.2 * len(pixels)
        assert red > 0.005 * len(pixels)


def test_labels_of_patches_name_what_is_there() -> None:
    """Each thing of a picture labels a patch, with its colour; all others have the background's."""
    rng = Draws(6)
    colours = list(vision_material().colours)
    for _ in range(100):
        scene = draw_scene(rng)
        numbers = labels(paint(rng, scene), 8)
        things, shades, middles = numbers[:64], numbers[64:128], numbers[128:]
        found = set(zip(things, shades, strict=True))
        expected = {(NAMES.index(g.name) + 1, colours.index(g.colour)) for g in scene.groups}
        assert found == {(0, colours.index(scene.background)), *expected}
        counts = Counter(middles)
        for group in scene.groups:
            number = NAMES.index(group.name) + 1
            assert counts[number] == sum(g.number for g in scene.groups if g.name == group.name)
        assert counts[0] == 64 - sum(group.number for group in scene.groups)
    assert (len(NAMES) + 1, len(colours), len(NAMES) + 1) == LABELS


def test_tower_learns_the_labels_of_two_pictures() -> None:
    torch.manual_seed(0)
    tower = DemoVision(course().config, course().image_token).vision_model
    teacher = TowerTeacher(tower, LABELS, MOST_SHAPES)
    album = Album(Draws(8), 2, tower.config.side)
    trainer = Trainer(teacher)
    batches = [album.batch(torch.tensor([0])), album.batch(torch.tensor([1]))]
    losses = [trainer.learn_mean(batches, 2, 0.5) for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0]
    assert teacher.counted(album.labels_NKP).sum(1).tolist() == [2, 1]


def test_second_stage_keeps_the_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_settings(FOLDER, tmp_path)
    for name in (WEIGHTS, TOKENIZER):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    monkeypatch.setattr(vision_course, "HELD_OUT", range(1))
    main(model="vision", steps=1, stage=2, out=tmp_path)
    before = load_file(FOLDER / WEIGHTS)
    after = load_file(tmp_path / WEIGHTS)
    assert before.keys() == after.keys()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert "model.connector.modality_projection.proj.weight" in changed
    assert not any(name.startswith("model.vision_model.") for name in changed)


def test_answer_contains_what_is_expected() -> None:
    rng = Draws(4)
    for _ in range(300):
        scene = draw_scene(rng)
        for topic in fitting(scene):
            question = ask(rng, scene, topic)
            assert "{" not in question.text + question.answer
            for phrase in question.expect:
                assert phrase.lower() in question.answer.lower()


def test_looker_same_seed_draws_same_talks() -> None:
    def drawn(seed: int) -> list[Any]:
        looker = Looker(seed)
        talks = [looker.talk() for _ in range(20)]
        return [(t.messages, [tile(picture.image) for picture in t.pictures]) for t in talks]

    first, same, other = map(drawn, (3, 3, 4))
    assert first == same != other
