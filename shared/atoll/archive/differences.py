"""What differs between a round as it is retained and a round as it was: decided, sent, and listed by its head."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.archive.decisions import Decision
from atoll.archive.rounds import RetainedFold, RetainedRound
from atoll.base.errors import AtollError
from atoll.protocol.events import PushKey
from atoll.run.heads import head_nonce
from atoll.run.push_keys import key_of
from atoll.wire.messages import Included


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not as it was: what, of which contribution (None: of the round), what was found and what was due."""

    what: str
    push: PushKey | None = None
    got: object = None
    due: object = None

    def __str__(self) -> str:
        """Return it as words."""
        whose = "" if self.push is None else f"push {self.push.push} of {self.push.learner}/{self.push.incarnation}: "
        values = [f"{word} {value}" for word, value in (("got", self.got), ("due", self.due)) if value is not None]
        return f"{whose}{self.what} ({', '.join(values)})" if values else f"{whose}{self.what}"


def otherwise(made: RetainedRound, decision: Decision) -> list[Difference]:
    """Return in what a round is not as it was decided."""
    folded, due = [key_of(fold.manifest) for fold in made.folds], [fold.key for fold in decision.folds]
    found = [Difference("it was folded, and is not retained", key) for key in due if key not in folded]
    found += [Difference("it is retained, and was not folded", key) for key in folded if key not in due]
    if not found and folded != due:
        found += [
            Difference("it was folded in another order", key, f"place {place}", f"place {due.index(key)}")
            for place, key in enumerate(folded)
            if due.index(key) != place
        ]
    decided = {fold.key: (fold.weight, fold.staleness_weight, fold.age, fold.scale) for fold in decision.folds}
    for key, fold in zip(folded, made.folds, strict=True):
        counted = fold.weight, fold.staleness_weight, fold.age, fold.scale
        if key in decided and counted != decided[key]:
            found.append(Difference("it was folded with other weights than were decided", key, counted, decided[key]))
    due_nonce = head_nonce(made.epoch, decision.commit.fragment_ledger)
    if made.head.nonce != due_nonce:
        found.append(Difference("the fragment's ledger is another one", None, made.head.nonce, due_nonce))
    return found


def unlisted(made: RetainedRound) -> list[Difference]:
    """Return in what the head lists other contributions than were folded."""
    listed = {(each.learner, each.incarnation, each.push): each for each in made.head.included}
    found = []
    for fold in made.folds:
        manifest = fold.manifest
        ours = Included(
            manifest.learner,
            manifest.incarnation,
            manifest.push,
            manifest.base_version,
            manifest.tokens,
            manifest.steps,
            fold.weight,
            fold.age,
            fold.scale,
        )
        there = listed.get((manifest.learner, manifest.incarnation, manifest.push))
        if there is None:
            found.append(Difference("the head does not list it", key_of(manifest)))
        elif ours != there:
            names = [name for name in Included.__struct_fields__ if getattr(ours, name) != getattr(there, name)]
            got, due = (", ".join(f"{name}={getattr(each, name)}" for name in names) for each in (ours, there))
            found.append(Difference("the head lists it otherwise than its manifest", key_of(manifest), got, due))
    return found


def wrong(fold: RetainedFold, error: AtollError) -> Difference:
    """Return what is wrong with a contribution."""
    return Difference(error.what, key_of(fold.manifest), error.got, error.allowed)
