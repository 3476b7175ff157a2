// The tokens of a prompt that show images: `images` have `runs`, their tokens as [first, count].

/**
 * What is drawn as one box, of `count` tokens: `{begin, end}` of a token, or of an image with all that
 * separates its tiles. An image also has its `place` in the prompt, from 0.
 */
export function boxesOf(images, count) {
  const boxes = [];
  const add = (from, to) => {
    for (let i = from; i < to; i += 1) boxes.push({ begin: i, end: i + 1 });
  };
  let next = 0;
  for (const [place, { runs }] of images.entries()) {
    const begin = runs[0][0];
    const end = runs.at(-1)[0] + runs.at(-1)[1];
    add(next, begin);
    boxes.push({ begin, end, place });
    next = end;
  }
  add(next, count);
  return boxes;
}

/** The places of an image's tokens in the prompt, in the order of its embeddings. */
export function placesOf({ runs }) {
  return runs.flatMap(([first, count]) => Array.from({ length: count }, (_, at) => first + at));
}
