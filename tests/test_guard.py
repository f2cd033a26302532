"""Who may use a server: API keys, hosts, origins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from edgekv.cli import run
from edgekv.errors import UsageError
from edgekv.serve import Limits, ServeOptions
from edgekv.serve.http import ApiKeys
from edgekv.serve.options import accepted_keys, read_keys
from tests.serving import Server, served

GET = "GET {} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n{}\r\n"


def _status(server: Server, path: str = "/v1/models", host: str = "localhost", header: str = "") -> int:
    return int(server.raw(GET.format(path, host, header and header + "\r\n").encode()).split()[1])


def test_a_key_is_needed_if_there_are_some(talking: Path, capfd: pytest.CaptureFixture[str]):
    with served(talking, keys=("right", "other")) as server:
        assert _status(server) == 401 and _status(server, "/metrics") == 401
        assert _status(server, "/health") == 200
        for wrong in ("Bearer wrong", "Bearer ", "right", "Basic right", "Bearer right2", "Bearer \xff"):
            assert _status(server, header=f"authorization: {wrong}") == 401
        assert b"\r\nwww-authenticate: Bearer\r\n" in server.raw(GET.format("/v1/models", "localhost", "").encode())
        for right in ("Bearer right", "bearer other"):
            assert _status(server, header=f"authorization: {right}") == 200
        assert "right" not in server.get("/health") + repr(server.serving.service.engine)
    printed = capfd.readouterr()
    assert "right" not in printed.out + printed.err


def test_salts_tell_keys_apart_and_do_not_tell_them():
    keys = ApiKeys(["one", "two"])
    salts = {keys.salt(b"Bearer one"), keys.salt(b"Bearer two")}
    assert len(salts) == 2 and None not in salts and not any("one" in (salt or "") for salt in salts)
    assert keys.salt(None) is None and ApiKeys([]).are_required is False
    assert "secret" not in repr(ServeOptions(keys=("secret",)))


def test_a_file_of_keys(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text("# mine\nfirst\n\n second \n")
    assert read_keys(path) == ("first", "second")
    for content, found in (("", "no key"), ("a b", "other characters"), ("\u00e9", "other characters")):
        path.write_text(content)
        with pytest.raises(UsageError, match=found):
            read_keys(path)
    with pytest.raises(UsageError, match="a file of API keys"):
        read_keys(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a regular file"):
        read_keys(tmp_path / "pipe")


def test_a_key_and_a_file_of_keys_add_up(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text("first\nsecond\n")
    assert accepted_keys(None, None) == () and accepted_keys("mine", None) == ("mine",)
    assert accepted_keys("mine", path) == ("mine", "first", "second")
    for wrong in ("", "a b", "tab\t", "\u00e9"):
        with pytest.raises(UsageError, match="API key: got") as refused:
            accepted_keys(wrong, None)
        assert not wrong or wrong not in str(refused.value)


def test_the_key_of_the_environment_is_needed(talking: Path):
    """Only that of the command line if both are given, and neither is printed."""
    command = [sys.executable, "-m", "edgekv", "serve", str(talking), "--port", "0", "--threads", "1"]
    for options, accepted, refused in (
        ([], "from-env", "from-line"),
        (["--api-key", "from-line"], "from-line", "from-env"),
    ):
        process = subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "EDGEKV_API_KEY": "from-env"},
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[0]
            assert openai.OpenAI(base_url=url, api_key=accepted).models.list().data
            with pytest.raises(openai.AuthenticationError, match="no accepted key"):
                openai.OpenAI(base_url=url, api_key=refused).models.list()
        finally:
            process.terminate()
            assert process.stdout is not None
            printed = process.stdout.read()
            process.wait(30)
        assert "from-" not in printed and "API keys   1\n" in printed
        assert "GET /v1/models 401, invalid_api_key, total" in printed


def test_a_foreign_page_cannot_reach_a_local_server(talking: Path):
    """Neither under a name of its own that resolves to this machine, nor by asking across origins."""
    with served(talking) as server:
        assert _status(server, host="evil.example") == 403 and _status(server, host="") == 403
        for host in ("127.0.0.1", f"localhost:{server.port}", "[::1]:80", "LOCALHOST"):
            assert _status(server, host=host) == 200
        answer = server.raw(GET.format("/v1/models", "localhost", "origin: http://evil.example\r\n").encode())
        assert b"access-control" not in answer.lower()


def test_an_origin_that_is_allowed(talking: Path):
    with served(talking, origins=("http://page.example",), keys=("k",)) as server:
        for origin, is_allowed in (("http://page.example", True), ("http://evil.example", False)):
            head = f"OPTIONS /v1/models HTTP/1.1\r\nhost: localhost\r\norigin: {origin}\r\nconnection: close\r\n"
            answer = server.raw(f"{head}access-control-request-method: GET\r\n\r\n".encode())
            assert (b"access-control-allow-origin: " + origin.encode() in answer) is is_allowed


def test_an_allowed_page_can_read_refusals(talking: Path):
    """Without the headers of CORS a browser shows it a failed connection, not the status."""
    allowed = b"access-control-allow-origin: http://page.example"
    with served(talking, origins=("http://page.example",), keys=("k",)) as server:
        for path, header, status in (("/v1/models", "", b" 401 "), ("/no", "authorization: Bearer k\r\n", b" 404 ")):
            answer = server.raw(GET.format(path, "localhost", f"origin: http://page.example\r\n{header}").encode())
            assert status in answer and allowed in answer


def test_a_server_for_all_without_keys_warns(
    talking: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "keys").write_text("mine")
    monkeypatch.delenv("EDGEKV_API_KEY", raising=False)
    wrong = ["serve", str(talking), "--cache-budget", "lots"]  # refused before it would serve
    for options, warns in (([], False), (["--host", "0.0.0.0"], True)):
        assert run([*wrong, *options]) == 2
        assert ("warning: --host 0.0.0.0 without API keys" in capsys.readouterr().err) is warns
    for keys in (["--api-key-file", str(tmp_path / "keys")], ["--api-key", "mine"]):
        assert run([*wrong, "--host", "0.0.0.0", *keys]) == 2
        assert "warning" not in capsys.readouterr().err
    monkeypatch.setenv("EDGEKV_API_KEY", "mine")
    assert run([*wrong, "--host", "0.0.0.0"]) == 2
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "70000"], "--port: got 70000"),
        (["--max-sessions", "0"], "--max-sessions: got 0"),
        (["--timeout", "0"], "--timeout: got 0"),
        (["--cache-budget", "lots"], "memory budget: got 'lots'"),
        (["--api-key", "a b"], "API key: got other characters"),
        (["--api-key-file", "nowhere"], "nowhere: got No such file"),
        (["--host", "no.such.host.invalid"], "address: got no.such.host.invalid"),
    ],
)
def test_options_are_checked(talking: Path, options: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert run(["serve", str(talking), *options]) == 2
    assert words in capsys.readouterr().err


def test_limits_are_checked():
    for wrong in ({"queue": 0}, {"send_s": float("nan")}, {"header_s": float("inf")}):
        with pytest.raises(UsageError):
            Limits(**wrong)  # type: ignore[arg-type]
