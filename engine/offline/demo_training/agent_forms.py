"""The sentences of agent_material.toml, with words drawn for their slots."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec

from engine.offline.demo_training.material import MaterialDraws, words
from engine.offline.demo_training.topics import copied


class AgentMaterial(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of agent_material.toml, whose comments explain each part."""

    words: dict[str, str]
    forms: dict[str, list[str]]


@cache
def agent_material() -> AgentMaterial:
    """Read agent_material.toml. Raises msgspec.ValidationError if a field is not known."""
    path = Path(__file__).with_name("agent_material.toml")
    return msgspec.toml.decode(path.read_bytes(), type=AgentMaterial)


@cache
def agent_words(kind: str) -> tuple[str, ...]:
    text = agent_material().words[kind]
    return tuple(text.split())


class Slots(dict[str, str]):
    """The words of one sentence. A slot is drawn at its first use, and then keeps its word."""

    def __init__(self, rng: MaterialDraws) -> None:
        super().__init__()
        self.rng = rng

    def __missing__(self, slot: str) -> str:
        drawn = SLOTS[slot.rstrip("2")](self.rng)
        self[slot] = drawn
        return drawn


def fill(rng: MaterialDraws, kind: str) -> str:
    """Return one of the sentences of a kind, with drawn words."""
    form = rng.choice(agent_material().forms[kind])
    return form.format_map(Slots(rng))


def draw_word(rng: MaterialDraws) -> str:
    """Return a word of prose, or rarely a coined one or letters of another script."""
    kind = rng.random()
    if kind < 0.8:
        return rng.choice(agent_words("prose"))
    if kind < 0.88:
        return rng.coined_word()
    if kind < 0.95:
        return rng.choice(copied())
    letters = rng.choices(agent_words("letters"), k=rng.randint(1, 4))
    return "".join(letters)


def draw_thing(rng: MaterialDraws) -> str:
    if rng.chance(0.5):
        return rng.coined_name()
    return rng.choice(copied())


def draw_place(rng: MaterialDraws) -> str:
    return rng.coined_name() if rng.chance(0.4) else rng.city()


def draw_sky(rng: MaterialDraws) -> str:
    sky = rng.choice(agent_words("skies"))
    if rng.chance(0.2):
        sky += f" and {rng.choice(agent_words('skies'))}"
    return sky.capitalize() if rng.chance(0.4) else sky


def draw_number(rng: MaterialDraws) -> str:
    number = rng.randint(0, 10 ** rng.randint(1, 4))
    return f"-{number}" if rng.chance(0.08) else str(number)


def draw_decimal(rng: MaterialDraws) -> str:
    return str(rng.randint(1, 9999) / rng.choice([10, 100]))


def draw_clock(rng: MaterialDraws) -> str:
    return f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"


def draw_code(rng: MaterialDraws) -> str:
    """Return an identifier, a file's name, a date or an address."""
    word = rng.coined_word()
    match rng.randrange(6):
        case 0:
            return f"{word}.{rng.choice(['py', 'txt', 'json', 'md', 'pdf', 'csv'])}"
        case 1:
            return f"https://{word}.{rng.choice(['com', 'org', 'io'])}/{rng.coined_word()}"
        case 2:
            return f"20{rng.randint(10, 39)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        case 3:
            return f"/{word}/{rng.choice(agent_words('prose'))}/{rng.coined_word()}"
        case 4:
            return f"{word[:3].upper()}-{rng.randint(1, 9999)}"
    return str(uuid.UUID(int=rng.getrandbits(128)))[: rng.choice([8, 13, 36])]


SLOTS: dict[str, Callable[[MaterialDraws], str]] = {
    "noun": lambda rng: rng.word("spelled"),
    "thing": draw_thing,
    "place": draw_place,
    "person": lambda rng: rng.person(),
    "day": lambda rng: rng.word("days"),
    "number": draw_number,
    "decimal": draw_decimal,
    "sky": draw_sky,
    "colour": lambda rng: rng.choice(words("colours")),
    "clock": draw_clock,
    "code": draw_code,
    "word": draw_word,
    "other": draw_word,
    "coined": lambda rng: rng.coined_name(),
}
