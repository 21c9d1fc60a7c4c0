"""`report.html`: the report as one page that loads nothing.

The page is put together from the report, the rounds of the view and a sample of the model's text. Everything that came
from outside is escaped, and a content policy forbids scripts and loads, so that a model's own text cannot do anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any, Final

from atoll.base.units import as_size
from atoll.base.wording import counted
from atoll.report.charts import Series, TimelineBar, lines, stack, timeline
from atoll.run.curves import first_s, thinned
from atoll.run.view import RoundLine, RunView

POINTS_MAX: Final = 3000
_WAITED: Final = {"grace": "grace that was waited"}
"""Parts of lost time whose name alone could be read as another figure of the page: the grace that was granted."""
SAMPLE_CHARS_MAX: Final = 20_000
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 820px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
svg { width: 100%; height: auto; } svg text { font-size: 10px; fill: currentColor; }
.grid { stroke: currentColor; opacity: .15; } .none, .dim { opacity: .65; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .15rem .8rem .15rem 0; }
td + td, th + th { font-variant-numeric: tabular-nums; }
.legend { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .85rem; }
.legend b { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; padding: .8rem; border: 1px solid; border-color: #8884; }
.bad { border-left: 4px solid #d55e00; padding-left: .8rem; }
"""


def page(report: Mapping[str, Any], view: RunView, sample: str) -> str:
    """Return the page."""
    rounds: list[RoundLine] = thinned(list(view.rounds), POINTS_MAX)
    began_s = first_s(view)
    sections = [
        ("Summary", _summary(report)),
        ("What was slow", _slow(report["slow"])),
        ("What became of the tokens", stack(report["tokens_by_fate"]) + _errors(report)),
        ("Validation", _validation_chart(report)),
        *_over_time(report["curves"]),
        ("Contributors per round", _contributors_chart(rounds, began_s)),
        ("Bytes", _bytes_chart(view, began_s) + _links(report["moved"])),
        ("Rounds", _rounds_chart(rounds, began_s, int(report["settings"]["protocol.fragments"]))),
        ("Learners", _learners(report)),
        ("A sample of its text", f"<pre>{escape(sample[:SAMPLE_CHARS_MAX])}</pre>" if sample else _NOTHING),
        ("Settings", _table(["setting", "value"], [[k, str(v)] for k, v in sorted(report["settings"].items())])),
    ]
    body = "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections)
    run = escape(report["run"])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Atoll: {run}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>'
        f'<body><h1>Atoll, run {run}</h1><p class="dim">{_provenance(report)}</p>{body}</body></html>\n'
    )


_NOTHING: Final = '<p class="none">there is none</p>'


def _provenance(report: Mapping[str, Any]) -> str:
    parts = [f"atoll {report['atoll']}", f"commit {report['commit']}", report["machine"], f"seed {report['seed']}"]
    return escape(" · ".join(str(part) for part in parts if part))


def _summary(report: Mapping[str, Any]) -> str:
    validation, rounds = report["validation"], report["rounds"]
    measured = validation["validation_bytes"]
    rows = [
        ["tokens trained", f"{report['tokens_trained']:,}"],
        ["every token accounted for", "yes" if report["fates_exact"] else "no, see the reasons below"],
        [
            "bits per byte" + ("" if measured is None else f" of the first {as_size(measured)} held out"),
            f"{_number(validation['initial_bits_per_byte'])} → {_number(validation['final_bits_per_byte'])}",
        ],
        *(
            [["bits per byte of the average of its values", _number(validation["average_bits_per_byte"])]]
            if "average_bits_per_byte" in validation
            else []
        ),
        ["goodput", "-" if report["goodput"] is None else f"{100 * report['goodput']:.1f}%"],
        ["commits", f"{report['commits']:,}"],
        ["contributors per round, mean", _number(rounds["contributors_mean"])],
        [
            "grace that was granted per round (a round that needs less waits less), mean",
            _number(rounds["grace_s_mean"], " s"),
        ],
        [
            "call to the end of a round (its merge and commit not counted), median and 95%",
            f"{_number(rounds['waited_s_p50'], ' s')}, {_number(rounds['waited_s_p95'], ' s')}",
        ],
        ["payload bytes that the learners sent, read", f"{report['bytes_up']:,}, {report['bytes_down']:,}"],
        ["bytes on the wire of the learners' links, up, down", _on_the_wire(report["moved"]["learners"])],
        ["payload bytes merged, published", f"{report['bytes_merged']:,}, {report['bytes_published']:,}"],
        [
            f"{report['clock']} time",
            f"{report['wall_s']:,.1f} s in {counted(report['sessions'], 'session')}, ended: {report['ended']}",
        ],
    ]
    return _table(["", ""], rows)


