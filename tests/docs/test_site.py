"""The site is whole: its reference names everything there is, its links hold, and it loads nothing from elsewhere."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import docs_api
import docs_commands
import docs_messages
import docs_settings
import docs_site
import pytest
from docs_api import markdown
from docs_links import BrokenLinks, Linker
from docs_site import generated, stage
from jsonschema import Draft202012Validator

import atoll
from atoll.base.docstrings import attributes
from atoll.run.taps import TAPS
from atoll.settings.catalogue import every_setting
from atoll.wire.messages import Head
from support.command_line import atoll as atoll_verb

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference() -> dict[str, str]:
    return generated(ROOT)


def test_every_setting_is_explained(reference: dict[str, str]) -> None:
    """Each has a row with its default, a meaning, and what the default follows from."""
    known = docs_settings.origins(ROOT)
    settings = every_setting()
    page = reference["docs/reference/settings.md"]

    assert [setting.name for setting in settings if not setting.meaning] == []
    assert [setting.name for setting in settings if f"`{setting.name}`" not in page] == []
    assert all(docs_settings.origin_of(setting.name, known) for setting in settings)


def test_no_setting_is_explained_that_is_gone() -> None:
    names = {setting.name for setting in every_setting()}
    sections = {f"{name.rpartition('.')[0]}.*" for name in names} | {f"{name.split('.')[0]}.*" for name in names}

    assert set(docs_settings.origins(ROOT)) - names - sections == set()


def test_every_setting_that_the_command_knows_is_on_the_page(reference: dict[str, str]) -> None:
    """`atoll config` and the page agree about what there is."""
    shown = subprocess.run(
        [sys.executable, "-m", "atoll.cli", "config"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    names = [line.split()[0] for line in shown.splitlines() if " = " in line]

    assert len(names) > 50
    assert [name for name in names if f"`{name}`" not in reference["docs/reference/settings.md"]] == []


def test_every_verb_and_option_is_on_the_page(reference: dict[str, str]) -> None:
    page = reference["docs/reference/commands.md"]
    verbs = dict(docs_commands.verbs())
    options = {
        word for command in verbs.values() for word in docs_commands.options_of(command) if word.startswith("--")
    }

    assert {"atoll up", "atoll plan", "atoll sim train", "atoll archive show"} <= verbs.keys()
    assert [verb for verb in verbs if f"## `{verb}`" not in page] == []
    assert [word for word in options if word != "--help" and f"`{word}`" not in page] == []


def test_every_public_name_is_on_a_page(reference: dict[str, str]) -> None:
    text = "\n".join(page for path, page in reference.items() if "/api/" in path)
    missing = []
    for module, path in docs_api.modules(ROOT).items():
        found = re.findall(r"^(?:async def|def|class) ([A-Za-z]\w*)", path.read_text(encoding="utf-8"), re.MULTILINE)
        missing += [f"{module}.{name}" for name in found if f"#{module}.{name} " not in text]

    assert missing == []
    assert [name for name in atoll.__all__ if not name.startswith("__") and f".{name} " not in text] == []


def test_every_message_has_a_schema(reference: dict[str, str]) -> None:
    """What the code encodes is what the schema describes, and every subject names a message that there is."""
    schema = json.loads(docs_messages.schemas()["Head.json"])

    assert set(schema["$defs"]["Head"]["properties"]) == set(Head.__struct_fields__)
    assert set(docs_messages.CARRIED_BY) <= docs_messages.messages().keys()
    assert all(f"## {name}\n" in reference["docs/reference/messages.md"] for name in docs_messages.messages())


def test_the_taps_are_published_as_the_code_reads_them(reference: dict[str, str]) -> None:
    """The document is what the command prints, and every kind has a row and a schema whose references lead somewhere."""
    document = json.loads(reference["docs/reference/asyncapi.json"])

    assert document == json.loads(atoll_verb("tap", "--schema").stdout)
    for tap in TAPS:
        schema = json.loads(reference[f"docs/reference/schemas/taps/{tap.kind}.json"])
        Draft202012Validator.check_schema(schema)
        assert set(re.findall(r'"#/\$defs/(\w+)"', json.dumps(schema))) == schema["$defs"].keys()
        assert f"| `{tap.kind}` | `{tap.subject}` |" in reference["docs/reference/taps.md"]


def test_every_log_event_is_on_the_page(reference: dict[str, str]) -> None:
    events = {event.event: event for event in docs_api.every_event(ROOT)}

    assert {"learner.joined", "shard.serving", "round.committed", "checkpoint.saved"} <= events.keys()
    assert "incarnation" in events["learner.joined"].fields
    assert [name for name in events if f"`{name}`" not in reference["docs/reference/log-events.md"]] == []


def test_all_pages_are_put_together(reference: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every link of every page leads somewhere; the pages of the root and the sources they name are there."""
    monkeypatch.setattr(docs_site, "generated", lambda _: reference)  # which takes longer than all the rest
    stage(ROOT, tmp_path)

    assert (tmp_path / "index.md").exists()
    assert (tmp_path / "explanation" / "architecture.md").exists()
    assert (tmp_path / "reference" / "settings.md").exists()
    assert list((tmp_path / "source").rglob("*.py.txt")) != []


def test_a_broken_link_is_an_error(tmp_path: Path) -> None:
    """A link in prose is followed to the site; one in code is left alone; one to nowhere is named with its page."""
    (tmp_path / "docs" / "a").mkdir(parents=True)
    (tmp_path / "x.py").touch()
    linker = Linker(tmp_path, frozenset({"a/made.md"}))
    text = "[one](../../x.py) [two](made.md#here) `[three](no.md)` [four](../../README.md)\n```\n[five](no.md)\n```"
    page = linker.page("docs/a/page.md", text)
    linker.broken.clear()
    linker.page("docs/a/page.md", "[gone](gone.md)")

    assert page.startswith("[one](../source/x.py.txt) [two](made.md#here) `[three](no.md)`")
    with pytest.raises(BrokenLinks, match=r"docs/a/page\.md: gone\.md"):
        linker.check()


def test_docstrings_become_markdown() -> None:
    text = """One.

    Attributes:
        a: first
            and more.
        b_s: second.
    """

    assert attributes(text) == {"a": "first and more.", "b_s": "second."}
    assert markdown(text) == "One.\n\n**Attributes**\n\n- `a`: first and more.\n- `b_s`: second."


@pytest.mark.second_tier
def test_the_site_is_built_and_loads_nothing() -> None:
    """Zensical finds no broken link or heading, and no page asks another machine for a script, style, font or picture."""
    built = subprocess.run(
        [sys.executable, ROOT / "infra/docs/docs_site.py"], capture_output=True, text=True, timeout=300, check=False
    )
    pages = list((ROOT / "build" / "docs" / "site").rglob("*.html"))
    asks = re.compile(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=\"(?:https?:)?//[^\"]+\"")
    found = {str(page): asks.findall(page.read_text(encoding="utf-8")) for page in pages}

    assert built.returncode == 0, built.stdout + built.stderr
    assert len(pages) > 60
    assert {page: links for page, links in found.items() if links} == {}
