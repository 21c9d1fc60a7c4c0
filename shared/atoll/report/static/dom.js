/* Elements made and kept: text is always text, and what has not changed is not touched, so focus and a reader's place stay. */

const SVG = "http://www.w3.org/2000/svg";

export function make(tag, attributes = {}, ...children) {
  return dressed(document.createElement(tag), attributes, children);
}

export function draw(tag, attributes = {}, ...children) {
  return dressed(document.createElementNS(SVG, tag), attributes, children);
}

function dressed(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function mark(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value === true ? "" : value);
}

/* One child of each kind by key: made at first, updated later, removed when its key is gone, in the order of the keys. */
export function keyed(parent, keys, create, update) {
  const there = parent.kept ?? (parent.kept = new Map());
  const wanted = new Set(keys);
  for (const [key, child] of there) {
    if (!wanted.has(key)) { child.remove(); there.delete(key); }
  }
  keys.forEach((key, index) => {
    let child = there.get(key);
    if (!child) { child = create(key, index); there.set(key, child); }
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
    update(child, key, index);
  });
}

/* What a panel says while there is nothing to show; null takes the words away. */
export function empty(parent, text) {
  let words = parent.words;
  if (text === null) { words?.remove(); parent.words = null; } else {
    if (!words) { words = parent.words = make("p", { class: "empty" }); parent.prepend(words); }
    say(words, text);
  }
  for (const child of parent.children) if (child !== words) child.hidden = text !== null;
  return text !== null;
}

/* A table whose rows are arrays of cells: a text, or {text, sign, kind, meter, code}. The first cell names its row. */
export class Table {
  constructor(parent, caption, columns) {
    this.columns = columns;
    this.body = make("tbody");
    const heads = columns.map((column) => make("th", { scope: "col", class: column.number ? "number" : null }, column.name));
    const table = make("table", {}, make("caption", { class: "unseen" }, caption), make("thead", {}, make("tr", {}, ...heads)), this.body);
    this.box = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, table);
    parent.append(this.box);
  }

  fill(rows, keyOf = (row, index) => index) {
    const byKey = new Map(rows.map((row, index) => [keyOf(row, index), row]));
    keyed(this.body, [...byKey.keys()], () => this.#row(), (tr, key) => this.#update(tr, byKey.get(key)));
  }

  #row() {
    return make("tr", {}, ...this.columns.map((column, index) =>
      make(index ? "td" : "th", { scope: index ? null : "row", class: column.number ? "number" : column.text ? "text" : null })));
  }

  #update(tr, row) {
    mark(tr, "class", row.total ? "total" : null);
    row.forEach((given, index) => {
      const cell = tr.children[index];
      const told = given !== null && typeof given === "object" ? given : { text: given };
      const shown = JSON.stringify(told);
      if (cell.shown === shown) return;
      cell.shown = shown;
      cell.replaceChildren();
      if (told.sign) cell.append(make("span", { class: `sign ${told.kind ?? ""}`, "aria-hidden": "true" }, told.sign));
      if (told.meter) cell.append(meterOf(told.meter));
      else if (told.code) cell.append(make("code", { class: "command" }, told.code));
      else cell.append(told.text ?? "");
    });
  }
}

function meterOf(parts) {
  const meter = make("span", { class: "meter", "aria-hidden": "true" });
  for (const [part, colour] of parts) {
    const piece = make("i");
    piece.style.width = `${100 * part}%`;
    piece.style.background = colour;
    meter.append(piece);
  }
  return meter;
}

/* A key: what each colour, dash and shape stands for. */
export function keys(list, entries) {
  keyed(list, entries.map((entry) => entry.name), (name, index) => {
    const entry = entries[index];
    return make("li", {}, swatch(entry), make("span", {}, name), make("span", { class: "now" }));
  }, (item, _, index) => say(item.lastChild, entries[index].now ?? ""));
}

export function swatch({ colour, dash, shape, filled }) {
  const svg = draw("svg", { width: 18, height: 12, viewBox: "0 0 18 12", "aria-hidden": "true" });
  if (shape) svg.append(draw("text", { x: 9, y: 11, "text-anchor": "middle", "font-size": 12, fill: colour }, shape));
  else if (filled) svg.append(draw("rect", { x: 2, y: 0, width: 12, height: 12, rx: 2, fill: colour }));
  else svg.append(draw("line", { x1: 0, y1: 6, x2: 18, y2: 6, stroke: colour, "stroke-width": 2.5, "stroke-dasharray": dash ? dash.join(" ") : null }));
  return svg;
}
