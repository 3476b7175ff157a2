"""The pictures of the seeing demo: shapes and digits drawn with Pillow, from a seeded generator.

A scene says what a picture shows: groups of equal shapes, or one digit, and a background. Sizes,
places, lines, fonts, turns and shades are drawn when it is painted.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFilter, ImageFont

from engine.offline.demo_training.draws import Draws
from engine.offline.demo_training.vision_material import vision_material

TILE = 64  # pixels of a side of what the model sees
LONGEST = 128  # pixels of the longer side of a picture before that
MOST_SHAPES = 5
KINDS = {"single": 20, "several": 25, "mixed": 28, "digit": 27}  # of scenes, with their weights
LEAST_CONTRAST = 0.4  # distance of two colours in the unit cube of red, green and blue

NEAREST = Image.Resampling.NEAREST

Point = tuple[float, float]
Colour = tuple[float, float, float]  # red, green and blue from 0 to 1


class Group(NamedTuple):
    """Equal things of a picture."""

    name: str  # of a shape, or a digit
    colour: str
    number: int  # of things


class Scene(NamedTuple):
    groups: tuple[Group, ...]
    background: str

    @property
    def is_digit(self) -> bool:
        return self.groups[0].name.isdecimal()


class Disc(NamedTuple):
    """The place of a thing in pixels."""

    x: float
    y: float
    radius: float


class Thing(NamedTuple):
    name: str
    disc: Disc


class Painted(NamedTuple):
    image: Image.Image
    maps: tuple[Image.Image, Image.Image]  # of the number of each pixel's thing, and its colour's
    things: tuple[Thing, ...]


# ---- shapes: points around the origin, none farther away than 1 ----------------------------------


def around(*radii: float, points: int, turn: float = 0.0) -> list[Point]:
    """Return points around the origin that have the radii in turn, the first one at the top."""
    found = []
    for index in range(points):
        angle = math.radians(turn + 360 * index / points)
        radius = radii[index % len(radii)]
        found.append((radius * math.sin(angle), -radius * math.cos(angle)))
    return found


def cross() -> list[Point]:
    quarter = [(-0.3, -0.95), (0.3, -0.95), (0.3, -0.3)]
    found = []
    for _ in range(4):
        found += quarter
        quarter = [(-y, x) for x, y in quarter]
    return found


def heart() -> list[Point]:
    found = []
    for index in range(40):
        t = 2 * math.pi * index / 40
        y = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        found.append((16 * math.sin(t) ** 3 / 17, -y / 17))
    return found


SHAPES: dict[str, Callable[[], list[Point]]] = {
    "circle": lambda: around(1, points=40),
    "square": lambda: around(1, points=4, turn=45),
    "triangle": lambda: around(1, points=3),
    "star": lambda: around(1, 0.42, points=10),
    "cross": cross,
    "heart": heart,
}
DIGITS = "0123456789"
NAMES = (*SHAPES, *DIGITS)  # of things, in the order of their numbers, which begin at one
NUMBERS = len(NAMES) + 1  # of things, with none
LABELS = (NUMBERS, 11, NUMBERS)  # numbers of things, of colours, and of things in their middles


@cache
def strokes(digit: str) -> list[list[Point]]:
    """Return the lines of a digit drawn by hand, around the origin."""
    lines = []
    for line in vision_material().strokes[digit]:
        pairs = [point.split() for point in line.split(",")]
        lines.append([(float(x) / 3.6 - 2 / 3.6, float(y) / 3.6 - 3 / 3.6) for x, y in pairs])
    return lines


# ---- scenes --------------------------------------------------------------------------------------


def is_unseen(group: Group) -> bool:
    """Whether no training picture has the group's colour and shape together."""
    return f"{group.colour} {group.name}" in vision_material().unseen


def draw_scene(rng: Draws, kind: str = "", *, unseen: bool = False) -> Scene:
    """Draw a scene of one of the KINDS, or of any. With `unseen` it has a pair that is held out."""
    kind = kind or rng.weighted(KINDS)
    while True:
        background = rng.weighted(vision_material().backgrounds)
        groups = draw_groups(rng, kind)
        if any(group.colour == background for group in groups):
            continue
        if any(map(is_unseen, groups)) == unseen:
            return Scene(groups, background)


