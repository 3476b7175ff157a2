// Picture: how much one token looks at each part of the pictures before it.
import { placesOf } from "../images.js";
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../html.js";
import { blobOf } from "../pictures.js";
import { theme } from "../store.js";
import { percent, visible } from "../text.js";
import { SHADES, shadeOf } from "./colours.js";
import { useRow } from "./data.js";
import { Choice, FigureTable, Scale, useWidth } from "./parts.js";
import { areaOf, drawingsOf, shareOf } from "./patches.js";
import { exact, figure, piecesOf, short } from "./text.js";

const LARGEST = 440; // px of a drawing's longer side
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };

export default function Picture({ report, body, params, update, answerFrom, pictures }) {
  const found = report.attention.decoder;
  const images = useMemo(() => report.images.map((image) => drawingsOf(image)), [report]);
  const from = fromOf(report, params, answerFrom);
  const layer = layerOf(found.numbers, params.layer);
  const head = headOf(found.heads, params.head);
  const which = { stack: "decoder", layer, head };
  const { value, error } = useRow(report, body, which, from);
  const heads = Array.from({ length: found.heads }, (_, at) => [String(at), `H${at}`]);
  return html`
    <div class="lens-row">
      <${From} report=${report} from=${from} answerFrom=${answerFrom}
        pick=${(row) => update({ row })} />
      <${Choice} label="Layer" value=${String(layer)}
        options=${found.numbers.map((number) => [String(number), `L${number}`])}
        pick=${(chosen) => update({ layer: chosen })} />
      <${Choice} label="Head" value=${String(head)} options=${[["mean", "mean of all"], ...heads]}
        pick=${(chosen) => update({ head: chosen })} />
    </div>
    ${error && html`<p class="warn" role="alert">${error}</p>`}
    ${!value && !error && html`<p class="muted" role="status">Loading…</p>`}
    ${value && html`<${Images} images=${images} pictures=${pictures} weights=${value.weights} />`}`;
}

/** The places of the tokens that come behind the first image and are none of it. */
function sightedOf(report) {
  const shown = new Set(report.images.flatMap(placesOf));
  const first = report.images[0].runs.at(-1);
  const behind = first[0] + first[1];
  return report.tokens.map((_, at) => at).filter((at) => at >= behind && !shown.has(at));
}

/** The token that looks: by default the one behind which the answer begins. */
function fromOf(report, params, answerFrom) {
  const sighted = sightedOf(report);
  const wanted = Number.parseInt(params.row, 10);
  if (sighted.includes(wanted)) return wanted;
  const last = answerFrom ? answerFrom - 1 : report.tokens.length - 1;
  return sighted.findLast((at) => at <= last) ?? null;
}

const layerOf = (numbers, text) => {
  const wanted = Number.parseInt(text, 10);
  return numbers.includes(wanted) ? wanted : numbers.at(-1);
};

const headOf = (count, text) => {
  const wanted = Number.parseInt(text, 10);
  return wanted >= 0 && wanted < count ? wanted : "mean";
};

/** The list of tokens that can look, those of the prompt and those of the answer. */
function From({ report, from, answerFrom, pick }) {
  const texts = piecesOf(report, report.tokens);
  const end = answerFrom ?? report.tokens.length;
  const sighted = sightedOf(report);
  const options = (places) => places.map((at) => html`<option key=${at} value=${String(at)}>
    ${`${at}: ${short(texts[at], 20)}`}</option>`);
  return html`<label>From${" "}
    <select class="mono" value=${String(from)} onChange=${(event) => pick(event.target.value)}>
      <optgroup label="Prompt">${options(sighted.filter((at) => at < end))}</optgroup>
      <optgroup label="Answer">${options(sighted.filter((at) => at >= end))}</optgroup>
    </select></label>`;
}

function Images({ images, pictures, weights }) {
  const shares = images.map((drawings) => (
    drawings.reduce((sum, one) => sum + shareOf(one, weights), 0)));
  const all = images.flat().flatMap(({ places }) => places.map((place) => weights[place] ?? 0));
  const most = Math.max(...all, Number.MIN_VALUE);
  const rest = weights.reduce((sum, weight) => sum + weight, 0) - shares.reduce((a, b) => a + b, 0);
  return html`
    <p>${images.length > 1 ? "The images get" : "The image gets"}
      ${" "}${shares.map((share) => percent(share)).join(" and ")} of this token's attention, the
      other tokens ${percent(Math.max(0, rest))}.</p>
    <${Scale} most=${figure(most)} text="weight; the shade is the square root of its share of the largest" />
    ${images.map((drawings, at) => html`<${Image} key=${at} number=${at + 1} drawings=${drawings}
      url=${pictures[at]} weights=${weights} most=${most} />`)}`;
}

/** One image: a drawing for each of its parts. */
function Image({ number, drawings, url, weights, most }) {
  const bitmap = useBitmap(url);
  return html`<section class="lens-picture" aria-label=${`Image ${number}`}>
    <h2>Image ${number}</h2>
    <div class="lens-drawings">
      ${bitmap && drawings.map((drawing) => html`<${Drawing} key=${drawing.name} bitmap=${bitmap}
        drawing=${drawing} weights=${weights} most=${most} number=${number} />`)}
    </div>
  </section>`;
}

