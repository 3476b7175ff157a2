// Canvases: sharp on each screen, in the colours of the theme, drawn again when these change.
import { useEffect, useLayoutEffect, useRef, useState } from "../html.js";
import { theme } from "../store.js";

const NAMES = ["ground", "panel", "raised", "free", "line", "text", "muted", "accent", "warn"];
const OWNERS = 8;

/** Return the colours of the present theme; `owner(id)` is that of a request. */
export function readColors() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  const colors = Object.fromEntries(NAMES.map((name) => [name, read(name)]));
  const owners = Array.from({ length: OWNERS }, (_, place) => read(`owner-${place + 1}`));
  return { ...colors, owner: (id) => owners[(id - 1) % OWNERS], mono: read("mono") };
}

/** The CSS pixels that a canvas may be wide. */
export const widthOf = (canvas) => Math.floor(canvas.parentElement.clientWidth);

/** Clear a canvas and make it as wide as its parent and `height` CSS pixels high. */
export function prepare(canvas, height) {
  const scale = Math.max(1, Math.round(devicePixelRatio));
  const width = widthOf(canvas);
  if (canvas.width !== width * scale) canvas.width = width * scale;
  if (canvas.height !== height * scale) canvas.height = height * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width };
}

/**
 * Draw by `paint(canvas)`, which returns the layout, whenever `inputs` change, or the width or the
 * colours do. Return [ref of the canvas, the last layout or null].
 */
export function useCanvas(paint, inputs) {
  const canvas = useRef(null);
  const latest = useRef(paint);
  latest.current = paint;
  const [layout, setLayout] = useState(null);
  const redraw = () => canvas.current && setLayout(latest.current(canvas.current));
  useLayoutEffect(redraw, [...inputs, theme.value]);
  useEffect(() => {
    const size = new ResizeObserver(redraw);
    size.observe(canvas.current.parentElement);
    const scheme = matchMedia("(prefers-color-scheme: light)");
    scheme.addEventListener("change", redraw);
    return () => {
      size.disconnect();
      scheme.removeEventListener("change", redraw);
    };
  }, []);
  return [canvas, layout];
}
