"""The parts of the translated sentences: subjects, objects, places and times."""

from __future__ import annotations

from typing import NamedTuple

from engine.offline.demo_training.lexicon import (
    EN,
    ETT,
    PLURAL,
    LexiconDraws,
    Noun,
    Verb,
    adjectives,
    masses,
    nouns,
)

DEFINITE_ARTICLES = ("den", "det", "de")  # before an adjective
SUBJECT_FORMS = ("the", "the", "my", "the many", "my many")
OBJECT_FORMS = ("a", "a", "the", "the", "my", "many", "the many", "my many", "number")


class Words(NamedTuple):
    """A part of a sentence. As a subject it determines the forms of the verb and adjective."""

    english: str
    swedish: str
    person: str = "third"  # or "base", "plural"
    form: int = EN  # index of the adjective's form: EN, ETT, PLURAL
    light: bool = False  # a pronoun, which stands before adverbs


NO_WORDS = Words("", "")


def joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def swedish_noun(noun: Noun, *, is_plural: bool, is_definite: bool) -> str:
    if is_plural:
        return noun.plural_definite if is_definite else noun.plural
    return noun.definite if is_definite else noun.swedish


class SentenceParts:
    """Draws parts of a sentence and records the pairs of words in them."""

    def __init__(self, rng: LexiconDraws) -> None:
        self.rng = rng
        self.pairs: set[str] = set()  # of the current sentence: "love cake", "red house"

    def noun_phrase(self, noun: Noun, form: str, adjective_share: float = 0.3) -> Words:
        """Return a noun phrase. `form`: a, the, my, many, the many, my many, number."""
        determiner, _, number = form.partition(" ")
        is_plural = number == "many" or determiner in ("many", "number")
        gender = ETT if noun.article == "ett" else EN
        adjective_form = PLURAL if is_plural else gender
        english = noun.many if is_plural else noun.one
        swedish = swedish_noun(noun, is_plural=is_plural, is_definite=determiner == "the")
        person = "plural" if is_plural else "third"
        words = Words(english, swedish, person, adjective_form)
        if self.rng.chance(adjective_share):
            words = self.described(words, noun, determiner)
        return self.determined(words, noun, determiner)

    def described(self, words: Words, noun: Noun, determiner: str) -> Words:
        """Return a noun with an adjective and, if it is definite, with the article for both."""
        adjective = self.rng.choice(adjectives(noun.kinds))
        self.pairs.add(f"{adjective.english} {noun.one}")
        english = f"{adjective.english} {words.english}"
        swedish = f"{adjective.forms[words.form]} {words.swedish}"
        if determiner in ("the", "my") and words.form != PLURAL:
            swedish = f"{adjective.definite} {words.swedish}"
        if determiner == "the":
            article = DEFINITE_ARTICLES[words.form]
            swedish = f"{article} {swedish}"
        return words._replace(english=english, swedish=swedish)

    def determined(self, words: Words, noun: Noun, determiner: str) -> Words:
        """Return a noun and its adjective with an article, a possessive or a number."""
        english = ""
        swedish = ""
        match determiner:
            case "a":
                english = "an" if words.english[0] in "aeiou" else "a"
                swedish = noun.article
            case "the":
                english = "the"
            case "my":
                english, *possessives = self.rng.entry("possessives")
                swedish = possessives[words.form]
            case "number":
                english, swedish = self.rng.entry("numbers")
        english = joined(english, words.english)
        swedish = joined(swedish, words.swedish)
        return words._replace(english=english, swedish=swedish)

    def people(self) -> Words:
        """Return a subject: a name, a pronoun, two names or a noun phrase."""
        kind = self.rng.random()
        if kind < 0.45:
            return self.name()
        if kind < 0.7:
            return self.pronoun()
        if kind < 0.78:
            one = self.rng.name()
            other = self.rng.name()
            return Words(f"{one} and {other}", f"{one} och {other}", "plural", PLURAL)
        form = self.rng.choice(SUBJECT_FORMS)
        noun = self.rng.choice(nouns("alive"))
        return self.noun_phrase(noun, form, 0.2)

    def name(self) -> Words:
        name = self.rng.name()
        return Words(name, name)

    def pronoun(self) -> Words:
        english, swedish, person = self.rng.entry("pronouns")
        form = PLURAL if person == "plural" else EN
        return Words(english, swedish, person, form)

    def thing(self, verb: Verb) -> Words:
        """Return an object that fits the verb."""
        kind = self.rng.random()
        if verb.kind == "-" and kind < 0.06:
            return self.name()
        countable = nouns(verb.kind)
        prefers_mass = kind < 0.35 or not countable
        if prefers_mass and masses(verb.kind):
            return self.mass(verb)
        noun = self.rng.choice(countable)
        self.pairs.add(f"{verb.base} {noun.one}")
        form = self.rng.choice(OBJECT_FORMS)
        return self.noun_phrase(noun, form)

    def mass(self, verb: Verb) -> Words:
        """Return one or two nouns without a plural that fit the verb."""
        english, swedish, _ = self.rng.choice(masses(verb.kind))
        self.pairs.add(f"{verb.base} {english}")
        if not self.rng.chance(0.1):
            return Words(english, swedish)
        other = self.rng.choice(masses(verb.kind))
        self.pairs.add(f"{verb.base} {other.english}")
        return Words(f"{english} and {other.english}", f"{swedish} och {other.swedish}")

    def place(self) -> Words:
        english, swedish = self.rng.entry("prepositions")
        noun = self.rng.choice(nouns(english))
        phrase = self.noun_phrase(noun, "the", 0.1)
        return Words(f"{english} {phrase.english}", f"{swedish} {phrase.swedish}")

    def time(self, tense: str) -> Words:
        """Return a time that fits the tense, or most often none."""
        if tense in ("present", "past", "future") and self.rng.chance(0.2):
            english, swedish = self.rng.entry(tense)
            return Words(english, swedish)
        return NO_WORDS
