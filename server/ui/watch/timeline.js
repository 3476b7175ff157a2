// The timeline of steps: one row for each request, prefill chunks and decodes as slices.
import { html, useEffect, useRef, useState } from "../html.js";
import { prepare, readColors, useCanvas } from "./canvas.js";
import { StepTable } from "./tables.js";

const ROW = 16; // pixels
const AXIS = 18;
const LABEL = 56;
const MOST_ROWS = 24;
const SHORTEST = 2e3; // microseconds that the view can show
const LONGEST = 60e6;
const GRID_PX = 70; // least distance of two grid lines
const ZOOM = 1.4;

/** The steps that overlap [begin, end), which are sorted by time. */
function visible(steps, begin, end) {
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle].begin + steps[middle].dur < begin) low = middle + 1;
    else high = middle;
  }
  let past = low;
  while (past < steps.length && steps[past].begin < end) past += 1;
  return steps.slice(low, past);
}

/** The rows: request -> its slices {begin, end, kind, steps}; decodes without a gap are one. */
export function rowsOf(steps) {
  const rows = new Map();
  const add = (id, kind, begin, end, index) => {
    if (!rows.has(id)) rows.set(id, []);
    const slices = rows.get(id);
    const last = slices.at(-1);
    if (kind === "decode" && last?.kind === kind && last.index === index - 1) {
      last.end = end;
      last.index = index;
    } else slices.push({ begin, end, kind, index });
  };
  steps.forEach(({ begin, dur, chunks, decodes, preempted }, index) => {
    for (const [id, start] of chunks) {
      add(id, start < 0 ? "encode" : "prefill", begin, begin + dur, index);
    }
    for (const id of decodes) add(id, "decode", begin, begin + dur, index);
    for (const id of preempted) add(id, "preempt", begin, begin, index);
  });
  return [...rows].sort(([a], [b]) => a - b);
}

/** Microseconds between grid lines: 1, 2 or 5 times a power of ten. */
export function gridStep(span, width) {
  const least = (span * GRID_PX) / width;
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}

function say(microseconds) {
  if (microseconds >= 1e6) return `${+(microseconds / 1e6).toFixed(3)} s`;
  return `${+(microseconds / 1e3).toFixed(3)} ms`;
}

/** "step 8812, 3.10 ms: prefill #40 256 tokens at 0; 13 decodes". */
export function sayStep({ n, dur, chunks, decodes, preempted, others }) {
  const parts = chunks.map(([id, start, count]) =>
    start < 0 ? `encodes ${count} tokens of #${id}` : `prefill #${id} ${count} tokens at ${start}`);
  const total = decodes.length + others[1];
  if (total) parts.push(`${total} decode${total === 1 ? "" : "s"}`);
  if (others[0]) parts.push(`${others[0]} prompt tokens of others`);
  for (const id of preempted) parts.push(`#${id} preempted`);
  return `step ${n}, ${(dur / 1000).toFixed(2)} ms: ${parts.join("; ") || "nothing of yours"}`;
}

function drawGrid(context, colors, { begin, span, width, height, x }) {
  const step = gridStep(span, width);
  context.font = `11px ${colors.mono}`;
  context.textBaseline = "top";
  for (let at = Math.ceil(begin / step) * step; at < begin + span; at += step) {
    context.fillStyle = colors.line;
    context.fillRect(Math.round(x(at)), 0, 1, height);
  }
  context.fillStyle = colors.muted;
  context.fillText(`grid ${say(step)}`, LABEL + 4, height - AXIS + 3);
}

/** Lenses have a row of their own, because they belong to no request. */
function drawLenses(context, colors, lenses, top, { x, width }) {
  context.fillStyle = colors.muted;
  context.font = `11px ${colors.mono}`;
  context.textBaseline = "middle";
  context.fillText("lens", 0, top + ROW / 2, LABEL - 8);
  for (const { begin, dur } of lenses) {
    const left = Math.max(LABEL, x(begin));
    const right = Math.min(width, x(begin + dur));
    if (right > LABEL && left < width) context.fillRect(left, top + 2, Math.max(1, right - left), ROW - 4);
  }
}

function drawRow(context, colors, id, slices, top, { x, width }) {
  context.fillStyle = colors.muted;
  context.font = `11px ${colors.mono}`;
  context.textBaseline = "middle";
  context.fillText(`#${id}`, 0, top + ROW / 2, LABEL - 8);
  const hue = colors.owner(id);
  for (const { begin, end, kind } of slices) {
    const left = Math.max(LABEL, x(begin));
    const right = Math.min(width, x(end));
    const wide = Math.max(1, right - left - (right - left > 3 ? 1 : 0));
    if (right < LABEL || left > width) continue;
    context.fillStyle = hue;
    if (kind === "decode") context.fillRect(left, top + 6, wide, 4);
    else if (kind === "preempt") {
      context.fillStyle = colors.warn;
      context.font = `bold 13px ${colors.mono}`;
      context.fillText("×", Math.max(LABEL, left - 4), top + ROW / 2);
    } else context.fillRect(left, top + 2, wide, ROW - 4);
  }
}

/** Draw the view; return where its steps and rows are. */
function paint(canvas, state, view) {
  const end = view.end ?? lastEnd(state);
  const begin = end - view.span;
  const steps = visible(state.steps, begin, end);
  const rows = rowsOf(steps);
  const shown = rows.slice(-MOST_ROWS);
  const lenses = visible(state.lenses, begin, end);
  const height = Math.max(4, shown.length + (lenses.length > 0)) * ROW + AXIS;
  const { context, width } = prepare(canvas, height);
  const colors = readColors();
  const x = (at) => LABEL + ((at - begin) / view.span) * (width - LABEL);
  const place = { begin, span: view.span, width, height, x };
  drawGrid(context, colors, place);
  if (lenses.length) drawLenses(context, colors, lenses, shown.length * ROW, place);
  shown.forEach(([id, slices], row) => drawRow(context, colors, id, slices, row * ROW, place));
  return { ...place, steps, hidden: rows.length - shown.length };
}

