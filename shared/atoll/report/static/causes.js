/* What is wrong and why: what stands out with its evidence, alerts that hold, and the largest shares of time that were lost. */

import { empty, keyed, make, mark, say, Table } from "./dom.js";
import { clock, exact, fine, plural, seconds, share } from "./format.js";

const WHOLES = { learners: "of the learners' time", rounds: "of the rounds' time" };
const RUN = "the rounds";
const UNREAD = "The event log could not be read to its end.";
const SHORT_S = 60; // a time before this is told to a tenth of a second

/* From when to when; what has no end lasts. */
function span(from, until) {
  const at = (value) => (value < SHORT_S ? fine(value) : clock(value));
  return until === null ? `since ${at(from)}, to the end of what is known` : `${at(from)} to ${at(until)}`;
}

/* A finding is told from others by cause and culprit, and from one of the same by which of them came first. Its beginning is no
   part of its key: on a run that goes on it moves with the oldest round that is known. */
export function findingKeys(findings) {
  const times = new Map();
  const keys = [];
  const inTime = findings.map((each, place) => ({ each, place })).sort((one, other) => one.each.from_s - other.each.from_s || one.place - other.place);
  for (const { each, place } of inTime) {
    const same = JSON.stringify([each.cause, each.who]);
    const former = times.get(same) ?? 0;
    times.set(same, former + 1);
    keys[place] = `${same} ${former}`;
  }
  return keys;
}

export class Causes {
  constructor(host) {
    this.host = host;
    this.list = make("ul", { class: "causes" });
    this.note = make("p", { class: "note" });
    host.append(this.list, this.note);
  }

  set(causes) {
    if (empty(this.host, causes ? null : UNREAD)) return;
    const none = causes.rounds ? `Nothing stands out in ${plural(causes.rounds, "round")}: no slow link or learner, no quarantine, no lost shard, no full disk.` : "No round has ended yet: causes are found by comparing learners, and shards with their usual pace.";
    if (empty(this.host, causes.findings.length ? null : none)) return;
    keyed(this.list, findingKeys(causes.findings), () => this.#item(), (item, _, index) => this.#show(item, causes.findings[index]));
    say(this.note, `Found in ${plural(causes.rounds, "round")}; the gravest first.`);
  }

  #item() {
    const item = make("li");
    item.name = make("strong");
    item.time = make("span", { class: "when" });
    item.text = make("p");
    item.command = make("code", { class: "command" });
    item.evidence = make("ul", { class: "evidence" });
    item.details = make("details", {}, make("summary", {}, "on what this rests"), item.evidence);
    const head = make("div", {}, make("span", { class: "sign fault", "aria-hidden": "true" }, "▼"), item.name, " ", item.time);
    item.append(head, item.text, make("p", { class: "more" }, "more: ", item.command), item.details);
    return item;
  }

  #show(item, found) {
    say(item.name, `${found.cause}: ${found.who}`);
    say(item.time, span(found.from_s, found.until_s));
    say(item.text, sentence(found.text));
    say(item.command, found.command);
    item.details.hidden = !found.evidence.length;
    keyed(item.evidence, found.evidence, () => make("li"), (line, text) => say(line, text));
  }
}

const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;

export class Slow {
  constructor(host) {
    this.host = host;
    this.table = new Table(host, "What was slow", [{ name: "share", number: true }, { name: "of what" }, { name: "time", number: true }, { name: "whose" }, { name: "what", text: true }, { name: "tells more" }]);
    this.table.box.classList.add("tall", "slow");
    this.notes = make("p", { class: "note" });
    host.append(this.notes);
  }

  set(causes) {
    if (empty(this.host, causes ? null : UNREAD)) return;
    const none = causes.rounds ? "No share of time beyond 1 % was lost." : "No round has ended yet.";
    if (empty(this.host, causes.slow.length ? null : none)) return;
    this.table.fill(causes.slow.map((part) => [share(part.share), WHOLES[part.of] ?? part.of, seconds(part.seconds), part.who || RUN, `${part.what}: ${part.who ? "it" : "they"} ${part.sentence}`, { code: part.command }]), (_, index) => causes.slow[index].of + causes.slow[index].what + causes.slow[index].who);
    say(this.notes, causes.notes.length ? causes.notes.map(sentence).join(" ") : "");
  }
}

/* An alert is told from others as Prometheus does it, by name and labels; its words may have a figure that changes. */
export const alertKey = (alert) => JSON.stringify([alert.name, alert.labels]);

const SEVERITIES = { critical: ["▼", "fault"], warning: ["◆", "warning"] };

export class Alerts {
  constructor(host) {
    this.host = host;
    this.list = make("ul", { class: "causes" });
    host.append(this.list);
  }

  set(state) {
    const none = state.saved ? "This run is over and read from its folder: nothing holds now." : "None of the monitor's alert rules holds.";
    if (empty(this.host, state.alerts.length ? null : none)) return;
    keyed(this.list, state.alerts.map(alertKey), () => this.#item(), (item, _, index) => this.#show(item, state.alerts[index], state.at_s));
  }

  #item() {
    const item = make("li");
    item.sign = make("span", { class: "sign", "aria-hidden": "true" });
    item.name = make("strong");
    item.time = make("span", { class: "when" });
    item.more = make("p", { class: "note" });
    item.append(make("div", {}, item.sign, item.name), item.time, item.more);
    return item;
  }

  #show(item, alert, now) {
    const [sign, kind] = alert.pending ? ["◐", "change"] : SEVERITIES[alert.severity] ?? SEVERITIES.warning;
    say(item.sign, sign);
    mark(item.sign, "class", `sign ${kind}`);
    say(item.name, alert.summary);
    const lasts = Math.max(0, now - alert.since_s);
    say(item.time, alert.pending ? `so for ${exact(lasts)} s; it does not fire yet` : `${alert.severity}, ${alert.name}, since ${clock(alert.since_s)}`);
    say(item.more, alert.tells_more);
  }
}
