"""`python -m atoll_learner`: the same as `atoll learner`."""

from __future__ import annotations

from atoll.cli.main import run_verb
from atoll_learner.commands import learn

if __name__ == "__main__":
    run_verb(learn)
