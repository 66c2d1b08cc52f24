"""The root secret, purpose keys, keyed hashes, sealed bytes, passwords."""

import os
import stat
import threading
from pathlib import Path

import pytest
from argon2 import PasswordHasher
from cryptography.exceptions import InvalidTag

from app.crypto import FileSource, Passwords, SecretError, Secrets, TextSource, parse_root_secret

OLD = "old-0123456789abcdefghijklmnopqrstuv"
NEW = "new-0123456789abcdefghijklmnopqrstuv"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "secrets" / "root.json"


class TestFile:
    def test_the_first_start_makes_it_for_its_owner_alone(self, file: Path) -> None:
        Secrets.open(root_secret=None, path=file)
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        assert [entry.name for entry in file.parent.iterdir()] == ["root.json"]

    def test_the_second_start_keeps_it(self, file: Path) -> None:
        first = Secrets.open(root_secret=None, path=file).hash("session", "x")
        assert Secrets.open(root_secret=None, path=file).hash("session", "x") == first

    def test_processes_that_start_at_once_agree_on_one(self, file: Path) -> None:
        made: list[str] = []

        def start() -> None:
            made.append(Secrets.open(root_secret=None, path=file).hash("session", "x").digest)

        threads = [threading.Thread(target=start) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(made) == 8
        assert len(set(made)) == 1

    def test_one_that_others_may_read_is_refused(self, file: Path) -> None:
        Secrets.open(root_secret=None, path=file)
        os.chmod(file, 0o640)
        with pytest.raises(SecretError, match="chmod 600"):
            Secrets.open(root_secret=None, path=file)

    @pytest.mark.parametrize("text", ["", "{}", '{"versions": {}}', '{"versions": {"1": "ab"}}'])
    def test_one_that_is_damaged_is_refused_and_not_replaced(self, file: Path, text: str) -> None:
        Secrets.open(root_secret=None, path=file)
        file.write_text(text)
        with pytest.raises(SecretError, match="restore it"):
            Secrets.open(root_secret=None, path=file)
        assert file.read_text() == text


class TestPurposes:
    def test_one_purpose_cannot_make_anothers_hash(self) -> None:
        secrets = Secrets(TextSource(NEW))
        assert secrets.hash("session", "x").digest != secrets.hash("api-key", "x").digest

    def test_another_root_makes_other_hashes(self) -> None:
        assert Secrets(TextSource(NEW)).hash("session", "x") != (
            Secrets(TextSource(OLD)).hash("session", "x")
        )

    def test_a_hash_matches_its_value_alone(self) -> None:
        secrets = Secrets(TextSource(NEW))
        stored = secrets.hash("api-key", "right")
        assert secrets.matches("api-key", "right", stored)
        assert not secrets.matches("api-key", "wrong", stored)
        assert not secrets.matches("session", "right", stored)


class TestRotation:
    def test_old_hashes_stay_valid_and_new_ones_are_of_the_new_version(self, file: Path) -> None:
        secrets = Secrets.open(root_secret=None, path=file)
        before = secrets.hash("api-key", "key")
        assert FileSource(file).rotate() == 2
        secrets.reload()
        after = secrets.hash("api-key", "key")
        assert (before.version, after.version) == (1, 2)
        assert before.digest != after.digest
        assert secrets.matches("api-key", "key", before)
        assert secrets.matches("api-key", "key", after)
        assert secrets.hashes("api-key", "key") == [after.digest, before.digest]

    def test_a_running_process_learns_of_a_version_that_another_made(self, file: Path) -> None:
        running = Secrets.open(root_secret=None, path=file)
        FileSource(file).rotate()
        stored = Secrets.open(root_secret=None, path=file).hash("api-key", "key")
        assert stored.version == 2
        assert running.matches("api-key", "key", stored)

    def test_a_dropped_version_matches_no_more(self, file: Path) -> None:
        secrets = Secrets.open(root_secret=None, path=file)
        before = secrets.hash("api-key", "key")
        FileSource(file).rotate()
        FileSource(file).drop(1)
        secrets.reload()
        assert not secrets.matches("api-key", "key", before)

    def test_the_current_version_cannot_be_dropped(self, file: Path) -> None:
        Secrets.open(root_secret=None, path=file)
        with pytest.raises(SecretError):
            FileSource(file).drop(1)

    def test_the_environment_can_hold_two_versions(self) -> None:
        root = parse_root_secret(f"2:{NEW},1:{OLD}")
        assert root.current == 2
        before = Secrets(TextSource(OLD)).hash("api-key", "key")
        assert Secrets(TextSource(f"2:{NEW},1:{OLD}")).matches("api-key", "key", before)

    @pytest.mark.parametrize(
        "text", ["short", "a" * 64, f"1:{NEW},1:{OLD}", f"x:{NEW}", f"0:{NEW}"]
    )
    def test_a_weak_or_muddled_secret_is_refused_without_showing_it(self, text: str) -> None:
        with pytest.raises(ValueError, match="LORAMUX_ROOT_SECRET") as caught:
            parse_root_secret(text)
        assert NEW not in str(caught.value)


class TestSealing:
    def test_what_was_sealed_opens_also_after_a_rotation(self, file: Path) -> None:
        secrets = Secrets.open(root_secret=None, path=file)
        sealed = secrets.seal("idempotency", b"answer")
        FileSource(file).rotate()
        secrets.reload()
        assert b"answer" not in sealed
        assert secrets.open_sealed("idempotency", sealed) == b"answer"

    def test_a_changed_byte_is_noticed(self) -> None:
        secrets = Secrets(TextSource(NEW))
        sealed = bytearray(secrets.seal("idempotency", b"answer"))
        sealed[-1] ^= 1
        with pytest.raises(InvalidTag):
            secrets.open_sealed("idempotency", bytes(sealed))


class TestPasswords:
    cheap = Passwords(PasswordHasher(time_cost=1, memory_cost=8, parallelism=1))

    def test_are_kept_as_argon2id(self) -> None:
        assert Passwords().hash("correct horse").startswith("$argon2id$")

    def test_match_themselves_alone(self) -> None:
        stored = self.cheap.hash("correct horse")
        assert self.cheap.matches("correct horse", stored)
        assert not self.cheap.matches("correct hors", stored)

    def test_nobody_has_an_absent_or_broken_hash(self) -> None:
        assert not self.cheap.matches("x", None)
        assert not self.cheap.matches("x", "not a hash")

    def test_weaker_parameters_are_noticed(self) -> None:
        assert Passwords().outdated(self.cheap.hash("x"))
        assert not self.cheap.outdated(self.cheap.hash("x"))
