/* Several runs: their sums in one table, their curves over each other, each from its own founding. */

import { Chart } from "./chart.js";
import { empty, make, Table } from "./dom.js";
import { bytes, clock, count, exact, loss, share, tick } from "./format.js";

const WAITS = "Nothing has been measured yet.";

export class Compare {
  constructor(host) {
    this.host = host;
    this.table = new Table(host, "Runs in numbers", ["run", "state", "learners", "tokens", "time", "tokens/s", "bits per byte", "goodput", "bytes a token", "commits", "faults"].map((name, index) => ({ name, number: index > 1 })));
    const [losses, speeds] = [make("div", { class: "chart" }), make("div", { class: "chart" })];
    host.append(make("div", { class: "pair" }, make("div", {}, make("h3", {}, "Merged model, bits per byte over tokens"), losses), make("div", {}, make("h3", {}, "Tokens per second over time"), speeds)));
    this.losses = new Chart(losses, { name: "Merged models of the runs", value: loss, scale: tick, waits: WAITS, x: count, times: false, sync: null });
    this.speeds = new Chart(speeds, { name: "Speed of the runs", value: count, waits: WAITS, zero: true, sync: null });
    this.set([]);
  }

  set(runs) {
    if (empty(this.host, runs.length > 1 ? null : "Only one run is shown. To lay runs over each other, name their folders: atoll dashboard runs/one runs/other")) return;
    this.table.fill(runs.map((run) => [run.run, run.ended, exact(run.learners), count(run.tokens), clock(run.wall_s) + (run.clock === "virtual" ? " (virtual)" : ""), count(run.tokens_per_s), loss(run.bits_per_byte), share(run.goodput), bytes(run.bytes_per_token), exact(run.commits), exact(run.faults)]));
    this.losses.set({ lines: runs.map((run, place) => ({ name: run.run, place, x: run.merged.tokens, y: run.merged.bits_per_byte })) });
    this.speeds.set({ lines: runs.map((run, place) => ({ name: run.run, place, x: run.rates.at_s, y: run.rates.tokens_per_s, spans: false })) });
  }
}
