"""The run as `atoll top` and `atoll status` show it: its status, its numbers, a table for each panel. Pure, from a moment.

    TopMoment ──► numbers, heading           the lines above the panels
              ──► one of PANELS              columns, rows, and a row's detail in full below the table
              ──► status_of, status_lines    the status, and the lines that `atoll status` prints without `--json`

A column has a rank. On a narrow terminal columns of high rank are left out until the others fit (`fitting`), so no cell is
cut. Every column that is left out stands in the row's detail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from atoll.base.wording import as_bytes, as_count, as_duration, as_time, counted
from atoll.local.console import ConsolePicture, status_line
from atoll.run.decisions import CLIP_CURE, ISOLATION_CURE, describe_clip, describe_isolation, describe_wait
from atoll.run.history import RoundLine, TimeMark
from atoll.run.links import byte_ledger, name_of
from atoll.run.process_views import Hearing, HostView, LearnerView
from atoll.run.standing import (
    FragmentStatus,
    LearnerStatus,
    RunStatus,
    ShardStatus,
    Standing,
    Storing,
    heard_at_s,
    making_of,
    stalled_fragments,
    standing_of,
)

ROUNDS_SHOWN: Final = 200
LEARNERS_MAPPED: Final = 64
FRAGMENTS_MAPPED: Final = 256
ROUNDS_SEARCHED: Final = 20
"""For the map: how many of the newest rounds are searched for contributions, for each fragment."""
GAP: Final = 2
UNKNOWN: Final = "-"
MARK_STYLES: Final = {"fault": "red", "recovery": "green", "change": ""}
NAMED_MAX: Final = 4
RECENT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class TopMoment:
    """A run at one moment.

    `wall_s` is the moment of `picture.now_s` by date. `closing` says that the run record is
    closed. `unanswered_s` is for how long the broker has not answered.
    """

    picture: ConsolePicture
    wall_s: float
    closing: bool = False
    unanswered_s: float = 0.0

    @property
    def has_target_reached(self) -> bool:
        """Return whether the run has merged the tokens that it was to train."""
        return 0 < self.picture.target <= self.picture.view.run_tokens

    @property
    def has_ended(self) -> bool:
        """Return whether the run has reached its end."""
        return self.closing or self.has_target_reached

    @property
    def hearing(self) -> Hearing:
        """Return what judges who is heard."""
        return replace(self.picture.hearing, wall_s=self.wall_s, over=self.has_ended)

    def heard_at_s(self, learner: LearnerView) -> float | None:
        """Return when a learner was last heard, by date."""
        return heard_at_s(learner, self.wall_s - self.picture.now_s)

    def ago(self, at_s: float | None) -> str:
        """Return how long ago a wall time was."""
        return UNKNOWN if at_s is None else as_time(round(max(0.0, self.wall_s - at_s)))


@dataclass(frozen=True, slots=True)
class Cell:
    """A text, what it is sorted by, and its colour (a name of rich); colour never says what the text does not."""

    text: str
    key: float | str = ""
    style: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A heading; columns of high rank are left out first, those of rank 0 never."""

    name: str
    rank: int = 0
    right: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """The cells of a row, its name among the rows of its panel, and all that is known of it in words."""

    key: str
    cells: tuple[Cell, ...]
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A table, and what stands in its place while it is empty."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    empty: str


def heading(moment: TopMoment) -> str:
    """Return the run's name, what it does and what it waits for."""
    if moment.unanswered_s:
        return f"{moment.picture.run}: the broker has not answered for {as_time(round(moment.unanswered_s))}"
    return f"{moment.picture.run}: {standing_at(moment).line}"


def standing_at(moment: TopMoment) -> Standing:
    """Return how the run stands."""
    picture, hearing = moment.picture, moment.hearing
    states = [hearing.state(learner) for learner in picture.view.learners.values()]
    owned = {shard for host in picture.hosts() for shard in host.owns}
    unheard = tuple(
        f"{name} for {moment.ago(moment.heard_at_s(learner))}"
        for name, learner in sorted(picture.view.learners.items())
        if hearing.state(learner) == "silent"
    )
    # Both by the clocks of those who wrote them: ours may differ.
    silent_s = picture.view.newest_beat_s - (moment.picture.view.newest_s or picture.view.newest_beat_s)
    storing = Storing(silent_s, stalled_fragments(picture.view.rounds, picture.protocol.fragments))
    training = {name for name, one in picture.view.learners.items() if hearing.state(one) == "training"}
    return standing_of(
        picture.protocol,
        states,
        owned,
        ended=moment.has_ended,
        stopped=not moment.has_target_reached,
        unheard=unheard,
        storing=storing,
        making=making_of(picture.view, picture.protocol, training),
    )


