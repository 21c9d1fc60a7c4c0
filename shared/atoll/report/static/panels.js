/* The panels of words and numbers: tiles, learners, links, fates, marks, quarantine. */

import { empty, keyed, keys, make, mark, say, Table } from "./dom.js";
import { ago, bytes, clock, count, exact, loss, NONE, plural, seconds, share } from "./format.js";
import { GROUPS } from "./palette.js";

const STATES = { training: ["●", "recovery"], joining: ["◐", "change"], draining: ["◑", "change"], silent: ["▼", "fault"], left: ["○", "change"], ended: ["○", "change"], serving: ["●", "recovery"], answers: ["●", "recovery"], away: ["▼", "fault"], standby: ["◐", "change"] };
const FATES = ["merged", "merged_late", "superseded", "queued", "open", "lost"];
const PARTS = [["frames", "parameters", "var(--c0)"], ["rest", "other payload", "var(--c1)"], ["overhead", "protocol overhead", "var(--c7)"]];
const MARKS = 60;

export class Tiles {
  constructor(list) { this.list = list; }

  set(state, goodput) {
    const training = state.learners.filter((one) => one.state === "training").length;
    const everybody = state.learners.length + state.left_out.learners;
    const first = this.first ?? null;
    const less = state.traffic.times_less;
    const done = state.target ? Math.min(1, state.tokens / state.target) : null;
    const left = state.target && state.tokens_per_s > 0 ? `, ${clock((state.target - state.tokens) / state.tokens_per_s)} to go` : "";
    const few = state.waits_for ? `waiting for ${state.waits_for}` : state.status === "live" && training < state.quorum ? `below the quorum of ${state.quorum}` : `quorum ${state.quorum}`;
    const tiles = [
      ["merged model", loss(state.bits_per_byte), "bits/byte", state.bits_per_byte === null ? "the evaluator has not measured yet" : first ? `from ${loss(first)}` : ""],
      ["tokens trained", count(state.tokens), "", state.target ? `${share(done, 0)} of ${count(state.target)}${left}` : "no target", done],
      ["speed", count(state.tokens_per_s), "tokens/s", state.status === "live" ? "all learners, now" : "nobody trains now"],
      ["goodput", share(goodput?.whole), "", recently(state, goodput)],
      ["learners training", `${training}`, `of ${everybody}`, few],
      ["commits", exact(state.commits), "", plural(state.fragments, "fragment")],
      ["traffic", state.traffic.bytes_per_token === null ? NONE : bytes(state.traffic.bytes_per_token), "/token", less === null ? "over the learners' links" : `1/${count(less)} of data-parallel`],
    ];
    keyed(this.list, tiles.map(([name]) => name), (name) => {
      const value = make("span", { class: "value" }), unit = make("span", { class: "unit" });
      const dd = make("dd", {}, make("div", {}, value, unit), make("div", { class: "more" }));
      return Object.assign(make("div", { class: "tile" }, make("dt", {}, name), dd), { value, unit, more: dd.lastChild });
    }, (tile, _, index) => {
      const [, value, unit, more, part] = tiles[index];
      say(tile.value, value); say(tile.unit, unit); say(tile.more, more);
      if (typeof part === "number") {
        if (!tile.progress) { tile.progress = make("i"); tile.lastChild.append(make("div", { class: "bar", "aria-hidden": "true" }, tile.progress)); }
        tile.progress.style.width = `${100 * part}%`;
      }
    });
  }
}

/* What the goodput was lately. It is unknown where nobody's samples are of the last minute; a run that is over has no "lately". */
export function recently(state, goodput) {
  if (goodput && goodput.now !== null) return `${share(goodput.now)} in the last minute`;
  if (!goodput || goodput.whole === null) return "no samples yet";
  return state.saved || state.status === "over" ? "of the whole run" : "no samples in the last minute";
}