function lastEnd(state) {
  const last = state.steps.at(-1);
  return last ? last.begin + last.dur : state.now;
}

const clamp = (value, low, high) => Math.max(low, Math.min(high, value));

export function Timeline({ state, version, isTable, set }) {
  return html`<section class="en-section" aria-label="Steps of the engine">
    <div class="en-head">
      <h2>Steps</h2>
      <span class="muted">wheel or + − zooms, drag or Shift+arrows move, 0 follows</span>
      <label class="en-check"><input type="checkbox" checked=${isTable}
        onChange=${(event) => set({ steps: event.target.checked ? "table" : "" })} /> table</label>
    </div>
    ${isTable && html`<${StepTable} state=${state} version=${version} />`}
    ${!isTable && html`<${Canvas} state=${state} version=${version} />`}
  </section>`;
}

/** The part that is shown: `end` null follows the newest step. Returns the ways to change it. */
function useView(state) {
  const [view, setView] = useState({ end: null, span: 2e6 });
  const endOf = () => view.end ?? lastEnd(state);
  return {
    ...view,
    endOf,
    follow: () => setView({ ...view, end: null }),
    moveTo: (end) => setView({ ...view, end }),
    /** Zoom around a time; without one, around the end. */
    zoom(factor, center) {
      const span = clamp(view.span * factor, SHORTEST, LONGEST);
      if (center === undefined) setView({ ...view, span });
      else setView({ span, end: center + (endOf() - center) * (span / view.span) });
    },
  };
}

/** The wheel zooms and pans. Preact's own listener is passive and could not stop scrolling. */
function useWheel(canvas, onWheel) {
  useEffect(() => {
    const element = canvas.current;
    const listen = (event) => {
      event.preventDefault();
      onWheel(event);
    };
    element.addEventListener("wheel", listen, { passive: false });
    return () => element.removeEventListener("wheel", listen);
  });
}

function timeAt(canvas, layout, event) {
  const { left } = canvas.getBoundingClientRect();
  return layout.begin + ((event.clientX - left - LABEL) / (layout.width - LABEL)) * layout.span;
}

/** What a key does to the view or to the cursor; undefined if nothing. */
function actionOf(event, view, go) {
  if (event.ctrlKey || event.metaKey || event.altKey) return undefined;
  const side = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (side && event.shiftKey) return () => view.moveTo(view.endOf() + (side * view.span) / 8);
  if (side) return () => go(side);
  return {
    "+": () => view.zoom(1 / ZOOM), "=": () => view.zoom(1 / ZOOM), "-": () => view.zoom(ZOOM),
    0: view.follow, Home: () => go(-Infinity), End: () => go(Infinity),
  }[event.key];
}

function Canvas({ state, version }) {
  const view = useView(state);
  const drag = useRef(null);
  const [chosen, setChosen] = useState(null); // the number of a step
  const [canvas, layout] = useCanvas((on) => paint(on, state, view),
    [state, version, view.end, view.span]);
  const steps = layout?.steps ?? [];
  const found = steps.findIndex((step) => step.n === chosen);
  const index = found < 0 ? steps.length - 1 : found;
  const step = steps[index];
  const text = step ? sayStep(step) : "No step is in view.";
  const go = (by) => setChosen(steps[clamp(index + by, 0, steps.length - 1)]?.n ?? null);

  useWheel(canvas, (event) => {
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      view.moveTo(view.endOf() + (event.deltaX / layout.width) * view.span);
    } else view.zoom(event.deltaY > 0 ? ZOOM : 1 / ZOOM, timeAt(canvas.current, layout, event));
  });

  function key(event) {
    const action = actionOf(event, view, go);
    if (!action) return;
    event.preventDefault();
    action();
  }

  function move(event) {
    if (!drag.current) {
      const at = timeAt(canvas.current, layout, event);
      setChosen(steps.find((one) => one.begin + one.dur >= at)?.n ?? null);
      return;
    }
    const share = (drag.current.at - event.clientX) / (layout.width - LABEL);
    if (Math.abs(share) > 0) view.moveTo(drag.current.end + share * view.span);
  }

  function grab(event) {
    drag.current = { at: event.clientX, end: view.endOf() };
    event.currentTarget.setPointerCapture(event.pointerId);
  }

  return html`
    <div class="en-map en-timeline" tabindex="0" role="slider" aria-label="Steps" aria-valuemin="0"
      aria-valuemax=${Math.max(0, steps.length - 1)} aria-valuenow=${Math.max(0, index)}
      aria-valuetext=${text} onKeyDown=${key} onPointerMove=${move} onPointerDown=${grab}
      onPointerUp=${() => { drag.current = null; }}>
      <canvas ref=${canvas} />
      ${found >= 0 && html`<${Mark} layout=${layout} step=${step} />`}
    </div>
    <p class="en-said mono">${text}</p>
    ${layout?.hidden > 0 && html`<p class="muted">${layout.hidden} older requests not shown.</p>`}`;
}

function Mark({ layout, step }) {
  const left = Math.max(LABEL, layout.x(step.begin));
  const right = Math.min(layout.width, layout.x(step.begin + step.dur));
  return html`<span class="en-cursor" style=${{
    left: `${left}px`, width: `${Math.max(2, right - left)}px`, top: 0,
    height: `${layout.height - AXIS}px` }} />`;
}
