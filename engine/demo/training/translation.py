"""The training text of the translating demo: an endless, seeded stream of translated sentences.

A small grammar combines the words of translation.toml into English and Swedish. Some pairs of
words (a verb and its object, or an adjective and its noun) are held out. No training sentence
contains such a pair; every probe does.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple
from zlib import crc32

from engine.demo.training.lexicon import Noun, Verb, adjectives, entries, lexicon, nouns

FIRST_SEEN = {"love icecream", "love ice_cream"}  # always held out


class VerbGroup(NamedTuple):
    """The verb of a clause, in two parts per language: English, then Swedish."""

    auxiliary: str  # in questions and negations
    plain: str  # in statements; "" if they have the auxiliary too
    finite: str
    rest: str


class Words(NamedTuple):
    """A part of a sentence. As a subject it determines the forms of the verb and adjective."""

    english: str
    swedish: str
    person: str = "third"  # or "base", "plural"
    form: int = 0  # index of the adjective's form: en, ett, plural
    light: bool = False  # a pronoun, which stands before adverbs


def word(row: tuple[str, ...]) -> Words:
    return Words(row[0], row[1])


def held_out(pair: str) -> bool:
    """Whether a pair of words is held out of training: about one in twelve."""
    return pair in FIRST_SEEN or crc32(pair.encode()) % 12 == 0


def parted(verb: str) -> tuple[str, str]:
    """Split a verb such as vill_ha in two: adverbs and subjects stand between its parts."""
    finite, _, rest = verb.partition("_")
    return finite, rest


def finished(text: str, end: str) -> str:
    """Return the text with a capital letter, and with the mark `end` unless it has one."""
    text = text.replace("_", " ")
    return text[0].upper() + text[1:] + ("" if text[-1] in "?!." else end)


def joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


Pair = tuple[str, str]  # English and Swedish


class Sentence(NamedTuple):
    topic: str
    english: str
    swedish: str


class Grammar:
    """Draws sentences from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.pairs: set[str] = set()

    def sentence(self, *, probe: bool = False) -> Sentence:
        """Return the next training sentence or, as a probe, one with a pair that is held out."""
        while True:
            self.pairs = set()
            topic = self.rng.choices(list(TOPICS), [weight for weight, _ in TOPICS.values()])[0]
            english, swedish = TOPICS[topic][1](self)
            if any(map(held_out, self.pairs)) == probe:
                end = self.rng.choice(("", "", ".", ".", ".", "!"))
                return Sentence(topic, finished(english, end), finished(swedish, end))

    def rehearsal(self) -> Sentence:
        """Return names to repeat: the decoder's attention learns copying before anything else."""
        names = " ".join(self.name() for _ in range(self.rng.randint(2, 8)))
        return Sentence("rehearsal", names, names)

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def entry(self, kind: str) -> tuple[str, ...]:
        return self.rng.choice(entries(kind))

    def name(self) -> str:
        """Return a known name or, less often, an invented one, to be copied letter by letter."""
        if self.chance(0.75):
            return self.rng.choice(lexicon().names.split())
        syllables = (
            self.rng.choice("bdfghjklmnprstv") + self.rng.choice(("a", "e", "i", "o", "u", "y"))
            for _ in range(self.rng.randint(2, 3))
        )
        return ("".join(syllables) + self.rng.choice(("", "", "n", "r", "s"))).capitalize()

    # ---- parts of a sentence -----------------------------------------------------------------

    def noun_phrase(self, noun: Noun, form: str, adjective_share: float = 0.3) -> Words:
        """Return a noun phrase. `form`: a, the, my, many, the many, my many, number."""
        many = "many" in form or form == "number"
        gender = 2 if many else int(noun.article == "ett")
        english, swedish = (noun.many, noun.plural) if many else (noun.one, noun.swedish)
        if form.startswith("the"):
            swedish = noun.plural_definite if many else noun.definite
        described, determiner = "", ""
        if self.chance(adjective_share):
            adjective = self.rng.choice(adjectives(noun.kinds))
            self.pairs.add(f"{adjective.english} {noun.one}")
            english = f"{adjective.english} {english}"
            definite = form.startswith(("the", "my")) and not many
            described = adjective.definite if definite else adjective.forms[gender]
            if form.startswith("the"):
                determiner = ("den", "det", "de")[gender]
        match form.split()[0]:
            case "a":
                english = f"{'an' if english[0] in 'aeiou' else 'a'} {english}"
                determiner = noun.article
            case "the":
                english = f"the {english}"
            case "my":
                own, *forms = self.entry("possessives")
                english, determiner = f"{own} {english}", forms[gender]
            case "number":
                number, determiner = self.entry("numbers")
                english = f"{number} {english}"
        person = "plural" if many else "third"
        return Words(english, joined(determiner, described, swedish), person, gender)

    def people(self) -> Words:
        """Return a subject: a name, a pronoun, two names or a noun phrase."""
        draw = self.rng.random()
        if draw < 0.45:
            name = self.name()
            return Words(name, name)
        if draw < 0.7:
            english, swedish, person = self.entry("pronouns")
            return Words(english, swedish, person, 2 if person == "plural" else 0)
        if draw < 0.78:
            one, other = self.name(), self.name()
            return Words(f"{one} and {other}", f"{one} och {other}", "plural", 2)
        form = self.rng.choice(("the", "the", "my", "the many", "my many"))
        return self.noun_phrase(self.rng.choice(nouns("alive")), form, 0.2)

    def thing(self, verb: Verb) -> Words:
        """Return an object that fits the verb."""
        draw = self.rng.random()
        masses = [row for row in entries("masses") if verb.kind in ("-", "thing", *row[2:])]
        countable = nouns(verb.kind)
        if verb.kind == "-" and draw < 0.06:
            name = self.name()
            return Words(name, name)
        if masses and (draw < 0.35 or not countable):
            english, swedish = self.rng.choice(masses)[:2]
            self.pairs.add(f"{verb.base} {english}")
            if self.chance(0.1):
                other = self.rng.choice(masses)
                self.pairs.add(f"{verb.base} {other[0]}")
                return Words(f"{english} and {other[0]}", f"{swedish} och {other[1]}")
            return Words(english, swedish)
        noun = self.rng.choice(countable)
        self.pairs.add(f"{verb.base} {noun.one}")
        form = ("a", "a", "the", "the", "my", "many", "the many", "my many", "number")
        return self.noun_phrase(noun, self.rng.choice(form))

    def place(self) -> Words:
        english, swedish = self.entry("prepositions")
        where = self.noun_phrase(self.rng.choice(nouns(english)), "the", 0.1)
        return Words(f"{english} {where.english}", f"{swedish} {where.swedish}")

    def time(self, tense: str) -> Words:
        if tense in ("present", "past", "future") and self.chance(0.2):
            return word(self.entry(tense))
        return Words("", "")

    # ---- sentences ---------------------------------------------------------------------------

    def verb_group(self, who: Words, verb: Verb, kind: str) -> tuple[str, VerbGroup]:
        """Return (tense, verb group). A verb such as vill_ha has a present and a past only."""
        tense = self.rng.choices(("present", "past", "future", "modal"), (5, 2, 1.5, 1.5))[0]
        third = who.person == "third"
        if tense == "past":
            return tense, VerbGroup("did", verb.past, *parted(verb.swedish_past))
        if tense == "present" or "_" in verb.infinitive:
            plain = verb.third if third else verb.base
            group = VerbGroup("does" if third else "do", plain, *parted(verb.swedish_present))
            return "present", group
        if tense == "future":
            return tense, VerbGroup("will", "", "ska", verb.infinitive)
        english, swedish = self.entry("modals") if kind == "statement" else ("can", "kan")
        if not third:
            english = english.replace("wants", "want")
        return tense, VerbGroup(english, "", swedish, verb.infinitive)

    def clause(self, who: Words, verb: Verb, what: Words) -> Pair:
        """Return a statement, its negation or a question."""
        kind = self.kind()
        tense, group = self.verb_group(who, verb, kind)
        when = self.time(tense)
        if kind == "question":
            return (
                joined(group.auxiliary, who.english, verb.base, what.english, when.english) + "?",
                joined(group.finite, who.swedish, group.rest, what.swedish, when.swedish) + "?",
            )
        if kind == "negation":
            verbs, adverb = f"{self.negated(group.auxiliary)} {verb.base}", "inte"
        else:
            often, adverb = "", ""
            if tense != "modal" and self.chance(0.12):
                often, adverb = self.entry("often")
            verbs = joined(often, group.plain) if group.plain else ""
            verbs = verbs or joined(group.auxiliary, often, verb.base)
        after = [adverb, group.rest, what.swedish]
        if what.light and not group.rest:
            after = [what.swedish, adverb]
        return (
            joined(who.english, verbs, what.english, when.english),
            joined(who.swedish, group.finite, *after, when.swedish),
        )

    def negated(self, auxiliary: str) -> str:
        if self.chance(0.4):
            return {"will": "won't", "can": "can't"}.get(auxiliary, f"{auxiliary}n't")
        return f"{auxiliary} not"

    def kind(self) -> str:
        return self.rng.choices(("statement", "negation", "question"), (6, 2, 2))[0]

    def doing(self) -> Pair:
        """Return a sentence with a verb and its object, which may be a pronoun."""
        verb = Verb(*self.entry("verbs"))
        who = self.people()
        if verb.kind == "-" and self.chance(0.1):
            pronouns = [row for row in entries("objects") if row[2] != who.english]
            return self.clause(who, verb, word(self.rng.choice(pronouns))._replace(light=True))
        return self.clause(who, verb, self.thing(verb))

    def staying(self) -> Pair:
        """Return a sentence in which a person lives or works in a place."""
        row, (place, swedish) = self.entry("stays"), self.entry("places")
        where = Words(f"{row[6]} {place}", f"{row[7]} {swedish}")
        return self.clause(self.people(), Verb(*(*row[:6], "-")), where)

    def being(self) -> Pair:
        """Return a sentence about the quality, the place or the job of a person or thing."""
        noun, who = self.rng.choice(nouns()), self.people()
        kinds, draw, thing = frozenset(("alive",)), self.rng.random(), self.chance(0.5)
        if thing:
            form = self.rng.choice(("the", "the", "my", "the many", "my many"))
            who, kinds = self.noun_phrase(noun, form, 0.1), noun.kinds
        if draw < 0.6:
            adjective = self.rng.choice([a for a in adjectives(kinds) if thing or a.kind != "-"])
            if thing:
                self.pairs.add(f"{adjective.english} {noun.one}")
            return self.be(who, Words(adjective.english, adjective.forms[who.form]))
        if draw < 0.85 or thing:
            return self.be(who, self.place())
        job = self.rng.choice(nouns("job"))
        if who.form == 2:
            return self.be(who, Words(job.many, job.plural))
        return self.be(who, Words(f"a {job.one}", job.swedish))

    def be(self, who: Words, what: Words) -> Pair:
        tense, kind = "past" if self.chance(0.2) else "present", self.kind()
        first = who.english == "I"
        one, more = ("was", "were") if tense == "past" else ("is", "are")
        verb = one if who.person == "third" or (first and tense == "past") else more
        verb = "am" if first and tense == "present" else verb
        finite, when = "var" if tense == "past" else "är", self.time(tense)
        if kind == "question":
            english = joined(verb, who.english, what.english, when.english)
            return english + "?", joined(finite, who.swedish, what.swedish, when.swedish) + "?"
        no = ""
        if kind == "negation":
            no = "inte"
            verb = f"{verb}n't" if self.chance(0.4) and verb != "am" else f"{verb} not"
        return (
            joined(who.english, verb, what.english, when.english),
            joined(who.swedish, finite, no, what.swedish, when.swedish),
        )

    def there(self) -> Pair:
        form = self.rng.choice(("a", "a", "number"))
        what, where = self.noun_phrase(self.rng.choice(nouns()), form), self.place()
        verb = "are" if what.person == "plural" else "is"
        if self.chance(0.2):
            english = joined(verb, "there", what.english, where.english)
            return english + "?", joined("finns det", what.swedish, where.swedish) + "?"
        return (
            joined("there", verb, what.english, where.english),
            joined("det finns", what.swedish, where.swedish),
        )

    def phrase(self) -> Pair:
        english, swedish = self.rng.choice(list(lexicon().phrases.items()))
        name, (place, swedish_place) = self.name(), self.entry("places")
        return english.format(name, place=place), swedish.format(name, place=swedish_place)


TOPICS: dict[str, tuple[int, Callable[[Grammar], Pair]]] = {
    "doing": (60, Grammar.doing),
    "being": (22, Grammar.being),
    "staying": (7, Grammar.staying),
    "there": (6, Grammar.there),
    "phrase": (5, Grammar.phrase),
}


def probes(count: int = 200) -> list[dict[str, Any]]:
    """Return the content of translate/probes.jsonl."""
    grammar = Grammar(17)
    drawn = [Sentence("doing", "Dan loves icecream", "Dan älskar glass")]
    drawn += [grammar.sentence(probe=True) for _ in range(count - 1)]
    return [
        {
            "topic": topic,
            "messages": [{"role": "user", "content": english}],
            "expect": [swedish],
            "match": "identical",
        }
        for topic, english, swedish in drawn
    ]
