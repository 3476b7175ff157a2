// Engine live: the steps, the KV blocks and the queue of the engine while it works.
import { html, useEffect, useMemo, useStyle } from "../html.js";
import { navigate } from "../router.js";
import { KvMap } from "./kv.js";
import { Queue, Requests } from "./tables.js";
import { Timeline } from "./timeline.js";
import { CHATS, failure, hasRoom, makeTraffic, sendTwice } from "./traffic.js";
import { Watch } from "./watch.js";

/** `params`: `kv` is pool or requests, `table` and `steps` show tables instead of pictures. */
export default function Engine({ params }) {
  useStyle("watch/page.css");
  const watch = useMemo(() => new Watch(), []);
  useEffect(() => {
    watch.begin();
    return () => watch.end();
  }, []);
  useSpace(watch);
  const version = watch.version.value;
  const { state } = watch;
  // State is changed in place; `version` tells components that read signals to render again.
  const set = (changes) => navigate("engine", { ...params, ...changes }, { replace: true });
  return html`<div class="page en">
    <h1>Engine live</h1>
    ${watch.problem.value && html`<p class="warn" role="alert">${watch.problem.value}</p>`}
    ${!state && !watch.problem.value &&
      html`<p class="muted" role="status">Asking the engine…</p>`}
    ${state && html`
      <${Stats} watch=${watch} state=${state} version=${version} />
      <${Explanation} state=${state} version=${version} />
      <${Timeline} state=${state} version=${version} set=${set}
        isTable=${params.steps === "table"} />
      <${KvMap} state=${state} version=${version} isTable=${params.table === "1"} set=${set}
        view=${params.kv === "requests" ? "requests" : "pool"} />
      <${Queue} state=${state} version=${version} />
      <${Requests} state=${state} version=${version} />`}
  </div>`;
}

/** Space pauses, unless a control has the focus. */
function useSpace(watch) {
  useEffect(() => {
    const onKey = (event) => {
      const control = event.target.closest?.("input, textarea, select, button, a, summary");
      if (event.key !== " " || control) return;
      event.preventDefault();
      watch.toggle();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
}

/** A share as text, with a decimal where it is small. */
function percent(part, whole) {
  const share = (100 * part) / Math.max(whole, 1);
  return `${share.toFixed(share > 0 && share < 10 ? 1 : 0)} %`;
}

function Stats({ watch, state }) {
  const { stats, rate } = state;
  const mode = watch.mode.value;
  const figures = [
    ["running", stats.running],
    ["waiting", stats.waiting],
    ["KV", percent(stats.held, stats.total)],
    ["cached", percent(stats.cached, stats.total)],
    ["prefix hits", percent(stats.prefix_hits, stats.prefix_queries)],
    ["preempted", stats.preemptions],
    ["tok/s", rate.toFixed(rate < 10 ? 1 : 0)],
  ];
  return html`<div class="en-stats" data-seq=${state.seq} data-mode=${mode}>
    <dl>${figures.map(([name, value]) =>
      html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    <span class="en-buttons">
      <button onClick=${() => watch.toggle()} disabled=${mode === "pausing"} title="Space">
        ${mode === "paused" ? "go on" : "pause"}</button>
      <button class="primary" onClick=${makeTraffic} disabled=${!hasRoom(1)}>make traffic</button>
      <button onClick=${sendTwice} disabled=${!hasRoom(2)}>send ×2</button>
    </span>
    ${mode === "paused" && html`<p class="en-note" role="status">
      Paused at step ${stats.step}. ${watch.checked.value}</p>`}
    ${failure.value && html`<p class="en-note warn" role="alert">${failure.value}</p>`}
  </div>`;
}

/** What to do while there is nothing to see, and what a reader without admin rights sees. */
function Explanation({ state }) {
  if (state.role !== "admin") {
    return html`<p class="muted">You see your own requests, from now on, and totals of the others.
      An admin key (<code>--admin-key-file</code>) shows all.</p>`;
  }
  if (state.steps.length || state.requests.size) return null;
  return html`<p class="panel">The engine is idle. <b>make traffic</b> sends ${CHATS} small requests
    from this browser. <b>send ×2</b> sends one prompt twice: the second request lights up on the
    first one's blocks, because both begin with the same tokens.</p>`;
}
