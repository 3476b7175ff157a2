// A heat map on a canvas: labels, hover, a keyboard cursor that is read out, a pinned row, PNG.
import { saveAs } from "../files.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../html.js";
import { theme } from "../store.js";
import { SHADES } from "./colours.js";
import { useWidth } from "./parts.js";
import { Scroll } from "./scroll.js";
import { short } from "./text.js";

const GAP = 6;
const FONT = 12;
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

/** The sizes of a map in CSS pixels. */
function layoutOf(props, width) {
  const { rows, columns, rowLabels, columnLabels } = props;
  const longest = (labels) => Math.max(...labels.map((label) => [...short(label)].length), 1);
  const left = Math.ceil(longest(rowLabels) * FONT * 0.62) + GAP;
  const top = Math.ceil(longest(columnLabels) * FONT * 0.62) + GAP;
  const fits = Math.floor((width - left) / columns);
  const cell = Math.max(3, Math.min(props.largest ?? 28, fits));
  return { left, top, cell, width: left + columns * cell + 1, height: top + rows * cell + 1 };
}

/** The cells as an image of one pixel each; cells of `shadeAt` null stay clear. */
function imageOf({ rows, columns, shadeAt }) {
  const image = new ImageData(columns, rows);
  for (let row = 0; row < rows; row += 1) {
    for (let column = 0; column < columns; column += 1) {
      const shade = shadeAt(row, column);
      if (shade === null) continue;
      image.data.set([...SHADES[shade], 255], 4 * (row * columns + column));
    }
  }
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [columns, rows];
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function draw(canvas, props, layout, image, cursor) {
  const { left, top, cell, width, height } = layout;
  const scale = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.fillStyle = colour("panel");
  context.fillRect(0, 0, width, height);
  context.imageSmoothingEnabled = false;
  context.drawImage(image, left, top, props.columns * cell, props.rows * cell);
  drawLabels(context, props, layout, cursor, colour);
  context.strokeStyle = colour("warn");
  context.lineWidth = 2;
  if (props.edge) strokeEdge(context, props, layout);
  context.strokeStyle = colour("accent");
  if (props.pinned != null) {
    context.strokeRect(left + 1, top + props.pinned * cell + 1, props.columns * cell - 2, cell - 2);
  }
  context.lineWidth = 1;
  const [row, column] = cursor;
  context.strokeRect(left, top + row * cell + 0.5, props.columns * cell, cell);
  context.strokeRect(left + column * cell + 0.5, top, cell, props.rows * cell);
}

function drawLabels(context, props, { left, top, cell }, cursor, colour) {
  const fits = cell >= 10;
  const label = (text, isShown, isCurrent, x, y, angle) => {
    if (!isShown) return;
    context.save();
    context.translate(x, y);
    context.rotate(angle);
    context.fillStyle = colour(isCurrent ? "accent" : "muted");
    context.font = `${isCurrent ? "700 " : ""}${FONT}px ${colour("mono")}`;
    context.textBaseline = "middle";
    context.textAlign = angle ? "left" : "right";
    context.fillText(short(text), 0, 0);
    context.restore();
  };
  props.rowLabels.forEach((text, row) => {
    const isCurrent = cursor[0] === row;
    label(text, fits || isCurrent, isCurrent, left - GAP, top + (row + 0.5) * cell, 0);
  });
  props.columnLabels.forEach((text, column) => {
    const isCurrent = cursor[1] === column;
    const x = left + (column + 0.5) * cell;
    label(text, fits || isCurrent, isCurrent, x, top - GAP, -Math.PI / 2);
  });
}

/** Draw the line left of the first visible key of each row. */
function strokeEdge(context, { rows, edge }, { left, top, cell }) {
  context.beginPath();
  for (let row = 0; row < rows; row += 1) {
    const x = left + edge(row) * cell;
    context.moveTo(x, top + row * cell);
    context.lineTo(x, top + (row + 1) * cell);
    if (row + 1 < rows && edge(row + 1) !== edge(row)) {
      context.lineTo(left + edge(row + 1) * cell, top + (row + 1) * cell);
    }
  }
  context.stroke();
}

/**
 * `shadeAt(row, column)` is a shade from 0 to 255, or null; `readOut(row, column)` a sentence.
 * `edge(row)` is the first visible column. `onCursor(row, column)` follows pointer and keys,
 * `onPin(row, column)` a click or Enter; `pinned` is a row or null. `id` names what is drawn: a new
 * one draws again.
 */
export function HeatMap(props) {
  const { id, rows, columns, readOut, label, start } = props;
  const [cursor, setCursor] = useState(start ?? [0, 0]);
  const [hovered, setHovered] = useState(null);
  const [frame, width] = useWidth();
  const canvas = useRef(null);
  const image = useRef({ id: null });
  const at = (hovered ?? cursor).map((place, axis) => Math.min(place, [rows, columns][axis] - 1));
  const layout = width ? layoutOf(props, width) : null;

  useLayoutEffect(() => {
    if (!layout) return;
    if (image.current.id !== id) image.current = { id, canvas: imageOf(props) };
    draw(canvas.current, props, layout, image.current.canvas, at);
  }, [id, width, ...at, props.pinned, theme.value]);
  useEffect(() => props.onCursor?.(...at), at);

  function cellAt(event) {
    const box = canvas.current.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top - layout.top) / layout.cell);
    const column = Math.floor((event.clientX - box.left - layout.left) / layout.cell);
    const isInside = row >= 0 && row < rows && column >= 0 && column < columns;
    return isInside ? [row, column] : null;
  }

  function onKey(event) {
    const move = MOVES[event.key];
    if (event.key === "Enter" || event.key === " ") props.onPin?.(...at);
    else if (event.key === "Home") setCursor([at[0], 0]);
    else if (event.key === "End") setCursor([at[0], columns - 1]);
    else if (move) {
      const next = at.map((place, axis) => place + move[axis]);
      setCursor([clamp(next[0], rows), clamp(next[1], columns)]);
    } else return;
    event.preventDefault();
    setHovered(null);
  }

  function onClick(event) {
    const cell = cellAt(event);
    if (!cell) return;
    setCursor(cell);
    props.onPin?.(...cell);
  }

  const size = layout ? { width: `${layout.width}px`, height: `${layout.height}px` } : {};
  return html`<div class="lens-heat" ref=${frame}>
    <${Scroll} className="lens-wide" moved=${layout?.width}><canvas ref=${canvas} style=${size} tabindex="0" role="slider" aria-label=${label}
      aria-valuemin="0" aria-valuemax=${rows * columns - 1} aria-valuenow=${at[0] * columns + at[1]}
      aria-valuetext=${readOut(...at)} onKeyDown=${onKey} onClick=${onClick}
      onPointerMove=${(event) => layout && setHovered(cellAt(event))}
      onPointerLeave=${() => setHovered(null)} /><//>
    <p class="lens-read mono">${readOut(...at)}</p>
    ${props.file && html`<button type="button" onClick=${() => save(canvas.current, props.file)}>
      Save as PNG</button>`}
  </div>`;
}

const clamp = (place, count) => Math.max(0, Math.min(count - 1, place));

function save(canvas, name) {
  canvas.toBlob((blob) => saveAs(blob, `${name}.png`));
}
