// Markdown as elements, never as an HTML string: tags in a text are shown as text.
//
// `data-at` of an element is the place in the source where its text begins. Its text is the source
// from there on, character by character, so a place in the page leads back to a token.

import { Component, html, useMemo, useRef } from "../html.js";
import { Marked } from "../vendor/marked.js";
import { Code } from "./code.js";
import { Formula, mathExtensions } from "./math.js";

const marked = new Marked({ extensions: mathExtensions });

const ENTITIES = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", reg: "®",
  hellip: "…", mdash: "—", ndash: "–", times: "×", deg: "°", euro: "€", rarr: "→", larr: "←",
};
const ENTITY = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-z]{2,8}));/g;
const PLAIN = { strong: "strong", em: "em", del: "del", blockquote: "blockquote" };

/** The character that an entity stands for, or null if it is none that is known. */
function characterOf([, decimal, hexadecimal, name]) {
  if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : null;
  const code = decimal ? Number(decimal) : Number.parseInt(hexadecimal, 16);
  return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : null;
}

/** Makes elements of one text. Texts are looked up from `place` on, in their order. */
class Builder {
  constructor(source, base) {
    this.source = source;
    this.base = base;
    this.place = 0;
  }

  /** Where `text` begins in the whole source, or null; later texts are behind it. */
  find(text) {
    const found = this.source.indexOf(text, this.place);
    if (found < 0) return null;
    this.place = found + text.length;
    return this.base + found;
  }

  leaf(text) {
    if (!text) return null;
    const at = this.find(text);
    return html`<span data-at=${at ?? undefined}>${text}</span>`;
  }

  /** A text with entities, whose lines may have been indented in the source. */
  text(text) {
    const found = [];
    let last = 0;
    for (const match of text.matchAll(ENTITY)) {
      const character = characterOf(match);
      if (character === null) continue;
      found.push(this.lines(text.slice(last, match.index)));
      this.find(match[0]);
      found.push(character);
      last = match.index + match[0].length;
    }
    return [...found, this.lines(text.slice(last))];
  }

  lines(text) {
    if (!text.includes("\n")) return this.leaf(text);
    return text.split("\n").map((line, index) => [index ? "\n" : null, this.leaf(line)]);
  }

  all(tokens) {
    return tokens.map((token) => this.one(token));
  }

  one(token) {
    const { type } = token;
    if (type === "space" || type === "def") return null;
    if (type === "hr") return html`<hr />`;
    if (type === "br") return html`<br />`;
    if (type === "code") return this.code(token);
    if (type === "codespan") return html`<code>${this.leaf(token.text)}</code>`;
    if (type === "checkbox") {
      return html`<input type="checkbox" disabled checked=${token.checked} aria-label="task" />`;
    }
    if (type === "heading") {
      return html`<p class="md-h" role="heading" aria-level=${Math.min(token.depth + 2, 6)}
        data-depth=${token.depth}>${this.all(token.tokens)}</p>`;
    }
    if (type === "paragraph") return html`<p>${this.all(token.tokens)}</p>`;
    if (type === "list") return this.list(token);
    if (type === "table") return this.table(token);
    if (type === "link" || type === "image") return this.link(token);
    if (type === "math") return this.math(token);
    if (PLAIN[type]) return html`<${PLAIN[type]}>${this.all(token.tokens)}</${PLAIN[type]}>`;
    if (type === "text" && token.tokens) return this.all(token.tokens);
    return this.text(type === "escape" ? token.text : token.raw); // text, escape, html
  }