def numbers(moment: TopMoment) -> list[tuple[str, str]]:
    """Return the run in numbers, each with its name."""
    picture, view = moment.picture, moment.picture.view
    per_token = byte_ledger(view, picture.protocol.fragments).per_token("learner")
    hearing = moment.hearing
    training = sum(hearing.state(learner) == "training" for learner in view.learners.values())
    of = f" of {as_count(picture.target)}" if picture.target else ""
    told = [
        ("bits/byte", f"{view.validations[-1].fields.bits_per_byte:.3f}" if view.validations else UNKNOWN),
        ("tokens", f"{as_count(view.run_tokens)}{of}"),
        ("tokens/s", as_count(round(picture.tokens_per_s))),
        ("goodput now", UNKNOWN if picture.goodput is None else f"{100 * picture.goodput:.0f}%"),
        ("training", f"{training} of {len(view.learners)}"),
        ("commits", f"{view.commits:,}"),
        ("bytes/token", UNKNOWN if per_token is None else f"{per_token:.3g}"),
    ]
    return told if picture.left_s is None else [*told, ("to go", as_duration(picture.left_s))]


def learners(moment: TopMoment) -> Panel:
    """Return a row per learner."""
    columns = (
        Column("learner", right=False),
        Column("state", right=False),
        Column("life", 3),
        Column("step"),
        Column("loss"),
        Column("tok/s"),
        Column("step s", 1),
        Column("lag"),
        Column("overh.", 2),
        Column("heard"),
    )
    hearing, learners = moment.hearing, sorted(moment.picture.view.learners.items())
    rows = [_learner_row(moment, hearing.state(learner), name, learner) for name, learner in learners]
    return Panel(columns, tuple(rows), "No learner has joined yet.")


def _learner_row(moment: TopMoment, state: str, name: str, learner: LearnerView) -> Row:
    life, told = learner.latest, learner.report
    incarnation = 0 if life is None else life.incarnation
    heard_s = moment.heard_at_s(learner)
    style = {"training": "green", "silent": "red", "draining": "yellow"}.get(state, "")
    cells = [Cell(name, name), Cell(state, state, style), _number_cell(incarnation, str(incarnation))]
    if told is None:
        cells += [Cell(UNKNOWN, -1.0)] * 6
        rest = "nothing of its steps is known"
    else:
        loss = UNKNOWN if told.loss is None else f"{told.loss:.3f}"
        cells += [
            _number_cell(told.step, as_count(told.step)),
            _number_cell(-1.0 if told.loss is None else told.loss, loss),
            _number_cell(told.tokens_per_s, as_count(round(told.tokens_per_s))),
            _number_cell(told.step_s, f"{told.step_s:.3g}"),
            _number_cell(told.lag_versions, str(told.lag_versions)),
            _number_cell(told.overhead, f"{100 * told.overhead:.1f}%"),
        ]
        rest = (
            f"{learner.tokens:,} tokens, a step in {as_time(told.step_s)}, overhead {100 * told.overhead:.1f}%, "
            f"{told.lag_versions} versions behind"
        )
    cells.append(_number_cell(-1.0 if heard_s is None else moment.wall_s - heard_s, moment.ago(heard_s)))
    return Row(name, tuple(cells), f"{name}: {state}, incarnation {incarnation}; {rest}")


