/* Which version each learner's last merged contribution to each fragment was made on, and how far that is behind. */

import { empty, keyed, keys, make, mark, say } from "./dom.js";
import { ago, count, share } from "./format.js";

const STEPS = [["lag0", "in the newest version"], ["lag1", "1 version ago"], ["lag2", "2 versions ago"], ["lag3", "3 or more ago"], ["lagnone", "nothing merged yet"]];

export class FragmentMap {
  constructor(host) {
    this.head = make("tr");
    this.body = make("tbody");
    this.grid = make("table", { class: "map", role: "grid", "aria-label": "Fragments and learners" }, make("thead", {}, this.head), this.body);
    this.readout = make("p", { class: "readout" });
    this.list = make("ul", { class: "keys" });
    this.more = make("p", { class: "note" });
    this.host = host;
    host.append(make("div", { class: "scroll tall" }, this.grid), this.readout, this.list, this.more);
    keys(this.list, STEPS.map(([step, name]) => ({ name, colour: step === "lagnone" ? "none" : `var(--${step})`, filled: true })));
    this.list.lastChild.firstChild.firstChild.setAttribute("stroke", "var(--dim)");
    this.at = [0, 0];
    this.grid.addEventListener("keydown", (event) => this.#onKey(event));
    this.grid.addEventListener("focusin", (event) => this.#onFocus(event.target));
    this.grid.addEventListener("pointerover", (event) => { const cell = event.target.closest("td"); if (cell?.told) say(this.readout, cell.told); });
  }

  set(state) {
    const { learners, rows } = state.map;
    if (empty(this.host, rows.length && learners.length ? null : "No version has been merged yet. Each fragment's first round fills its row.")) return;
    keyed(this.head, ["fragment", ...learners], (name) => make("th", { scope: "col" }, name), () => {});
    keyed(this.body, rows.map((row) => row.fragment), () => make("tr"), (tr, _, index) => this.#row(tr, rows[index], learners, index, state.at_s));
    say(this.more, state.left_out.fragments || state.left_out.learners ? `Not shown: ${state.left_out.fragments} more fragments, ${state.left_out.learners} more learners.` : "");
    this.size = [rows.length, learners.length];
  }

  #row(tr, row, learners, index, now) {
    keyed(tr, ["fragment", ...learners], (key) => make(key === "fragment" ? "th" : "td", key === "fragment" ? { scope: "row" } : { tabindex: -1 }), (cell, key, column) => {
      if (column === 0) { say(cell, `p${row.fragment} v${row.version}`); return; }
      const told = row.cells[column - 1];
      mark(cell, "tabindex", this.at[0] === index && this.at[1] === column - 1 ? 0 : -1);
      if (!told) {
        mark(cell, "class", "lagnone");
        say(cell, "–");
        cell.told = `${key} has no merged contribution to fragment ${row.fragment} yet.`;
        return;
      }
      mark(cell, "class", `lag${Math.min(3, told.lag)}`);
      say(cell, `v${told.base}`);
      const late = told.age ? `, ${told.age} late` : "", behind = told.lag ? `, ${told.lag} behind the newest` : ", the newest";
      cell.told = `${key}, fragment ${row.fragment}: made on version ${told.base}${late}, merged into ${told.base + told.age + 1}${behind}; ${count(told.tokens)} tokens, weight ${share(told.weight)}, ${ago(now - told.at_s)}.`;
      mark(cell, "aria-label", `v${told.base}, ${told.lag} behind`);
    });
  }

  #onFocus(cell) {
    if (!cell.told) return;
    mark(this.readout, "aria-live", "polite");
    say(this.readout, cell.told);
  }

  #onKey(event) {
    const [row, column] = this.at, [rows, columns] = this.size;
    const next = { ArrowUp: [row - 1, column], ArrowDown: [row + 1, column], ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1], Home: [row, 0], End: [row, columns - 1] }[event.key];
    if (!next) return;
    event.preventDefault();
    this.at = [Math.max(0, Math.min(rows - 1, next[0])), Math.max(0, Math.min(columns - 1, next[1]))];
    for (const cell of this.grid.querySelectorAll("td[tabindex='0']")) mark(cell, "tabindex", -1);
    const cell = this.body.children[this.at[0]].children[this.at[1] + 1];
    mark(cell, "tabindex", 0);
    cell.focus();
  }
}
