"""Opens a page in a person's browser, where there is a person and a browser."""

from __future__ import annotations

import os
import sys
import webbrowser

TEXT_BROWSERS = frozenset({"www-browser", "links", "elinks", "lynx", "w3m"})


def open_page(url: str) -> bool:
    """Open `url`, and return whether a browser was asked to; on a machine without a screen nothing happens."""
    if not has_screen():
        return False
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        return False
    # A browser in the terminal would take it away from the program that runs there.
    return getattr(browser, "name", "") not in TEXT_BROWSERS and browser.open(url)


def has_screen() -> bool:
    """Return whether this process can show a window: a session over ssh without X cannot."""
    if sys.platform in ("darwin", "win32"):
        return "SSH_CONNECTION" not in os.environ
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
