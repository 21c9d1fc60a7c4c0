/* What only the report of a run knows, which is over: its figures, every life of its learners, its settings, a sample of its text. */

import { empty, make, say, Table } from "./dom.js";
import { bytes, exact, loss, NONE, plural, seconds, share, tick } from "./format.js";

export class Report {
  constructor({ sections, figures, lives, settings, sample }) {
    Object.assign(this, { sections, livesHost: lives });
    this.figures = new Table(figures, "The report's figures", [{ name: "figure" }, { name: "value", text: true }]);
    this.errors = make("ul", { class: "evidence" });
    figures.append(this.errors);
    this.lives = new Table(lives, "Lives of the learners", [...["learner", "life", "tokens", "steps", "tokens/s", "overhead"].map((name, index) => ({ name, number: index > 0 })), { name: "fates of its tokens", text: true }, { name: "end" }]);
    this.lives.box.classList.add("tall");
    this.settings = new Table(settings, "Settings of the run", [{ name: "setting" }, { name: "value", text: true }]);
    this.settings.box.classList.add("tall");
    this.sampleHost = sample;
    this.sample = make("pre");
    sample.append(this.sample);
  }

  set(report) {
    for (const section of this.sections) section.hidden = false;
    this.figures.fill(figuresOf(report));
    this.errors.replaceChildren(...report.fates_errors.map((error) => make("li", {}, error)));
    const lives = report.learners.flatMap((one) => one.incarnations.map((life) => [one.learner, exact(life.incarnation), exact(life.tokens), exact(life.steps), exact(life.tokens_per_s), share(life.overhead), fates(life.tokens_by_fate), life.left ? "left" : "died or was killed"]));
    if (!empty(this.livesHost, lives.length ? null : "No learner has joined.")) this.lives.fill(lives);
    this.settings.fill(Object.entries(report.settings).sort().map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]));
    if (!empty(this.sampleHost, report.sample ? null : "There is none.")) say(this.sample, report.sample);
  }
}

const fates = (counts) => Object.entries(counts).filter(([, count]) => count).map(([name, count]) => `${name.replaceAll("_", " ")} ${exact(count)}`).join(", ");
const pair = (format, one, other) => `${format(one)}, ${format(other)}`;

function figuresOf({ validation, rounds, moved, ...report }) {
  const { learners } = moved;
  const measured = validation.validation_bytes === null ? "" : ` of the first ${bytes(validation.validation_bytes)} held out`;
  return [
    ["tokens trained", exact(report.tokens_trained)],
    ["every token accounted for", report.fates_exact ? "yes" : "no, see the reasons below"],
    [`bits per byte${measured}, first and last`, pair(loss, validation.initial_bits_per_byte, validation.final_bits_per_byte)],
    ...("average_bits_per_byte" in validation ? [["bits per byte of the average of its values", loss(validation.average_bits_per_byte)]] : []),
    ["commits", exact(report.commits)],
    ["contributors per round, mean", tick(rounds.contributors_mean)],
    ["grace that was granted per round (a round that needs less waits less), mean", seconds(rounds.grace_s_mean)],
    ["call to the end of a round (its merge and commit not counted), median and 95 %", pair(seconds, rounds.waited_s_p50, rounds.waited_s_p95)],
    ["payload that the learners sent, read", pair(bytes, report.bytes_up, report.bytes_down)],
    ["on the wire of the learners' links, up, down (payload, and what carries it)", pair(bytes, learners.wire_up, learners.wire_down)],
    ["payload merged, published", pair(bytes, report.bytes_merged, report.bytes_published)],
    ["bytes a token over the learners' links, over all", pair(tick, moved.bytes_per_token, moved.bytes_per_token_all_links)],
    ["bytes a token of data-parallel training in bf16", tick(moved.data_parallel_bytes_per_token)],
    ["times less than data-parallel, learners' links, all", pair(tick, moved.times_less, moved.times_less_all_links)],
    ["bits a parameter merged, fetched (with each learner's first reading of the whole model), published", [moved.bits_per_parameter_up, moved.bits_per_parameter_down, moved.bits_per_parameter_published].map(tick).join(", ")],
    [`${report.clock} time`, `${seconds(report.wall_s)} in ${plural(report.sessions, "session")}, ended: ${report.ended}`],
    ["made by", ["atoll", report.atoll, report.commit && `commit ${report.commit}`].filter(Boolean).join(" ")],
    ["on", report.machine],
    ["seed", String(report.seed)],
    ["data", report.data_source_hash || NONE],
  ];
}
