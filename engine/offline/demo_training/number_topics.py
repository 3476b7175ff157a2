"""The demo model's topics about numbers: arithmetic, comparing and counting."""

from __future__ import annotations

from typing import NamedTuple

from engine.offline.demo_training.material import MaterialDraws, Question, words

# Ranges of the numbers in sums and differences, and their relative weights.
NUMBER_RANGES = {
    range(10, 100): 75,
    range(100): 20,
    range(13): 5,
}


class Step(NamedTuple):
    size: int
    phrase: str  # in the question


STEPS = (
    Step(1, ""),
    Step(1, ""),
    Step(2, " by twos"),
    Step(3, " by threes"),
    Step(5, " by fives"),
    Step(10, " by tens"),
)


def held_out(a: int, b: int) -> bool:
    """Whether training questions leave out a pair of numbers: about one in 23 two-digit pairs."""
    low, high = sorted((a, b))
    mixed = 31 * low + 17 * high
    return low >= 10 and mixed % 23 == 0


def number_pair(rng: MaterialDraws) -> tuple[int, int]:
    while True:
        numbers = rng.weighted(NUMBER_RANGES)
        a = rng.choice(numbers)
        b = rng.choice(numbers)
        if not held_out(a, b):
            return a, b


def arithmetic(rng: MaterialDraws) -> Question:
    a, b = number_pair(rng)
    kind = rng.random()
    if kind < 0.43:
        text = calculation(rng, a, "+", b, "plus")
        return Question(text, worked_sum(a, b))
    if kind >= 0.86:
        return multiplication(rng)
    if a < b and rng.chance(0.9):
        a, b = b, a
    text = calculation(rng, a, "-", b, "minus")
    return Question(text, worked_difference(a, b))


def multiplication(rng: MaterialDraws) -> Question:
    a = rng.randint(1, 10)
    b = rng.randint(1, 10)
    sign = rng.choice("*x")
    text = calculation(rng, a, sign, b, "times")
    product = str(a * b)
    answer = f"{a} {sign} {b} = {product}."
    return Question(text, answer, product)


def calculation(rng: MaterialDraws, a: int, sign: str, b: int, word: str) -> str:
    """Return the question for a result, with the sign or in words (`word`: plus, minus, times)."""
    if rng.chance(0.45):
        return rng.form(word, a, b)
    return rng.form("arithmetic", a, sign, b)


def worked_sum(a: int, b: int) -> str:
    """Return an addition digit by digit: "7 + 8 = 15, 3 + 4 + 1 = 8, so 37 + 48 = 85."."""
    result = f"{a} + {b} = {a + b}."
    if a < 10 and b < 10:
        return result
    tens, ones = divmod(a, 10)
    other_tens, other_ones = divmod(b, 10)
    ones_sum = ones + other_ones
    tens_sum = tens + other_tens
    carry = ""
    if ones_sum > 9:
        carry = " + 1"
        tens_sum += 1
    ones_step = f"{ones} + {other_ones} = {ones_sum}"
    tens_step = f"{tens} + {other_tens}{carry} = {tens_sum}"
    return f"{ones_step}, {tens_step}, so {result}"


def worked_difference(a: int, b: int) -> str:
    """Return a subtraction digit by digit: "17 - 8 = 9, 3 - 2 = 1, so 47 - 28 = 19."."""
    if a < b:
        return f"{a} - {b} is below zero, I do not know such numbers."
    result = f"{a} - {b} = {a - b}."
    if a < 10:
        return result
    tens, ones = divmod(a, 10)
    other_tens, other_ones = divmod(b, 10)
    if ones < other_ones:
        tens -= 1
        ones += 10
    ones_step = f"{ones} - {other_ones} = {ones - other_ones}"
    tens_step = f"{tens} - {other_tens} = {tens - other_tens}"
    return f"{ones_step}, {tens_step}, so {result}"


def compare(rng: MaterialDraws) -> Question:
    a, b = rng.sample(range(100), 2)
    smaller, larger = sorted((a, b))
    if rng.chance(0.5):
        adjective = rng.form("larger")
        return rng.question("compare", adjective, a, b, "larger", smaller, larger)
    adjective = rng.form("smaller")
    return rng.question("compare", adjective, a, b, "smaller", larger, smaller)


def counting(rng: MaterialDraws) -> Question:
    step = rng.choice(STEPS)
    length = rng.randint(4, 12)
    start = first_number(rng, step.size)
    end = start + step.size * length
    numbers = list(range(start, end, step.size))
    is_down = rng.chance(0.4)
    kind = "count down" if is_down else "count"
    if start == 1 and step.size == 1:
        kind += " from one"
    length_word = words("numbers")[length - 1]
    text = rng.form(kind, start, numbers[-1], step.phrase, length_word)
    if is_down:
        numbers.reverse()
    return Question(text, ", ".join(map(str, numbers)))


def first_number(rng: MaterialDraws, step: int) -> int:
    """Return the first number of a count: small, and a multiple of `step`."""
    if step > 1:
        return step * rng.randint(0, 5)
    number = rng.randint(0, 40)
    return rng.choice([1, number])
