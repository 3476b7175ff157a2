// The same figures as tables: the queue, the requests, the blocks, the last steps.
import { html } from "../html.js";
import { hrefOf, route } from "../router.js";
import { reasonOf } from "./state.js";

const LAST_STEPS = 40;
const number = (value) => value.toLocaleString("en");

function Table({ label, columns, rows, empty }) {
  if (!rows.length) return html`<p class="muted">${empty}</p>`;
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}>
    <table class="en-table">
      <thead><tr>
        ${columns.map((name) => html`<th scope="col" key=${name}>${name}</th>`)}
      </tr></thead>
      <tbody>${rows}</tbody>
    </table>
  </div>`;
}

/** The waiting requests, each with the reason. Its head says how many are not shown. */
export function Queue({ state }) {
  const { queue, stats, now, facts } = state;
  const rows = queue.requests.map(([id, place]) => {
    const request = state.requests.get(id);
    if (!request) return null;
    const waited = Math.max(0, now - request.arrived) / 1e6;
    return html`<tr key=${id}>
      <th scope="row">#${id}</th>
      <td>p${request.priority}</td>
      <td>${number(request.prompt)} tok</td>
      <td>${waited.toFixed(1)} s</td>
      <td class="en-reason">${reasonOf(queue, place, facts)}</td>
    </tr>`;
  }).filter(Boolean);
  const hidden = Math.max(0, stats.waiting - rows.length);
  return html`<section class="en-section" aria-label="Queue">
    <h2>Queue</h2>
    <${Table} label="Waiting requests" columns=${["request", "priority", "prompt", "waits", "why"]}
      rows=${rows} empty=${hidden ? "" : "Nothing waits."} />
    ${hidden > 0 && html`<p class="muted">${number(hidden)} more wait.</p>`}
  </section>`;
}

/** The running requests, and the last ones that have ended. */
export function Requests({ state }) {
  const live = [...state.requests.values()].filter((one) => one.state !== "waiting");
  const rows = [...live.sort((a, b) => a.id - b.id), ...state.ended].map((request) => {
    const blocks = request.tables.reduce((sum, table) => sum + table.filter(Boolean).length, 0);
    const isEnded = !state.requests.has(request.id);
    return html`<tr key=${request.id} class=${isEnded ? "en-ended" : ""}>
      <th scope="row"><span class="en-owner en-owner-${((request.id - 1) % 8) + 1}" />
        #${request.id}</th>
      <td>${isEnded ? `ended: ${request.state}` : request.state}</td>
      <td>${number(request.prompt)}</td>
      <td>${number(request.cached)}</td>
      <td>${number(request.out)}</td>
      <td>${number(blocks)}</td>
      <td>${request.name && html`<a href=${linkTo(request.name)}>why this time</a>`}</td>
    </tr>`;
  });
  return html`<section class="en-section" aria-label="Requests">
    <h2>Requests</h2>
    <${Table} label="Table of requests" rows=${rows}
      empty="No request has come since this page was opened."
      columns=${["request", "state", "prompt", "cached", "out", "blocks", "waterfall"]} />
  </section>`;
}

function linkTo(request) {
  return hrefOf("engine", { ...route.value.params, drawer: "waterfall", request });
}

/** The block tables as text, one row for each request and KV group. */
export function BlockTable({ state }) {
  const rows = [...state.requests.values()].flatMap((request) =>
    request.tables.map((table, group) => {
      const names = table.map((block) => {
        if (!block) return "–";
        return state.blockOf(block).owners.length > 1 ? `${block}/` : `${block}`;
      });
      return html`<tr key=${`${request.id} ${group}`}>
        <th scope="row">#${request.id}</th><td>${group}</td><td>${table.filter(Boolean).length}</td>
        <td class="mono en-blocks">${names.join(" ")}</td>
      </tr>`;
    }),
  );
  const { held, cached, total } = state.stats;
  const free = total - held - cached;
  return html`<p class="en-said">${held} held, ${cached} cached, ${free} free of ${total} blocks.
      A slash marks a shared block, a dash an entry behind the window.</p>
    <${Table} label="Block tables" columns=${["request", "group", "blocks", "block ids"]}
      rows=${rows} empty="No request holds blocks." />`;
}

/** The last steps, the newest first. */
export function StepTable({ state }) {
  const rows = state.steps.slice(-LAST_STEPS).reverse().map((step) => {
    const chunks = step.chunks.map(([id, start, count]) =>
      start < 0 ? `#${id} encoded ${count}` : `#${id} ${start}+${count}`);
    return html`<tr key=${step.begin}>
      <th scope="row">${step.n}</th>
      <td>${(step.begin / 1000).toFixed(1)}</td>
      <td>${(step.dur / 1000).toFixed(2)}</td>
      <td>${chunks.join(", ")}</td>
      <td>${step.decodes.length + step.others[1]}</td>
      <td>${step.preempted.map((id) => `#${id}`).join(", ")}</td>
    </tr>`;
  });
  return html`<${Table} label="Last steps" rows=${rows} empty="No step has run."
    columns=${["step", "begin ms", "ms", "prefill chunks", "decodes", "preempted"]} />`;
}