def _errors(report: Mapping[str, Any]) -> str:
    if not report["fates_errors"]:
        return ""
    items = "".join(f"<li>{escape(error)}</li>" for error in report["fates_errors"])
    return f'<div class="bad"><p>Not every token is accounted for:</p><ul>{items}</ul></div>'


def _validation_chart(report: Mapping[str, Any]) -> str:
    curve, named = (
        report["validation"]["curve"],
        {"bits_per_byte": "merged model", "average_bits_per_byte": "its average"},
    )
    points = {key: [(float(p["run_tokens"]), float(p[key])) for p in curve if key in p] for key in named}
    shown = [Series(named[key], there) for key, there in points.items() if there or key == "bits_per_byte"]
    return lines(shown, "tokens trained by the run", "bits per byte")


def _over_time(curves: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the charts of what learners said of themselves over time."""
    learners, rates = curves["learners"], curves["rates"]
    left_out = curves["learners_left_out"]
    ended_s = max([at_s for one in learners for at_s in one["at_s"]] + rates["at_s"], default=0.0)
    more = (
        f'<p class="dim">{counted(left_out, "more learner is", "more learners are")} not drawn.</p>' if left_out else ""
    )

    def of_each(what: str, y_label: str, scale: float = 1.0) -> str:
        drawn = []
        for one in learners:
            told = zip(one["at_s"], one[what], strict=True)
            drawn.append(Series(one["learner"], [(at_s, scale * y) for at_s, y in told if y is not None]))
        return lines(drawn, "seconds", y_label, (0.0, ended_s)) + more

    speeds = [
        Series(name, list(zip(rates["at_s"], told, strict=True)))
        for name, told in (
            *((one["learner"], one["tokens_per_s"]) for one in learners if one["tokens_per_s"]),
            *([("all learners", rates["tokens_per_s"])] if len(learners) > 1 else []),
        )
    ]
    return [
        ("Training loss of each learner", of_each("loss", "nats per token")),
        ("Tokens per second", lines(speeds, "seconds", "tokens per second", (0.0, ended_s)) + more),
        ("Versions that each learner lags behind", of_each("lag", "versions")),
        ("Overhead of each learner", of_each("overhead", "% of its time", 100.0)),
    ]


def _on_the_wire(sums: Mapping[str, Any]) -> str:
    return f"{sums['wire_up']:,}, {sums['wire_down']:,} (payload, and what carries it)"


def _slow(told: Mapping[str, Any] | None) -> str:
    """Return the largest shares of time lost, each with the command that tells more."""
    if told is None:
        return '<p class="none">the event log could not be read to its end</p>'
    parts = []
    for of, whole, intro in (
        (
            "learners",
            "of the learners' time",
            "Time that learners were there and did not step, or stepped more slowly:",
        ),
        ("rounds", "of the rounds' time", "Where rounds spent their time; learners do not wait for it:"),
    ):
        items = "".join(
            f"<li><b>{100 * one['share']:.1f}%</b> {whole}, {one['seconds']:,.3g} s "
            f"({escape(_WAITED.get(one['what'], one['what']))}): "
            f"{escape(one['who'] or 'rounds')} {_code(one['sentence'])}. {_more(one['command'])}</li>"
            for one in told["lost"]
            if one["of"] == of
        )
        nothing = f'<p class="none">nothing of note {whole}</p>'
        parts.append(f"<p>{intro}</p><ul>{items}</ul>" if items else nothing)
    found = "".join(map(_found, told["findings"]))
    parts.append(f"<p>What stands out:</p><ul>{found}</ul>" if found else "")
    notes = "".join(f"<li>{escape(note)}</li>" for note in told["notes"])
    return "".join(parts) + (
        f'<ul class="dim">{notes}<li>the commands take <code>--out</code> and the folder of this run</li></ul>'
    )


def _found(one: Mapping[str, Any]) -> str:
    """Return a finding as an item: its sentence, its time, its command, and beneath it what it has led to."""
    until = "the end" if one["until_s"] is None else f"{one['until_s']:,.1f} s"
    beneath = "".join(map(_found, one["consequences"]))
    so = f"<ul>{beneath}</ul>" if beneath else ""
    return (
        f"<li>{escape(one['cause'])}, {escape(one['culprit'])}: {escape(one['text'])} "
        f"({one['from_s']:,.1f} s to {until}). {_more(one['command'])}{so}</li>"
    )


def _more(command: str) -> str:
    return f'<span class="dim">More: <code>{escape(command)}</code></span>'


def _code(sentence: str) -> str:
    """Return a sentence with what it has between backquotes as code."""
    return "".join(
        f"<code>{escape(part)}</code>" if number % 2 else escape(part)
        for number, part in enumerate(sentence.split("`"))
    )


def _contributors_chart(rounds: list[RoundLine], began_s: float) -> str:
    contributors = [(line.at_s - began_s, float(len(line.round.contributors))) for line in rounds]
    live = [(line.at_s - began_s, float(line.round.live)) for line in rounds]
    return lines([Series("contributors", contributors), Series("live learners", live)], "seconds", "learners")


def _bytes_chart(view: RunView, began_s: float) -> str:
    # What rounds moved that the view no longer keeps lies before the first point.
    up = view.bytes_merged - sum(line.round.bytes_up for line in view.rounds)
    down = view.bytes_published - sum(line.round.bytes_down for line in view.rounds)
    points: list[tuple[float, int, int]] = []
    for line in view.rounds:
        up, down = up + line.round.bytes_up, down + line.round.bytes_down
        points.append((line.at_s - began_s, up, down))
    shown = thinned(points, POINTS_MAX)
    return lines(
        [Series("merged", [(t, u) for t, u, _ in shown]), Series("published", [(t, d) for t, _, d in shown])],
        "seconds",
        "bytes",
    )


def _links(moved: Mapping[str, Any]) -> str:
    """Return every link with what it carried, and what that means per token."""
    sums = [
        {"link": "all learners", "processes": "", **moved["learners"]},
        {"link": "all", "processes": "", **moved["all"]},
    ]
    rows = [
        [
            str(link["link"]),
            str(link["processes"]),
            *(as_size(link[f"{what}_{way}"]) for what in ("frames", "payload", "wire") for way in ("up", "down")),
            as_size(link["overhead"]),
        ]
        for link in [*moved["links"], *sums]
    ]
    heads = [f"{what} {way}" for what in ("frames", "payload", "wire") for way in ("up", "down")]
    per_token = [
        ["bytes per token over the learners' links, over all", _both(moved, "bytes_per_token")],
        ["data-parallel training in bf16, bytes per token", _number(moved["data_parallel_bytes_per_token"])],
        ["times less than data-parallel, learners' links, all", _both(moved, "times_less")],
        [
            "bits per parameter merged, fetched (with each learner's first reading of the whole model), published",
            ", ".join(_number(moved[f"bits_per_parameter_{way}"]) for way in ("up", "down", "published")),
        ],
    ]
    return _table(["link", "processes", *heads, "overhead"], rows) + _table(["", ""], per_token)


def _both(moved: Mapping[str, Any], name: str) -> str:
    return f"{_number(moved[name])}, {_number(moved[f'{name}_all_links'])}"


def _rounds_chart(rounds: list[RoundLine], began_s: float, fragments: int) -> str:
    bars = []
    for line in rounds:
        done = line.round
        stop = line.at_s - began_s
        start = stop - done.took_s
        names = ", ".join(f"{c.learner}{f' (age {c.age})' if c.age else ''}" for c in done.contributors)
        title = f"fragment {done.fragment} version {done.version}: {names}; {done.end}; {done.waited_s:.2f} s"
        bars.append(TimelineBar(done.fragment, start, stop, title))
    return timeline(bars, fragments, "seconds, from call to commit")


def _learners(report: Mapping[str, Any]) -> str:
    rows = []
    for learner in report["learners"]:
        for life in learner["incarnations"]:
            speed, overhead = life["tokens_per_s"], life["overhead"]
            rows.append(
                [
                    learner["learner"],
                    str(life["incarnation"]),
                    f"{life['tokens']:,}",
                    "-" if life["steps"] is None else f"{life['steps']:,}",
                    ", ".join(f"{fate} {count:,}" for fate, count in life["tokens_by_fate"].items() if count),
                    _number(speed),
                    "-" if overhead is None else f"{100 * overhead:.2f}%",
                    "left" if life["left"] else "died or was killed",
                ]
            )
    return _table(["learner", "life", "tokens", "steps", "fates", "tokens/s", "overhead", "end"], rows)


def _table(head: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return _NOTHING
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:,.4g}{unit}"
