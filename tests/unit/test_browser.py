"""A page is opened where somebody can see it, and nowhere else."""

from __future__ import annotations

import webbrowser

import pytest

from atoll.local.console import open_page


class NamedBrowser(webbrowser.BaseBrowser):
    """Keeps what it was asked to open."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.opened: list[str] = []

    def open(self, url: str, new: int = 0, autoraise: bool = True) -> bool:  # noqa: ARG002, FBT001, FBT002  (the library's)
        self.opened.append(url)
        return True


@pytest.mark.parametrize(
    ("name", "screen", "opens"), [("firefox", ":0", True), ("lynx", ":0", False), ("firefox", "", False)]
)
def test_a_page_is_opened_on_a_screen(monkeypatch: pytest.MonkeyPatch, name: str, screen: str, *, opens: bool) -> None:
    """A browser in the terminal would take it from the run, and without a screen nobody would see one."""
    browser = NamedBrowser(name)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("DISPLAY", screen)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr(webbrowser, "get", lambda: browser)

    assert open_page("http://127.0.0.1:1") is opens
    assert browser.opened == (["http://127.0.0.1:1"] if opens else [])
