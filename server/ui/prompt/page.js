// Prompt: what a chat or a text becomes, token by token, and which tokens are in the prefix cache.
import { post } from "../api.js";
import { html, useEffect, useMemo, useRef, useState, useStyle } from "../html.js";
import { withPictures } from "../pictures.js";
import { navigate, route } from "../router.js";
import { hello } from "../store.js";
import { duration } from "../text.js";
import { causeOf, lintHelp, lossOf } from "./facts.js";
import { Messages } from "./messages.js";
import { Tokens } from "./tokens.js";

const WAIT_MS = 250; // after the last key, before the server is asked
const AGAIN_MS = 5000; // the cache changes without an edit
const LARGE = 200_000; // characters of a body that is not sent again without an edit
const MOST_URL = 1500; // characters of a prompt that the address holds
const FIRST = [
  { role: "system", content: "You are a helpful assistant." },
  { role: "user", content: "What is the capital of France?" },
];

/** The prompt that the address names, or a first one that the model can read. */
function promptOf(params) {
  const kind = params.text !== undefined ? "text" : "chat";
  let messages = hello.value?.has_template === false ? FIRST.slice(1) : FIRST;
  try {
    const given = JSON.parse(params.messages ?? "null");
    if (Array.isArray(given) && given.every(isMessage)) messages = given;
  } catch {
    // a damaged address shows the first prompt
  }
  const canChat = hello.value?.has_template || hello.value?.ready.kind === "encoder-decoder";
  return { kind: canChat ? kind : "text", messages, text: params.text ?? "Once upon a time" };
}

const isMessage = (value) =>
  typeof value?.role === "string" && typeof value?.content === "string" && !value.pictures;

/** The body that the route gets. */
function bodyOf({ kind, messages, text }) {
  if (kind === "text") return { prompt: text };
  const sent = messages.map(({ pictures, ...message }) => {
    return { ...message, content: withPictures(message.content, pictures) };
  });
  return { messages: sent };
}

const picturesOf = ({ messages }) => messages.flatMap(({ pictures = [] }) => pictures);

export default function PromptPage({ params }) {
  useStyle("prompt/page.css");
  if (!hello.value) return html`<p class="empty muted">Asking the server…</p>`;
  return html`<${Editor} params=${params} />`;
}

function Editor({ params }) {
  const [prompt, setPrompt] = useState(() => promptOf(params));
  const [answerId, setAnswerId] = useState("");
  const { answer, problem, baseline, keepAsBaseline } = useTokens(prompt, answerId.trim());
  useAddress(prompt);
  const change = (part) => setPrompt((now) => ({ ...now, ...part }));
  const edit = (next) => setPrompt((now) => ({ ...now, messages: next(now.messages) }));
  const canChat = hello.value.has_template || hello.value.ready.kind === "encoder-decoder";
  return html`<div class="page pr">
    <h1>Prompt</h1>
    <div class="pr-columns">
      <section class="panel" aria-label="What is sent">
        <div class="pr-kinds" role="group" aria-label="Kind of prompt">
          ${[["chat", "Messages"], ["text", "Plain text"]].map(([kind, title]) => html`<button
            key=${kind} aria-pressed=${prompt.kind === kind} disabled=${kind === "chat" && !canChat}
            onClick=${() => change({ kind })}>${title}</button>`)}
        </div>
        ${prompt.kind === "chat"
          ? html`<${Messages} messages=${prompt.messages} lint=${answer?.lint ?? []}
              change=${edit} />`
          : html`<label class="pr-message">Text
              <textarea rows="10" value=${prompt.text} spellcheck=${false}
                onInput=${(event) => change({ text: event.target.value })} /></label>`}
      </section>
      <section class="panel pr-result" aria-label="What the model reads">
        ${problem && html`<p class="warn" role="alert">${problem}</p>`}
        ${!answer && !problem && html`<p class="muted" role="status">Tokenising…</p>`}
        ${answer && html`
          <${Counts} answer=${answer} />
          <${Loss} answer=${answer} baseline=${baseline} keep=${keepAsBaseline} />
          <${Compared} comparison=${answer.comparison} id=${answerId} change=${setAnswerId} />
          <${Tokens} answer=${answer} />
          <${Lint} lint=${answer.lint} />`}
      </section>
    </div>
  </div>`;
}

/**
 * The tokens of a prompt, asked a moment after the last change. The baseline is the version with
 * the most cached tokens so far: the one that an edit is compared with.
 */
