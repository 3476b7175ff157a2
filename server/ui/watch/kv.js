// The map of KV blocks: the pool as it lies in memory, or the tables of the requests.
import { html, useState } from "../html.js";
import { prepare, readColors, useCanvas, widthOf } from "./canvas.js";
import { drawBlock, drawPassed, sayBlock } from "./cells.js";
import { BlockTable } from "./tables.js";

const LARGEST = 14; // pixels of a block
const POOL_HEIGHT = 224; // pixels that the pool should not exceed
const LABEL = 72; // pixels left of a request's blocks
const MOST_ROWS = 48;

/** How the pool is laid out on `width` pixels: {size, columns, rows}. */
export function poolLayout(count, width) {
  for (let size = LARGEST; ; size -= 1) {
    const columns = Math.max(1, Math.floor(width / size));
    const rows = Math.ceil(count / columns);
    if (rows * size <= POOL_HEIGHT || size <= 3) return { size, columns, rows };
  }
}

/** The rows of the view by request: {request, group, table}, the oldest request first. */
export function tableRows(state) {
  const rows = [];
  const requests = [...state.requests.values()].sort((a, b) => a.id - b.id);
  for (const request of requests) {
    request.tables.forEach((table, group) => {
      if (table.length) rows.push({ request, group, table });
    });
  }
  return rows;
}

/** What each cell of the map is, so that pointer, keys and drawing agree. */
function layoutOf(state, view, width) {
  const count = state.facts.num_blocks;
  if (view === "pool") {
    const { size, columns, rows } = poolLayout(count, width);
    return {
      view, size, columns, cells: count, height: rows * size,
      at: (cell) => [(cell % columns) * size, Math.floor(cell / columns) * size],
      block: (cell) => cell + 1,
    };
  }
  const rows = tableRows(state).slice(0, MOST_ROWS);
  const longest = Math.max(1, ...rows.map(({ table }) => table.length));
  const room = Math.floor((width - LABEL) / longest);
  const size = Math.min(LARGEST, Math.max(1, room));
  const place = rows.flatMap(({ table }, row) =>
    table.map((block, index) => ({ block, row, index })));
  return {
    view, size, rows, columns: longest, cells: place.length,
    height: Math.max(1, rows.length) * LARGEST,
    at: (cell) => [LABEL + place[cell].index * size, place[cell].row * LARGEST],
    block: (cell) => place[cell].block,
    place,
  };
}

function paint(canvas, state, view) {
  const layout = layoutOf(state, view, widthOf(canvas));
  const { context } = prepare(canvas, layout.height);
  const colors = readColors();
  if (view === "pool") {
    for (let cell = 0; cell < layout.cells; cell += 1) {
      const block = state.blockOf(layout.block(cell));
      drawBlock(context, colors, block, ...layout.at(cell), layout.size);
    }
    return layout;
  }
  const groups = state.facts.groups;
  context.font = `12px ${colors.mono}`;
  context.textBaseline = "middle";
  layout.rows.forEach(({ request, group }, row) => {
    context.fillStyle = colors.muted;
    const name = groups.length > 1 ? `#${request.id} g${group}` : `#${request.id}`;
    context.fillText(name, 0, row * LARGEST + LARGEST / 2, LABEL - 8);
  });
  layout.place.forEach(({ block }, cell) => {
    const [x, y] = layout.at(cell);
    if (block) drawBlock(context, colors, state.blockOf(block), x, y, layout.size);
    else drawPassed(context, colors, x, y, layout.size);
  });
  return layout;
}

/** The cell at a point, or -1. */
function cellAt(layout, x, y) {
  if (layout.view === "pool") {
    const column = Math.floor(x / layout.size);
    const cell = Math.floor(y / layout.size) * layout.columns + column;
    return column >= 0 && column < layout.columns && cell < layout.cells ? cell : -1;
  }
  const [row, index] = [Math.floor(y / LARGEST), Math.floor((x - LABEL) / layout.size)];
  return layout.place.findIndex((one) => one.row === row && one.index === index);
}

