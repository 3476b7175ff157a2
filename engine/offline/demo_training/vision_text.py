"""Questions about the pictures of the seeing demo, and their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from PIL import Image

from engine.offline.demo_training.chat import Message
from engine.offline.demo_training.draws import Draws
from engine.offline.demo_training.pictures import (
    KINDS,
    SHAPES,
    Group,
    Painted,
    Scene,
    draw_scene,
    paint,
)
from engine.offline.demo_training.vision_material import vision_material

SYSTEM = ("You are a helpful assistant.", "Answer briefly.", "You describe pictures.")
NO_PICTURE = "I see no picture. Please show me one."
# Weights of the topics of questions; those that a scene cannot answer are not drawn.
TOPICS = {
    "describe": 30,
    "shape": 20,
    "shape_of_colour": 10,
    "colour": 20,
    "count": 20,
    "count_shapes": 6,
    "digit": 36,
    "background": 8,
    "there": 10,
}


class Question(NamedTuple):
    topic: str
    text: str
    answer: str
    expect: list[str]  # phrases of a right answer


class Talk(NamedTuple):
    """A chat, and its pictures in the order of their markers."""

    messages: list[Message]
    pictures: tuple[Painted, ...]


def plural(name: str) -> str:
    return f"{name}es" if name.endswith("cross") else f"{name}s"


def amount(count: int, name: str) -> str:
    """Return a number of shapes such as "one circle" or "three circles"."""
    return f"{vision_material().counts[count - 1]} {name if count == 1 else plural(name)}"


def with_article(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou8" else f"a {name}"


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def listed(parts: Sequence[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def named(group: Group) -> str:
    """Return a group such as "a red circle", "two red circles" or "a red 7"."""
    name = f"{group.colour} {group.name}"
    if group.number == 1:
        return with_article(name)
    return f"{vision_material().counts[group.number - 1]} {plural(name)}"


def description(scene: Scene) -> str:
    groups = listed([named(group) for group in scene.groups])
    return capital(f"{groups} on {with_article(scene.background)} background.")


def ask(rng: Draws, scene: Scene, topic: str = "") -> Question:
    """Draw a question about a scene, of a topic or of any that fits."""
    topic = topic or rng.weighted({name: TOPICS[name] for name in fitting(scene)})
    text = rng.choice(vision_material().questions[topic])
    group = rng.choice(scene.groups)
    names = [each.name for each in scene.groups]
    match topic:
        case "describe":
            parts = [named(each) for each in scene.groups]
            background = f"{scene.background} background"
            return Question(topic, text, description(scene), [*parts, background])
        case "shape" | "digit":
            return Question(topic, text, f"This is {with_article(group.name)}.", [group.name])
        case "background":
            answer = f"The background is {scene.background}."
            return Question(topic, text, answer, [scene.background])
        case "shape_of_colour":
            verb = "is" if group.number == 1 else "are"
            name = group.name if group.number == 1 else plural(group.name)
            text = text.format(colour=group.colour)
            return Question(topic, text, f"The {name} {verb} {group.colour}.", [name])
        case "count_shapes":
            total = sum(each.number for each in scene.groups)
            return counted(topic, text, total, "shape")
        case "count":
            total = sum(each.number for each in scene.groups if each.name == group.name)
            text = text.format(many=plural(group.name))
            return counted(topic, text, total, group.name)
        case "there":
            name = group.name if rng.chance(0.5) else rng.choice(list(SHAPES))
            answer = "Yes" if name in names else "No"
            return Question(topic, text.format(one=name), f"{answer}.", [answer])
    return colour_question(rng, scene, text)


def counted(topic: str, text: str, count: int, name: str) -> Question:
    verb = "is" if count == 1 else "are"
    answer = f"There {verb} {amount(count, name)}."
    return Question(topic, text, answer, [vision_material().counts[count - 1]])


def colour_question(rng: Draws, scene: Scene, text: str) -> Question:
    group = rng.choice(scene.groups)
    name = "digit" if scene.is_digit else group.name
    verb = "is"
    if group.number > 1:
        text = text.replace(" is the {one}", " are the {one}")
        name, verb = plural(name), "are"
    answer = f"The {name} {verb} {group.colour}."
    return Question("colour", text.format(one=name), answer, [group.colour])


def fitting(scene: Scene) -> list[str]:
    """Return the topics of questions that a scene answers with one answer."""
    topics = ["describe", "background"]
    if scene.is_digit:
        return [*topics, "digit", "colour"]
    topics += ["count", "count_shapes", "there", "shape_of_colour"]
    names = {group.name for group in scene.groups}
    if len(names) == len(scene.groups):
        topics.append("colour")
    if len(scene.groups) == 1 and scene.groups[0].number == 1:
        topics.append("shape")
    return topics


class Looker:
    """Draws chats about pictures from one seed."""

    def __init__(self, seed: int, kinds: Mapping[str, float] = KINDS, counts: float = 0) -> None:
        """`kinds` are the weights of the kinds of scenes, `counts` a share of questions."""
        self.rng = Draws(seed)
        self.kinds = kinds
        self.counts = counts

    def talk(self, *, paints: bool = True) -> Talk:
        """Return the next chat of the training: questions about one picture, seldom about two.

        Without `paints` it has only the text.
        """
        rng = self.rng
        messages: list[Message] = []
        if rng.chance(0.1):
            messages.append({"role": "system", "content": rng.choice(SYSTEM)})
        if rng.chance(0.04):
            return Talk(messages + self.without_picture(), ())
        pictures = []
        for _ in range(2 if rng.chance(0.08) else 1):
            scene = draw_scene(rng, rng.weighted(self.kinds))
            if paints:
                pictures.append(paint(rng, scene))
            for index in range(rng.randint(2, 6)):
                messages += self.turn(scene, is_first=index == 0)
        return Talk(messages, tuple(pictures))

    def turn(self, scene: Scene, *, is_first: bool) -> list[Message]:
        """Return a question, with the picture if it is the first about it, and its answer."""
        is_count = self.counts > 0 and not scene.is_digit and self.rng.chance(self.counts)
        question = ask(self.rng, scene, "count" if is_count else "")
        text = question.text
        if self.rng.chance(0.1):
            text = text.lower().rstrip("?.")
        content: Any = text
        if is_first:
            content = [{"type": "image"}, {"type": "text", "text": text}]
            if self.rng.chance(0.4):
                content.reverse()
        return [
            {"role": "user", "content": content},
            {"role": "assistant", "content": question.answer},
        ]

    def without_picture(self) -> list[Message]:
        replies = vision_material().without_picture
        if self.rng.chance(0.5):
            text = self.rng.choice(list(replies))
            answer = replies[text]
        else:
            text, answer = ask(self.rng, draw_scene(self.rng)).text, NO_PICTURE
        return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


# Topics of probes: the kind of their scenes and the topic of their questions.
PROBES = {
    "shape": (("single",), "shape"),
    "colour": (("single", "mixed", "digit"), "colour"),
    "count": (("several",), "count"),
    "digit": (("digit",), "digit"),
    "describe": (("single", "several", "mixed", "digit"), "describe"),
    "new_pair": (("single",), "describe"),
    "count_mixed": (("mixed",), "count"),
}


def probe_scene(rng: Draws, topic: str) -> Scene:
    kinds, _ = PROBES[topic]
    return draw_scene(rng, rng.choice(kinds), unseen=topic == "new_pair")


def probe_picture(topic: str, seed: int) -> Image.Image:
    """Return the picture of a probe."""
    rng = Draws(seed)
    return paint(rng, probe_scene(rng, topic)).image


def probe_talk(topic: str, seed: int) -> Talk:
    """Return a probe's question with its picture, and the right answer."""
    question = ask(Draws(seed), probe_scene(Draws(seed), topic), PROBES[topic][1])
    content = [{"type": "image"}, {"type": "text", "text": question.text}]
    rng = Draws(seed)
    painted = paint(rng, probe_scene(rng, topic))
    messages: list[Message] = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": question.answer},
    ]
    return Talk(messages, (painted,))


def probes(each: int = 25) -> list[dict[str, Any]]:
    """Return the content of vision/probes.jsonl. The pictures are drawn when they are needed."""
    found: list[dict[str, Any]] = []
    for topic, (_, about) in PROBES.items():
        for seed in range(len(found), len(found) + each):
            found.append(probe(topic, about, seed))
    return found


def probe(topic: str, about: str, seed: int) -> dict[str, Any]:
    scene = probe_scene(Draws(seed), topic)
    question = ask(Draws(seed), scene, about)
    return {
        "topic": topic,
        "picture": seed,
        "messages": [{"role": "user", "content": question.text}],
        "expect": question.expect,
        "match": "contains",
    }
