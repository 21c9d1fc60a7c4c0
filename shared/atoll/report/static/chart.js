/* A chart of lines with marks, drawn by uPlot; beside it what a canvas cannot tell: a key with values, a readout, a table.

   chart.set({ lines: [{ name, place, x, y }], marks: [{ x, group, who, text }], span: [from, to] })

   Lines need not share their places on the x axis. A line's null is a gap. Arrow keys move the cursor, Home and End jump. */

import uPlot from "./vendor/uPlot.esm.js";
import { empty, keyed, make, mark, say, swatch, Table } from "./dom.js";
import { clock, NONE } from "./format.js";
import { GROUPS, onTheme, resolved, style } from "./palette.js";

const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800, 2592000];
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 100000, 1000000];
const TALL = 4; // a value that is so many times as high as nine in ten others is cut off
const NEAR = 7; // pixels between the cursor and a mark that it points at
const ROWS = 24;
const PHONE = 640;

export class Chart {
  /* `scale` makes the words of a tick from its value and the step between ticks; `unit` stands beside the axis. The axis of y
     reaches from 0 (`zero`) to at least `least`, or always to `top`. `whole`: only whole numbers, held until the next one.
     `tall`: a few values far above all others are cut off, and told, so that the others are still seen. */
  constructor(host, { name, value, scale = value, unit = "", waits, zero = false, top = null, least = 0, whole = false, tall = false, x = clock, times = true, sync = "time" }) {
    Object.assign(this, { host, name, value, scale, unit, waits, zero, top, least, whole, tall, x, times, sync });
    this.hidden = new Set();
    this.lines = [];
    this.marks = [];
    this.plot = make("div", { class: "plot", tabindex: 0, role: "img" });
    this.readout = make("p", { class: "readout" });
    this.note = make("p", { class: "note" });
    this.keys = make("ul", { class: "keys" });
    const details = make("details", {}, make("summary", {}, "as a table"));
    this.table = null;
    details.addEventListener("toggle", () => this.#tell());
    this.details = details;
    host.append(this.plot, this.readout, this.note, this.keys, details);
    this.plot.addEventListener("keydown", (event) => this.#onKey(event));
    this.plot.addEventListener("blur", () => this.u?.setCursor({ left: -10, top: -10 }));
    new ResizeObserver(() => this.#fit()).observe(this.plot);
    onTheme(() => this.#rebuild());
  }

  set({ lines, marks = [], span = null }) {
    const before = this.#shape();
    this.lines = lines;
    this.marks = marks;
    this.span = span;
    const nothing = !lines.some((line) => line.y.some((value) => value !== null));
    if (empty(this.host, nothing ? this.waits : null)) { this.#drop(); return; }
    this.#bound();
    this.data = uPlot.join(lines.map((line) => [line.x, line.y]), lines.map((line) => line.y.map(() => 2)));
    if (this.u && before === this.#shape()) this.u.setData(this.data);
    else this.#rebuild();
    this.#showKeys();
    this.#tell();
    mark(this.plot, "aria-label", this.#words());
  }

  /* What the axis of x counts has changed: time, tokens. */
  count({ x, times }) { Object.assign(this, { x, times }); this.#drop(); }

  #shape() { return JSON.stringify(this.lines.map((line) => [line.name, line.place])); }

  #drop() { this.u?.destroy(); this.u = null; }

  #rebuild() {
    this.#drop();
    if (!this.data || !this.lines.length || this.plot.hidden) return;
    const dim = resolved("var(--dim)"), grid = resolved("var(--grid)");
    const font = "12px " + getComputedStyle(document.body).fontFamily;
    const axis = { stroke: dim, font, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 4 } };
    const series = this.lines.map((line) => {
      const look = style(line.place);
      const stroke = resolved(look.colour);
      const few = line.y.filter((value) => value !== null).length < 40;
      return { label: line.name, stroke, paths: this.whole ? uPlot.paths.stepped({ align: 1 }) : undefined, width: line.width ?? 1.75, dash: look.dash ?? undefined, spanGaps: line.spans ?? true,
        show: !this.hidden.has(line.name), points: { show: few, size: 5, fill: stroke }, alpha: line.alpha ?? 1 };
    });
    this.u = new uPlot({
      width: Math.max(120, this.plot.clientWidth), height: this.plot.clientHeight,
      legend: { show: false },
      padding: [14, 8, 0, 0],
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 }, sync: this.sync ? { key: this.sync } : undefined },
      scales: { x: { time: false, range: (_, low, high) => this.span ?? (low === high ? [low - 1, high + 1] : [low, high]) },
        y: { range: (_, low, high) => this.#range(low, high) } },
      axes: [
        { ...axis, size: 26, space: this.plot.clientWidth < PHONE ? 60 : 80, incrs: this.times ? TIMES : undefined, values: (_, places) => places.map(this.x) },
        { ...axis, size: (u, words) => this.#width(u, words), gap: 6, incrs: this.whole ? WHOLE : undefined, space: 34,
          label: this.unit || undefined, labelSize: 18, labelGap: 2, labelFont: font, values: (_, places, __, ___, step) => places.map((each) => this.scale(each, step)) },
      ],
      series: [{}, ...series],
      hooks: { draw: [(u) => this.#drawMarks(u)], setCursor: [(u) => this.#point(u)] },
    }, this.data, this.plot);
    mark(this.u.root, "aria-hidden", "true");
  }

  #range(low, high) {
    if (low === null || high === null) return [0, 1];
    const air = 0.06 * (high - low) || Math.abs(high) * 0.1 || 1;
    if (!this.zero) return [low - air, this.top ?? high + air];
    return [0, this.top ?? Math.max(this.least, 1.06 * Math.min(high, this.cut))];
  }

  /* Where the axis ends: above the values that count, if a few others are many times as high. */
  #bound() {
    this.cut = Infinity;
    const known = this.tall ? this.lines.flatMap((line) => line.y.filter((value) => value !== null)).sort((one, other) => one - other) : [];
    const usual = known[Math.floor(0.9 * (known.length - 1))] ?? 0, most = known.at(-1) ?? 0;
    if (known.length >= 8 && most > TALL * Math.max(usual, this.least)) this.cut = 2 * Math.max(usual, this.least / 2);
    const beyond = known.filter((value) => value > this.cut).length;
    say(this.note, beyond ? `${beyond} of ${known.length} values are above this axis, the highest ${this.value(most)}.` : "");
  }

  /* The longest label and its distance from the axis. */
  #width(u, words) {
    const longest = (words ?? []).reduce((most, word) => (word && word.length > most.length ? word : most), "");
    if (!longest) return 40;
    u.ctx.save();
    u.ctx.font = u.axes[1].font[0];
    const width = u.ctx.measureText(longest).width / devicePixelRatio;
    u.ctx.restore();
    return Math.ceil(width) + 14;
  }

  #fit() {
    const [width, height] = [this.plot.clientWidth, this.plot.clientHeight];
    if (!width) return;
    if (this.u) { if (this.u.width !== width || this.u.height !== height) this.u.setSize({ width, height }); } else this.#rebuild();
  }

  #drawMarks(u) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, 0, bbox.width, bbox.top + bbox.height);
    ctx.clip();
    ctx.textAlign = "center";
    ctx.font = `${11 * devicePixelRatio}px sans-serif`;
    ctx.lineWidth = devicePixelRatio;
    for (const each of this.marks) {
      if (each.x < u.scales.x.min || each.x > u.scales.x.max) continue;
      const x = Math.round(u.valToPos(each.x, "x", true));
      ctx.strokeStyle = ctx.fillStyle = resolved(GROUPS[each.group].colour);
      ctx.globalAlpha = each.group === "change" ? 0.45 : 0.9;
      ctx.setLineDash(each.group === "fault" ? [] : each.group === "recovery" ? [4 * devicePixelRatio, 3 * devicePixelRatio] : [devicePixelRatio, 4 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.globalAlpha = 1;
      ctx.fillText(GROUPS[each.group].sign, x, bbox.top - 2 * devicePixelRatio);
    }
    ctx.restore();
  }

  #point(u) {
    const { left, idx } = u.cursor;
    if (left < 0 || idx === null || idx === undefined) { say(this.readout, ""); return; }
    const near = this.marks.filter((each) => Math.abs(u.valToPos(each.x, "x") - left) < NEAR);
    const told = near.map((each) => `${GROUPS[each.group].sign} ${this.x(each.x)} ${each.who} ${each.text}`);
    const values = this.lines.map((line, number) => (this.hidden.has(line.name) ? null : [line.name, this.#nearest(number, idx)]));
    const shown = values.filter((pair) => pair && pair[1] !== null).slice(0, 12).map(([name, value]) => `${name} ${this.value(value)}`);
    say(this.readout, [...told, `${this.x(this.data[0][idx])} · ${shown.join(" · ")}`].join("  "));
  }

  #nearest(line, index) {
    const column = this.data[line + 1];
    for (let step = 0; step < column.length; step++) {
      for (const place of [index - step, index + step]) {
        if (column[place] !== null && column[place] !== undefined) return column[place];
      }
    }
    return null;
  }

  #onKey(event) {
    const places = this.data?.[0];
    if (!this.u || !places?.length) return;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
    let index = this.u.cursor.idx ?? places.length - 1;
    if (event.key in moves) index += moves[event.key];
    else if (event.key === "Home") index = 0;
    else if (event.key === "End") index = places.length - 1;
    else return;
    event.preventDefault();
    index = Math.max(0, Math.min(places.length - 1, index));
    mark(this.readout, "aria-live", "polite");
    this.u.setCursor({ left: this.u.valToPos(places[index], "x"), top: 10 });
  }

  #showKeys() {
    const groups = [...new Set(this.marks.map((each) => each.group))];
    const entries = [...this.lines.map((line) => line.name), ...groups.map((group) => `:${group}`)];
    keyed(this.keys, entries, (entry) => this.#key(entry), (item, entry) => {
      const line = this.lines.find((each) => each.name === entry);
      if (!line) return;
      say(item.querySelector(".now"), this.value(line.y.findLast((value) => value !== null) ?? null));
      const drawn = JSON.stringify(line.place);
      if (item.drawn !== drawn) { item.drawn = drawn; item.querySelector("svg").replaceWith(swatch(style(line.place))); }
    });
  }

  #key(entry) {
    if (entry.startsWith(":")) {
      const group = GROUPS[entry.slice(1)];
      return make("li", {}, swatch({ colour: group.colour, shape: group.sign }), group.word);
    }
    const button = make("button", { type: "button", "aria-pressed": "true" }, swatch({ colour: "currentColor" }), make("span", {}, entry), " ", make("span", { class: "now" }));
    button.addEventListener("click", () => {
      const off = !this.hidden.delete(entry);
      if (off) this.hidden.add(entry);
      mark(button, "aria-pressed", String(!off));
      this.u?.setSeries(1 + this.lines.findIndex((line) => line.name === entry), { show: !off });
    });
    return make("li", {}, button);
  }

  #words() {
    const told = this.lines.slice(0, 8).map((line) => {
      const known = line.y.filter((value) => value !== null);
      return known.length ? `${line.name} from ${this.value(known[0])} to ${this.value(known.at(-1))}` : `${line.name} ${NONE}`;
    });
    const faults = this.marks.filter((each) => each.group === "fault").length;
    return `${this.name}: ${told.join(", ")}${faults ? `; ${faults} faults are marked` : ""}. Arrow keys read values.`;
  }

  #tell() {
    if (!this.details.open || !this.data) return;
    const shape = this.#shape();
    if (this.told !== shape) {
      this.told = shape;
      this.table?.box.remove();
      this.table = new Table(this.details, `${this.name}, as a table`, [{ name: this.times ? "time" : "tokens" }, ...this.lines.map((line) => ({ name: line.name, number: true }))]);
      this.table.box.classList.add("tall");
    }
    const all = this.data[0].length, step = Math.max(1, Math.ceil(all / ROWS));
    const rows = [];
    for (let index = all - 1; index >= 0; index -= step) {
      rows.push([this.x(this.data[0][index]), ...this.lines.map((_, number) => this.value(this.#nearest(number, index)))]);
    }
    this.table.fill(rows);
  }
}
