"""Questions whose answer is JSON that a grammar holds: the model learns only the values.

The question need not mention JSON or the keys, because a schema in a request is not in the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from engine.offline.demo_training.material import MaterialDraws, material
from engine.offline.demo_training.number_topics import arithmetic
from engine.offline.demo_training.topics import calendar, capital, opposite, record_values, spelling

KEYS = {
    "name": "name name full_name person user first_name customer",
    "age": "age age years age_years",
    "city": "city city town location home place address",
    "job": "job profession occupation role work",
    "colour": "colour color favourite_colour favorite_color",
    "item": "item product object thing title name",
    "price": "price cost amount total value",
    "count": "count quantity number amount pieces",
    "country": "country country nation state",
    "answer": "answer answer result value output solution",
    "steps": "reasoning explanation steps thought why",
    "people": "people persons users names items list",
    "mood": "sentiment sentiment mood label class category",
    "adult": "adult is_adult of_age",
    "capital": "is_capital capital",
    "inhabitants": "inhabitants population size",
}
INSTRUCTIONS = ("", "", "", "Answer in JSON.", "You extract data as JSON.", "Reply with JSON only.")
BEFORE = (
    *("", "", ""),
    *("Extract the data: ", "Extract the person: ", "Fill in the form: ", "Read this: "),
    *("Describe as JSON: ", "Return JSON: ", "Get the details: ", "Extract the information: "),
)
MOODS = {
    "positive": "love like enjoy adore",
    "negative": "hate dislike fear",
    "neutral": "have see bought",
}


class Form(NamedTuple):
    """A question and the values of its JSON answer."""

    text: str
    values: dict[str, Any]


def key(rng: MaterialDraws, field: str) -> str:
    """Return one of the names of a field."""
    return rng.choice(KEYS[field].split())


def draw_form(rng: MaterialDraws) -> Form:
    """Return a question and its JSON answer, whose keys may come in any order."""
    draw = rng.weighted(FORMS)
    return draw(rng)


def shuffled(rng: MaterialDraws, values: dict[str, Any]) -> dict[str, Any]:
    names = list(values)
    if rng.chance(0.4):
        rng.shuffle(names)
    return {name: values[name] for name in names}


def fresh_values(rng: MaterialDraws) -> dict[str, str | int]:
    """Return the values of a record. Names are often coined, so that they must be copied."""
    values = record_values(rng)
    if rng.chance(0.4):
        values["name"] = rng.coined_name()
    if rng.chance(0.3):
        values["city"] = rng.coined_name()
    return values


def described(rng: MaterialDraws) -> Form:
    """Return a sentence about a person or a thing, and its record."""
    values = fresh_values(rng)
    record = rng.choice(material().records)
    text = rng.choice(record["texts"]).format(**values)
    fields: dict[str, Any] = {}
    for field in record["keys"]:
        fields[key(rng, field)] = values[field]
    if "age" in record["keys"] and rng.chance(0.25):
        fields[key(rng, "adult")] = int(values["age"]) >= 18
    if rng.chance(0.12):
        fields = {rng.choice(["data", "person", "record"]): fields}
    return Form(rng.choice(BEFORE) + text, shuffled(rng, fields))


def introduced(rng: MaterialDraws) -> Form:
    """Return a sentence with many facts. The record has some of them."""
    values = fresh_values(rng)
    form = rng.choice(INTRODUCTIONS)
    text = form.format(**values)
    names = [name for name in ("name", "age", "city", "job", "colour") if f"{{{name}}}" in form]
    rng.shuffle(names)
    count = rng.randint(2, len(names))
    fields = {key(rng, name): values[name] for name in names[:count]}
    return Form(rng.choice(BEFORE) + text, fields)


INTRODUCTIONS = (
    "{name} is {age} years old, lives in {city} and works as a {job}.",
    "{name}, {age}, is a {job} from {city}.",
    "My name is {name}. I am {age} and I live in {city}.",
    "{name} is a {job} in {city} and likes {colour}.",
    "Yesterday I met {name}, a {job} of {age} years.",
    "The {job} {name} lives in {city}.",
)


def ordered(rng: MaterialDraws) -> Form:
    """Return an order of some things, and its record."""
    values = fresh_values(rng)
    count = rng.randint(2, 99)
    item = values["item"]
    text = rng.choice(ORDERS).format(count=count, item=item, name=values["name"])
    count_key = key(rng, "count")
    item_key = rng.choice(["item", "product", "object", "thing", "article"])
    fields: dict[str, Any] = {item_key: item, count_key: count}
    if "name" in text or rng.chance(0.3):
        fields["customer"] = values["name"]
        text = f"{values['name']} says: {text}"
    return Form(rng.choice(BEFORE) + text, shuffled(rng, fields))


ORDERS = ("I want {count} pieces of {item}.", "Order {count} x {item}.", "{count} {item}, please.")


def grouped(rng: MaterialDraws) -> Form:
    """Return a sentence about several people, and a list of them."""
    people = []
    sentences = []
    for _ in range(rng.randint(2, 3)):
        name = rng.coined_name() if rng.chance(0.4) else rng.person()
        age = rng.randint(2, 95)
        people.append({"name": name, "age": age})
        sentences.append(f"{name} is {age}")
    text = rng.choice([", ", " and "]).join(sentences)
    listed: list[Any] = list(people)
    if rng.chance(0.4):
        listed = [person["name"] for person in people]
    return Form(f"{rng.choice(BEFORE)}{text}.", {key(rng, "people"): listed})


def place(rng: MaterialDraws) -> Form:
    """Return a question about a city or a country."""
    country, city = rng.pair("capitals")
    is_city = rng.chance(0.6)
    subject = city if is_city else country
    form = rng.choice(PLACE_ASKS)
    fields: dict[str, Any] = {}
    fields[rng.choice(["name", "city"] if is_city else ["name", "country"])] = subject
    if is_city:
        fields[key(rng, "country")] = country
    else:
        fields[rng.choice(["capital", "capital_city"])] = city
    if rng.chance(0.4):
        fields[key(rng, "inhabitants")] = 1_000_000
    return Form(form.format(subject), fields)


PLACE_ASKS = (
    "Describe {} as JSON.",
    "Describe {}.",
    "Tell me about {}.",
    "Give me facts about {}.",
    "What do you know about {}?",
    "{}",
)


def answered(rng: MaterialDraws) -> Form:
    """Return a question with a brief answer, sometimes after its reasoning."""
    while True:
        topic = rng.weighted(BRIEF_TOPICS)
        question = topic(rng)
        brief = question.brief or question.answer.rpartition(" = ")[2].rstrip(".")
        if len(brief) <= 20:
            break
    value: Any = brief
    if brief.isdigit() and rng.chance(0.8):
        value = int(brief)
    fields: dict[str, Any] = {}
    if rng.chance(0.3):
        fields[key(rng, "steps")] = question.answer
    name = key(rng, "answer")
    if topic is capital and brief in question.answer.split(" is ")[-1] and rng.chance(0.5):
        name = rng.choice(["capital", "city", "name"])
    fields[name] = value
    return Form(question.text, fields)


def decided(rng: MaterialDraws) -> Form:
    """Return a question that is answered with true or false."""
    country, city = rng.pair("capitals")
    is_true = rng.chance(0.5)
    other = city if is_true else rng.city()
    text = f"Is {other} the capital of {country}?"
    name = rng.choice([key(rng, "answer"), "correct", "is_true", key(rng, "capital")])
    return Form(text, {name: other == city})


def felt(rng: MaterialDraws) -> Form:
    """Return a sentence with a mood, and the name of the mood."""
    mood = rng.choice(list(MOODS))
    verb = rng.choice(MOODS[mood].split())
    text = f"I {verb} this {rng.word('items')}."
    if rng.chance(0.3):
        adjective = {"positive": "good", "negative": "bad", "neutral": rng.word("colours")}[mood]
        text = f"The {rng.word('items')} is {adjective}."
    opening = rng.choice(["", "", "Classify: ", "What is the sentiment? "])
    return Form(opening + text, {key(rng, "mood"): mood})


FORMS: dict[Callable[[MaterialDraws], Form], float] = {
    described: 22,
    introduced: 22,
    ordered: 8,
    grouped: 10,
    place: 12,
    answered: 18,
    decided: 3,
    felt: 5,
}
BRIEF_TOPICS = {
    capital: 3,
    arithmetic: 4,
    opposite: 1,
    calendar: 1,
    spelling: 1,
}
