// Formulas in LaTeX: how marked finds them, and how they become MathML elements.

import { h, html, useEffect, useState } from "../html.js";

// A dollar opens before a character that is no space, and closes behind one, with no digit after it:
// "costs $5 and $7" has no formula.
const INLINE = [
  { pattern: /^\$\$([^$]+?)\$\$/, isBlock: true },
  { pattern: /^\$(?![\s$])((?:\\[^]|[^\\$\n])*?(?:\\[^\s]|[^\\$\s]))\$(?!\d)/, isBlock: false },
  { pattern: /^\\\(([^]+?)\\\)/, isBlock: false },
  { pattern: /^\\\[([^]+?)\\\]/, isBlock: true },
];
const BLOCK = /^ {0,3}(?:\$\$([^$]+?)\$\$|\\\[([^]+?)\\\])[ \t]*(?:\n+|$)/;
const LIMITS = { maxSize: [20, 40], maxExpand: 500 }; // em; of macros

/** Extensions for marked. Their tokens are `{type: "math", raw, text, isBlock}`. */
export const mathExtensions = [
  {
    name: "math",
    level: "block",
    start: (source) => source.match(/\n {0,3}(?:\$\$|\\\[)/)?.index,
    tokenizer(source) {
      const found = BLOCK.exec(source);
      if (!found) return undefined;
      return { type: "math", raw: found[0], text: found[1] ?? found[2], isBlock: true };
    },
  },
  {
    name: "inlineMath",
    level: "inline",
    start: (source) => source.match(/\$|\\[([]/)?.index,
    tokenizer(source) {
      for (const { pattern, isBlock } of INLINE) {
        const found = pattern.exec(source);
        if (found) return { type: "math", raw: found[0], text: found[1], isBlock };
      }
      return undefined;
    },
  },
];

let library = null;

/** temml, loaded when the first formula is met. */
async function temml() {
  library ??= (await import("../vendor/temml.js")).default;
  return library;
}

/** The elements of temml's tree. Its own output would be an HTML string, or nodes of the page. */
function asElements(node) {
  if (node.text !== undefined) return node.text;
  const children = (node.children ?? []).map(asElements);
  if (!node.type) return children; // a fragment
  if (!/^m[a-z]+$|^semantics$/.test(node.type)) return children; // no links, images or HTML
  const { href: _, id: __, ...attributes } = node.attributes;
  return h(node.type, { ...attributes, class: node.classes.join(" "), style: node.style }, children);
}

/** A formula; its source is shown until the library is there, and if it is not valid. */
export function Formula({ source, text, isBlock }) {
  const [shown, setShown] = useState(null);
  useEffect(() => {
    let isCurrent = true;
    temml().then((found) => {
      const options = { displayMode: isBlock, throwOnError: true, ...LIMITS };
      const content = asElements(found.__renderToMathMLTree(text, options));
      if (isCurrent) setShown({ text, content });
    }).catch((error) => isCurrent && setShown({ text, problem: error.message }));
    return () => { isCurrent = false; };
  }, [text, isBlock]);
  if (shown?.text !== text || shown.problem) {
    return html`<code class="md-tex" title=${shown?.problem}>${source.trim()}</code>`;
  }
  return html`<span class=${isBlock ? "md-math scroll" : "md-math"}>${shown.content}</span>`;
}
