"""Panels of the page without a browser: Node runs the page's own scripts on a document of a few lines."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import playwright
import pytest

from atoll.report.page_data import HoldingAlert
from atoll.report.write import STATIC

NODES = (Path(playwright.__file__).parent / "driver" / "node", shutil.which("node"))
NODE = next((str(each) for each in NODES if each is not None and Path(each).exists()), "")
DEADLINE_S = 60.0
DOCUMENT = """
class Element {
  constructor(tag) { Object.assign(this, { tag, children: [], attributes: {}, own: "", hidden: false }); }
  get textContent() { return this.own + this.children.map((each) => each.textContent).join(""); }
  set textContent(text) { this.own = text; this.children = []; }
  get lastChild() { return this.children.at(-1); }
  setAttribute(name, value) { this.attributes[name] = value; }
  getAttribute(name) { return this.attributes[name] ?? null; }
  removeAttribute(name) { delete this.attributes[name]; }
  append(...more) { more.forEach((each) => typeof each === "string" ? (this.own += each) : this.insertBefore(each, null)); }
  prepend(each) { each.remove(); each.parent = this; this.children.unshift(each); }
  insertBefore(each, next) {
    each.remove();
    each.parent = this;
    this.children.splice(next === null ? this.children.length : this.children.indexOf(next), 0, each);
  }
  remove() { if (this.parent) this.parent.children = this.parent.children.filter((each) => each !== this); this.parent = null; }
}
globalThis.document = { createElement: (tag) => new Element(tag), createElementNS: (_, tag) => new Element(tag) };
const rows = (host) => host.children[0].children;
"""

pytestmark = pytest.mark.skipif(not NODE, reason="no Node: neither on the path nor with playwright")


def told_by(folder: Path, script: str, **given: object) -> Any:  # noqa: ANN401  (JSON)
    """Return what a script of the page says: `tell` takes it; what is `given` are its constants."""
    for file in STATIC.glob("*.js"):
        shutil.copy(file, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    constants = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in given.items())
    imports = 'import { Alerts, Causes } from "./causes.js";\nimport { recently } from "./panels.js";\n'
    tell = "const tell = (what) => console.log(JSON.stringify(what));\n"
    (folder / "script.js").write_text(imports + DOCUMENT + tell + constants + script, encoding="utf-8")
    done = subprocess.run(
        [NODE, "script.js"], cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def alert(learner: str) -> dict[str, Any]:
    labels = {"run": "r", "learner": learner, "region": ""}
    summary = f"Learner {learner} of run r fell silent"
    return HoldingAlert("AtollLearnerLost", "warning", labels, summary, "", 20.0, pending=False).as_json(0.0)


def finding(from_s: float, text: str, who: str = "learner-1") -> dict[str, Any]:
    more = {"evidence": ["e"], "until_s": None, "command": "atoll why"}
    return {"cause": "link was slow", "who": who, "text": text, "from_s": from_s, **more}


def test_alerts_that_differ_in_a_digit_are_two(tmp_path: Path) -> None:
    """Learners, nodes of a broker, certificates by address: their names often differ in nothing else."""
    script = """
      const panel = new Alerts(new Element("section"));
      panel.set({ alerts, at_s: 30, saved: false });
      tell(rows(panel.host).map((item) => item.name.textContent));
    """

    assert told_by(tmp_path, script, alerts=[alert("learner-1"), alert("learner-2")]) == [
        "Learner learner-1 of run r fell silent",
        "Learner learner-2 of run r fell silent",
    ]


def test_a_finding_whose_beginning_moves_stays_open(tmp_path: Path) -> None:
    script = """
      const panel = new Causes(new Element("section"));
      panel.set({ rounds: 320, findings: before });
      const [first, other] = rows(panel.host);
      panel.set({ rounds: 320, findings: after });
      const shown = rows(panel.host);
      tell([shown.length, shown[0] === other, shown[1] === first, shown.map((item) => item.text.textContent)]);
    """
    before = [finding(10.0, "slow"), finding(10.0, "slow, too", "learner-2")]
    after = [finding(14.0, "slow, too", "learner-2"), finding(14.0, "slow")]

    assert told_by(tmp_path, script, before=before, after=after) == [2, True, True, ["Slow, too.", "Slow."]]
