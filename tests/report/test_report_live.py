"""A watched report is served on this machine only, and follows the files of its runs."""

import http.client
import threading

import pytest
from internals import main
from made_runs import write_run
from refusals import refused

import fedjax_peft as fp
from fedjax_peft.report import live


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Function (path, host) -> status and text, of a page that counts how often it is made."""
    made = []

    def render(version):
        made.append(version)
        if len(made) == 1:
            raise fp.InputError("no run has <begun>")
        return f"page {len(made)} of {version}"

    monkeypatch.setattr(live, "_SHARE", 1e9)  # made at once whenever the files change
    with live.server([tmp_path], render) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def get(path, host="localhost:{}"):
            connection = http.client.HTTPConnection(live.HOST, server.server_port)
            connection.request("GET", path, headers={"Host": host.format(server.server_port)})
            answer = connection.getresponse()
            text = answer.read().decode()
            connection.close()
            return answer.status, text

        yield get
        server.shutdown()


def test_the_page_follows_the_files_of_the_runs(served, tmp_path):
    assert "<p>no run has &lt;begun&gt;</p>" in served("/")[1]
    (_, version), (status, text) = served("/version"), served("/")
    assert (status, text) == (200, f"page 2 of {version}")
    assert served("/")[1] == text, "nothing has changed"
    write_run(tmp_path / "a", {"name": "a"}, [{"round": 0}])
    assert served("/version")[1] != version
    assert served("/")[1].startswith("page 3")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:80", "127.0.0.1:{}"])
def test_a_browser_may_leave_the_port_80_out(served, host):
    served("/")
    assert served("/", host)[0] == served("/version", host)[0] == 200


@pytest.mark.parametrize(
    ("path", "host"),
    [
        ("/etc/passwd", "127.0.0.1:{}"),
        *(("/", host) for host in ("example.org", "example.org:{}", "127.0.0.1.org", "", ":80")),
    ],
)
def test_other_paths_and_hosts_are_refused(served, path, host):
    assert served(path, host)[0] == 404


def test_what_cannot_be_served_is_an_input_error(tmp_path, capsys):
    refused("does not exist", live.server, [tmp_path / "nowhere"], str)
    with live.server([tmp_path], str) as server:
        port = server.server_port
        assert main(["report", str(tmp_path), "--watch", "--port", str(port)]) == 2
    assert f"The port {port} cannot be used" in capsys.readouterr().err
    assert main(["report", str(tmp_path), "--watch", "--out", "x"]) == 2
    assert "leave --out out" in capsys.readouterr().err
