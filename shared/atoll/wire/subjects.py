"""Every subject of a run in one place.

All subjects of run R begin with `atoll.R`. Tokens (run, learner, nonce) hold letters, digits, `-` and `_`, and begin with no
`-`. A dot would open a new level, and the broker would refuse a space or wildcard, so `token` checks them once at the border.
A nonce is two levels where a shard's owner writes, `<epoch>.<hash>`, and one where a founder does.

    up.c.<learner>.<fragment>.<life>-<push>-<nonce>.<chunk>  contribution chunks          stream UPC
    up.c.sum.<fragment>.<region>.<base>-<nonce>.<chunk>      chunks of a region's sum      stream UPC
    up.m.<shard>.<fragment>.<learner>                        contribution manifests       stream UPM (work queue)
    up.m.<shard>.bye.<learner>                               goodbyes, behind the manifests
    gl.run                                                   the run record (CAS)         stream GL
    gl.head.<fragment>                                       newest version (CAS)         stream GL
    gl.lease.<shard>                                         tenure of a shard's owner    stream GL
    gl.c.<fragment>.<version>.<nonce>.<chunk>                keyframes                    stream GL
    gl.d.<fragment>.<version>.<nonce>.<chunk>                deltas                       stream GL
    st.c.<fragment>.<version>.<nonce>.<chunk>                outer state                  stream ST
    st.b.<fragment>.<nonce>.<chunk>                          fragment ledgers             stream ST
    mb.learner.<learner> · mb.data                           membership, data leases      stream MB
    ps.c.<learner>.<incarnation>-<nonce>.<chunk>             inner state lent to a peer   stream PS
    ev.<kind>.<who>                                          the event log                stream EV
    call.<fragment> · hb.<learner> · ctl.<who> · sy.<host>   core NATS, at most once
    out.<region>.<as above>                                  not sent yet by a region     stream OUT, at its leaf
    keep.<region>.up.c.<as above>                            folded by a region           stream KEEP, at its leaf
    rg.<region>[.kept] · pm.<region>; with .<nonce> behind   what its keeper and synchronizer are asked; what they answer
    tap.>                                                    read-only republish of what the streams stored
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from atoll.base.errors import SettingsError
from atoll.base.quantities import ID, ID_IN_WORDS

ALL_FRAGMENTS: Final = "*"
SUM: Final = "sum"
"""Stands in the place of a learner where chunks are of a region's sum."""
_WITH_FRAGMENT: Final = ("up.c.*", "gl.head", "gl.c", "gl.d", "st.c", "st.b", "tap.gl.head")
"""Subjects that are kept with their fragment, as the levels between a run and the fragment's number."""
HUB: Final = "hub"
_RESERVED: Final = frozenset({HUB, "keys", "kubernetes", "broker", "synchronizer", "shard", "monitor"})
"""Names of folders and services beside a region's. A learner `shard-1` would have the subjects of a shard."""
REGION_LETTERS_MAX: Final = 32
_REGION_NAME: Final = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
REGION_NAMES: Final = (
    f"up to {REGION_LETTERS_MAX} small letters, digits and '-', a letter first and no '-' last, "
    f"and not {', '.join(sorted(_RESERVED))}"
)
"""The name is a level of subjects, a JetStream domain, the beginning of names of identities and learners, a folder, and a part
of names in Kubernetes, compose and systemd. The narrowest of them decides: Kubernetes."""
_TOKEN = re.compile(ID)
PUSH_NONCE_BYTES: Final = 8
"""Of the nonce of a contribution, which is written as hex."""
_PUSH_NONCE = re.compile(rf"[0-9a-f]{{{2 * PUSH_NONCE_BYTES}}}")
_PUSH = re.compile(rf"[0-9]+-[0-9]+(?:-{_PUSH_NONCE.pattern})?")
_FILTER = re.compile(r"(?:(?:[A-Za-z0-9_-]+|\*)\.)*(?:[A-Za-z0-9_-]+|\*|>)")


def token(value: str, what: str) -> str:
    """Return `value` if it is a valid level of a subject, else raise `SettingsError` naming `what`."""
    if not isinstance(value, str) or not is_token(value):
        raise SettingsError(
            f"{what} cannot be part of a subject",
            got=repr(value),
            allowed=ID_IN_WORDS,
            todo=f"choose another {what}",
        )
    return value


def is_token(value: str) -> bool:
    """Return whether `value` is a valid level of a subject."""
    return _TOKEN.fullmatch(value) is not None


def is_region_name(name: object) -> bool:
    """Return whether a region may be called so."""
    fits = isinstance(name, str) and len(name) <= REGION_LETTERS_MAX and _REGION_NAME.fullmatch(name) is not None
    return fits and name not in _RESERVED


def region_name(name: str, todo: str) -> str:
    """Return `name` if a region may be called so, else raise `SettingsError`."""
    if not is_region_name(name):
        raise SettingsError("a region cannot have this name", got=repr(name), allowed=REGION_NAMES, todo=todo)
    return name


