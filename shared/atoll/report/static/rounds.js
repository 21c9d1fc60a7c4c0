/* The newest rounds, a lane for each fragment: from the call to the commit, with quorum and grace. */

import { draw, empty, keys, make, mark, say, Table } from "./dom.js";
import { clock, fine, seconds } from "./format.js";
import { GROUPS, onTheme, PHASES } from "./palette.js";

const LEFT = 44, RIGHT = 10, TOP = 20, BOTTOM = 22;
const PER_LANE = 6; // rounds of each fragment that a window shows, if there are as many
const ROWS = 40;
const TICKS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 14400];

export class Rounds {
  constructor(host) {
    this.host = host;
    this.svg = draw("svg", { class: "lanes", tabindex: 0, role: "img" });
    this.readout = make("p", { class: "readout" });
    this.list = make("ul", { class: "keys" });
    this.details = make("details", {}, make("summary", {}, "as a table"));
    host.append(this.svg, this.readout, this.list, this.details);
    keys(this.list, [...PHASES.map((phase) => ({ ...phase, filled: true })), ...["fault", "recovery"].map((group) => ({ name: group, colour: GROUPS[group].colour, shape: GROUPS[group].sign }))]);
    this.table = new Table(this.details, "the newest rounds", ["fragment", "version", "committed at", "merged", ...PHASES.map((phase) => phase.name), "ended because"].map((name, index) => ({ name, number: index > 1 && index < 9, text: index === 9 })));
    this.table.box.classList.add("tall");
    this.svg.addEventListener("keydown", (event) => this.#onKey(event));
    this.svg.addEventListener("pointermove", (event) => this.#onPointer(event));
    this.details.addEventListener("toggle", () => this.#tell());
    new ResizeObserver(() => this.#paint()).observe(host);
    onTheme(() => this.#paint());
    this.rounds = [];
  }

  set(state) {
    const lanes = state.map.rows.map((row) => row.fragment);
    const newest = state.rounds.at(-1);
    const shape = JSON.stringify([lanes, newest?.fragment, newest?.version, state.rounds.length, state.marks.length]);
    empty(this.host, state.rounds.length ? null : `No round has ended yet. A round ends once ${state.quorum === 1 ? "one learner has" : `${state.quorum} learners have`} answered its call; the first call comes after about ${state.interval_steps} steps.`);
    if (shape === this.shape) return;
    Object.assign(this, { shape, lanes, rounds: state.rounds, marks: state.marks });
    const shown = this.rounds.slice(-PER_LANE * Math.max(1, lanes.length));
    this.shown = shown.filter((round) => lanes.includes(round.fragment));
    if (this.chosen && !this.shown.includes(this.chosen)) this.chosen = this.shown.find((round) => same(round, this.chosen)) ?? null;
    this.#paint();
    this.#tell();
  }

  #paint() {
    const width = this.host.clientWidth;
    if (!width || !this.shown?.length) return;
    const step = this.lanes.length > 24 ? 12 : this.lanes.length > 10 ? 17 : 24;
    const height = TOP + step * this.lanes.length + BOTTOM;
    const from = Math.min(...this.shown.map(called)), to = Math.max(...this.shown.map((round) => round.at_s));
    const x = (at) => LEFT + (at - from) / Math.max(0.001, to - from) * (width - LEFT - RIGHT);
    Object.assign(this, { step, at: x });
    mark(this.svg, "viewBox", `0 0 ${width} ${height}`);
    this.svg.style.height = `${height}px`;
    const parts = [];
    this.lanes.forEach((fragment, lane) => {
      const y = TOP + step * (lane + 0.5);
      parts.push(draw("line", { class: "lane", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }), draw("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, `p${fragment}`));
    });
    const base = TOP + step * this.lanes.length + 2;
    parts.push(draw("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: base, y2: base }));
    const tick = TICKS.find((each) => (to - from) / each <= width / 90) ?? TICKS.at(-1);
    for (let at = Math.ceil(from / tick) * tick; at <= to; at += tick) {
      parts.push(draw("line", { class: "axis", x1: x(at), x2: x(at), y1: base, y2: base + 4 }), draw("text", { x: x(at), y: base + 16, "text-anchor": "middle" }, tick < 1 ? fine(at) : clock(at)));
    }
    for (const each of this.marks) {
      if (each.group === "change" || each.at_s < from || each.at_s > to) continue;
      const { colour, sign } = GROUPS[each.group];
      parts.push(draw("line", { x1: x(each.at_s), x2: x(each.at_s), y1: TOP - 4, y2: base, stroke: colour, "stroke-dasharray": each.group === "fault" ? null : "4 3" }), draw("text", { x: x(each.at_s), y: 11, "text-anchor": "middle", fill: colour }, sign));
    }
    for (const round of this.shown) parts.push(...this.#bar(round));
    this.outline = draw("rect", { class: "chosen", rx: 2 });
    this.svg.replaceChildren(...parts, this.outline);
    this.#choose(this.chosen ?? null);
    const last = this.shown.at(-1);
    mark(this.svg, "aria-label", `The newest ${this.shown.length} rounds of ${this.lanes.length} fragments. ${told(last)} Arrow keys read rounds.`);
  }

  #box(round) {
    const y = TOP + this.step * this.lanes.indexOf(round.fragment) + 2;
    return { x: this.at(called(round)), y, width: Math.max(2, this.at(round.at_s) - this.at(called(round))), height: this.step - 4 };
  }

  #bar(round) {
    const box = this.#box(round), parts = [];
    let at = called(round);
    round.phases.forEach((length, number) => {
      const [left, right] = [this.at(at), this.at(at + length)];
      at += length;
      if (right - left < 0.3) return;
      parts.push(draw("rect", { x: left, y: box.y, width: right - left, height: box.height, fill: PHASES[number].colour }));
    });
    if (!parts.length) parts.push(draw("rect", { ...box, width: 2, fill: PHASES[4].colour }));
    const label = merged(round);
    if (box.width > 34 && box.height > 11) parts.push(draw("text", { class: "count", x: box.x + 4, y: box.y + box.height / 2 + 3.5 }, label));
    return parts;
  }

  #choose(round) {
    this.chosen = round;
    if (!round) {
      mark(this.outline, "visibility", "hidden");
      // What was being read stays when its round leaves the window.
      if (!this.readout.textContent) say(this.readout, "A bar is a round; its number says how many of the live learners were merged.");
      return;
    }
    const box = this.#box(round);
    for (const [name, value] of Object.entries(box)) mark(this.outline, name, value);
    mark(this.outline, "visibility", null);
    say(this.readout, told(round));
  }

  #onPointer(event) {
    if (!this.at) return;
    const frame = this.svg.getBoundingClientRect(), x = event.clientX - frame.left, y = event.clientY - frame.top;
    const found = this.shown.findLast((round) => {
      const box = this.#box(round);
      return x >= box.x - 2 && x <= box.x + box.width + 2 && y >= box.y - 2 && y <= box.y + box.height + 2;
    });
    if (found) this.#choose(found);
  }

  #onKey(event) {
    if (!this.shown?.length) return;
    const index = this.chosen ? this.shown.indexOf(this.chosen) : this.shown.length;
    const lane = this.chosen ? this.shown.filter((round) => round.fragment === this.chosen.fragment) : this.shown;
    const inLane = lane.indexOf(this.chosen);
    const next = {
      ArrowLeft: this.shown[Math.max(0, index - 1)], ArrowRight: this.shown[Math.min(this.shown.length - 1, index + 1)],
      ArrowUp: lane[Math.max(0, inLane - 1)], ArrowDown: lane[Math.min(lane.length - 1, inLane + 1)],
      Home: this.shown[0], End: this.shown.at(-1),
    }[event.key];
    if (!next) return;
    event.preventDefault();
    mark(this.readout, "aria-live", "polite");
    this.#choose(next);
  }

  #tell() {
    if (!this.details.open) return;
    this.table.fill(this.rounds.slice(-ROWS).reverse().map((round) => [
      `p${round.fragment}`, `v${round.version}`, clock(round.at_s), merged(round), ...round.phases.map(seconds), round.end,
    ]), (row) => row[0] + row[1]);
  }
}

/* How many of the live learners; one of them may have sent two contributions, a late one and one in time. */
const merged = (round) => { const learners = new Set(round.contributors.map(([learner]) => learner)).size; return `${learners}/${Math.max(round.live, learners)}`; };
const called = (round) => round.at_s - round.phases.reduce((sum, length) => sum + length, 0);
const same = (one, other) => one.fragment === other.fragment && one.version === other.version;

function told(round) {
  const names = round.contributors.map(([learner, age]) => learner + (age ? ` (${age} late)` : "")).join(", ") || "nobody";
  const [quorum, grace, queued, merge, commit] = round.phases.map(seconds);
  return `Fragment ${round.fragment}, version ${round.version}, at ${clock(round.at_s)}: ${names}. Quorum after ${quorum}, grace ${grace} of ${seconds(round.granted_s)} granted, queued ${queued}, merge ${merge}, commit ${commit}. Ended: ${round.end || "unknown"}.${round.why ? ` ${round.why}.` : ""}`;
}
