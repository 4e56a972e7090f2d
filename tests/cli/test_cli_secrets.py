"""Passwords in the addresses of trackers: used by the run, and nowhere recorded or printed."""

import pytest
from internals import cli, sweeping
from internals import config as configs
from shallow import draw_nothing

OWN = """
import pathlib
def own(address: str = "", key: str = ""):
    def send(row, run):
        with pathlib.Path(__file__).with_name("sent").open("a") as file:
            file.write(f"{address} {row['round']}\\n")
        assert "secret" not in repr(run.config)
        if "broken" in address:
            raise OSError(f"no answer from {address}")
    return send
"""


def recorded_secrets(folder):
    """Returns the files of a folder that have the secret."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if b"secret" in path.read_bytes()]


def test_passwords_are_used_and_not_shown(project, tmp_path, capsys, monkeypatch):
    """Without the password a resumed run sends nothing, and says how to give it again."""
    address = "https://user:secret@host/?token=secret"
    draw_nothing(monkeypatch)
    (tmp_path / "mine.py").write_text(OWN)
    table = f'[trackers."mine.py:own"]\naddress = "{address}"\n'
    (tmp_path / "config.toml").write_text((project / "config.toml").read_text() + table)
    out = tmp_path / "out" / "run"
    command = ["run", str(tmp_path / "config.toml"), "rounds=1", "--out", str(out)]
    assert cli.main([*command, "--dry-run"]) == 0
    assert cli.main(command) == 0
    assert cli.main(["report", str(out)]) == 0
    assert (tmp_path / "sent").read_text() == f"{address} 0\n{address} 1\n"
    assert configs.load(out / "config.toml")["trackers"] == {
        f"{tmp_path / 'mine.py'}:own": {"address": "https://***@host/?token=***", "key": ""}
    }
    with pytest.warns(UserWarning, match="its 'address' has .* in their place. Give it again"):
        assert cli.main(["resume", str(out), "rounds=2"]) == 0
    assert cli.main(["sync", str(out)]) == 2
    again = f"trackers.{tmp_path / 'mine.py'}:own.address={address}"
    assert cli.main(["sync", str(out), again.replace("host", "broken")]) == 2
    assert cli.main(["sync", str(out), again]) == 0
    assert (tmp_path / "sent").read_text().endswith(f"{address} 2\n")
    assert cli.main([*command, "rounds=2", "--resume"]) == 0  # with the address: the same run
    monkeypatch.setattr(sweeping, "_run", lambda *_: None)
    sweep = ["sweep", str(tmp_path / "config.toml"), "seed=0,1", again]
    assert cli.main([*sweep, "--out", str(tmp_path / "out" / "sweep")]) == 0
    printed = capsys.readouterr()
    assert "no answer from https://***@broken/?token=***" in printed.err
    assert "secret" not in printed.out + printed.err
    assert recorded_secrets(tmp_path / "out") == []