def is_push_nonce(value: str) -> bool:
    """Return whether a learner may have drawn this for the chunks of a contribution."""
    return _PUSH_NONCE.fullmatch(value) is not None


def filter_below(value: str, what: str) -> str:
    """Return `value` if it is a filter of subjects below another level, else raise `SettingsError` naming `what`."""
    if not _FILTER.fullmatch(value):
        raise SettingsError(
            f"{what} is no filter of subjects",
            got=repr(value),
            allowed="levels of letters, digits, '-' or '_' with dots between; '*' for one level, '>' at the end for the rest",
            todo="quote it for the shell, as in 'ev.>'",
        )
    return value


def matches(pattern: str, subject: str) -> bool:
    """Return whether `pattern` covers `subject`, which may itself be a narrower pattern.

    `*` stands for exactly one level and `>` for one or more at the end, as on the broker.
    """
    wanted, given = pattern.split("."), subject.split(".")
    for level, want in enumerate(wanted):
        if want == ">":
            return len(given) > level
        if level >= len(given) or given[level] == ">" or want not in ("*", given[level]):
            return False
    return len(wanted) == len(given)


def fragment_level(subject: str) -> str | None:
    """Return the number of the fragment with which `subject` is kept, as it stands there; None if it is kept with none.

    For a pattern that covers several fragments that is `ALL_FRAGMENTS`.
    """
    given = subject.split(".")[2:]
    for path in _WITH_FRAGMENT:
        wanted = path.split(".")
        covers = len(given) <= len(wanted) and given[-1:] == [">"]
        lead = given[:-1] if covers else given[: len(wanted)]
        if any("*" not in pair and pair[0] != pair[1] for pair in zip(wanted, lead, strict=False)):
            continue
        if covers:
            return ALL_FRAGMENTS
        if len(given) > len(wanted):
            level = given[len(wanted)]
            return ALL_FRAGMENTS if level in ("*", ">") else level if level.isdecimal() else None
    return None


