"""`atoll top` on a terminal: a Textual application around the tables of `console_tables`. It only draws and takes keys.

    heading            the run, what it does, what it waits for
    numbers            the run in numbers, on as many lines as they need
    tabs               the panels, each with the key that shows it
    table              the panel; the row under the cursor is told in full below it
    footer             the keys

`moment` is called twice a second. A panel whose columns stay the same is updated cell by cell, so the cursor and the scroll
position stay where they are. Nothing blinks and nothing is told by colour alone; with NO_COLOR set there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.coordinate import Coordinate
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from atoll.base.errors import INTERRUPTED, for_a_terminal
from atoll.local.console_tables import PANELS, Panel, Row, TopMoment, fitting_columns, heading, numbers, sort_rows

EVERY_S: Final = 0.5
GAP: Final = 3
LEFT: Final = 0
HELP: Final = """\
1-6, Tab   show a panel, the next panel
arrows     move; the row is told in full below
s          sort by the next column
S          sort in the other order
?          this help; Esc closes it
q, Ctrl-C  leave

learners   heard: since the last heartbeat
shards     bytes on the links of synchronizers
map        the version that a learner's newest part
           went into; -2: the newest is 2 ahead
rounds     the wait for a quorum, then the grace
faults     processes lost, and their return
quarantine learners that shards refuse, and why

A narrow terminal leaves columns out."""


class PanelTable(DataTable[Text]):
    """A table whose keys for rows stand in the footer."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "cursor_up", "row", key_display="↑↓"),
    ]


