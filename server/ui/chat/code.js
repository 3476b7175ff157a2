// A block of code: coloured when it is complete, with a button that copies it.

import { html, useEffect, useState } from "../html.js";

const LANGUAGES = {
  bash: "bash", c: "cpp", "c++": "cpp", cpp: "cpp", css: "css", diff: "diff", go: "go",
  html: "xml", java: "java", javascript: "javascript", js: "javascript", json: "json",
  jsx: "javascript", py: "python", python: "python", rs: "rust", rust: "rust", sh: "bash",
  shell: "bash", sql: "sql", ts: "typescript", tsx: "typescript", typescript: "typescript",
  xml: "xml", yaml: "yaml", yml: "yaml",
};
const MOST_COLOURED = 50_000; // characters; longer code stays plain

let highlighter = null;

/** highlight.js with the grammar of a language, loaded when it is first met. */
async function withGrammar(name) {
  highlighter ??= (await import("../vendor/highlight.js")).default;
  if (!highlighter.getLanguage(name)) {
    const grammar = await import(`../vendor/languages/${name}.js`);
    highlighter.registerLanguage(name, grammar.default);
  }
  return highlighter;
}

/** The elements of highlight.js' tree. Its own output would be an HTML string. */
function asElements(node) {
  if (typeof node === "string") return node;
  const content = node.children.map(asElements);
  if (!node.scope) return content;
  return html`<span class=${`hl-${node.scope.split(".", 1)[0]}`}>${content}</span>`;
}

function useColours(text, language, grows) {
  const [coloured, setColoured] = useState(null);
  const name = Object.hasOwn(LANGUAGES, language) ? LANGUAGES[language] : null;
  useEffect(() => {
    if (grows || !name || text.length > MOST_COLOURED) return undefined;
    let isCurrent = true;
    withGrammar(name).then((highlight) => {
      const { _emitter: emitter } = highlight.highlight(text, { language: name });
      if (isCurrent) setColoured({ text, content: asElements(emitter.rootNode) });
    }, console.error);
    return () => { isCurrent = false; };
  }, [text, name, grows]);
  return coloured?.text === text ? coloured.content : text;
}

/** `at` is the place of the code in the source; `grows` says that more of it will come. */
export function Code({ text, language, at, grows = false }) {
  const name = language.trim().split(/\s/, 1)[0].toLowerCase();
  const content = useColours(text, name, grows);
  return html`<${Figure} name=${name || "code"} text=${text}>
    <code data-at=${at ?? undefined}>${content}</code></${Figure}>`;
}

/** The frame of a block of code; its button copies `text`. */
export function Figure({ name, text, children }) {
  return html`<figure class="code">
    <figcaption><span>${name}</span><${Copy} text=${text} /></figcaption>
    <pre tabindex="0">${children}</pre>
  </figure>`;
}

/** A button that copies a text, and says so for a moment. */
export function Copy({ text }) {
  const [isCopied, setCopied] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 1500);
  };
  return html`<button class="quiet" type="button" onClick=${copy}>
    ${isCopied ? "Copied" : "Copy"}</button>`;
}
