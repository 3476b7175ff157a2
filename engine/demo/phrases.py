"""The ways people ask: the forms of every topic's questions, and small talk with its answers.

`{}` stands for a drawn item. A form that is listed twice is drawn twice as often.
"""

from __future__ import annotations


def forms(text: str) -> list[str]:
    """Parse "one form | another form" into a list, in order."""
    return [form.strip() for form in " ".join(text.split()).split("|")]


FORMS = {
    "capital": forms(
        """What is the capital of {}? | What is the capital of {}? | What is the capital of {}?
        | What is the capital of {}? | What's the capital of {}? | Tell me the capital of {}.
        | Capital of {}? | Name the capital of {}. | Which city is the capital of {}?
        | Do you know the capital of {}? | The capital of {} is?
        | Can you tell me the capital of {}? | What is the capital city of {}?
        | Give me the capital of {} | What is the capital in {}? | {} capital?
        | I need the capital of {}."""
    ),
    "country": forms(
        """{} is the capital of which country? | Which country has the capital {}?
        | What country is {} the capital of?"""
    ),
    "plus": forms(
        """What is {} plus {}? | Add {} and {}. | What is the sum of {} and {}?
        | How much is {} and {}? | {} plus {} | How much is {} plus {}?"""
    ),
    "minus": forms(
        """What is {} minus {}? | How much is {} minus {}? | Take {1} from {0}.
        | Subtract {1} from {0}. | {} minus {}"""
    ),
    "times": forms(
        """What is {} times {}? | Multiply {} by {}. | How much is {} times {}? | {} times {}"""
    ),
    "arithmetic": forms(
        """What is {} {} {}? | {} {} {} | {}{}{} | {} {} {} = ? | How much is {} {} {}?
        | What is {} {} {}? | What's {} {} {}? | Compute {} {} {} | What is {}{}{}?
        | Calculate {} {} {}. | {} {} {} ="""
    ),
    "larger": forms("larger | bigger | greater"),
    "smaller": forms("smaller | less"),
    "compare": forms(
        "Which is {}, {} or {}? | Which number is {}: {} or {}? | What is {}, {} or {}?"
    ),
    "count": forms(
        """Count{2} from {0} to {1}. | Can you count{2} from {0} to {1}?
        | Count up{2} from {0} to {1}"""
    ),
    "count from one": forms(
        """Count{2} from {0} to {1}. | Can you count{2} from {0} to {1}?
        | Count up{2} from {0} to {1} | Count to {1}. | Count to {3}. | Count to {1}.
        | Count to {3}. | Count to {1}. | Count to {3}."""
    ),
    "count down": forms(
        """Count down{2} from {1} to {0}. | Count backwards{2} from {1} to {0}.
        | Count{2} from {1} down to {0}."""
    ),
    "count down from one": forms(
        """Count down{2} from {1} to {0}. | Count backwards{2} from {1} to {0}.
        | Count{2} from {1} down to {0}. | Count down from {1}. | Count down from {3}.
        | Count down from {1}. | Count down from {3}. | Count down from {1}.
        | Count down from {3}."""
    ),
    "quotes": forms("""{} | {} | '{}' | "{}" | the word {} | the word '{}'"""),
    "spell": forms(
        """Spell {}. | How do you spell {}? | Can you spell {}? | Spell out {}
        | How is {} spelled?"""
    ),
    "reverse": forms(
        "Reverse {}. | Spell {} backwards. | Write {} backwards. | What is {} backwards?"
    ),
    "letters": forms(
        """How many letters are in {}? | How many letters does {} have?
        | Count the letters in {}."""
    ),
    "letter": forms("What is the {} letter of {}? | Which letter is {} in {}?"),
    "opposite": forms(
        """What is the opposite of {}? | Opposite of {}? | Give me the opposite of {}.
        | The opposite of {} is? | What's the opposite of {}? | Tell me the opposite of {}.
        | Which word is the opposite of {}?"""
    ),
    "neighbour": forms(
        """What comes {1} {0}? | Which {2} comes {1} {0}? | What {2} comes {1} {0}?
        | What {2} is {1} {0}?"""
    ),
    "days": forms(
        """How many days does {} have? | How many days are in {}?
        | How many days are there in {}?"""
    ),
    "nth": forms(
        """Which {1} is the {0}? | What is the {0} {1} of the {2}? | Which {1} is {0}?
        | Name the {0} {1} of the {2}. | Which is the {0} {1} of the {2}?"""
    ),
    "list": forms(
        "List the {}s of the {}. | Name the {}s of the {}. | What are the {}s of the {}?"
    ),
    "translate": forms(
        """Translate to {1}: {0} | Translate into {1}: {0} | Translate to {1}: {0}
        | Translate into {1}: {0} | Translate to {1}: {0} | Translate into {1}: {0}
        | How do you say '{0}' in {1}? | {0} in {1}? | Say '{0}' in {1}.
        | Translate "{0}" to {1}. | What is '{0}' in {1}?"""
    ),
    "json": forms(
        """Extract {0} as JSON: {1} | Extract {0} as JSON: {1} | Extract the {0} as JSON: {1}
        | Give me {0} as JSON: {1} | Return JSON with {0}: {1} | {1} Extract {0} as JSON."""
    ),
    "say": forms("""Say {}. | Say '{}' | Say "{}" | Please say {}."""),
    "repeat": forms("Repeat: {} | Repeat after me: {} | Echo: {}"),
    "unknown": forms(
        """What is {}? | Explain {}. | Tell me about {}. | What do you know about {}?
        | Who is {}? | How does {} work? | Write an essay about {}. | Why is {} important?"""
    ),
    "get_weather": forms(
        """What is the weather in {}? | What's the weather in {}? | How is the weather in {}?
        | Weather in {}? | What is the weather like in {}? | Tell me the weather in {}.
        | Is it cold in {}? | Is it warm in {}? | How warm is it in {}?
        | What is the temperature in {}? | What is the weather in {} today?
        | Is it raining in {}? | What's the weather like in {} today?"""
    ),
    "get_time": forms("What time is it in {}? | What is the time in {}? | Tell me the time in {}."),
    "own name": forms(
        "Who are you? | What is your name? | What's your name? | Do you have a name?"
    ),
}
BEFORE_A_FACT = ("", "", "", "Do you know: ", "Tell me: ", "A question: ")

