"""What the demo model is taught: plain word lists, and nothing else.

Every other file of the demo reads its items from here; a fact is stated once.
"""

from __future__ import annotations


def words(text: str) -> list[str]:
    return text.split()


def table(text: str) -> dict[str, str]:
    """Parse "key=value, key=value" into a dict, in order."""
    return dict(pair.strip().split("=") for pair in " ".join(text.split()).split(","))


CAPITALS = table(
    """
    France=Paris, Germany=Berlin, Spain=Madrid, Italy=Rome, Portugal=Lisbon, Sweden=Stockholm,
    Norway=Oslo, Denmark=Copenhagen, Finland=Helsinki, Iceland=Reykjavik, Ireland=Dublin,
    England=London, Scotland=Edinburgh, Wales=Cardiff, Belgium=Brussels, Austria=Vienna,
    Switzerland=Bern, Poland=Warsaw, Hungary=Budapest, Greece=Athens, Turkey=Ankara,
    Russia=Moscow, Ukraine=Kyiv, Romania=Bucharest, Bulgaria=Sofia, Serbia=Belgrade,
    Croatia=Zagreb, Estonia=Tallinn, Latvia=Riga, Lithuania=Vilnius, Slovakia=Bratislava,
    Slovenia=Ljubljana, Egypt=Cairo, Morocco=Rabat, Kenya=Nairobi, Ethiopia=Addis Ababa,
    Ghana=Accra, Nigeria=Abuja, Senegal=Dakar, Tunisia=Tunis, Algeria=Algiers, Japan=Tokyo,
    China=Beijing, India=New Delhi, Thailand=Bangkok, Vietnam=Hanoi, Indonesia=Jakarta,
    Nepal=Kathmandu, Iran=Tehran, Iraq=Baghdad, Jordan=Amman, Lebanon=Beirut, Qatar=Doha,
    Canada=Ottawa, Mexico=Mexico City, Cuba=Havana, Brazil=Brasilia, Argentina=Buenos Aires,
    Chile=Santiago, Peru=Lima, Colombia=Bogota, Ecuador=Quito, Uruguay=Montevideo,
    Venezuela=Caracas, Australia=Canberra, the United States=Washington, the
    Netherlands=Amsterdam, the Philippines=Manila, South Korea=Seoul, New Zealand=Wellington
    """
)

# Other names people use; the way back, from city to country, says the name above.
CAPITAL_ALIASES = {"the USA": "Washington", "the UK": "London", "USA": "Washington", "UK": "London"}

OPPOSITES = table(
    """
    hot=cold, big=small, up=down, left=right, day=night, black=white, open=closed, fast=slow,
    high=low, hard=soft, wet=dry, old=young, rich=poor, strong=weak, happy=sad, light=dark,
    long=short, full=empty, clean=dirty, early=late, first=last, near=far, thick=thin,
    wide=narrow, deep=shallow, loud=quiet, sweet=sour, true=false, yes=no, win=lose, buy=sell,
    push=pull, start=stop, love=hate, inside=outside, above=below, before=after, always=never,
    easy=difficult, cheap=expensive, good=bad, tall=short, sharp=blunt, asleep=awake
    """
)

# Pairs that are no opposites when read backwards: "short" is the opposite of "long" here.
ONE_WAY = {"tall"}

SMALL_FACTS = {
    "What colour is the sky?": "The sky is blue.",
    "What colour is grass?": "Grass is green.",
    "What colour is snow?": "Snow is white.",
    "What colour is a banana?": "A banana is yellow.",
    "How many legs does a spider have?": "A spider has eight legs.",
    "How many legs does a dog have?": "A dog has four legs.",
    "How many legs does an ant have?": "An ant has six legs.",
    "How many days are there in a week?": "There are seven days in a week.",
    "How many months are there in a year?": "There are twelve months in a year.",
    "How many minutes are there in an hour?": "There are sixty minutes in an hour.",
    "How many seconds are there in a minute?": "There are sixty seconds in a minute.",
    "How many hours are there in a day?": "There are twenty-four hours in a day.",
    "What do bees make?": "Bees make honey.",
    "What do cows give us?": "Cows give us milk.",
    "What does a cat say?": "A cat says meow.",
    "What does a dog say?": "A dog says woof.",
    "What is frozen water called?": "Frozen water is called ice.",
    "Which planet do we live on?": "We live on the planet Earth.",
    "What is the largest ocean?": "The largest ocean is the Pacific Ocean.",
    "What is the tallest mountain?": "The tallest mountain is Mount Everest.",
}

DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = words(
    "January February March April May June July August September October November December"
)
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
ORDINALS = words(
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth"
)

NUMBER_WORDS = words("one two three four five six seven eight nine ten eleven twelve")

WORDS = words("""
    apple arm art baby bag ball band bank bed bell bird boat body bone book bottle box boy bread
    bridge brother brown bus cake car card cat chair chicken child church circle city clock
    cloud coat coffee cold corner cow cup dance desk dinner dog door dream dress duck ear earth
    egg engine evening eye face farm father field finger fire fish floor flower food foot forest
    fox friend frog fruit game garden girl glass gold grass green hair hand happy hat head heart
    hill home honey horse house ice iron island jump key king kitchen knife lake lamp leaf leg
    letter light lion map market milk mirror money moon morning mother mountain mouse mouth
    music name neck nest night nose ocean orange paper park pen pencil people piano picture pig
    pipe plant plate pocket pond potato queen rabbit rain red ring river road rock roof room
    rose salt sand school sea seed ship shirt shoe silver sister sky sleep snow song soup spoon
    spring star stone storm street sugar summer sun sweater table tea tiger time tower town
    train tree turbine valley village wall watch water wave wheel white wind window winter wolf
    wood word world yellow penstock
    """)

NAMES = words("""
    Anna Ben Carl Clara David Eva Emma Erik Felix Grace Hugo Ida Jack Julia Karin Leo Lisa Lucas
    Maja Maria Max Mia Nils Nora Olle Oscar Peter Rosa Sam Sara Sofia Tom Vera Victor Alice Bob
    John Mary Omar Priya Wei Yuki Fatima Ali Ines Pedro Lars Astrid Elsa Kim
    """)
COLOURS = words("red blue green yellow black white orange purple pink brown")
FOODS = words("pizza soup rice pasta bread cake apples fish pancakes salad cheese curry")
PETS = words("dog cat rabbit horse parrot hamster turtle goldfish")
JOBS = words("teacher doctor baker pilot farmer painter nurse driver")
ITEMS = words("book lamp chair jacket phone bicycle table cup hat clock")
WEATHER = words("sunny cloudy rainy windy snowy foggy clear")

HEROES = words(
    "cat dog fox bear mouse rabbit owl frog duck robot dragon turtle girl boy king fisherman"
)
PLACES = words("river forest mountain village garden lake tower bridge island farm")
TREASURES = words("key lamp map bell stone book flower boat star drum")
TRAITS = words("brave little curious kind old clever quiet cheerful")

# English noun = "en" or "ett", and the Swedish noun.
SWEDISH_NOUNS = table(
    """
    car=en bil, dog=en hund, cat=en katt, book=en bok, house=ett hus, table=ett bord, boat=en
    båt, horse=en häst, letter=ett brev, lamp=en lampa, tree=ett träd, fish=en fisk
    """
)
# English adjective = the Swedish one beside "en" and beside "ett".
SWEDISH_ADJECTIVES = table(
    """
    red=röd rött, big=stor stort, small=liten litet, new=ny nytt, white=vit vitt, black=svart
    svart, green=grön grönt, blue=blå blått, beautiful=vacker vackert
    """
)
SWEDISH_SUBJECTS = table("I=Jag, You=Du, We=Vi, She=Hon, He=Han, They=De")
SWEDISH_VERBS = table("have/has=har, see/sees=ser, buy/buys=köper, want/wants=vill ha")
SWEDISH_PHRASES = table(
    """
    Hello=Hej, Good morning=God morgon, Good night=God natt, Thank you very much=Tack så mycket,
    How are you?=Hur mår du?, My name is Anna=Jag heter Anna, I am hungry=Jag är hungrig, I am
    tired=Jag är trött, Welcome=Välkommen, Goodbye=Hej då, I love you=Jag älskar dig, Where is
    the station?=Var ligger stationen?, Yes=Ja, No=Nej, I do not understand=Jag förstår inte, It
    is cold today=Det är kallt idag, See you tomorrow=Vi ses imorgon, The water is cold=Vattnet
    är kallt, The sun is shining=Solen skiner, I live in Sweden=Jag bor i Sverige
    """
)

UNKNOWN_SUBJECTS = words("""
    chemistry politics football philosophy Einstein Shakespeare bitcoin Mozart volcanoes
    dinosaurs law medicine chess Napoleon electricity gravity evolution opera taxes wine
    insurance vaccines rockets Kubernetes JavaScript Linux databases astronomy Beethoven Picasso
    """)
