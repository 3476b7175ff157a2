// Parts that several tabs use.
import { Scroll } from "./scroll.js";
import { html, useEffect, useRef, useState } from "../html.js";
import { SHADES } from "./colours.js";

/** A list to choose from: `options` are `[value, text]`. */
export function Choice({ label, value, options, pick }) {
  return html`<label>${label}${" "}
    <select value=${value} onChange=${(event) => pick(event.target.value)}>
      ${options.map(([id, text]) => html`<option value=${id} key=${id}>${text}</option>`)}
    </select></label>`;
}

/** What the colours mean, from 0 to `most`. */
export function Scale({ most, text }) {
  const stops = [0, 64, 128, 191, 255];
  const colours = stops.map((shade) => `rgb(${SHADES[shade].join(" ")})`).join(", ");
  return html`<p class="lens-scale"><span>0</span>
    <span class="lens-bar" style=${{ background: `linear-gradient(to right, ${colours})` }} />
    <span>${most}</span> <small class="muted">${text}</small></p>`;
}

/** Return a ref for an element and its width in whole pixels; 0 before it is known. */
export function useWidth() {
  const [width, setWidth] = useState(0);
  const frame = useRef(null);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    observer.observe(frame.current);
    return () => observer.disconnect();
  }, []);
  return [frame, width];
}

/**
 * Figures as a table, made when its summary is opened. The first cell of each row is its head.
 * `ids` are the data-id of the rows.
 */
export function FigureTable({ summary, label, id, heads, rows, ids = [], startsOpen = false }) {
  const [isOpen, setOpen] = useState(startsOpen);
  return html`<details open=${startsOpen}
    onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>${summary}</summary>
    ${isOpen && html`<${Scroll} tabindex="0" role="region" aria-label=${label}>
      <table class="lens-table" id=${id}>
        <thead><tr>
          ${heads.map((text, at) => html`<th scope="col" key=${at}>${text}</th>`)}
        </tr></thead>
        <tbody>
          ${rows.map((row, at) => html`<${Row} key=${at} row=${row} id=${ids[at]} />`)}
        </tbody>
      </table><//>`}
  </details>`;
}

function Row({ row: [head, ...cells], id }) {
  return html`<tr data-id=${id}>
    <th scope="row" class="mono">${head}</th>
    ${cells.map((text, at) => html`<td key=${at}>${text}</td>`)}
  </tr>`;
}