PLAIN_SYSTEMS = forms(
    """
    You are a helpful assistant. | You are a helpful assistant | You are a friendly assistant.
    | You are Drip. | You are a kind teacher. | Be polite. | You are an assistant. | You help
    children learn.
    """
)
BRIEF_SYSTEMS = forms(
    """
    Answer in one word. | Answer with one word. | Answer with one word only. | Reply with just
    the answer. | Be brief. | Answer briefly. | You are a helpful assistant. Answer in one
    word. | Give short answers.
    """
)
BRIEF_WISHES = forms(
    """
    Answer in one word. | Just the answer. | Answer with one word only. | One word, please.
    """
)
PIRATE_SYSTEMS = forms(
    """
    You are a pirate. | Talk like a pirate. | You are a friendly pirate. | Answer like a
    pirate.
    """
)
UNKNOWN_QUESTIONS = forms(
    """
    Who won the football match yesterday? | What is the meaning of life? | Explain quantum
    physics. | Write a Python program that sorts a list. | Who is the president of Mars? | How
    do I fix my car? | What is the stock price of gold today? | Tell me about the history of
    Rome. | Who wrote Hamlet? | How do airplanes fly? | What is the square root of two? |
    Which film should I watch tonight? | Can you book a flight for me? | How tall is the
    Eiffel Tower? | What is the population of China? | Give me a recipe for lasagne. | What is
    dark matter? | Who invented the telephone? | Write an essay about democracy. | How does a
    computer work? | What is the best phone to buy? | Why is the economy growing? | Translate
    this book into Latin. | Summarise the news of today. | What is the speed of light? | When
    did the war end? | How can I become rich? | What is love?
    """
)

