"""Where an engine may listen, and with which keys."""

import pytest

from engine.curve import CurveKeyError, create_curve_keys, load_client_curve, load_engine_curve
from engine.ipc import AddressRefused, IpcLock, ipc_path
from engine.server import EngineServer, ServerOptions
from engine.zap import DOMAIN, ZapGate


class TestSocketPaths:
    def test_a_path_that_is_too_long_names_the_remedy(self):
        with pytest.raises(AddressRefused, match="LORAMUX_ENGINES"):
            ipc_path("ipc:///" + "x" * 107)

    def test_bytes_count_and_not_characters(self):
        with pytest.raises(AddressRefused, match="109 bytes"):
            ipc_path("ipc:///" + "é" * 54)

    def test_the_folder_is_made_private(self, tmp_path):
        lock = IpcLock(tmp_path / "run" / "e.sock")
        assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
        lock.release()

    def test_a_folder_that_others_can_enter_is_refused(self, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "run").chmod(0o755)
        with pytest.raises(AddressRefused, match="chmod 700"):
            IpcLock(tmp_path / "run" / "e.sock")

    def test_a_link_is_no_folder(self, tmp_path):
        (tmp_path / "real").mkdir(mode=0o700)
        (tmp_path / "run").symlink_to(tmp_path / "real")
        with pytest.raises(AddressRefused):
            IpcLock(tmp_path / "run" / "e.sock")

    def test_a_second_engine_does_not_take_the_socket_over(self, tmp_path):
        path = tmp_path / "run" / "e.sock"
        first = IpcLock(path)
        with pytest.raises(AddressRefused, match="another engine"):
            IpcLock(path)
        first.release()
        IpcLock(path).release()


class TestListening:
    def test_tcp_without_keys_is_refused(self, tmp_path):
        with pytest.raises(AddressRefused, match="secrets init"):
            EngineServer(ServerOptions("tcp://127.0.0.1:0", tmp_path / "journal"))

    def test_another_transport_is_refused(self, tmp_path):
        with pytest.raises(AddressRefused, match="neither"):
            EngineServer(ServerOptions("udp://127.0.0.1:0", tmp_path / "journal"))


class TestCurveKeys:
    def test_both_sides_read_what_was_made(self, tmp_path):
        made = create_curve_keys(tmp_path / "curve")
        engine = load_engine_curve(tmp_path / "curve")
        client = load_client_curve(tmp_path / "curve", made.public)
        assert engine.pair == made
        assert engine.allowed == {client.pair.public}
        assert (tmp_path / "curve" / "engine.key").stat().st_mode & 0o777 == 0o600

    def test_keys_in_use_are_not_overwritten(self, tmp_path):
        create_curve_keys(tmp_path)
        before = (tmp_path / "engine.key").read_text()
        with pytest.raises(CurveKeyError, match="exists already"):
            create_curve_keys(tmp_path)
        assert (tmp_path / "engine.key").read_text() == before

    def test_a_key_that_others_can_read_is_refused(self, tmp_path):
        create_curve_keys(tmp_path)
        (tmp_path / "engine.key").chmod(0o644)
        with pytest.raises(CurveKeyError, match="chmod 600"):
            load_engine_curve(tmp_path)

    def test_an_empty_allow_list_is_refused(self, tmp_path):
        create_curve_keys(tmp_path)
        (tmp_path / "clients.allowed").write_text("# nobody\n")
        with pytest.raises(CurveKeyError, match="nobody could connect"):
            load_engine_curve(tmp_path)

    def test_halves_of_different_pairs_are_refused(self, tmp_path):
        create_curve_keys(tmp_path)
        other = create_curve_keys(tmp_path / "other")
        text = f"public {other.public}\nsecret {load_engine_curve(tmp_path).pair.secret}\n"
        (tmp_path / "engine.key").write_text(text)
        with pytest.raises(CurveKeyError, match="belong together"):
            load_engine_curve(tmp_path)

    def test_secrets_are_not_in_the_representation(self, tmp_path):
        made = create_curve_keys(tmp_path)
        assert made.secret not in repr(load_engine_curve(tmp_path))


class TestZap:
    def test_only_a_curve_key_of_the_list_is_admitted(self):
        import zmq
        from zmq.utils import z85

        public, _ = zmq.curve_keypair()
        other, _ = zmq.curve_keypair()
        context = zmq.Context()
        gate = ZapGate(context, frozenset({public.decode()}))

        def asked(mechanism=b"CURVE", key=public):
            return [b"1.0", b"1", DOMAIN, b"::1", b"", mechanism, z85.decode(key)]

        assert gate.admits(asked())
        assert not gate.admits(asked(key=other))
        assert not gate.admits(asked(mechanism=b"PLAIN"))
        assert not gate.admits(asked()[:6])
        gate.close()
        context.term()
