// The frame of all pages: rail, status strip, drawer, list of keys, and the question for the key.
import { BASE, get } from "./api.js";
import { Component, html, useEffect, useRef, useState } from "./html.js";
import { drawers, pages } from "./pages.js";
import { weightFormat } from "./formats.js";
import { NotLoaded, useModule } from "./modules.js";
import { hrefOf, navigate, route } from "./router.js";
import { Sheet } from "./sheet.js";
import { askForKey, hello, key, problem, theme } from "./store.js";

const THEMES = ["auto", "dark", "light"];
const KEYS = [
  ...pages.map((page) => [`g ${page.key}`, page.title]),
  ["?", "this list"],
  ["Esc", "close what is open; in a chat, stop the answer"],
  ["Enter", "send a message; in the Inspector, fork at the chosen token"],
  ["Shift Enter", "start a line in a message"],
  ["Ctrl Enter", "save an edited message"],
  ["← → ↑ ↓", "move in a chart, a map or a list of tokens"],
  ["Home End", "the first and the last of them"],
  ["Space", "pause the Engine page, or continue"],
];

export function Shell({ refresh }) {
  const [showsKeys, setShowsKeys] = useState(false);
  useKeys(() => setShowsKeys(true));
  return html`
    <a class="skip" href="#main" onClick=${skip}>To the content</a>
    <nav class="rail" aria-label="Pages">
      ${pages.map((page) => html`<${RailLink} page=${page} />`)}
      <span class="rail-space" />
      <button class="quiet" onClick=${() => setShowsKeys(true)} title="Keys (?)">?</button>
      <button class="quiet" onClick=${nextTheme} title="Theme: ${theme.value}">
        ${{ auto: "◐", dark: "☾", light: "☀" }[theme.value]}
      </button>
    </nav>
    <${Status} />
    <main id="main" tabindex="-1"><${Page} /></main>
    <${Drawer} />
    ${askForKey.value && html`<${KeyDialog} refresh=${refresh} />`}
    ${showsKeys && html`<${KeyList} close=${() => setShowsKeys(false)} />`}
  `;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

function nextTheme() {
  theme.value = THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length];
}

function RailLink({ page }) {
  const isShown = route.value.page === page.id;
  return html`<a href=${hrefOf(page.id)} aria-current=${isShown ? "page" : undefined}>
    ${page.title}
  </a>`;
}