export class Learners {
  constructor(host) {
    this.host = host;
    this.table = new Table(host, "Learners, shards and broker nodes", ["process", "state", "life", "step", "loss", "tokens/s", "tokens", "step time", "lag, versions", "overhead", "last heard"].map((name, index) => ({ name, number: index > 1 })));
    this.more = make("p", { class: "note" });
    host.append(this.more);
  }

  set(state) {
    if (empty(this.host, state.learners.length || state.hosts.length || state.nodes.length ? null : "No learner has joined yet.")) return;
    const learners = state.learners.map((one) => {
      const [sign, kind] = one.quarantine ? ["■", "fault"] : STATES[one.state] ?? ["○", "change"];
      const still = one.state !== "training" && one.state !== "draining";
      return [one.learner + (one.region ? ` (${one.region})` : ""), { text: one.quarantine ? `quarantine: ${one.quarantine}` : one.state, sign, kind }, exact(one.life), exact(one.step), loss(one.loss), still ? NONE : count(one.tokens_per_s), count(one.tokens), seconds(one.step_s), still ? NONE : exact(one.lag), share(one.overhead), one.heard_s === null ? NONE : ago(state.at_s - one.heard_s)];
    });
    const hosts = state.hosts.map((one) => {
      const [sign, kind] = STATES[one.state] ?? ["○", "change"];
      return [one.name, { text: one.state, sign, kind }, ...Array(9).fill(NONE)];
    });
    const nodes = state.nodes.map((one) => {
      const [sign, kind] = STATES[one.state];
      return [`broker node ${one.name || "?"} at ${one.address}`, { text: one.state, sign, kind }, ...Array(9).fill(NONE)];
    });
    this.table.fill([...learners, ...hosts, ...nodes], (row, index) => `${row[0]} ${index < learners.length ? "" : index}`);
    say(this.more, state.left_out.learners ? `${plural(state.left_out.learners, "more learner")} are not shown; sums count them.` : "");
  }
}

export class Links {
  constructor(host) {
    this.host = host;
    this.table = new Table(host, "Bytes on each link", [{ name: "link" }, ...["processes", "up/s", "down/s", "up", "down"].map((name) => ({ name, number: true })), { name: "parts" }, { name: "overhead", number: true }]);
    this.list = make("ul", { class: "keys" });
    this.note = make("p", { class: "note" });
    host.append(this.list, this.note);
    keys(this.list, PARTS.map(([, name, colour]) => ({ name, colour, filled: true })));
  }

  set(state) {
    if (empty(this.host, state.links.length ? null : "No link has been heard of yet; processes tell their bytes with each heartbeat.")) return;
    const most = Math.max(1, ...state.links.map(wire));
    this.table.fill(state.links.map((link) => row(link, most)), (_, index) => state.links[index].role + state.links[index].link);
    const { data_parallel_bytes_per_token: parallel, bytes_per_token: ours, bits_per_parameter_up: up, bits_per_parameter_down: down } = state.traffic;
    say(this.note, ours === null ? "" : `${bytes(ours)} a token over the learners' links; data-parallel training in bf16 would move ${bytes(parallel)}. ${up === null ? NONE : up.toFixed(1)} bits a parameter up, ${down === null ? NONE : down.toFixed(1)} down.`);
  }
}

const wire = (link) => link.wire_up + link.wire_down || link.payload_up + link.payload_down;

function row(link, most) {
  const all = wire(link), frames = link.frames_up + link.frames_down, payload = link.payload_up + link.payload_down;
  const sizes = { frames, rest: Math.max(0, payload - frames), overhead: link.overhead };
  return [link.link, exact(link.processes), bytes(link.up_per_s, "/s"), bytes(link.down_per_s, "/s"), bytes(link.wire_up || link.payload_up), bytes(link.wire_down || link.payload_down), { meter: PARTS.map(([part, , colour]) => [sizes[part] / most, colour]) }, all ? share(link.overhead / all) : NONE];
}

export class Fates {
  constructor(host) {
    this.host = host;
    this.stack = make("div", { class: "stack", "aria-hidden": "true" });
    this.list = make("ul", { class: "keys" });
    this.note = make("p", { class: "note" });
    host.append(this.stack, this.list, this.note);
  }

