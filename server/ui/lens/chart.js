// A small line chart: series over layers, with a linear or a logarithmic axis.
import { html, useState } from "../html.js";
import { figure } from "./text.js";

const WIDTH = 560;
const HEIGHT = 240;
const BOX = { left: 48, right: 12, top: 12, bottom: 28 };
const MARKS = { o: circle, x: cross, "+": plus };

/** The ends of an axis, and its ticks. */
function axisOf(values, isLog) {
  if (!isLog) {
    const high = Math.ceil(Math.max(...values, 1));
    return { low: 0, high, ticks: [0, 0.25, 0.5, 0.75, 1].map((share) => share * high) };
  }
  const finite = values.filter((value) => value > 0);
  const low = Math.floor(Math.log10(Math.min(...finite, 1)));
  const high = Math.ceil(Math.log10(Math.max(...finite, 1)));
  const ends = { low, high: Math.max(high, low + 1) };
  const ticks = Array.from({ length: ends.high - low + 1 }, (_, step) => 10 ** (low + step));
  return { ...ends, ticks };
}

function tickText(tick) {
  return tick >= 1e4 || (tick > 0 && tick < 1e-3) ? tick.toExponential(0) : `${tick}`;
}

/**
 * `series` are `{name, mark, hue, points: [[x, y], ...]}`; `xs` the labels of the horizontal axis,
 * by x, and `names` their names in full. The arrows move a cursor along it, whose figures are read
 * out.
 */
export function Chart({ label, series, xs, names = xs, isLog = false, xTitle }) {
  const [at, setAt] = useState(xs.length - 1);
  const cursor = Math.min(at, xs.length - 1);
  const all = series.flatMap(({ points }) => points);
  const axis = axisOf(all.map(([, y]) => y), isLog);
  const [right, bottom] = [WIDTH - BOX.right, HEIGHT - BOX.bottom];
  const width = right - BOX.left;
  const x = (place) => BOX.left + (xs.length > 1 ? (width * place) / (xs.length - 1) : width / 2);
  const y = (value) => {
    const scaled = isLog ? Math.log10(Math.max(value, 1e-30)) : value;
    const share = (scaled - axis.low) / (axis.high - axis.low);
    return bottom - share * (bottom - BOX.top);
  };
  const shown = series.flatMap(({ name, points }) => points
    .filter(([place]) => place === cursor).map(([, value]) => `${name} ${figure(value)}`));
  const readOut = `${names[cursor]}: ${shown.join(", ") || "–"}`;

  function onKey(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    setAt(Math.max(0, Math.min(xs.length - 1, cursor + move)));
  }

  function onMove(event) {
    const box = event.currentTarget.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * WIDTH - BOX.left;
    setAt(Math.max(0, Math.min(xs.length - 1, Math.round((place / width) * (xs.length - 1)))));
  }

  const step = Math.ceil(xs.length / 14);
  return html`<figure class="lens-chart">
    <figcaption>${label}
      ${series.map(({ name, mark, hue }) => html`<span class="lens-key" key=${name}
        style=${{ borderColor: `var(--owner-${hue})` }}>${mark} ${name}</span>`)}</figcaption>
    <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} tabindex="0" role="slider" aria-label=${label}
      aria-valuemin="0" aria-valuemax=${xs.length - 1} aria-valuenow=${cursor}
      aria-valuetext=${readOut} onKeyDown=${onKey} onPointerMove=${onMove}>
      ${axis.ticks.map((tick) => html`<g key=${tick}>
        <line class="lens-grid" x1=${BOX.left} x2=${right} y1=${y(tick)} y2=${y(tick)} />
        <text x=${BOX.left - 6} y=${y(tick) + 4} text-anchor="end">${tickText(tick)}</text></g>`)}
      ${xs.map((name, place) => place % step === 0 && html`<text key=${place} x=${x(place)}
        y=${bottom + 18} text-anchor="middle">${name}</text>`)}
      <line class="lens-at" x1=${x(cursor)} x2=${x(cursor)} y1=${BOX.top} y2=${bottom} />
      ${series.map((one) => html`<${Line} key=${one.name} one=${one} x=${x} y=${y} />`)}
    </svg>
    <p class="lens-read mono">${xTitle} ${readOut}</p>
  </figure>`;
}

function Line({ one: { points, mark, hue }, x, y }) {
  const places = points.map(([place, value]) => [x(place), y(value)]);
  const path = places.map(([px, py], at) => `${at ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`);
  return html`<g style=${{ color: `var(--owner-${hue})` }}>
    <path class="lens-line" d=${path.join("")} />
    ${places.map(([px, py], at) => MARKS[mark](px, py, at))}
  </g>`;
}

function circle(x, y, key) {
  return html`<circle key=${key} class="lens-mark" cx=${x} cy=${y} r="4" />`;
}

function cross(x, y, key) {
  return html`<path key=${key} class="lens-mark" d=${`M${x - 4} ${y - 4}l8 8m0 -8l-8 8`} />`;
}

function plus(x, y, key) {
  return html`<path key=${key} class="lens-mark" d=${`M${x - 5} ${y}h10m-5 -5v10`} />`;
}