def shards(moment: TopMoment) -> Panel:
    """Return a row per synchronizer process, and one per shard that nobody serves."""
    columns = (
        Column("serves", right=False),
        Column("state", right=False),
        Column("heard"),
        Column("up/s", 1),
        Column("down/s", 1),
        Column("up", 2),
        Column("down", 2),
    )
    picture = moment.picture
    rows = []
    for number, host in enumerate((*picture.hosts(), *silent_hosts(picture))):
        silent = picture.now_s - (host.heard_s or 0.0)
        state = Cell("serving", "serving", "green") if host.serving else Cell("standby", "standby")
        if host not in picture.hosts():
            state = Cell("silent", "silent", "red")
        up, down = (0.0, 0.0) if state.text == "silent" else host.meter.pace()
        moved = host.meter.moved
        amounts = (up, down, float(moved.wire_up), float(moved.wire_down))
        cells = (
            _name_cell(name_of(host)),
            state,
            _number_cell(silent, as_time(round(silent))),
            *map(_amount_cell, amounts),
        )
        told = ", ".join(cell.text for cell in cells[3:])
        rows.append(Row(f"{number}", cells, f"{name_of(host)}: {state.text}; up/s, down/s, up, down: {told}"))
    owned = {shard for host in picture.hosts() for shard in host.owns}
    absent = [shard for shard in range(picture.protocol.shards) if shard not in owned]
    nobody = (Cell("unserved", "unserved", "red"), *(Cell(UNKNOWN, -1.0),) * 5)
    rows += [
        Row(f"no {n}", (_name_cell(f"shard-{n}"), *nobody), f"no process that is heard serves shard {n}")
        for n in absent
    ]
    return Panel(columns, tuple(rows), "No synchronizer is heard.")


def silent_hosts(picture: ConsolePicture) -> list[HostView]:
    """Return the processes that were serving when they fell silent, and whose shards nobody has taken over."""
    heard = picture.hosts()
    owned = {shard for host in heard for shard in host.owns}
    known = [host for host in picture.view.hosts.values() if host.heard_s is not None and host not in heard]
    return sorted((host for host in known if host.owns and not {*host.owns} <= owned), key=name_of)


def fragments(moment: TopMoment) -> Panel:
    """Return the map: for each fragment and learner the version that its newest contribution went into, and its lag."""
    view = moment.picture.view
    names = sorted(view.learners)[:LEARNERS_MAPPED]
    newest: dict[tuple[int, str], int] = {}
    missing = len(view.fragments) * len(names)
    for line in _newest_rounds(moment, ROUNDS_SEARCHED * max(1, len(view.fragments))):
        for share in line.round.contributors:
            newest.setdefault((line.round.fragment, share.learner), line.round.version)
        if len(newest) >= missing:
            break
    rows = []
    for fragment, known in sorted(view.fragments.items())[:FRAGMENTS_MAPPED]:
        cells, told = [_number_cell(fragment, f"p{fragment}"), _number_cell(known.version, f"v{known.version}")], []
        for name in names:
            version = newest.get((fragment, name))
            cells.append(Cell(UNKNOWN, -1.0) if version is None else _lag_cell(version, known.version))
            told.append(f"{name} {'none' if version is None else f'v{version}'}")
        detail = f"fragment {fragment} at version {known.version}; newest contributions went into: {', '.join(told)}"
        rows.append(Row(str(fragment), tuple(cells), detail))
    columns = (Column("part"), Column("newest"), *(Column(name) for name in names))
    return Panel(columns, tuple(rows), "No fragment has been committed yet.")


def _lag_cell(version: int, newest: int) -> Cell:
    lag = max(0, newest - version)
    style = "green" if lag == 0 else "yellow" if lag <= 2 else "red"
    return Cell(f"v{version}" + (f" -{lag}" if lag else ""), float(lag), style)


def rounds(moment: TopMoment) -> Panel:
    """Return the newest rounds, newest first."""
    columns = (
        Column("ago"),
        Column("part"),
        Column("version"),
        Column("from"),
        Column("quorum s"),
        Column("grace s"),
        Column("merge s"),
        Column("commit s", 1),
        Column("ended by", 2, right=False),
    )
    rows = []
    for line in _newest_rounds(moment, ROUNDS_SHOWN):
        made = line.round
        phases = made.phases
        times_s = (phases.quorum_wait_s, phases.grace_s, phases.merge_s, phases.commit_s)
        cells = (
            _number_cell(moment.wall_s - line.at_s, moment.ago(line.at_s)),
            _number_cell(made.fragment, f"p{made.fragment}"),
            _number_cell(made.version, f"v{made.version}"),
            _number_cell(len(made.contributors), f"{len(made.contributors)}/{made.live}"),
            *(_number_cell(seconds, f"{seconds:.3f}") for seconds in times_s),
            Cell(made.end or UNKNOWN, made.end),
        )
        why = "" if made.why is None else "; ".join(describe_wait(made.why).values())
        names = ", ".join(share.learner for share in made.contributors)
        detail = f"p{made.fragment} v{made.version} by {line.shard}, from {names}; {made.end}. {why}"
        rows.append(Row(f"{made.fragment}.{made.version}", cells, detail))
    return Panel(columns, tuple(rows), "No round has been merged yet.")


