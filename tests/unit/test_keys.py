"""Identities and the roll: files that only their owner reads, keys that end, mistakes that are told by name."""

from __future__ import annotations

import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID
from structlog.testing import capture_logs

from atoll.base.errors import AtollError, SettingsError
from atoll.keys import certificates
from atoll.keys.doors import doors
from atoll.keys.identity import learner_identity, read_identity, run_credentials, write_identity
from atoll.keys.locked import LockedDoor
from atoll.keys.rights import Kind, Rights, at_leaf, carried, premerger_of, rights_of
from atoll.keys.roll import KeyFolder
from atoll.wire.subjects import Subjects, matches
from support.command_line import atoll

NOW_S = 1_000_000.0
HOUR_S = 3600.0


@pytest.fixture
def keys(tmp_path: Path) -> KeyFolder:
    made = KeyFolder(tmp_path / "keys")
    made.create(["127.0.0.1", "hub.example.org"], NOW_S)
    return made


def test_secrets_are_readable_for_their_owner_alone(keys: KeyFolder) -> None:
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


def test_nodes_of_a_cluster_need_a_certificate_for_both_ends_and_its_authority(
    keys: KeyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that an earlier version made lock a single broker; for nodes another certificate is asked for, by its command."""
    assert LockedDoor(keys, tmp_path / "new", node=True).routes == tmp_path / "new" / "routes.conf"
    assert "verify: true" in (tmp_path / "new" / "routes.conf").read_text(encoding="utf-8")
    with monkeypatch.context() as earlier:
        earlier.setattr(certificates, "_BOTH_ENDS", (ExtendedKeyUsageOID.SERVER_AUTH,))
        keys.certify(["127.0.0.1"])
    assert LockedDoor(keys, tmp_path / "single").routes is None
    with pytest.raises(SettingsError, match="atoll keys certificate"):
        LockedDoor(keys, tmp_path / "node", node=True)
    keys.certify(["127.0.0.1"])
    keys.authority_path.unlink()
    with pytest.raises(SettingsError, match=r"copy authority\.pem"):
        LockedDoor(keys, tmp_path / "node", node=True)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o644])
def test_an_identity_that_others_may_read_is_refused(keys: KeyFolder, mode: int) -> None:
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
        (f"name = {'9' * 5000}", "not TOML"),
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


@pytest.mark.parametrize("authority", ["", "\n", "no certificate\n"])
def test_an_identity_believes_one_authority(keys: KeyFolder, authority: str) -> None:
    """An empty one would be every public one: it is neither handed out, nor read, nor used."""
    path = keys.add("ada", "learner", "demo", NOW_S)
    identity = read_identity(path)
    write_identity(path, replace(identity, authority=authority))
    with pytest.raises(SettingsError, match="with an authority that is no certificate"):
        read_identity(path)
    keys.authority_path.write_text(authority, encoding="utf-8")
    with pytest.raises(SettingsError, match="the certificate of the authority is damaged"):
        keys.add("bob", "learner", "demo", NOW_S)
    if not authority.strip():
        with pytest.raises(SettingsError, match="would believe every public one"):
            replace(identity, authority=authority).credentials().tls()


def foreign_key(kind: str) -> bytes:
    """Return a key of a kind that no authority of ours has."""
    if kind == "damaged":
        return b"-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----\n"
    made: PrivateKeyTypes = ec.generate_private_key(ec.SECP256R1())
    if kind == "rsa":
        made = rsa.generate_private_key(65537, 2048)
    elif kind == "ed25519":
        made = ed25519.Ed25519PrivateKey.generate()
    lock = serialization.BestAvailableEncryption(b"x") if kind == "encrypted" else serialization.NoEncryption()
    return made.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock)


@pytest.mark.parametrize("kind", ["damaged", "rsa", "ed25519", "encrypted", "missing"])
def test_an_authority_that_cannot_sign_is_told(keys: KeyFolder, kind: str) -> None:
    former = keys.certificate_path.read_bytes()
    path = keys.path / "authority.key"
    path.unlink() if kind == "missing" else path.write_bytes(foreign_key(kind))
    with pytest.raises(SettingsError, match=r"signs no certificate|is missing") as told:
        keys.certify(["127.0.0.1"])
    assert str(path) in str(told.value)
    assert keys.certificate_path.read_bytes() == former


def test_a_copy_of_the_folder_is_not_changed(keys: KeyFolder) -> None:
    """Whoever changed a copy would lose the change with the next one; a text that is none is told by its path."""
    keys.authority_path.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match=r"authority\.pem: no text"):
        keys.add("ada", "learner", "demo", NOW_S)
    (keys.path / "root.key").unlink()
    for change in (
        lambda: keys.add("ada", "learner", "demo", NOW_S),
        lambda: keys.revoke("operator", "*", NOW_S),
        lambda: keys.certify(["hub"]),
    ):
        with pytest.raises(SettingsError, match=r"a copy for a broker[\s\S]*restore root\.key"):
            change()


def test_an_identity_is_of_one_run_and_one_learner(keys: KeyFolder) -> None:
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
    with pytest.raises(SettingsError, match="would let it in again"):
        keys.rotate("ada", "demo", NOW_S, overlap_s=0.0)
    keys.rotate("ada", "demo", NOW_S, overlap_s=0.0, readmit=True)
    assert keys.read().entrants(NOW_S)[-1].name == "ada"


def test_a_name_cannot_widen_a_right(keys: KeyFolder) -> None:
    """Names are levels of subjects: a wildcard or a dot would cover others."""
    for name in ("*", ">", "a.b", "", "a b", "ä", "x" * 65):
        with pytest.raises(SettingsError, match="cannot be part of a subject"):
            keys.add(name, "learner", "demo", NOW_S)
        with pytest.raises(SettingsError, match="cannot be part of a subject"):
            keys.add("ada", "learner", name, NOW_S)
    assert [one.name for one in keys.read().entries] == ["operator"]


@pytest.mark.parametrize("name", ["all", "bye", "evaluator", "sum", "shard-0", "shard-17"])
def test_no_learner_is_called_as_others_are(keys: KeyFolder, name: str) -> None:
    """It could write their events, and a broker refuses rights that are written down twice. Other kinds have no such rights."""
    with pytest.raises(SettingsError, match="no learner can have this name"):
        keys.add(name, "learner", "demo", NOW_S)
    keys.add(name, "synchronizer", "demo", NOW_S)
    keys.add(f"{name}-a", "learner", "demo", NOW_S)
    assert [one.name for one in keys.read().entries] == ["operator", name, f"{name}-a"]


def test_at_a_leaf_a_founder_creates_streams_of_the_hub_and_a_premerger_reads_what_stays() -> None:
    """The stream of contributions is the hub's; the messages that a premerger folds are kept at the leaf."""
    founder = at_leaf("demo", rights_of("learner", "demo", "ada", founds=True), "eu")
    premerger = at_leaf("demo", rights_of("premerger", "demo", premerger_of("eu")), "eu")
    hub, leaf = "$JS.hub.API.STREAM", "atoll_demo_KEEP"
    assert {f"{hub}.INFO.atoll_demo_UPC", f"{hub}.CREATE.atoll_demo_UPC"} <= set(founder.asks)
    assert not any(leaf in subject for subject in founder.asks)
    assert any(leaf in subject for subject in premerger.reads)
    assert not any("UPC" in subject for subject in (*premerger.asks, *premerger.reads))


@pytest.mark.parametrize("founds", [False, True])
def test_the_hub_takes_of_a_region_what_its_own_may_write_and_nothing_of_others(*, founds: bool) -> None:
    """Its learners, its evaluators and its premerger write as ever; of who is elsewhere, or on no roll, nothing is taken."""
    taken = carried(rights_of("region", "demo", "eu", founds=founds), "demo", "eu", ["ours", "free"], founds=founds)
    mine = [rights_of("learner", "demo", one, founds=founds) for one in ("ours", "free")]
    mine += [rights_of("evaluator", "demo", "eye"), rights_of("premerger", "demo", premerger_of("eu"))]
    others = [rights_of("learner", "demo", one) for one in ("theirs", "stranger")]
    others.append(rights_of("premerger", "demo", premerger_of("us")))

    def covered(rights: Rights) -> set[str]:
        wanted = {*rights.stores, *rights.tells} - {Subjects("demo").data}
        return {subject for subject in wanted if any(matches(one, subject) for one in (*taken.stores, *taken.tells))}

    for rights in mine:
        assert covered(rights) == {*rights.stores, *rights.tells} - {Subjects("demo").data}
    assert [covered(rights) for rights in others] == [set()] * len(others)
    assert Subjects("demo").data in taken.stores


@pytest.mark.parametrize("damage", ['{"entries": 3}', "", '{"entries": [{"name": "x"}]}', '{"people": []}'])
def test_a_damaged_roll_is_told(keys: KeyFolder, damage: str) -> None:
    keys.roll_path.write_text(damage, encoding="utf-8")
    with pytest.raises(SettingsError, match="the roll of keys is damaged"):
        keys.read()


def test_a_last_key_that_will_end_is_told_once_a_day(
    keys: KeyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a week before; a name that has a longer key beside it, or has been revoked, is not told."""
    now_s = time.time()
    for name, days in (("soon", 8.0), ("later", 20.0), ("rotated", 8.0), ("revoked", 8.0)):
        keys.add(name, "learner", "demo", now_s, until_s=now_s + days * 24 * HOUR_S)
    keys.rotate("rotated", "demo", now_s, overlap_s=8 * 24 * HOUR_S)
    keys.revoke("revoked", "demo", now_s)
    door = LockedDoor(keys, tmp_path / "store")
    told = []
    for hours in (1, 25, 30, 49, 7.9 * 24, 9 * 24):
        monkeypatch.setattr(time, "time", lambda hours=hours: now_s + hours * HOUR_S)
        with capture_logs() as logs:
            door.has_changed()
        told.append([line["identities"] for line in logs if line["event"] == "keys.ending"])
    assert told == [[], [["demo/soon"]], [], [["demo/soon"]], [["demo/soon"]], []]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("add", "{keys}", "ada"), "an identity is of one run"),
        (("add", "{keys}", "ada", "--run", "a.b"), "cannot be part of a subject"),
        (("add", "{keys}", "eye", "--run", "demo", "--kind", "reader", "--founds"), "only a learner founds a run"),
        (("add", "{keys}", "eu", "--run", "demo", "--kind", "premerger"), "says whose sums it may send"),
        (("add", "{nowhere}", "ada", "--run", "demo"), "this folder holds no keys"),
        (("list", "{nowhere}"), "this folder holds no keys"),
        (("new", "{keys}"), "holds keys already"),
        (("new", "{nowhere}", "--host", "a b"), "no name of a host"),
        (("revoke", "{keys}", "ada", "--run", "demo"), "no identity of this name"),
        (("rotate", "{keys}", "ada", "--run", "demo"), "no identity of this name"),
        (("move", "{keys}", "ada", "--run", "demo", "--region", "eu"), "no identity of this name"),
        (("move", "{keys}", "operator", "--region", "eu"), "only a learner is in a region"),
        (("add", "{keys}", "ada", "--run", "demo", "--region", "a.b"), "a learner cannot be there"),
        (
            ("add", "{keys}", "eye", "--run", "demo", "--kind", "reader", "--region", "eu"),
            "only a learner is in a region",
        ),
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


@pytest.mark.parametrize(
    ("kind", "verb", "needed"),
    [
        ("reader", ("runs",), "that of the operator"),
        ("learner", ("runs", "remove", "demo"), "that of the operator"),
        ("learner", ("top", "--run", "demo", "--once"), "that of a reader or"),
        ("learner", ("fates", "--run", "demo"), "that of a reader or"),
    ],
)
def test_a_verb_says_whose_identity_it_needs(keys: KeyFolder, kind: Kind, verb: tuple[str, ...], needed: str) -> None:
    """Before it asks the broker, which would say no more than that it refuses a subject."""
    identity = str(keys.add("ada", kind, "demo", NOW_S))
    done = atoll(*verb, "--broker", "nats://127.0.0.1:1", environment={"ATOLL_BROKER__IDENTITY": identity})
    assert done.returncode == 2, done.stderr
    assert f"the identity of {kind} 'ada' of run 'demo'" in done.stderr
    assert needed in done.stderr


def test_a_folder_that_is_being_changed_is_left_alone(keys: KeyFolder) -> None:
    """Two commands at once would lose one of their changes."""
    with keys._changing(), pytest.raises(AtollError, match="another command changes these keys"):
        keys.add("ada", "learner", "demo", NOW_S)


def test_keys_are_provided_as_often_as_one_likes(tmp_path: Path) -> None:
    """Each finds its own identity in its folder; a new key is handed out, a revoked one is taken back and stays so."""
    keys, into = tmp_path / "keys", tmp_path / "handed"
    words = ("keys", "provide", str(keys), "--into", str(into), "--run", "demo", "--host", "nats")
    names = ("--learner", "ada", "--learner", "bob", "--synchronizer", "shard", "--reader", "eye")
    first = atoll(*words, *names)
    assert first.returncode == 0, first.stderr
    assert {path.name: [each.name for each in path.iterdir()] for path in into.iterdir() if path.name != "broker"} == {
        name: ["identity.toml"] for name in ("ada", "bob", "shard", "eye")
    }
    assert sorted(path.name for path in (into / "broker").iterdir()) == [
        "authority.pem",
        "broker.key",
        "broker.pem",
        "roll.json",
    ]
    ada = read_identity(into / "ada" / "identity.toml")
    assert (ada.kind, ada.founds, read_identity(into / "eye" / "identity.toml").kind) == ("learner", True, "reader")
    assert {stat.S_IMODE(path.stat().st_mode) for path in into.rglob("*.toml")} == {0o600}
    assert stat.S_IMODE((into / "broker" / "broker.key").stat().st_mode) == 0o600
    before = {path: path.stat().st_mtime_ns for path in into.rglob("*")}
    assert "0 files changed" in atoll(*words, *names).stdout
    assert {path: path.stat().st_mtime_ns for path in into.rglob("*")} == before

    folder = KeyFolder(keys)
    folder.rotate("ada", "demo", NOW_S, overlap_s=0.0)
    folder.revoke("bob", "demo", NOW_S)
    assert atoll(*words, *names).returncode == 0
    assert read_identity(into / "ada" / "identity.toml").seed != ada.seed
    assert not (into / "bob" / "identity.toml").exists()
    assert (into / "broker" / "roll.json").read_bytes() == folder.roll_path.read_bytes()

    for wrong, told in ((("--learner", "shard"), "another kind"), (("--learner", "broker"), "broker's")):
        refused = atoll(*words, *wrong)
        assert refused.returncode != 0
        assert told in refused.stderr
        assert "Traceback" not in refused.stderr
