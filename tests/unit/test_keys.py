"""Identities and the roll: files that only their owner reads, keys that end, mistakes that are told by name."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import msgspec
import pytest

from atoll.base.errors import AtollError, SettingsError
from atoll.keys.certificates import days_left
from atoll.keys.doors import doors
from atoll.keys.identity import learner_identity, read_identity, run_credentials
from atoll.keys.rights import KINDS
from atoll.keys.roll import KeyFolder
from support.command_line import atoll

NOW_S = 1_000_000.0
HOUR_S = 3600.0


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    """A folder of keys with an operator."""
    made = KeyFolder(tmp_path / "keys")
    made.create(["127.0.0.1", "hub.example.org"], NOW_S)
    return made


def test_secrets_are_readable_for_their_owner_alone(keys: KeyFolder) -> None:
    """Certificates and the roll are no secrets; git takes none of it."""
    keys.add("ada", "learner", "demo", NOW_S)
    for path in keys.path.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        if path.suffix in (".key", ".toml"):
            assert mode == 0o600, path
        if path.is_dir():
            assert mode == 0o700, path
    assert (keys.path / ".gitignore").read_text(encoding="utf-8") == "*\n"
    public = keys.roll_path.read_text(encoding="utf-8") + doors(keys.read().entrants(NOW_S), Path("c"), Path("k"))
    identity = read_identity(keys.path / "identities" / "demo" / "ada.toml")
    assert identity.seed not in public
    assert identity.seed not in repr(identity) + repr(identity.credentials())
    assert identity.credentials().public in public


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o644])
def test_an_identity_that_others_may_read_is_refused(keys: KeyFolder, mode: int) -> None:
    """With the mode that it has, and what to do."""
    path = keys.add("ada", "learner", "demo", NOW_S)
    path.chmod(mode)
    with pytest.raises(SettingsError, match=f"mode {mode:04o}") as refused:
        read_identity(path)
    assert "chmod 600" in str(refused.value)
    assert "atoll keys rotate" in str(refused.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "without name"),
        ('name = "a"\nkind = "learner"\nrun = "demo"\nauthority = ""\nseed = "SUAB"\n', "without root, voucher"),
        ("name = ", "not TOML"),
        ("\x00\xff", "not TOML"),
        (
            'name = "a"\nkind = "learner"\nrun = "demo"\nauthority = ""\nseed = 3\nroot = ""\nvoucher = ""\n',
            "without seed",
        ),
        (
            'name = "a"\nkind = "king"\nrun = "demo"\nauthority = ""\nseed = "SUAB"\nroot = ""\nvoucher = ""\n',
            "of kind 'king'",
        ),
        (
            'name = "a"\nkind = "learner"\nrun = "demo"\nauthority = ""\nseed = "SUSECRET"\nroot = ""\nvoucher = ""\n',
            "with a seed that is none",
        ),
    ],
)
def test_a_file_that_is_no_identity_is_refused_without_its_words(keys: KeyFolder, text: str, why: str) -> None:
    """A secret that is damaged by one letter must not come out in an error."""
    path = keys.add("ada", "learner", "demo", NOW_S)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError, match="this file is no identity") as refused:
        read_identity(path)
    assert why in str(refused.value)
    assert "SUSECRET" not in str(refused.value)
    with pytest.raises(SettingsError, match="there is no such identity"):
        read_identity(path.with_name("nobody.toml"))


def test_an_identity_is_of_one_run_and_one_learner(keys: KeyFolder) -> None:
    """An operator is of every run, and may be any learner."""
    path = keys.add("ada", "learner", "demo", NOW_S)
    reader = keys.add("eye", "reader", "demo", NOW_S)
    operator = keys.path / "identities" / "operator.toml"
    assert learner_identity(path, "demo", "ada").founds is False
    assert learner_identity(str(operator), "any", "ada").founds is True
    with pytest.raises(SettingsError, match="of another run") as refused:
        run_credentials(path, "other")
    assert "allowed: demo" in str(refused.value)
    with pytest.raises(SettingsError, match="identity of another: learner 'ada'"):
        learner_identity(path, "demo", "eve")
    with pytest.raises(SettingsError, match="identity of another: reader 'eye'"):
        learner_identity(reader, "demo", "eye")


def test_keys_end_overlap_and_are_forgotten(keys: KeyFolder) -> None:
    """The roll says at every moment who may enter, and when that changes next."""
    keys.add("ada", "learner", "demo", NOW_S, until_s=NOW_S + HOUR_S)
    first = keys.read().entrants(NOW_S)[-1].keys
    assert keys.read().next_end_s(NOW_S) == NOW_S + HOUR_S
    assert [one.name for one in keys.read().entrants(NOW_S + HOUR_S)] == ["operator"]
    keys.rotate("ada", "demo", NOW_S, overlap_s=HOUR_S / 2)
    entrant = keys.read().entrants(NOW_S)[-1]
    assert len(entrant.keys) == 2
    assert entrant.keys[0] == first[0]
    later = keys.read().entrants(NOW_S + HOUR_S / 2)[-1]
    assert later.keys == entrant.keys[1:]
    keys.revoke("ada", "demo", NOW_S)
    entry = keys.read().of("demo", "ada")
    assert entry is not None
    assert (entry.state(NOW_S), entry.keys) == ("revoked", ())
    assert not keys.identity_path(entry).exists()
    with pytest.raises(SettingsError, match="has an identity of this name"):
        keys.add("ada", "learner", "demo", NOW_S)
    keys.rotate("ada", "demo", NOW_S, overlap_s=0.0)
    assert keys.read().entrants(NOW_S)[-1].name == "ada"


def test_a_name_cannot_widen_a_right(keys: KeyFolder) -> None:
    """Names are levels of subjects: a wildcard or a dot would cover others."""
    for name in ("*", ">", "a.b", "", "a b", "ä", "x" * 65):
        with pytest.raises(SettingsError, match="cannot be part of a subject"):
            keys.add(name, "learner", "demo", NOW_S)
        with pytest.raises(SettingsError, match="cannot be part of a subject"):
            keys.add("ada", "learner", name, NOW_S)
    assert [one.name for one in keys.read().entries] == ["operator"]


@pytest.mark.parametrize("damage", ['{"entries": 3}', "", '{"entries": [{"name": "x"}]}', '{"people": []}'])
def test_a_damaged_roll_is_told(keys: KeyFolder, damage: str) -> None:
    """By its path, not with a traceback."""
    keys.roll_path.write_text(damage, encoding="utf-8")
    with pytest.raises(SettingsError, match="the roll of keys is damaged"):
        keys.read()


def test_a_certificate_names_the_hosts_and_lasts(keys: KeyFolder) -> None:
    """A new one is of the same authority."""
    authority = (keys.path / "authority.pem").read_text(encoding="utf-8")
    former = keys.certificate_path.read_text(encoding="utf-8")
    assert days_left(former) > 800
    keys.certify(["hub2.example.org"])
    assert keys.certificate_path.read_text(encoding="utf-8") != former
    assert (keys.path / "authority.pem").read_text(encoding="utf-8") == authority
    for host in ("", "a b", "-x", "hub/..", "x" * 254):
        with pytest.raises(SettingsError, match="no name of a host"):
            keys.certify([host])


def test_every_kind_has_doors(keys: KeyFolder) -> None:
    """Each isolated one has an account; nobody shares one."""
    for kind in KINDS:
        if kind != "operator":
            keys.add(f"one-{kind}", kind, "demo", NOW_S)
    text = doors(keys.read().entrants(NOW_S), Path("cert"), Path("key"))
    for account in ("core", "demo/one-learner", "demo/one-reader", "demo/one-evaluator"):
        assert text.count(f'  "{account}": {{') == 1
    assert 'min_version: "1.3"' in text


def test_the_verbs_say_what_they_did(tmp_path: Path) -> None:
    """From new keys to a revoked one; a list for people and for programs."""
    folder = str(tmp_path / "keys")
    assert "operator.toml" in atoll("keys", "new", folder, "--host", "hub.example.org").stdout
    added = atoll("keys", "add", folder, "ada", "--run", "demo", "--founds", "--days", "30")
    assert added.returncode == 0
    assert str(tmp_path / "keys" / "identities" / "demo" / "ada.toml") in added.stdout
    assert "learner, founds" in atoll("keys", "list", folder).stdout
    assert atoll("keys", "rotate", folder, "ada", "--run", "demo", "--overlap-minutes", "5").returncode == 0
    rows = json.loads(atoll("keys", "list", folder, "--json").stdout)
    assert [(row["name"], row["state"], len(row["keys"])) for row in rows] == [
        ("operator", "valid", 1),
        ("ada", "valid", 2),
    ]
    assert "revoked ada" in atoll("keys", "revoke", folder, "ada", "--run", "demo").stdout
    assert "revoked" in atoll("keys", "list", folder).stdout
    assert atoll("keys", "certificate", folder, "--host", "10.0.0.1").returncode == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("add", "{keys}", "ada"), "an identity is of one run"),
        (("add", "{keys}", "ada", "--run", "a.b"), "cannot be part of a subject"),
        (("add", "{keys}", "eye", "--run", "demo", "--kind", "reader", "--founds"), "only a learner founds a run"),
        (("add", "{nowhere}", "ada", "--run", "demo"), "this folder holds no keys"),
        (("list", "{nowhere}"), "this folder holds no keys"),
        (("new", "{keys}"), "holds keys already"),
        (("new", "{nowhere}", "--host", "a b"), "no name of a host"),
        (("revoke", "{keys}", "ada", "--run", "demo"), "no identity of this name"),
        (("rotate", "{keys}", "ada", "--run", "demo"), "no identity of this name"),
    ],
)
def test_a_mistake_is_told_and_changes_nothing(keys: KeyFolder, words: tuple[str, ...], told: str) -> None:
    """With exit code 2 and no traceback."""
    before = keys.roll_path.read_bytes()
    names = {"keys": keys.path, "nowhere": keys.path.with_name("nowhere")}
    done = atoll("keys", *(word.format(**names) for word in words))
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert keys.roll_path.read_bytes() == before


def test_a_folder_that_is_being_changed_is_left_alone(keys: KeyFolder) -> None:
    """Two commands at once would lose one of their changes."""
    with keys._changing(), pytest.raises(AtollError, match="another command changes these keys"):
        keys.add("ada", "learner", "demo", NOW_S)


def test_the_roll_is_read_back_as_it_was_written(keys: KeyFolder) -> None:
    """And holds nothing that it does not know."""
    keys.add("ada", "learner", "demo", NOW_S, founds=True)
    roll = keys.read()
    assert msgspec.json.decode(msgspec.json.encode(roll), type=type(roll)) == roll