def _newest_rounds(moment: TopMoment, count: int) -> Iterator[RoundLine]:
    for number, line in enumerate(reversed(moment.picture.view.rounds)):
        if number >= count:
            return
        yield line


def faults(moment: TopMoment) -> Panel:
    """Return faults, recoveries and changes, newest first; processes that are silent at the moment among them."""
    picture, hearing = moment.picture, moment.hearing
    since_s = moment.wall_s - picture.now_s
    silent = {
        name: since_s + learner.heard_s
        for name, learner in picture.view.learners.items()
        if hearing.state(learner) == "silent" and learner.heard_s is not None
    }
    silent |= {name_of(host): since_s + (host.heard_s or 0.0) for host in silent_hosts(picture)}
    rows = []
    said = "is silent: the last message of it"
    now = [TimeMark(at_s, "fault", "silent", who, said) for who, at_s in silent.items()]
    told = sorted([*moment.picture.view.marks, *now], key=lambda mark: mark.at_s, reverse=True)
    for number, line in enumerate(told):
        cells = (
            _number_cell(moment.wall_s - line.at_s, moment.ago(line.at_s)),
            Cell(line.group, line.group, MARK_STYLES[line.group]),
            Cell(line.who, line.who),
            Cell(line.text, line.text),
        )
        rows.append(Row(str(len(told) - number), cells, f"{line.who} {line.text}, {moment.ago(line.at_s)} ago"))
    columns = (
        Column("ago"),
        Column("kind", right=False),
        Column("process", right=False),
        Column("what", 1, right=False),
    )
    return Panel(columns, tuple(rows), "Nothing has happened to a process yet.")


def quarantine(moment: TopMoment) -> Panel:
    """Return the learners in quarantine, newest first."""
    rows = []
    count = len(moment.picture.view.quarantined)
    for number, line in enumerate(reversed(list(moment.picture.view.quarantined))):
        told = line.fields
        cells = (
            _number_cell(moment.wall_s - line.at_s, moment.ago(line.at_s)),
            Cell(told.learner, told.learner),
            _number_cell(told.incarnation, str(told.incarnation)),
            _number_cell(told.offences, str(told.offences)),
            Cell(told.reason, told.reason),
        )
        why = f"{describe_isolation(told.offences, told.reason)}; {ISOLATION_CURE}"
        detail = f"{told.learner}, incarnation {told.incarnation}: {why}"
        rows.append(Row(str(count - number), cells, detail))
    columns = (
        Column("ago"),
        Column("learner", right=False),
        Column("life"),
        Column("offences"),
        Column("last reason", 1, right=False),
    )
    return Panel(columns, tuple(rows), "No learner is in quarantine.")


PANELS: Final[dict[str, Callable[[TopMoment], Panel]]] = {
    "learners": learners,
    "shards": shards,
    "map": fragments,
    "rounds": rounds,
    "faults": faults,
    "quarantine": quarantine,
}


def fitting_columns(panel: Panel, width: int, marked: str | None = None) -> list[int]:
    """Return the columns that are shown in so many columns of text; the heading of the `marked` one has a mark."""
    widths = [
        max(len(column.name) + 2 * (column.name == marked), *(len(row.cells[n].text) for row in panel.rows), 0) + GAP
        for n, column in enumerate(panel.columns)
    ]
    shown = list(range(len(panel.columns)))
    while sum(widths[n] for n in shown) > width:
        worst = max(shown, key=lambda n: (panel.columns[n].rank, n))
        if not panel.columns[worst].rank:
            break
        shown.remove(worst)
    return shown


def sort_rows(rows: Sequence[Row], column: int | None, *, falling: bool) -> list[Row]:
    """Return the rows sorted by a column, in their own order if that is None."""
    if column is None:
        return list(rows)
    return sorted(rows, key=lambda row: row.cells[column].key, reverse=falling)


def _number_cell(value: float, text: str) -> Cell:
    return Cell(text, float(value))


def _name_cell(name: str) -> Cell:
    return Cell(name, name)


def _amount_cell(count: float) -> Cell:
    return Cell(as_bytes(count), count)


