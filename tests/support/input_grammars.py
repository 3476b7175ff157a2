"""Random grammars of custom tools, and independent checks of the inputs that they allow."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

TEXTS = ("abc", "*** Begin", "\\n", '\\"', "\\\\", "</p>", "é", "{", "}]", "'", ": ", "<|x|>")
CLASSES = (r"[a-z]", r"\d", r"[^a-y]", r".", r"[\"'\\\\]", r"[\n\t ]", r"[<>\/]", r"(?:ab|c)")


class InputGrammar(NamedTuple):
    syntax: str
    definition: str


def random_regex(rng: random.Random) -> str:
    """Return an expression that Python's `re` reads as Rust's crate does, without long texts."""

    def part(depth: int) -> str:
        kind = rng.randrange(5 if depth else 3)
        if kind == 3:
            return f"(?:{part(depth - 1)}|{part(depth - 1)})"
        if kind == 4:
            return f"(?:{part(depth - 1)}{part(depth - 1)})?"
        if kind == 0:
            return re.escape(rng.choice(('a"b', "\\n", "/x", "{}", "é'", "-> ", "\n")))
        atom = rng.choice(CLASSES)
        return atom + rng.choice(("", "?", "{1,3}", "{2}"))

    return "".join(part(2) for _ in range(rng.randint(1, 4)))


def random_lark(rng: random.Random) -> str:
    """Return a grammar that both the `lark` package and llguidance read."""
    terminals = [f"T{index}" for index in range(rng.randint(1, 4))]
    rules = [f"r{index}" for index in range(rng.randint(1, 3))]
    lines = [f"start: {_sequence(rng, [*rules, *terminals])}"]
    for place, rule in enumerate(rules):  # without recursion, so that answers end
        inner = [*rules[place + 1 :], *terminals]
        options = [_sequence(rng, inner) for _ in range(rng.randint(1, 3))]
        lines.append(f"{rule}: {' | '.join(options)}")
    for terminal in terminals:
        lines.append(f"{terminal}: {_terminal(rng)}")
    if rng.random() < 0.2:
        lines.append("%import common.LF\nlast: LF")
    return "\n".join(lines) + rng.choice(("", "\n", "\n// end\n"))


def _sequence(rng: random.Random, names: list[str]) -> str:
    parts = []
    for _ in range(rng.randint(1, 3)):
        atom = rng.choice([*names, f'"{rng.choice(TEXTS)}"'])
        repeat = rng.choice(("", "", "?", "~1..3", "~2"))
        parts.append(f"{atom}{repeat}" if repeat != "?" else f"[{atom}]")
    return " ".join(parts)


def _terminal(rng: random.Random) -> str:
    if rng.random() < 0.4:
        return f'"{rng.choice(TEXTS)}"{rng.choice(("", "", "i"))}'
    return f"/{rng.choice(CLASSES)}{rng.choice(('', '{1,4}', '{2}'))}/"


def random_grammar(seed: int) -> InputGrammar:
    rng = random.Random(seed)
    if seed % 2:
        return InputGrammar("regex", random_regex(rng))
    return InputGrammar("lark", random_lark(rng))


def matches(grammar: InputGrammar, text: str) -> bool | None:
    """Return whether a text matches, by `re` or by the `lark` package, which must be there.

    None: `lark` does not read the grammar, because two of its expansions are the same.
    """
    if grammar.syntax == "regex":
        return re.fullmatch(grammar.definition, text) is not None
    import lark

    try:
        parser = lark.Lark(grammar.definition, parser="earley", lexer="dynamic_complete")
        parser.parse(text)
    except lark.exceptions.GrammarError:
        return None
    except lark.exceptions.UnexpectedInput:
        return False
    return True
