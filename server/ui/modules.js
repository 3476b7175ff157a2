// Modules that are loaded when they are first shown.
import { html, useEffect, useRef, useState } from "./html.js";
import { problem } from "./store.js";

/** Load a module once; return `{component, error}`. */
export function useModule(id, load) {
  const [found, setFound] = useState({ id: null });
  useEffect(() => {
    let isCurrent = true;
    load?.().then(
      (module) => isCurrent && setFound({ id, component: module.default }),
      (error) => isCurrent && setFound({ id, error }),
    );
    return () => { isCurrent = false; };
  }, [id]);
  return found.id === id ? found : {};
}

/**
 * Says that a module did not load. Browsers keep a failed import, and those of its own imports, as
 * long as the document lives: only a new document loads them. With `atReturn` that happens when a
 * server that was lost answers again.
 */
export function NotLoaded({ what, error, atReturn = false }) {
  const wasLost = useRef(false);
  const isLost = Boolean(problem.value);
  useEffect(() => {
    if (atReturn && wasLost.current && !isLost) location.reload();
    wasLost.current = isLost;
  }, [isLost]);
  return html`<div class="empty">
    <p class="warn" role="alert">${what} could not be loaded: ${error.message}</p>
    <button type="button" onClick=${() => location.reload()}>Load again</button>
  </div>`;
}