def status_of(moment: TopMoment, broker: str) -> RunStatus:
    """Return the status of a run at a moment; `broker` is the address that answered."""
    picture, view = moment.picture, moment.picture.view
    standing = standing_at(moment)
    hearing = moment.hearing
    learners = tuple(_learner_status(moment, hearing, learner) for _, learner in sorted(view.learners.items()))
    lags = [each.lag_versions for each in learners if each.state == "training" and each.lag_versions is not None]
    owners = {shard: host for host in picture.hosts() for shard in host.owns}
    shards = []
    for shard in range(picture.protocol.shards):
        owner = owners.get(shard)
        heard_s = None if owner is None or owner.heard_s is None else picture.now_s - owner.heard_s
        shards.append(ShardStatus(shard=shard, served=owner is not None, heard_s=_round(heard_s)))
    return RunStatus(
        run=picture.run,
        standing=standing.word,
        waits_for=standing.waits_for,
        unheard=standing.unheard,
        broker=broker,
        tokens=view.run_tokens,
        tokens_target=picture.target,
        tokens_per_s=round(picture.tokens_per_s, 3),
        commits=view.commits,
        quorum=picture.protocol.quorum,
        bits_per_byte=view.validations[-1].fields.bits_per_byte if view.validations else None,
        goodput=_round(picture.goodput),
        bytes_per_token=_round(byte_ledger(view, picture.protocol.fragments).per_token("learner")),
        lag_versions_max=max(lags, default=None),
        faults=moment.picture.view.faults,
        learners=learners,
        shards=tuple(shards),
        fragments=tuple(
            FragmentStatus(fragment=fragment, version=known.version, contributors=known.contributors)
            for fragment, known in sorted(view.fragments.items())
        ),
        quarantined=tuple(sorted({isolated.learner for isolated in view.isolations})),
        clipped=_clipped_lines(moment),
    )


def status_lines(moment: TopMoment, founded_at_s: float | None = None) -> str:
    """Return the lines for a person: what the run does and waits for, the run in one line, who is isolated or clipped.

    `founded_at_s` is from the run record. Without it the run began with the first entry of its event log.
    """
    isolated = [
        f"in quarantine: {isolated.learner}, {describe_isolation(isolated.offences, isolated.reason)}; {ISOLATION_CURE}"
        for isolated in moment.picture.view.isolations[-NAMED_MAX:]
    ]
    return "\n".join(
        [heading(moment), status_line(with_age(moment, founded_at_s)), *isolated, *_clipped_lines(moment)[:NAMED_MAX]]
    )


def _clipped_lines(moment: TopMoment) -> tuple[str, ...]:
    return tuple(
        f"{name}: {counted(clips.count, 'contribution was', 'contributions were')} clipped, the last {moment.ago(clips.at_s)} "
        f"ago, {describe_clip(clips.norm, clips.norm_max)}; {CLIP_CURE}"
        for name, clips in sorted(moment.picture.view.sums.clipped.items())
        if moment.wall_s - clips.at_s <= RECENT_S
    )


def with_age(moment: TopMoment, founded_at_s: float | None = None) -> ConsolePicture:
    """Return the picture of a moment with the age of its run; `founded_at_s` as in `status_lines`."""
    return replace(moment.picture, run_s=_age_s(moment, founded_at_s))


def _age_s(moment: TopMoment, founded_at_s: float | None) -> float:
    view = moment.picture.view
    until_s = view.newest_s if moment.has_ended and view.newest_s else moment.wall_s
    began_s = view.began_s if founded_at_s is None else founded_at_s
    # Two machines may disagree about the time: an age is never below zero.
    return 0.0 if began_s is None else max(0.0, until_s - began_s)


def _learner_status(moment: TopMoment, hearing: Hearing, learner: LearnerView) -> LearnerStatus:
    life, told = learner.latest, learner.report
    heard_at_s = moment.heard_at_s(learner)
    heard_s = None if heard_at_s is None else max(0.0, moment.wall_s - heard_at_s)
    return LearnerStatus(
        learner=learner.learner,
        state=hearing.state(learner),
        incarnation=0 if life is None else life.incarnation,
        tokens=learner.tokens,
        step=None if told is None else told.step,
        step_s=None if told is None else told.step_s,
        loss=None if told is None else told.loss,
        tokens_per_s=None if told is None else told.tokens_per_s,
        overhead=None if told is None else told.overhead,
        lag_versions=None if told is None else told.lag_versions,
        heard_s=_round(heard_s),
    )


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
