"""The `[model]` and `[train]` sections: the learner completes and checks them before anything starts.

The kernel knows no model. It asks every installed service, by the entry-point group `atoll.settings`, to complete its own
sections. So the command that was given a wrong dimension refuses it, and `atoll config` shows every value. No JAX here: the
command line must answer at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll_learner.model_settings import SIZE_DEFAULT, model_settings
from atoll_learner.train_settings import train_settings

Section = dict[str, Any]


def complete(model: Mapping[str, Any], train: Mapping[str, Any]) -> tuple[Section, Section]:
    """Return both sections with every value that follows from what was given; the vocabulary mostly comes with the data.

    A `config.json` that was named is read here, once, and does not stay: whoever is given the result needs no such file.

    Raises:
        SettingsError: a name is unknown, a value out of range, or two of them contradict each other.
    """
    dimensions = model_settings(model, vocab=None)
    schedule = train_settings(train, model=dimensions)
    later = set() if "vocab" in model or model.get("config") is not None else {"vocab"}
    told = {"size": model.get("size", SIZE_DEFAULT), "config": None, **dimensions.model_dump(exclude=later)}
    return told, schedule.model_dump()
