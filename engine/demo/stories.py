"""Short stories for the demo model: a fixed plot with drawn words, long enough to see an answer
stream.
"""

from __future__ import annotations

from random import Random

from engine.demo import facts
from engine.demo.phrases import forms

OPENINGS = (
    "Once upon a time there was a {trait} {hero} called {name}. {name} lived near a {place}.",
    "Once upon a time a {trait} {hero} lived near a {place}. Everyone called the {hero} {name}.",
)
FINDS = (
    "One morning {name} found a golden {thing} in the grass.",
    "One day {name} saw a silver {thing} under a tree.",
)
WONDERS = (
    'The {thing} was warm and sang a quiet song. "Whose {thing} is this?" asked {name}.',
    'The {thing} glowed like the moon. "Who lost this {thing}?" asked {name}.',
)
MEETINGS = (
    "So {name} walked to the {place} and met an old {friend}. "
    '"The {thing} is mine," said the {friend}.',
    'On the way to the {place} {name} met a sad {friend}. "I lost my {thing}," said the {friend}.',
)
TROUBLES = (
    "Then a storm came, and the rain fell all night. "
    "The two of them hid in a small house and shared some bread.",
    "Then the wind grew strong and the path was gone. "
    "The two of them waited together until the stars came out.",
)
RETURNS = (
    "{name} gave the {thing} back, and the {friend} smiled.",
    "{name} gave it back at once, and the {friend} danced for joy.",
)
ENDINGS = (
    "From that day on the {hero} and the {friend} were best friends. The end.",
    "Every summer after that they met again at the {place}. The end.",
)
ANIMALS = [
    *facts.HEROES,
    *facts.words("penguin elephant lion wolf horse hamster goose whale snail knight"),
]
REQUESTS = forms(
    """
    Tell me a story. | Tell me a short story. | Write a story. | Can you tell me a story? | A
    story, please. | Tell me a bedtime story. | I want to hear a story. | Make up a story. |
    Tell me another story.
    """
)
ABOUT = forms(
    """
    Tell me a story about a {hero}. | Tell me a short story about a {hero}. | Write a story
    about a {hero}. | Write a short story about a {hero}. | Can you tell me a story about a
    {hero}? | A story about a {hero}, please. | I want a story about a {hero}. | Tell me a
    tale about a {hero}.
    """
)
NAMED = forms(
    """
    Tell me a story about a {hero} called {name}. | Write a short story about a {hero} named
    {name}. | Tell me a short story about a {hero} called {name}. | Write a story about a
    {hero} called {name}.
    """
)
LONG = forms(
    """
    Tell me a long story about a {hero}. | Write a long story about a {hero}. | Tell me a long
    story.
    """
)


def tell(rng: Random) -> tuple[str, str]:
    """A request and its story, 60 to 150 words."""
    hero, friend = rng.sample(ANIMALS, 2)
    words = {
        "hero": hero, "friend": friend, "name": rng.choice(facts.NAMES),
        "trait": rng.choice(facts.TRAITS),
        "place": rng.choice(facts.PLACES), "thing": rng.choice(facts.TREASURES),
    }  # fmt: skip
    kind = rng.choices([REQUESTS, ABOUT, NAMED, LONG], [2, 4, 2, 2])[0]
    parts = [OPENINGS, FINDS, WONDERS, MEETINGS, RETURNS, ENDINGS]
    if kind is LONG:
        parts.insert(4, TROUBLES)
    return rng.choice(kind).format(**words), " ".join(
        rng.choice(part).format(**words) for part in parts
    )