def draw_groups(rng: Draws, kind: str) -> tuple[Group, ...]:
    colours = rng.sample(list(vision_material().colours), MOST_SHAPES)
    names = rng.sample(list(SHAPES), 3)
    match kind:
        case "digit":
            return (Group(rng.choice(DIGITS), colours[0], 1),)
        case "single":
            return (Group(names[0], colours[0], 1),)
        case "several" if rng.chance(0.6):
            return (Group(names[0], colours[0], rng.randint(2, MOST_SHAPES)),)
        case "several":
            count = rng.randint(2, MOST_SHAPES)
            return tuple(Group(names[0], colour, 1) for colour in colours[:count])
    counts = rng.choice(((1, 1), (1, 1), (1, 1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (3, 2)))
    rows = zip(names, colours, counts, strict=False)
    return tuple(Group(*row) for row in rows)


# ---- painting ------------------------------------------------------------------------------------


def draw_colour(rng: Draws, name: str) -> Colour:
    """Draw a shade of a named colour."""
    low_hue, high_hue, *rest = vision_material().colours[name]
    low_saturation, high_saturation, low_value, high_value = (number / 100 for number in rest)
    hue = rng.uniform(low_hue, high_hue) / 360 % 1
    saturation = rng.uniform(low_saturation, high_saturation)
    return colorsys.hsv_to_rgb(hue, saturation, rng.uniform(low_value, high_value))


def pixel(colour: Colour) -> tuple[int, int, int]:
    red, green, blue = (round(255 * part) for part in colour)
    return red, green, blue


def draw_size(rng: Draws) -> tuple[int, int]:
    """Draw the width and height of a picture. Small ones have few pixels for each shape."""
    longer = round(rng.choice((64, 96, 128, 160, 224, 320)) * rng.uniform(0.8, 1.2))
    ratio = 1.0 if rng.chance(0.4) else rng.uniform(0.75, 1.0)
    width, height = longer, round(longer * ratio)
    return (width, height) if rng.chance(0.6) else (height, width)


def draw_discs(rng: Draws, count: int, width: int, height: int) -> list[Disc]:
    """Draw places for `count` things that neither touch each other nor leave the picture."""
    shorter = min(width, height)
    largest = {1: 0.46, 2: 0.26, 3: 0.23}.get(count, 0.2)
    least = {1: 0.22, 2: 0.17, 3: 0.15}.get(count, 0.14)
    common = rng.uniform(least, largest)
    varies = rng.chance(0.5)
    while True:
        discs: list[Disc] = []
        for _ in range(60):
            radius = shorter * (rng.uniform(least, largest) if varies else common)
            x = rng.uniform(radius, width - radius)
            y = rng.uniform(radius, height - radius)
            gap = 0.05 * shorter
            if all(math.hypot(x - o.x, y - o.y) > radius + o.radius + gap for o in discs):
                discs.append(Disc(x, y, radius))
            if len(discs) == count:
                return discs
        largest = common = least


class Painter:
    """Paints one scene, and two maps of it: of the things' numbers, and of the colours'."""

    def __init__(self, rng: Draws, scene: Scene) -> None:
        self.rng = rng
        self.scene = scene
        size = draw_size(rng)
        self.ground = draw_colour(rng, scene.background)
        self.image = Image.new("RGB", size, pixel(self.ground))
        self.draw = ImageDraw.Draw(self.image)
        ground = list(vision_material().colours).index(scene.background)
        self.maps = (Image.new("L", size, 0), Image.new("L", size, ground))
        self.things: list[Thing] = []

    def painted(self) -> Painted:
        """Return the picture and its maps."""
        groups = self.scene.groups
        count = sum(group.number for group in groups)
        discs = draw_discs(self.rng, count, *self.image.size)
        for group in groups:
            fill = self.contrasting(group.colour)
            for _ in range(group.number):
                disc = discs.pop()
                if self.scene.is_digit:
                    points = self.paint_digit(group.name, disc, fill)
                else:
                    points = self.paint_shape(group.name, disc, fill)
                self.label(group, points)
                self.things.append(Thing(group.name, disc))
        if self.rng.chance(0.3):
            radius = self.rng.uniform(0.3, 0.012 * max(self.image.size))
            self.image = self.image.filter(ImageFilter.GaussianBlur(radius))
        return Painted(self.image, self.maps, tuple(self.things))

    def label(self, group: Group, points: Sequence[Point]) -> None:
        """Enter a thing's outline into the maps."""
        numbers = (NAMES.index(group.name) + 1, list(vision_material().colours).index(group.colour))
        for image, number in zip(self.maps, numbers, strict=True):
            ImageDraw.Draw(image).polygon(points, number)

    def contrasting(self, name: str) -> tuple[int, int, int]:
        """Draw a shade of a colour that is not too close to the background's."""
        for _ in range(20):
            colour = draw_colour(self.rng, name)
            if math.dist(colour, self.ground) >= LEAST_CONTRAST:
                break
        return pixel(colour)

    def paint_shape(self, name: str, disc: Disc, fill: tuple[int, int, int]) -> list[Point]:
        """Paint a shape; return the points of its outline."""
        turn = math.radians(self.rng.uniform(-12, 12))
        points = placed(SHAPES[name](), disc, turn)
        self.draw.polygon(points, fill)
        return points

    def paint_digit(self, digit: str, disc: Disc, fill: tuple[int, int, int]) -> list[Point]:
        """Paint a digit; return the corners of the place that it takes."""
        radius = max(disc.radius, 0.34 * min(self.image.size))
        margin = min(radius, *(side / 2 for side in self.image.size))
        x = min(max(disc.x, margin), self.image.width - margin)
        y = min(max(disc.y, margin), self.image.height - margin)
        if self.rng.chance(0.5):
            self.paint_strokes(digit, Disc(x, y, radius), fill)
        else:
            self.paint_text(digit, Disc(x, y, radius), fill)
        corners = [(-0.6, -0.85), (0.6, -0.85), (0.6, 0.85), (-0.6, 0.85)]
        return placed(corners, Disc(x, y, radius), 0.0)

    def paint_text(self, digit: str, disc: Disc, fill: tuple[int, int, int]) -> None:
        """Paint a digit in Pillow's own font."""
        font = ImageFont.load_default(2.2 * disc.radius)
        thick = round(self.rng.uniform(0, 0.12) * disc.radius)
        side = round(3 * disc.radius)
        mask = Image.new("L", (side, side))
        middle = (side / 2, side / 2)
        ImageDraw.Draw(mask).text(middle, digit, 255, font, anchor="mm", stroke_width=thick)
        mask = mask.rotate(self.rng.uniform(-14, 14), Image.Resampling.BILINEAR)
        corner = (round(disc.x - side / 2), round(disc.y - side / 2))
        self.image.paste(fill, corner, mask)

    def paint_strokes(self, digit: str, disc: Disc, fill: tuple[int, int, int]) -> None:
        """Paint a digit as lines, which no hand draws twice in the same way."""
        width = max(2, round(self.rng.uniform(0.1, 0.32) * disc.radius))
        slant = self.rng.uniform(-0.25, 0.25)
        narrow = self.rng.uniform(0.7, 1.1)
        for line in strokes(digit):
            bent = []
            for x, y in line:
                x += self.rng.uniform(-0.05, 0.05)
                y += self.rng.uniform(-0.05, 0.05)
                bent.append((0.9 * (narrow * x - slant * y), 0.9 * y))
            points = placed(bent, disc, 0.0)
            self.draw.line(points, fill, width, joint="curve")
            for x, y in (points[0], points[-1]):
                half = width / 2
                self.draw.ellipse((x - half, y - half, x + half, y + half), fill)


def placed(points: Sequence[Point], disc: Disc, turn: float) -> list[Point]:
    """Return points around the origin, turned by an angle and moved into a disc."""
    sine, cosine = math.sin(turn), math.cos(turn)
    return [
        (
            disc.x + disc.radius * (x * cosine - y * sine),
            disc.y + disc.radius * (x * sine + y * cosine),
        )
        for x, y in points
    ]


def paint(rng: Draws, scene: Scene) -> Painted:
    """Return a picture of a scene, with its maps."""
    return Painter(rng, scene).painted()


def labels(painted: Painted, side: int) -> bytes:
    """Return the numbers [3, side * side] of LABELS: of what each patch shows, of a map at four
    points, and of the thing whose middle it has.

    A thing at one of the four points counts more than the background at the others.
    """
    maps = painted.maps
    things, colours = (image.resize((2 * side, 2 * side), NEAREST).tobytes() for image in maps)
    points = (0, 1, 2 * side, 2 * side + 1)
    shown = []
    for row in range(side):
        for column in range(side):
            corner = 4 * side * row + 2 * column
            shown.append(max((corner + point for point in points), key=things.__getitem__))
    middles = bytearray(side * side)
    width, height = painted.image.size
    for name, disc in painted.things:
        row, column = int(side * disc.y / height), int(side * disc.x / width)
        middles[side * row + column] = NAMES.index(name) + 1
    return bytes(things[at] for at in shown) + bytes(colours[at] for at in shown) + bytes(middles)


def tile(picture: Image.Image) -> bytes:
    """Return what the model sees of a picture: uint8 [TILE, TILE, 3], as the server makes it."""
    ratio = picture.width / picture.height
    if ratio >= 1:
        width, height = LONGEST, even(int(LONGEST / ratio))
    else:
        width, height = even(int(LONGEST * ratio)), LONGEST
    longest = resized(picture, width, height)
    return resized(longest, TILE, TILE).tobytes()


def resized(picture: Image.Image, width: int, height: int) -> Image.Image:
    """Return a picture of another size: the width is resized first, in any version of Pillow."""
    wide = picture.resize((width, picture.height), Image.Resampling.LANCZOS)
    return wide.resize((width, height), Image.Resampling.LANCZOS)


def even(side: int) -> int:
    return side + side % 2
