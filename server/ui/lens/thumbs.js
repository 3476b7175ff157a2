// All heads of a model as thumbnails on one canvas: layers down, heads across.
import { html, useLayoutEffect, useRef } from "../html.js";
import { theme } from "../store.js";
import { SHADES } from "./colours.js";
import { FigureTable, useWidth } from "./parts.js";
import { kindOf } from "./kinds.js";
import { Scroll } from "./scroll.js";
import { figure } from "./text.js";

const GAP = 4;
const LABEL = 28;
const TOP = 18;
const LARGEST = 56;
const SMALLEST = 16;
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/** One thumbnail at its own size. */
function thumbOf({ thumb_rows: rows, thumb_columns: columns, heads }, shades, layer, head) {
  const image = new ImageData(columns, rows);
  const first = (layer * heads + head) * rows * columns;
  for (let place = 0; place < rows * columns; place += 1) {
    image.data.set([...SHADES[shades[first + place]], 255], 4 * place);
  }
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [columns, rows];
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function draw(canvas, { found, shades, order, layer, head, isLabelled }, cell, size) {
  const scale = devicePixelRatio || 1;
  [canvas.width, canvas.height] = size.map((side) => Math.round(side * scale));
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.imageSmoothingEnabled = false;
  context.font = `11px ${colour("mono")}`;
  context.textBaseline = "middle";
  order.forEach((heads, row) => {
    const y = TOP + row * (cell + GAP);
    context.fillStyle = colour("muted");
    context.textAlign = "left";
    context.fillText(`L${found.numbers[row]}`, 0, y + cell / 2);
    heads.forEach((one, column) => {
      const x = LABEL + column * (cell + GAP);
      context.drawImage(thumbOf(found, shades, row, one), x, y, cell, cell);
      const kind = isLabelled && cell >= 20 ? kindOf(found, row, one) : null;
      if (kind) drawLetter(context, kind.letter, x + cell, y, colour);
      if (row !== layer || one !== head) return;
      context.strokeStyle = colour("accent");
      context.lineWidth = 3;
      context.strokeRect(x - 1.5, y - 1.5, cell + 3, cell + 3);
    });
  });
  const isByIndex = order.every((heads) => heads.every((one, column) => one === column));
  if (!isByIndex || cell < 20) return;
  context.fillStyle = colour("muted");
  context.textAlign = "center";
  order[0].forEach((one, column) => {
    context.fillText(`H${one}`, LABEL + column * (cell + GAP) + cell / 2, TOP / 2);
  });
}

/** The letter of what a head does, on a patch in the upper right corner, which no query sees. */
function drawLetter(context, letter, right, top, colour) {
  context.fillStyle = colour("panel");
  context.fillRect(right - 11, top, 11, 12);
  context.fillStyle = colour("text");
  context.textAlign = "center";
  context.fillText(letter, right - 5.5, top + 6.5);
}

/**
 * `order` has the heads of each row in the order shown; `layer` is a row; `pick({layer, head})` chooses one. With
 * `isLabelled` a letter says what a head does.
 */
export function Thumbs(props) {
  const { found, order, layer, head, pick } = props;
  const [frame, width] = useWidth();
  const canvas = useRef(null);
  const fits = Math.floor((width - LABEL) / found.heads) - GAP;
  const cell = Math.max(SMALLEST, Math.min(LARGEST, fits));
  const size = [LABEL + found.heads * (cell + GAP), TOP + found.layers * (cell + GAP)];
  useLayoutEffect(() => {
    if (width) draw(canvas.current, props, cell, size);
  }, [found, order, layer, head, width, theme.value]);

  const choose = (row, column) => pick({ layer: String(found.numbers[row]), head: String(order[row][column]) });
  function onKey(event) {
    const move = MOVES[event.key];
    if (!move) return;
    event.preventDefault();
    const row = Math.max(0, Math.min(found.layers - 1, layer + move[0]));
    const column = Math.max(0, Math.min(found.heads - 1, order[layer].indexOf(head) + move[1]));
    choose(row, column);
  }

  function onClick(event) {
    const box = canvas.current.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top - TOP) / (cell + GAP));
    const column = Math.floor((event.clientX - box.left - LABEL) / (cell + GAP));
    if (order[row]?.[column] !== undefined) choose(row, column);
  }

  const kind = kindOf(found, layer, head);
  const text = `layer ${found.numbers[layer]}, head ${head}${kind ? `, ${kind.title}` : ""}, flatness ${figure(found.flatness[layer][head])}`;
  return html`<div class="lens-heat" ref=${frame}>
    <${Scroll} className="lens-wide" moved=${size[0]}><canvas ref=${canvas} style=${{ width: `${size[0]}px`, height: `${size[1]}px` }} tabindex="0"
      role="slider" aria-label="Head" aria-valuemin="0"
      aria-valuemax=${found.layers * found.heads - 1}
      aria-valuenow=${layer * found.heads + head} aria-valuetext=${text}
      onKeyDown=${onKey} onClick=${onClick} /><//>
    <${FigureTable} summary="Flatness of all heads as a table" label="Flatness"
      heads=${["layer", ...found.flatness[0].map((_, one) => `H${one}`)]}
      rows=${found.flatness.map((row, at) => [found.numbers[at], ...row.map((value) => value.toFixed(3))])} />
  </div>`;
}