function say(state, layout, cell) {
  if (cell < 0 || cell >= layout.cells) return "no block";
  const block = layout.block(cell);
  if (layout.view === "pool") return sayBlock(state.blockOf(block));
  const { row, index } = layout.place[cell];
  const { request, group } = layout.rows[row];
  const where = `#${request.id}, group ${group}, entry ${index}`;
  return block ? `${where}: ${sayBlock(state.blockOf(block))}` : `${where}: behind the window`;
}

/** How far an arrow key moves the cursor. */
function steps(key, layout) {
  const row = layout.view === "pool" ? layout.columns : 1;
  return { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -row, ArrowDown: row, PageUp: -10 * row,
    PageDown: 10 * row, Home: -layout.cells, End: layout.cells }[key];
}

export function KvMap({ state, version, view, isTable, set }) {
  const isEmpty = state.facts.num_blocks === 0;
  return html`<section class="en-section" aria-label="KV blocks">
    <div class="en-head">
      <h2>KV map</h2>
      <${Choice} name="kv" label="Order of the blocks" value=${view} set=${set}
        options=${[["pool", "physical"], ["requests", "by request"]]} />
      <label class="en-check"><input type="checkbox" checked=${isTable}
        onChange=${(event) => set({ table: event.target.checked ? "1" : "" })} /> table</label>
      <${Legend} role=${state.role} />
    </div>
    ${isEmpty && html`<p class="muted">This model keeps no KV cache.</p>`}
    ${!isEmpty && isTable && html`<${BlockTable} state=${state} version=${version} />`}
    ${!isEmpty && !isTable && html`<${Canvas} state=${state} version=${version} view=${view} />`}
  </section>`;
}

function Choice({ name, label, value, options, set }) {
  return html`<span class="en-choice" role="radiogroup" aria-label=${label}>
    ${options.map(([id, text]) => html`<label key=${id}><input type="radio" name=${name}
      checked=${value === id} onChange=${() => set({ [name]: id })} /> ${text}</label>`)}
  </span>`;
}

function Legend({ role }) {
  return html`<ul class="en-legend" aria-label="Legend">
    <li><span class="en-swatch" /> free</li>
    <li><span class="en-swatch en-cached" /> cached</li>
    <li><span class="en-swatch en-held" /> held</li>
    <li><span class="en-swatch en-shared" /> shared</li>
    ${role !== "admin" && html`<li>your own requests only</li>`}
  </ul>`;
}

function Canvas({ state, version, view }) {
  const [canvas, layout] = useCanvas((on) => paint(on, state, view), [state, version, view]);
  const [cursor, setCursor] = useState(0);
  const [hovered, setHovered] = useState(-1);
  const last = layout ? Math.max(0, layout.cells - 1) : 0;
  const cell = Math.min(hovered >= 0 ? hovered : cursor, last);
  const text = layout?.cells ? say(state, layout, cell) : "No request holds blocks.";

  function move(event) {
    const by = steps(event.key, layout);
    if (by === undefined) return;
    event.preventDefault();
    setHovered(-1);
    setCursor(Math.max(0, Math.min(last, Math.min(cursor, last) + by)));
  }

  function find(event) {
    const box = canvas.current.getBoundingClientRect();
    return cellAt(layout, event.clientX - box.left, event.clientY - box.top);
  }

  return html`
    <div class="en-map" tabindex="0" role="slider" aria-label="KV blocks" aria-valuemin="0"
      aria-valuemax=${last} aria-valuenow=${cell} aria-valuetext=${text} onKeyDown=${move}
      onPointerMove=${(event) => setHovered(find(event))} onPointerLeave=${() => setHovered(-1)}
      onClick=${(event) => setCursor(Math.max(0, find(event)))}>
      <canvas ref=${canvas} data-size=${layout?.size} data-columns=${layout?.columns}
        data-label=${LABEL} data-row=${LARGEST} />
      ${layout?.cells > 0 && html`<${Cursor} layout=${layout} cell=${cell} />`}
    </div>
    <p class="en-said mono">${text}</p>`;
}

function Cursor({ layout, cell }) {
  const [left, top] = layout.at(cell);
  const side = Math.max(layout.size, 4);
  return html`<span class="en-cursor" style=${{
    left: `${left}px`, top: `${top}px`, width: `${side}px`, height: `${side}px` }} />`;
}