/** `g` and the letter of a page open it; `?` lists the keys. Not while something is typed. */
function useKeys(showKeys) {
  const last = useRef("");
  useEffect(() => {
    const onKey = (event) => {
      const isTyping = event.target.closest?.("input, textarea, select, [contenteditable]");
      if (isTyping || event.ctrlKey || event.metaKey || event.altKey) return;
      const page = last.current === "g" && pages.find(({ key: letter }) => letter === event.key);
      if (page) navigate(page.id);
      else if (event.key === "?") showKeys();
      last.current = event.key;
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
}

function Status() {
  const facts = hello.value;
  if (!facts) {
    const text = problem.value || "Asking the server…";
    return html`<header class="status"><span class="warn" role="status">${text}</span></header>`;
  }
  const { stats } = facts;
  const percent = (blocks) => `${Math.round((100 * blocks) / Math.max(stats.blocks_total, 1))} %`;
  return html`<header class="status" aria-label="Server">
    <${ModelName} name=${facts.model.id} />
    <span class="muted">${facts.model.architecture} · ${weightFormat(facts)} · ${facts.ready.device}</span>
    <span class="status-space" />
    ${problem.value && html`<span class="warn" role="status">${problem.value}</span>`}
    ${!problem.value && html`<span>running <b>${stats.running}</b></span>
      <span>waiting <b>${stats.waiting}</b></span>`}
    ${!problem.value && stats.blocks_total > 0 && html`<span title="Shares of the KV cache's blocks">KV<span class="wide"> cache</span>${" "}
      <b>${percent(stats.blocks_held)}</b><span class="wide"> in use, ${percent(stats.blocks_cached)} kept</span></span>`}
  </header>`;
}

/** The model's name; behind an address of several models, a list that leads to the pages of each. */
function ModelName({ name }) {
  const [others, setOthers] = useState([]);
  const place = BASE.pathname.indexOf("/model/");
  useEffect(() => {
    if (place >= 0) get("/ui/api/models").then(({ data }) => setOthers(data), () => {});
  }, []);
  const roots = others.filter((model) => model.id === model.root);
  if (roots.length < 2) return html`<strong>${name}</strong>`;
  const own = roots.find((model) => BASE.pathname.endsWith(model.pages.replace(/ui\/$/, "")));
  const open = (event) => {
    const { pages: path } = roots.find(({ id }) => id === event.target.value);
    location.href = BASE.pathname.slice(0, place) + path + location.hash;
  };
  return html`<select aria-label="Model" value=${own?.id} onChange=${open}>
    ${roots.map(({ id, loaded }) => html`<option value=${id}>${id}${loaded ? "" : " (not loaded)"}</option>`)}
  </select>`;
}

function Page() {
  const page = pages.find(({ id }) => id === route.value.page);
  const { component, error } = useModule(route.value.page, page?.load);
  useEffect(() => {
    document.title = `${page?.title ?? "Unknown page"} · Penstock`;
  }, [page]);
  if (!page) return html`<p class="empty">There is no page “${route.value.page}”.</p>`;
  if (error) return html`<${NotLoaded} key=${page.id} what="This page" error=${error} atReturn />`;
  if (!component) return html`<p class="empty muted">Loading…</p>`;
  return html`<${Boundary} key=${page.id}><${component} params=${route.value.params} /></${Boundary}>`;
}

/** Shows an error of a page instead of nothing. */
class Boundary extends Component {
  constructor() {
    super();
    this.state = { error: null };
  }

  componentDidCatch(error) {
    console.error(error);
    this.setState({ error });
  }

  render({ children }, { error }) {
    if (!error) return children;
    return html`<p class="empty warn">This page failed: ${error.message}</p>`;
  }
}

function Drawer() {
  const { params } = route.value;
  const load = Object.hasOwn(drawers, params.drawer) ? drawers[params.drawer] : undefined;
  const { component, error } = useModule(params.drawer, load);
  const close = () => {
    const { page, params: now } = route.value;
    navigate(page, { ...now, drawer: "", answer: "", request: "", token: "" });
  };
  if (!load) return null;
  const content = error
    ? html`<${NotLoaded} what="This" error=${error} />`
    : component && html`<${component} params=${params} close=${close} />`;
  return html`<${Sheet} class="drawer" role="dialog" aria-label=${params.drawer} isOpen close=${close}>
    <${Boundary} key=${params.drawer + (params.answer ?? "")}>${content}</${Boundary}>
  </${Sheet}>`;
}

/** A modal dialog. The browser keeps the focus inside and closes it by Escape; so do × and a tap outside. */
function Modal({ label, close, children }) {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  const hide = () => dialog.current.close();
  const tap = (event) => event.target === dialog.current && hide(); // the content is in a box of its own
  return html`<dialog ref=${dialog} aria-label=${label} onClose=${close} onClick=${tap}>
    <div class="dialog"><button class="quiet close" type="button" onClick=${hide}
      aria-label="Close">×</button>${children}</div>
  </dialog>`;
}

function KeyList({ close }) {
  return html`<${Modal} label="Keys" close=${close}>
    <h2>Keys</h2>
    <table class="keys"><tbody>
      ${KEYS.map(([keys, text]) => html`<tr><td><kbd>${keys}</kbd></td><td>${text}</td></tr>`)}
    </tbody></table>
  </${Modal}>`;
}

function KeyDialog({ refresh }) {
  const field = useRef(null);
  const close = () => { askForKey.value = false; };
  const save = () => {
    key.value = field.current.value.trim();
    refresh();
  };
  return html`<${Modal} label="API key" close=${close}>
    <h2>API key</h2>
    <p>This server asks for a key. It is kept until you close this tab.</p>
    ${key.value && html`<p class="warn" role="alert">The server refused this key. Check it for
      missing characters.</p>`}
    <form method="dialog" onSubmit=${save}>
      <input type="password" autocomplete="off" autofocus ref=${field} aria-label="API key" />
      <button class="primary">Use this key</button>
    </form>
  </${Modal}>`;
}
