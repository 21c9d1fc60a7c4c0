"""The charts of reports, fleets and benchmarks: every point is drawn, every name is escaped, a file brings its legend along."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest

from atoll.report.charts import (
    PALETTE,
    Series,
    ShareCurve,
    SharePoint,
    TimelineBar,
    label,
    lines,
    lines_file,
    shares_file,
    stack,
    ticks,
    timeline,
)

NAMESPACE = "{http://www.w3.org/2000/svg}"


def drawn(svg: str, kind: str) -> list[ET.Element]:
    """Return the elements of one kind; the text is one well-formed document."""
    return list(ET.fromstring(svg).iter(NAMESPACE + kind))  # noqa: S314  (our own text)


def texts(svg: str) -> list[str]:
    """Return what is written in a file."""
    return [element.text or "" for element in drawn(svg, "text")]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 10.0, [0, 2, 4, 6, 8, 10]), (0.3, 0.32, [0.3, 0.305, 0.31, 0.315, 0.32]), (7.0, 7.0, [7.0])],
)
def test_ticks_are_round_numbers_within_their_range(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_large_numbers_are_labelled_in_thousands() -> None:
    assert [label(value) for value in (950.0, 1500.0, 2e6, 3e9, 0.12345)] == ["950", "1.5k", "2M", "3G", "0.1235"]


def test_a_file_of_lines_has_a_line_and_a_key_per_series_with_points() -> None:
    series = [Series("a <b>", [(0, 1), (1, 2)]), Series("alone", [(1, 3)]), Series("empty", [])]
    svg = lines_file(series, "tokens & time", "loss")

    assert [line.get("stroke") for line in drawn(svg, "polyline")] == [PALETTE[0]]
    assert [point.get("fill") for point in drawn(svg, "circle")] == [PALETTE[1]]
    assert {"a <b>", "alone", "tokens & time", "loss"} <= set(texts(svg))
    assert "empty" not in texts(svg)


def test_a_chart_of_a_page_leaves_its_style_to_the_page() -> None:
    page, file = (make([Series("a", [(0, 1), (1, 2)])], "x", "y") for make in (lines, lines_file))

    assert "<style>" in file
    assert "<style>" not in page
    assert page.endswith("</ul>")
    assert re.findall("<polyline[^>]*>", page) == re.findall("<polyline[^>]*>", file)


def test_a_chart_of_nothing_says_so() -> None:
    assert "nothing was measured" in texts(lines_file([], "x", "y"))
    assert "nothing was measured" in lines([Series("a", [])], "x", "y")
    assert "there were no rounds" in timeline([], 4, "s")
    assert "no token was trained" in stack({"merged": 0})


def test_a_timeline_has_a_bar_per_round_in_its_lane() -> None:
    svg = timeline([TimelineBar(0, 0.0, 1.0, "first"), TimelineBar(2, 1.0, 3.0, "second")], 3, "s")
    first, second = re.findall(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', svg)

    assert float(second[0]) > float(first[0])
    assert float(second[1]) > float(first[1])
    assert float(second[2]) == pytest.approx(2 * float(first[2]), abs=0.2)


def test_a_stack_is_as_wide_as_its_parts() -> None:
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="26"', stack({"a": 3, "b": 1, "none": 0}))]

    assert widths == [570.0, 190.0]


def test_shares_have_their_interval_their_rings_and_columns_on_a_logarithmic_axis() -> None:
    """Three columns that double are equally far apart; an interval beyond the whole ends at its frame."""
    points = [SharePoint(x, 0.98, 0.1, f"at {x}") for x in (100.0, 200.0, 400.0)]
    svg = shares_file([ShareCurve("ours", points, [(200.0, 0.5)])], {100: "100", 200: "200", 400: "400"}, "chips", "%")
    dots = [dot for dot in drawn(svg, "circle") if dot.get("r") == "2.5"]
    xs = [float(dot.get("cx", "nan")) for dot in dots]
    tops = {(path.get("d") or "").rpartition("V")[2] for path in drawn(svg, "path")}
    (full,) = (line.get("y1") for line in drawn(svg, "line")[5:6])

    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.11)
    assert tops == {full}
    assert len([ring for ring in drawn(svg, "circle") if ring.get("r") == "6"]) == 1
    assert {"100", "200", "400", "chips", "%", "ours"} <= set(texts(svg))


def test_one_column_alone_stands_in_the_middle() -> None:
    svg = shares_file([ShareCurve("one", [SharePoint(4096.0, 0.5, 0.0, "half")])], {4096: "4096"}, "chips", "%")
    frame = drawn(svg, "line")[0]

    assert float(drawn(svg, "circle")[0].get("cx", "nan")) == pytest.approx(
        (float(frame.get("x1", "nan")) + float(frame.get("x2", "nan"))) / 2
    )


def test_a_line_stops_where_nothing_is_known() -> None:
    """Two stretches with a gap between, of one colour; a series without any known point is not drawn."""
    broken = Series("a", [(0, 1), (1, 2), (2, None), (3, 4), (4, 5)])
    svg = lines_file([broken, Series("unknown", [(0, None)])], "x", "y")

    assert [line.get("stroke") for line in drawn(svg, "polyline")] == [PALETTE[0], PALETTE[0]]
    assert "unknown" not in texts(svg)


def test_charts_of_one_span_have_one_axis() -> None:
    """Of two charts one has points only at the end: both are drawn over the whole time."""
    late = lines([Series("a", [(90.0, 1.0), (100.0, 2.0)])], "seconds", "y", (0.0, 100.0))
    whole = lines([Series("a", [(0.0, 1.0), (100.0, 2.0)])], "seconds", "y")

    ends = [re.search(r'points="[^"]* ([0-9.]+),', svg) for svg in (late, whole)]
    assert None not in ends
    assert ends[0].group(1) == ends[1].group(1)  # type: ignore[union-attr]