class HelpScreen(ModalScreen[None]):
    """The keys and the panels in words."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q", "dismiss", "close", show=False),
        Binding("ctrl+c", "app.interrupt", show=False),
    ]

    def compose(self) -> ComposeResult:
        """Show the text in a box that scrolls where the terminal is low."""
        with VerticalScroll(id="help"):
            yield Static(HELP, markup=False)


class TopApp(App[int]):
    """Shows one run until it is left; the result is `LEFT`, or `INTERRUPTED` after Ctrl-C."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #heading { height: auto; max-height: 2; text-style: bold; }
    #numbers, #tabs { height: auto; }
    #panel { height: 1fr; }
    #empty { height: 1fr; color: $text-muted; padding: 1; display: none; }
    #detail { height: auto; max-height: 4; color: $text-muted; }
    HelpScreen { align: center middle; }
    #help { width: 66; max-width: 100%; height: auto; max-height: 100%; padding: 0 1; background: $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "panel(0)", "panel", key_display="1-6"),
        *(Binding(str(n + 1), f"panel({n})", show=False) for n in range(1, len(PANELS))),
        Binding("tab", "turn(1)", "next", key_display="Tab", priority=True),
        Binding("shift+tab", "turn(-1)", show=False, priority=True),
        Binding("s", "sort", "sort"),
        Binding("S", "reverse", "order", key_display="S"),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("q", "leave", "quit"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
    ]

    def __init__(self, moment: Callable[[], TopMoment]) -> None:
        super().__init__()
        self._moment = moment
        self._names = list(PANELS)
        self._shown = self._names[0]
        self._sorted: dict[str, tuple[str | None, bool]] = {}
        self._drawn: tuple[str, ...] = ()
        self._keys: list[str] = []
        self._rows: list[Row] = []
        self._cursors: dict[str, str] = {}

    def compose(self) -> ComposeResult:
        """Place the parts."""
        yield Static(id="heading", markup=False)
        yield Static(id="numbers", markup=False)
        yield Static(id="tabs", markup=False)
        yield PanelTable(id="panel", cursor_type="row")
        yield Static(id="empty", markup=False)
        yield Static(id="detail", markup=False)
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Draw at once, and then twice a second."""
        self.query_one(PanelTable).focus()
        self.draw()
        self.set_interval(EVERY_S, self.draw)

    def on_resize(self) -> None:
        """Draw for the new width."""
        self.draw()

    def draw(self) -> None:
        """Draw the run as it is."""
        moment, home = self._moment(), self.screen_stack[0]
        if not home.query("#heading"):  # the console ends: its parts go before the clock that draws them
            return
        home.query_one("#heading", Static).update(heading(moment))
        home.query_one("#numbers", Static).update(in_lines(numbers(moment), self.size.width))
        tabs = Text(no_wrap=True, end="")
        for n, name in enumerate(self._names):
            tabs.append(f"{n + 1} {name}", "bold reverse" if name == self._shown else "")
            tabs.append(" " if n + 1 < len(self._names) else "")
        home.query_one("#tabs", Static).update(tabs)
        panel = PANELS[self._shown](moment)
        table, empty = home.query_one("#panel", PanelTable), home.query_one("#empty", Static)
        table.display, empty.display = bool(panel.rows), not panel.rows
        empty.update(panel.empty)
        self._fill(table, panel)
        self._tell(table)
        if panel.rows and self.screen is home and self.focused is not table:
            table.focus()  # a table that was hidden has lost the keys

    def _fill(self, table: PanelTable, panel: Panel) -> None:
        by, falling = self._sorted.get(self._shown, (None, False))
        shown = fitting_columns(panel, self.size.width, by)
        names = [column.name for column in panel.columns]
        column = names.index(by) if by in names else None
        rows = sort_rows(panel.rows, column, falling=falling)
        mark = "▼" if falling else "▲"
        labels = tuple(names[n] + (f" {mark}" if n == column else "") for n in shown)
        former, self._rows = self._rows, rows
        if (self._shown, *labels) == self._drawn and [row.key for row in rows] == self._keys:
            self._fill_changed_cells(table, panel, shown, former)
        else:
            self._fill_anew(table, panel, shown, labels)

    def _fill_changed_cells(self, table: PanelTable, panel: Panel, shown: list[int], former: list[Row]) -> None:
        for place, (old, row) in enumerate(zip(former, self._rows, strict=True)):
            for slot, n in enumerate(shown):
                if old.cells[n].text != row.cells[n].text or old.cells[n].style != row.cells[n].style:
                    table.update_cell_at(Coordinate(place, slot), drawn_cell(panel, row, n), update_width=True)

    def _fill_anew(self, table: PanelTable, panel: Panel, shown: list[int], labels: tuple[str, ...]) -> None:
        """Draw all rows, with new columns if those are others; the cursor stays on its row, and the scroll position with it."""
        drawn, keys = (self._shown, *labels), [row.key for row in self._rows]
        held, top = self._cursors.get(self._shown), table.scroll_offset
        same = drawn == self._drawn
        table.clear(columns=not same)
        if not same:
            table.fixed_columns = 2 if self._shown == "map" else 1
            for label, n in zip(labels, shown, strict=True):
                table.add_column(Text(label, justify="right" if panel.columns[n].right else "left"))
        for row in self._rows:
            table.add_row(*(drawn_cell(panel, row, n) for n in shown), key=row.key)
        self._drawn, self._keys = drawn, keys
        if held in keys:
            table.move_cursor(row=keys.index(held), scroll=False)
        if same:
            table.scroll_to(top.x, top.y, animate=False)

    def _tell(self, table: PanelTable) -> None:
        here = self._rows[table.cursor_row].detail if 0 <= table.cursor_row < len(self._rows) else ""
        self.screen_stack[0].query_one("#detail", Static).update(for_a_terminal(here))

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Remember the row that the cursor is on; on the first one it stays there, where new rounds and faults come in."""
        if event.row_key.value is not None and event.row_key.value in self._keys:
            self._cursors[self._shown] = event.row_key.value if event.cursor_row else ""
            self._tell(self.screen_stack[0].query_one("#panel", PanelTable))

    def action_panel(self, number: int) -> None:
        """Show a panel."""
        self._shown = self._names[number]
        self.draw()

    def action_turn(self, by: int) -> None:
        """Show the next panel or the one before."""
        self.action_panel((self._names.index(self._shown) + by) % len(self._names))

    def action_sort(self) -> None:
        """Sort by the next column that is shown; after the last one the rows stand in their own order."""
        panel = PANELS[self._shown](self._moment())
        by, falling = self._sorted.get(self._shown, (None, False))
        names = [panel.columns[n].name for n in fitting_columns(panel, self.size.width, by)]
        place = names.index(by) + 1 if by in names else 0
        self._sorted[self._shown] = (names[place] if place < len(names) else None, falling)
        self.draw()

    def action_reverse(self) -> None:
        """Sort the other way round."""
        by, falling = self._sorted.get(self._shown, (None, False))
        self._sorted[self._shown] = (by, not falling)
        self.draw()

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(HelpScreen())

    def action_leave(self) -> None:
        """Leave, as asked for."""
        self.exit(LEFT)

    def action_interrupt(self) -> None:
        """Leave, as after any Ctrl-C."""
        self.exit(INTERRUPTED)


def drawn_cell(panel: Panel, row: Row, column: int) -> Text:
    """Return a cell as it is drawn; what peers wrote cannot steer the terminal."""
    cell, right = row.cells[column], panel.columns[column].right
    return Text(for_a_terminal(cell.text), cell.style, justify="right" if right else "left", end="")


def in_lines(told: list[tuple[str, str]], width: int) -> Text:
    """Return names and numbers, as many on a line as fit whole."""
    text, used = Text(end=""), 0
    for name, number in told:
        length = len(name) + 1 + len(number)
        if used and used + GAP + length > width:
            text.append("\n")
            used = 0
        elif used:
            text.append(" " * GAP)
            used += GAP
        text.append(f"{name} ", "dim")
        text.append(number, "bold")
        used += length
    return text
