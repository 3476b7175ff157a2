// A sheet: a panel beside the page that lies over it in a narrow window. ×, Esc and a tap outside
// close it. Drawers, the list of chats and the settings of a chat are sheets.
import { html, useLayoutEffect, useRef } from "./html.js";

/**
 * `as` is the element's name. A sheet with `isOpen` lies over the page where the style sheet says so;
 * `takesFocus` moves the focus into it, and back when it closes.
 */
export function Sheet({ as = "div", isOpen, close, takesFocus = true, class: name, children, ...rest }) {
  const panel = useRef(null);
  const closing = useRef(close);
  closing.current = close;
  useLayoutEffect(() => {
    if (!isOpen) return undefined;
    const before = document.activeElement;
    if (takesFocus) panel.current.focus();
    const onKey = (event) => {
      if (event.key !== "Escape" || event.defaultPrevented) return;
      if (document.querySelector("dialog[open]")) return; // it lies above
      event.preventDefault();
      closing.current();
    };
    addEventListener("keydown", onKey);
    return () => {
      removeEventListener("keydown", onKey);
      if (takesFocus) before?.focus?.();
    };
  }, [isOpen]);
  return html`
    ${isOpen && html`<div class="veil ${name}-veil" onClick=${close} />`}
    <${as} ...${rest} class=${`sheet ${name}`} data-open=${isOpen ? "true" : undefined} tabindex="-1"
      ref=${panel}>
      <button class="quiet close" type="button" onClick=${close} aria-label="Close">×</button>
      ${children}
    </${as}>`;
}

/** Whether a sheet or a dialog lies over the page, which Escape closes first. */
export function isCovered() {
  const veils = [...document.querySelectorAll(".veil")];
  return Boolean(document.querySelector("dialog[open], .drawer") ||
    veils.some((veil) => getComputedStyle(veil).display !== "none"));
}
