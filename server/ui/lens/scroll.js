// A box that scrolls sideways, whose edges show that there is more.
import { html, useLayoutEffect, useRef, useState } from "../html.js";

/**
 * Scrolls its children. A shadow at an edge says that something is hidden behind it. With `toward`,
 * a CSS selector, it opens with that element at the left edge, behind sticky cells.
 */
export function Scroll({ children, toward, moved, className = "lens-scroll", ...rest }) {
  const box = useRef(null);
  const [more, setMore] = useState("");
  const [head, setHead] = useState(0);
  const look = () => {
    const { scrollLeft, scrollWidth, clientWidth } = box.current;
    setHead(headOf(box.current));
    const left = scrollLeft > 1 ? " lens-more-left" : "";
    setMore(left + (scrollLeft + clientWidth < scrollWidth - 1 ? " lens-more-right" : ""));
  };
  useLayoutEffect(() => {
    const target = toward && box.current.querySelector(toward);
    if (target) scrollTo(box.current, target);
    look();
  }, [toward, moved]);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(look);
    observer.observe(box.current);
    if (box.current.firstElementChild) observer.observe(box.current.firstElementChild);
    return () => observer.disconnect();
  }, []);
  return html`<div class=${`lens-edges${more}`} style=${{ "--lens-head": `${head}px` }}>
    <div class=${className} ref=${box} onScroll=${look} ...${rest}>${children}</div>
  </div>`;
}

/** Scroll `box` alone, so that the element is right of the sticky first column. */
function scrollTo(box, element) {
  const distance = element.getBoundingClientRect().left - box.getBoundingClientRect().left;
  box.scrollLeft += distance - headOf(box);
}

/** The width of the column that stays at the left edge. */
const headOf = (box) => box.querySelector("th[scope=row]")?.offsetWidth ?? 0;