/** The picture of a data: URL, turned as its EXIF data say, as the server turns it. */
function useBitmap(url) {
  const [bitmap, setBitmap] = useState(null);
  useEffect(() => {
    let isCurrent = true;
    createImageBitmap(blobOf(url)).then((one) => isCurrent && setBitmap(one));
    return () => { isCurrent = false; };
  }, [url]);
  return bitmap;
}

/** A heat map over the picture. The pointer and the arrows move over its cells, which are read out. */
function Drawing({ bitmap, drawing, weights, most, number }) {
  const { rows, columns, places, name } = drawing;
  const [cursor, setCursor] = useState(() => brightest(drawing, weights));
  const [hovered, setHovered] = useState(null);
  const [frame, available] = useWidth();
  const canvas = useRef(null);
  const [row, column] = hovered ?? cursor;
  const scale = Math.min(LARGEST / Math.max(bitmap.width, bitmap.height), available / bitmap.width);
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  useLayoutEffect(() => {
    if (!available) return;
    draw(canvas.current, [width, height], bitmap, { drawing, weights, most }, [row, column]);
  }, [bitmap, weights, most, width, row, column, theme.value]);

  function cellAt(event) {
    const box = canvas.current.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width;
    const y = (event.clientY - box.top) / box.height;
    return [clamp(Math.floor(((y - drawing.top) / drawing.height) * rows), rows),
      clamp(Math.floor(((x - drawing.left) / drawing.width) * columns), columns)];
  }

  function onKey(event) {
    const move = MOVES[event.key];
    if (!move) return;
    event.preventDefault();
    setHovered(null);
    setCursor([clamp(row + move[0], rows), clamp(column + move[1], columns)]);
  }

  const place = places[row * columns + column];
  const readOut = `${name}, row ${row + 1} of ${rows}, column ${column + 1} of ${columns}, token ${place}: `
    + `${figure(weights[place] ?? 0)}`;
  return html`<figure class="lens-heat" ref=${frame}>
    <figcaption>${name} <b>${percent(shareOf(drawing, weights))}</b>
      ${" "}<small class="muted">${rows} × ${columns} tokens</small></figcaption>
    <canvas ref=${canvas} style=${{ width: `${width}px`, height: `${height}px` }} tabindex="0"
      role="slider" aria-label=${`Attention on image ${number}, ${name}`} aria-valuemin="0"
      aria-valuemax=${rows * columns - 1} aria-valuenow=${row * columns + column}
      aria-valuetext=${readOut} onKeyDown=${onKey} onClick=${(event) => setCursor(cellAt(event))}
      onPointerMove=${(event) => setHovered(cellAt(event))} onPointerLeave=${() => setHovered(null)} />
    <p class="lens-read mono">${readOut}</p>
    <${FigureTable} summary="Weights as a table" label=${`Weights of image ${number}, ${name}`}
      heads=${["row", ...Array.from({ length: columns }, (_, at) => at + 1)]}
      rows=${Array.from({ length: rows }, (_, at) => [at + 1,
        ...places.slice(at * columns, (at + 1) * columns).map((one) => exact(weights[one] ?? 0))])} />
  </figure>`;
}

const clamp = (place, count) => Math.max(0, Math.min(count - 1, place));

/** The cell with the largest weight. */
function brightest({ places, columns }, weights) {
  const values = places.map((place) => weights[place] ?? 0);
  const at = values.indexOf(Math.max(...values));
  return [Math.floor(at / columns), at % columns];
}

function draw(canvas, [width, height], bitmap, { drawing, weights, most }, [row, column]) {
  const scale = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [Math.round(width * scale), Math.round(height * scale)];
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const boxOf = (r, c) => {
    const [left, top, wide, high] = areaOf(drawing, r, c);
    const [x, y] = [Math.round(left * width), Math.round(top * height)];
    return [x, y, Math.round((left + wide) * width) - x, Math.round((top + high) * height) - y];
  };
  drawing.places.forEach((place, at) => {
    const shade = shadeOf((weights[place] ?? 0) / most);
    context.fillStyle = `rgb(${SHADES[shade].join(" ")})`;
    context.fillRect(...boxOf(Math.floor(at / drawing.columns), at % drawing.columns));
  });
  // Grey, of little contrast and in soft light, it lets each cell keep the colour of its weight.
  context.globalCompositeOperation = "soft-light";
  context.filter = "grayscale(1) contrast(0.5)";
  context.drawImage(bitmap, 0, 0, width, height);
  context.filter = "none";
  context.globalCompositeOperation = "source-over";
  const [left, top, wide, high] = boxOf(row, column);
  for (const [colour, line] of [["#000", 3], ["#fff", 1]]) {
    context.strokeStyle = colour;
    context.lineWidth = line;
    context.strokeRect(left + 1, top + 1, Math.max(1, wide - 2), Math.max(1, high - 2));
  }
}