  set(state) {
    const fates = state.fates ?? {};
    const names = [...FATES.filter((name) => name in fates), ...Object.keys(fates).filter((name) => !FATES.includes(name)).sort()];
    const whole = names.reduce((sum, name) => sum + fates[name], 0);
    if (empty(this.host, whole ? null : state.fates === null ? state.saved ? "The event log has no closing ledger of every shard." : "The ledger is being read from the broker." : "No token has been trained yet.")) return;
    const colours = Object.fromEntries(names.map((name) => [name, colourOf(name)]));
    keyed(this.stack, names, () => make("i"), (piece, name) => { piece.style.width = `${100 * fates[name] / whole}%`; piece.style.background = colours[name]; });
    keys(this.list, names.map((name) => ({ name: name.replaceAll("_", " ").replace(":", ": "), colour: colours[name], filled: true, now: `${exact(fates[name])}, ${share(fates[name] / whole)}` })));
    say(this.note, `${exact(whole)} tokens; each has one fate. What is open or queued is still on its way.`);
  }
}

/* A fate keeps its colour whatever other fates there are. */
function colourOf(name) {
  const known = { merged: 2, queued: 5, open: 0, superseded: 1, lost: 4 };
  return `var(--c${known[name] ?? (name.startsWith("refused") ? 3 : name.startsWith("merged") ? 6 : 7)})`;
}

export class Marks {
  constructor(host, news) {
    this.host = host;
    this.news = news;
    this.table = new Table(host, "Faults and recoveries", [{ name: "at" }, { name: "kind" }, { name: "who" }, { name: "what", text: true }]);
    this.table.box.classList.add("tall");
    this.seen = null;
  }

  set(state) {
    const shown = state.marks.slice(-MARKS).reverse();
    empty(this.host, shown.length ? null : "Nothing has happened yet: who joins, leaves, is lost and comes back is listed here.");
    this.table.fill(shown.map((each) => [clock(each.at_s), { text: GROUPS[each.group].word, sign: GROUPS[each.group].sign, kind: each.group }, each.who, each.text]), (row, index) => shown[index].kind + shown[index].who + shown[index].at_s + row[3]);
    const known = new Set(state.marks.map((each) => each.kind + each.who + Math.round(each.at_s)));
    const fresh = this.seen && state.marks.filter((each) => each.group !== "change" && !this.seen.has(each.kind + each.who + Math.round(each.at_s)));
    if (fresh?.length) say(this.news, fresh.map((each) => `${each.who} ${each.text}`).join(". "));
    this.seen = known;
  }
}

export class Quarantine {
  constructor(host) {
    this.parts = ["In quarantine", "Contributions refused", "Messages dropped as junk", "Contributions clipped"].map((title) => {
      const list = make("ul", { class: "keys" }), none = make("p", { class: "note" });
      host.append(make("h3", {}, title), list, none);
      return { list, none };
    });
  }

  set(state) {
    this.#fill(0, state.quarantined.map((q) => [`${q.learner}, incarnation ${q.incarnation}`, q.why]), "Nobody was isolated.");
    this.#fill(1, Object.entries(state.refused).map(([reason, times]) => [reason.replaceAll("_", " "), exact(times)]), "None was refused.");
    this.#fill(3, state.clipped.map((c) => [`${c.learner}, ${plural(c.count, "contribution")}`, c.why]), "None was clipped.");
    this.#fill(2, Object.entries(state.junk).map(([reason, times]) => [reason.replaceAll("_", " "), exact(times)]), "None.");
  }

  #fill(part, rows, none) {
    const { list, none: words } = this.parts[part];
    keys(list, rows.map(([name, now]) => ({ name, now, colour: part ? "var(--change)" : "var(--fault)", shape: part ? "●" : "■" })));
    mark(list, "hidden", rows.length === 0);
    say(words, rows.length ? "" : none);
  }
}
