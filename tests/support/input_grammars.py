"""Random grammars of custom tools, and independent checks of the inputs that they allow."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

import regex

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
    if rng.random() < 0.3:
        lines.append(f'nested: "(" nested ")" | {rng.choice(terminals)}')
        lines[0] += " nested"
    if rng.random() < 0.3:
        lines.append(f"T9: {terminals[0]} | {terminals[-1]} /x/")
        lines[0] += " T9"
    if rng.random() < 0.3:
        lines.append("%import common.INT\nlast: INT")
        lines[0] += " last"
    if rng.random() < 0.3:
        lines.append(
            rng.choice(('%ignore " "', "%ignore /[ \\t]/", "%import common.WS\n%ignore WS"))
        )
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
    """Return whether a text matches, by `regex` or by the `lark` package, which must be there.

    Python's own `re` knows fewer digits than llguidance, which has a newer Unicode.

    None: `lark` does not read the grammar, because two of its expansions are the same, or fails.
    """
    if grammar.syntax == "regex":
        return regex.fullmatch(grammar.definition, text) is not None
    import lark

    try:
        parser = lark.Lark(
            grammar.definition, parser="earley", lexer="dynamic_complete", regex=True
        )
        parser.parse(text)
    except (lark.exceptions.GrammarError, RuntimeError):
        return None
    except lark.exceptions.UnexpectedInput:
        return False
    return True