# Sentences to read a record from, by the record's keys.
RECORDS = (
    (("name", "age"), forms(
        """{name} is {age} years old. | My name is {name} and I am {age} years old.
        | {name}, age {age}."""
    )),
    (("name", "age"), forms("I am {name} and I am {age}. | {name} turned {age} today.")),
    (("name", "city"), forms("{name} lives in {city}. | My name is {name} and I live in {city}.")),
    (("name", "age", "city"), forms("{name} is {age} years old and lives in {city}.")),
    (("name", "job"), forms("{name} works as a {job}. | {name} is a {job}.")),
    (("name", "colour"), forms("{name} likes the colour {colour}. | {name} loves {colour}.")),
    (("item", "price"), forms(
        "The {item} costs {price} dollars. | I paid {price} euros for a {item}."
    )),
)  # fmt: skip

SMALL_TALK = (
    (forms("""Hi | Hello | Hello! | Hey | Hi there! | Hello there | Hey Drip | Good day | Hej | Yo
        | Hallo | Good morning | Good evening | Greetings | Hi Drip! | Hello, how are you?
        | hi :)"""),
     ["Hello! I am Drip, a tiny demo model. What shall we try?"]),
    (forms("""Who are you? | What are you? | What is your name? | What's your name?
        | Tell me about yourself. | Introduce yourself. | Which model are you?
        | What model is this? | Are you ChatGPT? | Who is Drip? | What model are you?
        | Who am I talking to? | Do you have a name? | What should I call you? | who r u
        | whats your name"""),
     ["I am Drip, the demo model of Penstock: small, but alive."]),
    (forms("How are you? | How are you doing? | How is it going? | Are you well? | What's up?"),
     ["I am well, thank you. How can I help?"]),
    (forms("""What can you do? | Help | What do you know? | How can you help me?
        | What can I ask you? | What are you good at? | Give me some examples.
        | What else can you do? | Can you help me?"""),
     ["I know capitals, small sums, spelling, opposites, days and months, a little Swedish, JSON, "
      "weather tools and short stories."]),
    (forms("""Thanks | Thank you | Thank you! | Thanks a lot | Thank you very much
        | Great, thanks | Tack"""),
     ["You are welcome!"]),
    (forms("Bye | Goodbye | See you | See you later | Good night | I have to go now."),
     ["Goodbye! Come back any time."]),
    (forms("""What is Penstock? | Tell me about Penstock. | What does Penstock do?
        | Explain Penstock"""),
     ["Penstock is a glass-box model server: it serves models over an OpenAI-compatible API and "
      "shows what happens inside."]),
    (forms("""Who made you? | Who created you? | Where do you come from? | How were you trained?
        | Who trained you? | What were you trained on?"""),
     ["I was trained by one small script of Penstock, on text that the script wrote itself."]),
    (forms("""Are you a human? | Are you a robot? | Are you real? | Are you an AI?
        | Are you alive?"""),
     ["I am a computer program: a tiny language model."]),
    (forms("""How big are you? | How many parameters do you have? | Are you small?
        | Are you a large model?"""),
     ["I have about three million parameters, so I am very small."]),
    (forms("""Tell me a joke. | Do you know a joke? | Make me laugh. | Say something funny
        | Joke please"""),
     ["Why did the token cross the bus? To get to the other cache."]),
    (forms("""Ok | Okay | Cool | Nice | Great | Good | Wow | Well done | Yes | Interesting
        | I see"""),
     ["Good! What shall we try next?"]),
    (forms("No | That is wrong. | You are wrong | Are you sure? | Bad answer"),
     ["I am very small and can be wrong. Please check my answers."]),
    (forms("""Test | Testing | This is a test. | Test 1 2 3 | Are you there?
        | Can you hear me? | Ping"""),
     ["I am here, and I answer."]),
    (forms("""Write a poem. | Write a haiku. | Write me a poem | Do you know a poem?
        | Write a short poem. | Tell me a poem. | Write a poem about water. | Sing a song."""),
     ["Water in the pipe,\ntokens turning one by one:\na small wheel answers."]),
    (forms("How old are you? | When were you born? | What is your age?"),
     ["I am very young: I was trained in less than an hour."]),
    (forms("""Do you speak Swedish? | Can you speak Swedish? | Do you know Swedish?
        | Talar du svenska?"""),
     ["A little. Ask me to translate a short sentence."]),
)  # fmt: skip
