"""The server's own words in its log, beside what clients say of themselves; over rotations."""

from __future__ import annotations

from pathlib import Path

from atoll.base.errors import BrokerUnavailable, InUse
from atoll.bus.server import DISK_FULL, LogReader, own_lines, startup_error

OWN = "[7] 2026/11/25 09:00:58.797992 [INF] Reloaded server configuration (sha256:27)"
OF_CLIENTS = (
    '[7] 2026/11/25 09:00:58.914203 [ERR] 127.0.0.1:42898 - cid:8 - authentication error - Nkey "no space left on device"',
    '[7] 2026/11/25 09:01:12.9 [ERR] 10.0.0.2:56096 - cid:8 - "v1:go:Reloaded server configuration" - "r/a" - Violation',
    "[7] 2026/11/25 09:01:12.9 [INF] [::1]:6222 - rid:12 - Route connection created: no space left on device",
    '[7] 2026/11/25 09:01:12.9 [ERR] 10.0.0.2:7422 - lid:4 - "Failed to reload server configuration"',
)
FULL_LINE = f"[7] 2026/11/25 09:00:58.79 [ERR] Filestore [S] Write error: write /s/1.blk: {DISK_FULL}"


def test_only_lines_that_are_about_no_connection_are_the_servers_word() -> None:
    text = "\n".join([OWN, *OF_CLIENTS, FULL_LINE, "Reloaded server configuration", "", OWN[:20]])
    assert own_lines(text) == [OWN.partition("[INF] ")[2], FULL_LINE.partition("[ERR] ")[2]]


def test_what_is_appended_is_read_once_also_when_the_file_is_another(tmp_path: Path) -> None:
    """The server renames a full file, and what it wrote there last is read before the new one."""
    log = tmp_path / "nats-server.log"
    log.write_text("before\n")
    reader = LogReader(log)
    assert reader.news() == ""
    with log.open("a") as more:
        more.write("one\n")
    assert (reader.news(), reader.news()) == ("one\n", "")
    with log.open("a") as more:
        more.write("two\n")
    log.rename(tmp_path / "nats-server.log.2026.11.25")
    assert reader.news() == "two\n"
    log.write_text("three\n")
    assert (reader.news(), reader.news()) == ("three\n", "")
    log.write_text("4\n")
    assert reader.news() == "4\n", "one that was cut is read from its beginning"


def test_a_death_is_explained_by_the_servers_words(tmp_path: Path) -> None:
    place = ("127.0.0.1:4222", tmp_path, tmp_path / "log")
    lie = OF_CLIENTS[0].replace(DISK_FULL, "address already in use")
    assert isinstance(startup_error(f"{OWN}\n{lie}", *place), BrokerUnavailable)
    true = "[7] 2026/11/25 09:00:58.7 [FTL] Error listening on port: address already in use"
    assert isinstance(startup_error(f"{lie}\n{true}", *place), InUse)
    leaf = true.replace("on port", "on leafnode port: 4462 - listen tcp 127.0.0.1:4462: bind")
    told = str(startup_error(leaf, *place))
    assert "4462" in told
    assert "--leaf-port" in told
    assert "4222" not in told
