// How a KV block is drawn and said: free, cached (a dot), held (its owner's hue), shared (hatched).

const HATCH = 4; // pixels from one line to the next

/** Draw one block as a square of `size` pixels, with a gap if there is room for one. */
export function drawBlock(context, colors, { kind, owners }, x, y, size) {
  const side = size > 4 ? size - 1 : size;
  context.fillStyle = owners.length ? colors.owner(owners[0]) : colors.free;
  context.fillRect(x, y, side, side);
  if (kind === "cached") {
    const dot = Math.max(1, side >> 2);
    const inset = (side - dot) >> 1;
    context.fillStyle = colors.muted;
    context.fillRect(x + inset, y + inset, dot, dot);
  } else if (kind === "shared") {
    context.fillStyle = colors.ground;
    for (let row = 0; row < side; row += 1) {
      for (let place = 0; place < side; place += 1) {
        if ((row + place) % HATCH === HATCH - 1) context.fillRect(x + place, y + row, 1, 1);
      }
    }
  }
}

/** Draw an entry of a block table without a block: the window has passed it. */
export function drawPassed(context, colors, x, y, size) {
  context.fillStyle = colors.line;
  context.fillRect(x, y + (size >> 1), size > 4 ? size - 1 : size, 1);
}

/** "block 301: shared by #12 and #40; the prefix cache finds it". */
export function sayBlock({ block, owners, isFound, kind }) {
  const names = owners.map((id) => `#${id}`);
  const found = isFound ? "; the prefix cache finds it" : "";
  if (kind === "shared") {
    const others = names.slice(0, -1).join(", ");
    return `block ${block}: shared by ${others} and ${names.at(-1)}${found}`;
  }
  if (kind === "held") return `block ${block}: held by ${names[0]}${found}`;
  if (kind === "cached") return `block ${block}: cached, no request holds it${found}`;
  return `block ${block}: free`;
}