function useTokens(prompt, answerId) {
  const [answer, setAnswer] = useState(null);
  const [problem, setProblem] = useState("");
  const [baseline, setBaseline] = useState(null);
  const body = useMemo(() => JSON.stringify(bodyOf(prompt)), [prompt]);
  const pictures = picturesOf(prompt);
  const last = useRef(null);
  const compared = useRef(null);
  compared.current = baseline;
  useEffect(() => {
    const stop = new AbortController();
    let timer;
    const ask = async () => {
      try {
        const asked = { ...JSON.parse(body), ...comparedWith(compared.current, body, answerId) };
        const found = await post("/ui/api/prompt", asked, { signal: stop.signal });
        found.body = body;
        found.pictures = pictures;
        setAnswer(found);
        setProblem("");
        setBaseline((best) => (best && best.cached_tokens > found.cached_tokens ? best : found));
      } catch (error) {
        if (stop.signal.aborted) return;
        setProblem(error.message);
        setAnswer(null);
      }
      if (body.length <= LARGE) wait();
    };
    const wait = () => { timer = setTimeout(() => (document.hidden ? wait() : ask()), AGAIN_MS); };
    timer = setTimeout(ask, last.current === null ? 0 : WAIT_MS);
    last.current = body;
    return () => {
      clearTimeout(timer);
      stop.abort();
    };
  }, [body, answerId]);
  useEffect(() => setBaseline(null), [prompt.kind]);
  return { answer, problem, baseline, keepAsBaseline: () => setBaseline(answer) };
}

/** The prompt to compare with: that of an answer, or the baseline. */
function comparedWith(baseline, body, answerId) {
  if (answerId) return { comparison_id: answerId };
  return baseline && baseline.body !== body ? { baseline: JSON.parse(baseline.body) } : {};
}

/** Keep a short prompt in the address, so that a link opens it. */
function useAddress(prompt) {
  useEffect(() => {
    const hasPictures = prompt.kind !== "text" && picturesOf(prompt).length > 0;
    const own = prompt.kind === "text"
      ? { text: prompt.text }
      : { messages: JSON.stringify(prompt.messages) };
    const isSmall = !hasPictures && JSON.stringify(own).length <= MOST_URL;
    const isFirst = own.messages === JSON.stringify(FIRST);
    const timer = setTimeout(() => {
      if (route.value.page !== "prompt") return;
      const { text, messages, ...others } = route.value.params;
      navigate("prompt", { ...others, ...(isSmall && !isFirst ? own : {}) }, { replace: true });
    }, WAIT_MS);
    return () => clearTimeout(timer);
  }, [prompt]);
}

function Counts({ answer }) {
  const { ids, cached_tokens: cached, max_model_len: longest, block_size: size } = answer;
  const blocks = Math.floor(cached / size);
  const part = cached % size;
  const width = (count) => ({ width: `${(100 * Math.min(count, longest)) / longest}%` });
  const parts = [`${blocks} block${blocks === 1 ? "" : "s"} of ${size}`];
  if (part) parts.push(`${part} tokens of another`);
  return html`<div class="pr-counts" aria-live="polite">
    <p><b class="pr-count">${ids.length.toLocaleString("en")}</b> of
      ${" "}${longest.toLocaleString("en")} tokens:
      ${" "}<b class="pr-cached-count">${cached.toLocaleString("en")}</b> cached
      ${cached > 0 && html` <span class="muted">(${parts.join(" + ")})</span>`},
      ${" "}<b>${(ids.length - cached).toLocaleString("en")}</b> new</p>
    <div class="pr-bar" aria-hidden="true">
      <span class="pr-bar-cached" style=${width(cached)} />
      <span class="pr-bar-new" style=${width(ids.length - cached)} />
    </div>
  </div>`;
}

/** What an edit costs: the cached tokens that this version can no longer use. */
function Loss({ answer, baseline, keep }) {
  const loss = lossOf(answer, baseline);
  if (!loss) return null;
  const about = loss.ms === null ? "" : `, about ${duration(loss.ms)}`;
  return html`<p class="pr-loss" role="status">
    This change loses <b>${loss.tokens.toLocaleString("en")}</b> cached tokens${about}.
    ${answer.comparison?.type === "miss" && ` ${causeOf(answer.comparison)}`}
    <button class="quiet" onClick=${keep}>Compare with this version instead</button>
  </p>`;
}

/** The comparison with the prompt of an answer that the API has given. */
function Compared({ comparison, id, change }) {
  return html`<p class="pr-compared">
    <label>Compare with the prompt of the answer${" "}
      <input value=${id} placeholder="resp_… or msg_…" spellcheck=${false}
        onInput=${(event) => change(event.target.value)} /></label>
    ${id.trim() && comparison && html` <span role="status">${causeOf(comparison)}</span>`}
  </p>`;
}

function Lint({ lint }) {
  if (!lint.length) return html`<p class="muted pr-clean">Nothing looks wrong with this prompt.</p>`;
  return html`<section aria-label="Warnings">
    <h2>Worth a look</h2>
    <ul class="pr-lint">
      ${lint.map((found) => html`<li key=${found.code + found.param} data-code=${found.code}>
        <b>${found.message}</b> ${lintHelp[found.code] ?? ""}
        ${found.param && html` <code>${found.param}</code>`}
      </li>`)}
    </ul>
  </section>`;
}
