/* The page: frames come in, panels show them. Each panel takes a whole state, so a frame that was missed costs nothing. */

import { Alerts, Causes, Slow } from "./causes.js";
import { Chart } from "./chart.js";
import { Compare } from "./compare.js";
import { make, mark, say } from "./dom.js";
import { follow } from "./feed.js";
import { bytes, clock, count, fraction, loss, percent, plural, share, tick } from "./format.js";
import { FragmentMap } from "./map.js";
import { followTheme } from "./palette.js";
import { Fates, Learners, Links, Marks, Quarantine, Tiles } from "./panels.js";
import { Report } from "./report.js";
import { Rounds } from "./rounds.js";

const at = (id) => document.getElementById(id);
const STATUS = {
  live: "training",
  over: "over",
  still: "no learner is heard",
  awaited: "waiting for the run to be founded",
  away: "the broker does not answer",
  gone: "no connection to the monitor",
};
const NO_ROUND = "No round has ended yet.";
const WAITS = "No sample has come yet: learners write one every few seconds once they train.";

followTheme(at("theme"));
const tiles = new Tiles(at("tiles"));
const merged = new Chart(at("merged"), { name: "Merged model", unit: "bits/byte", value: loss, scale: tick, waits: "No measurement yet: the evaluator measures the merged model at intervals." });
const losses = new Chart(at("losses"), { name: "Training loss of the learners", unit: "nats/token", value: loss, scale: tick, waits: WAITS });
const speed = new Chart(at("speed"), { name: "Tokens per second of all learners and of each", unit: "tokens/s", value: count, waits: WAITS, zero: true });
const goodput = new Chart(at("goodput"), { name: "Goodput", value: (value) => share(value, 0), scale: percent, waits: WAITS, zero: true, top: 1.02 });
const lag = new Chart(at("lag"), { name: "Versions that the learners lag behind", unit: "versions", value: count, waits: WAITS, zero: true, least: 3, whole: true });
const overhead = new Chart(at("overhead"), { name: "Overhead of the learners", value: fraction, scale: percent, waits: WAITS, zero: true, least: 0.01, tall: true });
const participation = new Chart(at("participation"), { name: "Contributors per round", value: tick, waits: NO_ROUND, zero: true, least: 3, whole: true });
const moved = new Chart(at("bytes"), { name: "Payload merged and published", value: bytes, scale: (value) => bytes(value), waits: NO_ROUND, zero: true });
const panels = [new Alerts(at("alerts")), new Learners(at("learners")), new Rounds(at("rounds")), new FragmentMap(at("map")), new Links(at("links")), new Fates(at("fates")), new Marks(at("marks"), at("news")), new Quarantine(at("quarantine"))];
const told = [new Causes(at("causes")), new Slow(at("slow"))];
const report = new Report({ sections: document.querySelectorAll(".report"), figures: at("figures"), lives: at("lives"), settings: at("settings"), sample: at("sample") });
const compare = new Compare(at("compare"));
const over = at("over");
let state = null, curves = null, stop = null;

function showState() {
  say(at("run"), state.run);
  status(state.status);
  tiles.set(state, curves?.goodput);
  for (const panel of panels) panel.set(state);
  const value = state.bits_per_byte === null ? "" : ` · ${loss(state.bits_per_byte)} bits/byte`;
  document.title = `${state.run}${value} · Atoll`;
  pick(state);
}

function showCurves() {
  const marks = state.marks.map((each) => ({ ...each, x: each.at_s }));
  const byTime = over.value === "at_s";
  const span = [0, Math.max(1, state.status === "live" ? state.at_s : state.newest_s ?? state.at_s)];
  const lines = [{ name: "merged model", place: 0, x: curves.merged[over.value], y: curves.merged.bits_per_byte }];
  if (curves.merged.average.some((value) => value !== null)) lines.push({ name: "its average", place: 1, x: curves.merged[over.value], y: curves.merged.average });
  tiles.first = curves.merged.bits_per_byte[0] ?? null;
  merged.set({ lines, marks: byTime ? marks : [], span: byTime ? span : null });
  losses.set({ lines: curves.losses.map((each, place) => ({ name: each.learner, place, x: each.at_s, y: each.loss, width: 1.5 })), marks, span });
  speed.set({ lines: [{ name: "all learners", place: 0, x: curves.rates.at_s, y: curves.rates.tokens_per_s, spans: false }, ...(curves.speeds.length > 1 ? curves.speeds : []).map((each, place) => ({ name: each.learner, place: place + 1, x: curves.rates.at_s, y: each.tokens_per_s, width: 1, spans: false }))], marks, span });
  goodput.set({ lines: [{ name: "goodput", place: 2, x: curves.rates.at_s, y: curves.rates.goodput, spans: false }], marks, span });
  const rounds = (...names) => names.map((name, place) => ({ name, place, x: curves.rounds.at_s, y: curves.rounds[name] }));
  participation.set({ lines: rounds("contributors", "live"), marks, span });
  moved.set({ lines: rounds("merged", "published"), marks, span });
  for (const [chart, what] of [[lag, "lag"], [overhead, "overhead"]]) chart.set({ lines: curves.lags.map((each, place) => ({ name: each.learner, place, x: each.at_s, y: each[what], width: 1.5 })), marks, span });
}

function status(kind) {
  const pill = at("status");
  mark(pill, "data-status", kind);
  const words = [STATUS[kind] ?? kind];
  if (state && ["live", "over", "still"].includes(kind)) words.push(clock(kind === "live" ? state.at_s : state.newest_s) + (state.clock === "virtual" ? " of virtual time" : ""));
  const away = state && kind !== "gone" ? state.nodes.filter((node) => node.state === "away").length : 0;
  if (away) words.push(`${away} of ${plural(state.nodes.length, "broker node")} away`);
  mark(pill, "data-away", away > 0);
  say(pill, words.join(" · "));
}

function pick({ run, runs }) {
  const select = at("runs");
  at("picker").hidden = runs.length < 2;
  if (select.options.length !== runs.length) select.replaceChildren(...runs.map((name) => make("option", { value: name }, name)));
  if (document.activeElement !== select) select.value = run;
}

function look(run) {
  stop?.();
  state = curves = null;
  delete document.documentElement.dataset.shown;
  stop = follow(run, {
    on(kind, frame) {
      if (kind === "state") {
        const fresh = curves && JSON.stringify(frame.marks) !== JSON.stringify(state?.marks);
        state = frame;
        showState();
        if (fresh) showCurves();
      }
      if (kind === "curves") { curves = frame; tiles.set(state, curves.goodput); showCurves(); }
      if (kind === "causes") for (const panel of told) panel.set(frame);
      if (kind === "report") report.set(frame);
      if (kind === "compared") compare.set(frame);
      if (state && curves) document.documentElement.dataset.shown = state.run;
    },
    trouble(text) {
      at("banner").hidden = text === null;
      say(at("banner"), text ?? "");
      if (text !== null) status("gone");
    },
  });
}

over.addEventListener("change", () => {
  const byTime = over.value === "at_s";
  merged.sync = byTime ? "time" : null;
  merged.count(byTime ? { x: clock, times: true } : { x: count, times: false });
  if (curves) showCurves();
});
at("runs").addEventListener("change", (event) => {
  const address = new URL(location.href);
  address.searchParams.set("run", event.target.value);
  history.replaceState(null, "", address);
  look(event.target.value);
});
look(new URL(location.href).searchParams.get("run") ?? "");
