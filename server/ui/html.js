// What pages import: preact, hooks, signals and htm, so that no page knows the vendored paths.
import { Component, Fragment, createRef, h, render } from "./vendor/preact.js";
import {
  useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState,
} from "./vendor/hooks.js";
import {
  batch, computed, effect, signal, useComputed, useSignal, useSignalEffect,
} from "./vendor/signals.js";
import htm from "./vendor/htm.js";

export const html = htm.bind(h);
export {
  Component, Fragment, batch, computed, createRef, effect, h, render, signal, useCallback,
  useComputed, useEffect, useLayoutEffect, useMemo, useRef, useSignal, useSignalEffect, useState,
};

/** Whether the window is as narrow as a phone's; the style sheets have the same limit. */
export function useNarrow() {
  const query = useMemo(() => matchMedia("(max-width: 700px)"), []);
  const [isNarrow, setNarrow] = useState(query.matches);
  useEffect(() => {
    const update = () => setNarrow(query.matches);
    query.addEventListener("change", update);
    return () => query.removeEventListener("change", update);
  }, [query]);
  return isNarrow;
}

/** Load a style sheet once; `path` is relative to /ui/. Rules stay when the page is left. */
export function useStyle(path) {
  useLayoutEffect(() => {
    const href = new URL(path, import.meta.url).href;
    if ([...document.styleSheets].some((sheet) => sheet.href === href)) return;
    if (document.querySelector(`link[href="${CSS.escape(href)}"]`)) return;
    const link = document.createElement("link");
    link.rel = "stylesheet";
    link.href = href;
    link.onerror = () => link.remove(); // the next page that needs it asks again
    document.head.append(link);
  }, [path]);
}