  code(token) {
    const fence = /^[ \t>]*(`{3,}|~{3,})[^\n]*\n?/.exec(token.raw);
    if (fence) this.find(fence[0].trim());
    const at = this.find(token.text);
    return html`<${Code} text=${token.text} language=${token.lang ?? ""} at=${at} />`;
  }

  math({ raw, text, isBlock }) {
    this.find(raw);
    return html`<${Formula} source=${raw} text=${text} isBlock=${isBlock} />`;
  }

  list(token) {
    const items = token.items.map((item) => html`<li>${this.all(item.tokens)}</li>`);
    if (!token.ordered) return html`<ul>${items}</ul>`;
    return html`<ol start=${token.start || 1}>${items}</ol>`;
  }

  table(token) {
    const cell = (tag) => ({ tokens, align }) => {
      return html`<${tag} class=${align ? `md-${align}` : ""}>${this.all(tokens)}</${tag}>`;
    };
    const head = token.header.map(cell("th"));
    const rows = token.rows.map((row) => html`<tr>${row.map(cell("td"))}</tr>`);
    return html`<div class="scroll" tabindex="0" role="region" aria-label="Table">
      <table><thead><tr>${head}</tr></thead><tbody>${rows}</tbody></table></div>`;
  }

  /** A link to http(s), which is never loaded by itself. Other links are shown as they are written. */
  link(token) {
    if (!/^https?:\/\//i.test(token.href)) return this.text(token.raw);
    const content = token.type === "image"
      ? ["image: ", this.leaf(token.text) ?? token.href]
      : this.all(token.tokens);
    return html`<a href=${token.href} target="_blank" rel="noopener noreferrer nofollow">
      ${content}</a>`;
  }
}

const OPEN_FENCE = /^ {0,3}(`{3,}|~{3,})([^\n`]*)\n/;

/** Whether a text is a fence of code that has not been closed yet. */
function openFence(text) {
  const found = OPEN_FENCE.exec(text);
  if (!found) return null;
  const [start, marks, language] = found;
  const close = new RegExp(`^ {0,3}${marks[0]}{${marks.length},}[ \\t]*$`, "m");
  if (close.test(text.slice(start.length))) return null;
  return { code: text.slice(start.length), language: language.trim(), start: start.length };
}

const GROUP = 32; // blocks that are compared as one when a text has grown

/**
 * The elements of a text that may grow. Blocks that cannot change any more are made once; only the
 * last block is read again when text is added.
 */
class Blocks {
  constructor() {
    this.text = "";
    this.groups = []; // of blocks that are done; all but the last one are full
    this.length = 0; // of the text in `groups`
  }

  elements(text, grows) {
    if (!text.startsWith(this.text.slice(0, this.length))) Object.assign(this, new Blocks());
    this.text = text;
    const fence = openFence(text.slice(this.length));
    if (fence) {
      const { code, language, start } = fence;
      const at = this.length + start;
      return this.with(html`<${Code} text=${code} language=${language} at=${at} grows=${grows} />`);
    }
    const tokens = marked.lexer(text.slice(this.length));
    let last = tokens.length - 1;
    while (last > 0 && tokens[last].type === "space") last -= 1;
    for (const token of tokens.slice(0, Math.max(last, 0))) this.finish(token);
    if (last < 0) return this.with(null);
    return this.with(new Builder(tokens[last].raw, this.length).one(tokens[last]));
  }

  /** Add a block that is complete. Groups are replaced, not changed, so that changes are seen. */
  finish(token) {
    const made = new Builder(token.raw, this.length).one(token);
    if (made) {
      const last = this.groups.at(-1);
      const block = wrapped(made, this.length);
      if (last && last.length < GROUP) this.groups[this.groups.length - 1] = [...last, block];
      else this.groups.push([block]);
    }
    this.length += token.raw.length;
  }

  /** All that is done, and the block that may still change. */
  with(content) {
    const groups = this.groups.map((blocks, place) => {
      return html`<${Group} key=${place} blocks=${blocks} />`;
    });
    return [groups, content && wrapped(content, this.length)];
  }
}

const wrapped = (content, key) => html`<div class="md-block" key=${key}>${content}</div>`;

/** Blocks that are drawn again only if the list of them is another one. */
class Group extends Component {
  shouldComponentUpdate({ blocks }) {
    return blocks !== this.props.blocks;
  }

  render({ blocks }) {
    return blocks;
  }
}

/** A text in markdown. With `grows` it is one that is being written. */
export function Markdown({ text, grows = false }) {
  const blocks = useRef(null);
  blocks.current ??= new Blocks();
  const content = useMemo(() => blocks.current.elements(text, grows), [text, grows]);
  return html`<div class="md">${content}</div>`;
}
