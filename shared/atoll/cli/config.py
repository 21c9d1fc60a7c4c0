"""`atoll config`: every setting, its value and where that comes from; in full, or as a file to begin with.

atoll config                        name = value, origin, one per line
atoll config protocol up.learners   of these sections and settings alone
atoll config --describe             with meaning, what is allowed, default and environment variable
atoll config --toml                 all of it as a TOML file: what was given as values, the rest as comments
atoll config --up                   as `atoll up` would have it, with its own defaults for short runs
atoll config --schema               a JSON Schema for editors
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import typer

from atoll.base.errors import SettingsError, redact
from atoll.cli.options import Assignments, Config
from atoll.cli.output import say, say_json
from atoll.local import run_settings
from atoll.local.run_settings import FOLLOWING, flat
from atoll.settings import LoadedSettings, SettingsFallback, given_values, load
from atoll.settings.catalogue import Setting, every_setting, settings_schema

T = TypeVar("T")
WIDTH: Final = 100
DEFAULT: Final = "default"
NONE: Final = "none"
TOML_HEAD: Final = """\
# A file of settings for `atoll up run.toml`, or for --config of any verb. A line that begins with # and a name shows the value
# that holds without it: remove the # to change it. A relative path counts from the folder of this file. `--set`, flags and
# the environment variables named below go before what this file says."""


def config_verb(  # noqa: PLR0913  (one option each)
    names: Annotated[list[str] | None, typer.Argument(help="Sections and settings to show; default: all.")] = None,
    *,
    describe: Annotated[
        bool, typer.Option("--describe", help="Tell of each what it is, what is allowed, default and variable.")
    ] = False,
    toml: Annotated[bool, typer.Option("--toml", help="Print a TOML file, with every setting explained.")] = False,
    up: Annotated[bool, typer.Option("--up", help="With the defaults that `atoll up` has for short runs.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of the settings instead.")] = False,
    config: Config = None,
    assignments: Assignments = None,
) -> None:
    """Print `name = value` and the origin of each value, one per line."""
    if schema:
        say_json(settings_schema())
        return

    fallback = None
    if up:
        stated = given_values(config, assignments or [])
        fallback = run_settings.default_fallback(run_settings.stated_learners(stated))
    loaded = load(config, assignments or [], fallback=fallback)
    if describe or toml:
        say("\n".join(_explained_lines(loaded, fallback, names, toml=toml)))
        return
    values, origins = _shown_values(loaded)
    shown = _select(values, names)
    width = max(len(name) for name in shown)
    for name, value in shown.items():
        say(f"{name:<{width}} = {_json(value):<24} {origins[name]}".rstrip())


def _shown_values(loaded: LoadedSettings) -> tuple[dict[str, Any], dict[str, str]]:
    values = {name: redact(value) for name, value in flat(loaded.settings).items()}
    return values, {name: redact(loaded.origins.get(name, DEFAULT)) for name in values}


def _explained_lines(
    loaded: LoadedSettings, fallback: SettingsFallback | None, names: Sequence[str] | None, *, toml: bool
) -> Iterator[str]:
    values, origins = _shown_values(loaded)
    settings = _select({one.name: one for one in every_setting()}, names)
    if not toml:
        return _description_lines(settings, values, origins)
    whole = flat(loaded.settings)
    ours: set[str] = set() if fallback is None else {fallback.origin_of(name) for name in fallback.values}
    live = {name for name in whole if origins[name] not in {DEFAULT, *ours}}
    follows = {name: origins[name] for name in FOLLOWING if origins[name] in ours}
    secret = {name for name, value in whole.items() if values[name] != value}
    return _toml_lines(settings, values, live, secret, follows)


def _select(known: Mapping[str, T], names: Sequence[str] | None) -> dict[str, T]:
    for name in names or ():
        if not any(_is_within(one, name) for one in known):
            raise SettingsError(
                "there is no such setting or section",
                got=name,
                allowed=", ".join(dict.fromkeys(one.partition(".")[0] for one in known)),
                todo="give sections or settings, and --config for a file",
            )
    return {one: value for one, value in known.items() if not names or any(_is_within(one, name) for name in names)}


def _is_within(setting: str, name: str) -> bool:
    return setting == name or setting.startswith(f"{name}.")


def _description_lines(
    settings: Mapping[str, Setting], values: Mapping[str, Any], origins: Mapping[str, str]
) -> Iterator[str]:
    for name, setting in settings.items():
        leaves = [one for one in values if _is_within(one, name)]
        for leaf in leaves:
            yield f"{leaf} = {_json(values[leaf])}  ({origins[leaf]})"
        if not leaves:
            yield f"{name} = {setting.default}  ({DEFAULT})"
        about = f"{setting.allowed}; default {setting.default}; {setting.variable}"
        yield from textwrap.wrap(_sentence(setting.meaning), WIDTH, initial_indent="    ", subsequent_indent="    ")
        yield from textwrap.wrap(about, WIDTH, initial_indent="    ", subsequent_indent="    ")


def _toml_lines(
    settings: Mapping[str, Setting],
    values: Mapping[str, Any],
    given: set[str],
    secret: set[str],
    follows: Mapping[str, str],
) -> Iterator[str]:
    """Yield a file of settings: what was given for this call as values, and as comments what would hold anyway.

    A value whose password is struck out is left out, too: the file would not say that it lacks one. A value that `follows` from
    another setting is marked: with another value there, the file would still show this one.
    """
    yield TOML_HEAD
    section = ""
    for name, setting in settings.items():
        table = name.rpartition(".")[0].partition(".")[0]
        if table != section:
            section = table
            yield f"\n[{section}]"
        about = f"{_sentence(setting.meaning)} Allowed: {setting.allowed}. {setting.variable}"
        yield from textwrap.wrap(about, WIDTH, initial_indent="# ", subsequent_indent="# ")
        leaves = {one: values[one] for one in values if _is_within(one, name)} or {name: None}
        for leaf, value in leaves.items():
            key = leaf.removeprefix(f"{section}.")
            if leaf in secret:
                yield f"# Given with a user or password, which is not shown: write it here, or in {setting.variable}."
            if leaf in follows:
                yield f"# This is the value of {follows[leaf]}; with others it may be another."
            shown = setting.default if leaf not in values else _json(value)
            live = leaf in given - secret
            yield f"{'' if live else '#'}{key} = {'' if shown == NONE else shown}".rstrip()


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _json(value: object) -> str:
    """Return a value in JSON, which for all that settings hold is TOML as well; "none" for no value, which is neither."""
    return NONE if value is None else json.dumps(value, ensure_ascii=False)