@dataclass(frozen=True, slots=True)
class Subjects:
    """The subjects of one run; `prefix` is `atoll.<run>`."""

    run: str
    prefix: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", f"atoll.{token(self.run, 'run id')}")

    def contribution_stem(self, learner: str, fragment: int, incarnation: int, push: int, nonce: str) -> str:
        """Return where the chunks of one contribution go; its learner draws the `nonce`, so nobody can write there first."""
        return f"{self.prefix}.up.c.{learner}.{fragment}.{incarnation}-{push}-{nonce}"

    def partial_stem(self, region: str, fragment: int, base_version: int, nonce: str) -> str:
        """Return where the chunks of a region's sum go: nobody else may write below its name there."""
        return f"{self.prefix}.up.c.{SUM}.{fragment}.{region}.{base_version}-{nonce}"

    def partial_stems(self, region: str, fragment: int) -> str:
        """Return the filter of the stems of all sums of a region for a fragment."""
        return f"{self.prefix}.up.c.{SUM}.{fragment}.{region}.*"

    def contribution(self, shard: int, fragment: int, learner: str) -> str:
        """Return where the manifest of a contribution is queued."""
        return f"{self.prefix}.up.m.{shard}.{fragment}.{learner}"

    def farewell(self, shard: int, learner: str) -> str:
        """Return where a learner queues its goodbye to `shard`, behind its last manifests."""
        return f"{self.prefix}.up.m.{shard}.bye.{learner}"

    def contributions_of(self, shard: int) -> str:
        """Return the filter of everything queued for `shard`."""
        return f"{self.prefix}.up.m.{shard}.>"

    @property
    def run_record(self) -> str:
        """Return where the run record is."""
        return f"{self.prefix}.gl.run"

    def head(self, fragment: int | str) -> str:
        """Return where the newest version of `fragment` is announced (`*` for all)."""
        return f"{self.prefix}.gl.head.{fragment}"

    def lease(self, shard: int) -> str:
        """Return where the tenure of `shard`'s owner is recorded."""
        return f"{self.prefix}.gl.lease.{shard}"

    def global_stem(self, fragment: int, version: int, nonce: str) -> str:
        """Return where the chunks of one keyframe go; `nonce` keeps two writers of one version apart."""
        return f"{self.prefix}.gl.c.{fragment}.{version}.{nonce}"

    def delta_stem(self, fragment: int, version: int, nonce: str) -> str:
        """Return where the chunks of one delta go."""
        return f"{self.prefix}.gl.d.{fragment}.{version}.{nonce}"

    def state_stem(self, fragment: int, version: int, nonce: str) -> str:
        """Return where the chunks of one outer-optimizer state go."""
        return f"{self.prefix}.st.c.{fragment}.{version}.{nonce}"

    def ledger_stem(self, fragment: int, nonce: str) -> str:
        """Return where the ledger of one fragment goes; each writing has a `nonce` of its own."""
        return f"{self.prefix}.st.b.{fragment}.{nonce}"

    def written_in(self, fragment: int, epoch: int) -> tuple[str, ...]:
        """Return filters of all chunks that an owner wrote of a fragment in tenure `epoch`; 0 is the founders'."""
        if epoch == 0:
            return (f"{self.prefix}.gl.c.{fragment}.0.*.*",)
        return (
            f"{self.prefix}.gl.c.{fragment}.*.{epoch}.>",
            f"{self.prefix}.gl.d.{fragment}.*.{epoch}.>",
            f"{self.prefix}.st.c.{fragment}.*.{epoch}.>",
            f"{self.prefix}.st.b.{fragment}.{epoch}.>",
        )

    def member(self, learner: str) -> str:
        """Return where the incarnation of `learner` is recorded (`*` for all)."""
        return f"{self.prefix}.mb.learner.{learner}"

    @property
    def data(self) -> str:
        """Return where the leases of data blocks are recorded."""
        return f"{self.prefix}.mb.data"

    def lent_stem(self, learner: str, incarnation: int, nonce: str) -> str:
        """Return where the chunks of an inner-optimizer state go that `learner` lends to another."""
        return f"{self.prefix}.ps.c.{learner}.{incarnation}-{nonce}"

    def event(self, kind: str, who: str) -> str:
        """Return where an event of the event log goes."""
        return f"{self.prefix}.ev.{kind}.{who}"

    def call(self, fragment: int | str) -> str:
        """Return where calls for `fragment` are heard (`*` for all)."""
        return f"{self.prefix}.call.{fragment}"

    def beat(self, learner: str) -> str:
        """Return where the heartbeats of `learner` are heard (`*` for all)."""
        return f"{self.prefix}.hb.{learner}"

    def presence(self, host: str) -> str:
        """Return where a synchronizer process says what it owns (`*` for all)."""
        return f"{self.prefix}.sy.{host}"

    def premerge(self, region: str) -> str:
        """Return where the synchronizer of `region` hears what shards ask it to fold."""
        return f"{self.prefix}.pm.{region}"

    def premerge_answer(self, region: str, nonce: str) -> str:
        """Return where a shard hears an answer of the synchronizer of `region`; each question has a `nonce` of its own."""
        return f"{self.prefix}.pm.{region}.{nonce}"

    def control(self, who: str) -> str:
        """Return where commands to `who` (a learner id, `shard-0`, or `all`) are heard."""
        return f"{self.prefix}.ctl.{who}"

    def verdict(self, learner: str) -> str:
        """Return where `learner` hears that one of its contributions was refused."""
        return f"{self.prefix}.ctl.{learner}.verdict"

    @property
    def answer(self) -> str:
        """Return for what answers are signed: they go to inboxes, which only the broker knows beforehand."""
        return f"{self.prefix}.answer"

    def archived(self, path: str) -> str:
        """Return for what a manifest of the archive is signed: `path` is its name in the object store."""
        return f"{self.prefix}.archive.{path}"

    def region(self, domain: str) -> str:
        """Return where the keeper of a region is asked to keep this run there."""
        return f"{self.prefix}.rg.{domain}"

    def region_kept(self, domain: str) -> str:
        """Return where shards tell the keeper of a region what becomes of the chunks that it keeps."""
        return f"{self.prefix}.rg.{domain}.kept"

    def region_copy(self, domain: str) -> str:
        """Return under what the hub sends a region its copy of the global stream."""
        return f"{self.prefix}.rg.{domain}.copy"

    def region_answer(self, domain: str, nonce: str) -> str:
        """Return where a shard hears an answer of a region's keeper; each question has a `nonce` of its own."""
        return f"{self.prefix}.rg.{domain}.{nonce}"

    def outbox(self, domain: str, subject: str = "") -> str:
        """Return where a region keeps what it could not send yet on `subject` of this run; without one, how those begin."""
        return f"{self.prefix}.out.{domain}{subject.removeprefix(self.prefix)}"

    def kept(self, domain: str, subject: str = "") -> str:
        """Return where a region keeps the chunks of contributions on `subject`; without one, how those begin."""
        return f"{self.prefix}.keep.{domain}{subject.removeprefix(self.prefix)}"

    def is_contribution(self, stem: str) -> bool:
        """Return whether the chunks of a learner's contribution lie there, and not those of a region's sum."""
        levels = stem.removeprefix(f"{self.prefix}.up.c.").split(".")
        named = len(levels) >= 3 and levels[0] != SUM and _PUSH.fullmatch(levels[2]) is not None
        return named and stem.startswith(f"{self.prefix}.up.c.")

    def is_partial(self, stem: str) -> bool:
        """Return whether the chunks of a region's sum lie there."""
        return stem.startswith(f"{self.prefix}.up.c.{SUM}.")

    def tap(self, tail: str = ">") -> str:
        """Return a read-only tap subject."""
        return f"{self.prefix}.tap.{tail}"
