"""Small tales, drawn from a grammar: the training text of this folder's checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

GIRLS = ("Lily", "Mia", "Anna", "Sue")
BOYS = ("Tim", "Ben", "Max", "Tom")
FRIENDS = ("bird", "cat", "dog", "frog", "mouse")
PLACES = ("park", "garden", "forest", "beach", "farm")
THINGS = ("ball", "box", "boat", "kite", "cake", "hat")
LOOKS = ("big", "red", "small", "blue", "old", "new")
LIKES = ("play outside", "sing songs", "run in the grass", "look at the sky", "swim")
FINDS = ("under a tree", "near the water", "behind a stone", "in the sand", "on the path")
FEELINGS = ("happy", "sad", "proud", "tired", "glad")


def often(random: Random, choices: Sequence[str]) -> str:
    """Draw a choice; the first is by far the likeliest, so that greedy answers are certain."""
    return random.choices(choices, [4.0**-place for place in range(len(choices))])[0]


def tale(random: Random) -> str:
    """One tale of about 20 sentences."""
    is_girl = random.random() < 0.6
    name = often(random, GIRLS if is_girl else BOYS)
    he, his, kind = ("she", "her", "girl") if is_girl else ("he", "his", "boy")
    friend, place, thing = (often(random, words) for words in (FRIENDS, PLACES, THINGS))
    look = often(random, LOOKS)
    sentences = [
        f"Once upon a time, there was a little {kind} named {name}.",
        f"{he.title()} loved to {often(random, LIKES)} with {his} friend, the {friend}.",
        f"One day, {name} and the {friend} went to the {place}.",
    ]
    for _ in range(3):
        sentences += finding(random, name, friend, f"{look} {thing}")
        place, thing, look = (often(random, words) for words in (PLACES, THINGS, LOOKS))
        sentences.append(f"Then {he} walked to the {place} and saw a {look} {thing}.")
    sentences += [
        f"{name} was very {often(random, FEELINGS)}.",
        f"{he.title()} took the {thing} home and showed it to {his} mom.",
        f"The {friend} and {name} were friends for ever.",
    ]
    return " ".join(sentences)


def finding(random: Random, name: str, friend: str, thing: str) -> list[str]:
    """A part of a tale: something is found and talked about."""
    where = often(random, FINDS)
    said = often(random, ("Look", "Oh", "See", "Wow"))
    answer = often(random, ("Yes, it is nice", "It is too heavy", "No, it is mine", "I like it"))
    feeling = often(random, FEELINGS)
    both = f"The {friend} was {feeling} and {name} was {feeling}, too."
    return [
        f'They found a {thing} {where}.\n"{said}! A {thing}!" said {name}.',
        f'"{answer}," said the {friend}.\n{both}',
    ]
