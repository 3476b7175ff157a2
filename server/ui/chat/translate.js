// Encoder–decoders: a source and its answer side by side. Each source is a request of its own.

import { html, useRef, useState } from "../html.js";
import { navigate } from "../router.js";
import { withSampling } from "../sampling.js";
import { hello } from "../store.js";
import { addStamps, emptyAnswer, stream } from "./stream.js";
import { newId } from "./tree.js";

const MOST_KEPT = 30;

export default function Translate() {
  const [pairs, setPairs] = useState([]); // the newest first
  const field = useRef(null);
  const stop = useRef(null);
  const [isWriting, setWriting] = useState(false);
  const send = async (event) => {
    event.preventDefault();
    const source = field.current.value.trim();
    if (!source || isWriting) return;
    const answer = emptyAnswer(`ui-${newId()}`, {});
    const update = () => setPairs((all) => {
      const others = all.filter((pair) => pair.answer.requestId !== answer.requestId);
      return [{ source, answer: { ...answer } }, ...others].slice(0, MOST_KEPT);
    });
    stop.current = new AbortController();
    setWriting(true);
    update();
    const body = { model: hello.value.model.id, prompt: source, ...withSampling({}) };
    await stream("v1/completions", body, answer, stop.current.signal, update);
    setWriting(false);
    if (answer.tokens.length && (await addStamps(answer))) update();
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  return html`<div class="page translate">
    <h1>${hello.value.model.id}: source and answer</h1>
    <p class="muted">This model reads one source and writes one answer. It has no conversation.</p>
    <form class="translate-form" onSubmit=${send}>
      <textarea rows="3" ref=${field} aria-label="Source" onKeyDown=${onKey}
        placeholder="A text. Enter sends, Shift+Enter starts a line." />
      ${isWriting ? html`<button type="button" onClick=${() => stop.current.abort()}>Stop</button>`
        : html`<button class="primary">Send</button>`}
    </form>
    <div role="log" aria-label="Answers">
      ${pairs.map((pair) => html`<${Pair} key=${pair.answer.requestId} pair=${pair} />`)}
    </div>
  </div>`;
}

function Pair({ pair: { source, answer } }) {
  const openTime = () => navigate("chat", { drawer: "waterfall", request: answer.requestId });
  const showLens = () => navigate("lens", { text: source });
  return html`<article class="pair panel">
    <p lang="">${source}</p>
    <p lang="">${answer.content || html`<span class="muted">…</span>`}
      ${answer.error && html`<span class="warn" role="alert">${answer.error}</span>`}</p>
    <p class="figures muted">${answer.tokens.length} tok
      ${answer.firstTokenMs != null && ` · TTFT ${answer.firstTokenMs.toFixed(0)} ms`}
      ${answer.finish && ` · ${answer.finish}`}
      ${" "}<button class="quiet" type="button" onClick=${openTime}>Why this time</button>
      <button class="quiet" type="button" onClick=${showLens}>Show the lens</button>
    </p>
  </article>`;
}
