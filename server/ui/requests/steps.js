// The row of a request's steps: as wide as they took, as high as each part's share.

import { html, useMemo, useRef, useState } from "../html.js";
import { duration } from "../text.js";
import { count, nameOf, stepLine } from "./format.js";

const HEIGHT = 64;
const STACK = ["base", "own", "others", "waiting", "unexplained"];

/** The paths of all steps: one for each part, so that 2,000 steps are eight elements. */
export function stepPaths(report) {
  const paths = Object.fromEntries(["server", "queue", "encoder", ...STACK].map((name) => [name, ""]));
  const box = (name, at, width, top, height) => {
    if (width > 0 && height > 0) paths[name] += `M${at} ${top}h${width}v${height}h${-width}z`;
  };
  const { submitted, ended } = report.stamps;
  const engineEnd = report.error === null ? report.stamps.last_token : ended;
  box("server", 0, submitted, 0, HEIGHT);
  box("server", engineEnd, ended - engineEnd, 0, HEIGHT);
  const queued = report.stamps.admitted === null ? ended : report.stamps.admitted;
  box("queue", submitted, queued - submitted, 0, HEIGHT);
  const { encode_begin: begin, images_ready: ready } = report.stamps;
  if (begin !== null) box("encoder", begin, ready - begin, 0, HEIGHT);
  for (const step of report.steps) {
    if (step.queue) {
      box("queue", step.at, step.ms, 0, HEIGHT);
      continue;
    }
    // A step that was shorter than the model says has no "unexplained"; the others are scaled.
    const total = STACK.reduce((sum, name) => sum + Math.max(step[name], 0), 0);
    let top = HEIGHT;
    for (const name of STACK) {
      const height = (HEIGHT * Math.max(step[name], 0)) / (total || 1);
      top -= height;
      box(name, step.at, step.ms, top, height);
    }
  }
  return paths;
}

/** The index of the step at a time, or of the nearest one. */
function stepAt(steps, time) {
  let low = 0;
  let high = steps.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle].at + steps[middle].ms < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** What the request went through, by its stamps: [name, begin, end] in ms. */
function phases(report) {
  const { submitted, admitted, first_token, last_token, ended } = report.stamps;
  const { encode_begin: begin, images_ready: ready } = report.stamps;
  const found = [[ready === null ? "tokenise" : "read images, tokenise", 0, submitted]];
  if (begin === null) found.push(["queue", submitted, admitted ?? ended]);
  else {
    found.push(["queue", submitted, begin], ["encode images", begin, ready]);
    found.push(["wait", ready, admitted]);
  }
  if (admitted === null) return found;
  const chunks = report.choices[0].prefills.map((chunk) => chunk[3]);
  const preempted = report.choices.some((choice) => choice.preemptions > 0);
  const prefill = `prefill ${chunks.slice(0, 3).join(" + ")}${chunks.length > 3 ? " + …" : ""}`;
  found.push([chunks.length ? prefill : "prefill", admitted, first_token ?? ended]);
  if (first_token === null) return found;
  const tokens = report.choices.reduce((sum, choice) => sum + choice.generated_tokens, 0);
  const decode = `${count(tokens, "token")}${preempted ? ", preempted" : ""}`;
  const end = report.error === null ? last_token : ended;
  found.push([decode, first_token, end]);
  if (end < ended) found.push(["detokenise", end, ended]);
  return found;
}

const MOVES = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };

export function StepRow({ report }) {
  const { steps, wall_ms: wall } = report;
  const [pinned, setPinned] = useState(0);
  const [hovered, setHovered] = useState(null);
  const box = useRef(null);
  const paths = useMemo(() => stepPaths(report), [report]);
  const index = Math.min(hovered ?? pinned, steps.length - 1);
  const step = steps[index];

  function find(event) {
    const { left, width } = box.current.getBoundingClientRect();
    return stepAt(steps, (wall * (event.clientX - left)) / width);
  }

  function move(event) {
    let next = pinned + (MOVES[event.key] ?? 0);
    if (event.key === "Home") next = 0;
    if (event.key === "End") next = steps.length - 1;
    if (next === pinned && !(event.key in MOVES)) return;
    event.preventDefault();
    setHovered(null);
    setPinned(Math.max(0, Math.min(steps.length - 1, next)));
  }

  const place = (ms) => `${(100 * ms) / wall}%`;
  const parts = phases(report).filter(([, begin, end]) => end > begin);
  return html`<section class="wf-row" aria-label="Steps">
    <ul class="wf-phases">
      ${parts.map(
        ([name, begin, end]) =>
          html`<li key=${name} style=${{ left: place(begin), width: place(end - begin) }}
            title=${`${name}: ${duration(end - begin)}`}><span>${name}</span></li>`,
      )}
    </ul>
    ${step
      ? html`<div class="wf-steps" ref=${box} tabindex="0" role="slider"
          aria-label="Step of the engine" aria-valuemin="0" aria-valuemax=${steps.length - 1}
          aria-valuenow=${index} aria-valuetext=${stepLine(step)} onKeyDown=${move}
          onPointerMove=${(event) => setHovered(find(event))}
          onPointerLeave=${() => setHovered(null)} onClick=${(event) => setPinned(find(event))}>
          <${Picture} paths=${paths} wall=${wall} />
          <span class="wf-cursor" style=${{ left: place(step.at), width: place(step.ms) }} />
          ${report.stamps.first_token !== null &&
          html`<span class="wf-first" style=${{ left: place(report.stamps.first_token) }}
            title=${`first token at ${duration(report.stamps.first_token)}`} />`}
        </div>
        <p class="wf-step-line">${stepLine(step)}</p>`
      : html`<p class="wf-note">No step of this request is recorded any more.</p>`}
    ${report.steps_omitted > 0 &&
    html`<p class="wf-note">${count(report.steps_omitted, "later step")} not shown.</p>`}
  </section>`;
}

function Picture({ paths, wall }) {
  return html`<svg viewBox=${`0 0 ${wall} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
    ${Object.entries(paths).map(
      ([name, path]) => html`<path key=${name} class=${`wf-fill-${name}`} d=${path} />`,
    )}
  </svg>`;
}

/** The same figures as a table, made when it is opened. */
export function StepTable({ steps }) {
  const [isOpen, setOpen] = useState(false);
  return html`<details onToggle=${(event) => setOpen(event.currentTarget.open)}>
    <summary>Steps as a table</summary>
    ${isOpen &&
    html`<div class="wf-scroll" tabindex="0" role="region" aria-label="Table of steps">
      <table class="wf-table">
        <thead><tr>
          ${["step", "at ms", "ms", "prefill", "decodes", ...STACK.map(nameOf)].map(
            (name) => html`<th scope="col" key=${name}>${name}</th>`,
          )}
        </tr></thead>
        <tbody>
          ${steps.map((step) => html`<${StepLine} key=${step.at} step=${step} />`)}
        </tbody>
      </table>
    </div>`}
  </details>`;
}

function StepLine({ step }) {
  const figures = step.queue ? ["", "waits", ...STACK.map(() => "")] : [step.prefill, step.decode];
  if (!step.queue) figures.push(...STACK.map((name) => step[name].toFixed(2)));
  const cells = [step.at.toFixed(1), step.ms.toFixed(2), ...figures];
  return html`<tr>
    <th scope="row">${step.n}</th>
    ${cells.map((figure, place) => html`<td key=${place}>${figure}</td>`)}
  </tr>`;
}
