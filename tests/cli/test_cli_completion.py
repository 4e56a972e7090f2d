"""The completion scripts, executed by a shell."""

import shutil
import subprocess

import pytest
from internals import cli


def completed(script: str, *words: str) -> set[str]:
    """Returns the completions that bash offers for the last word."""
    line = " ".join(f"'{word}'" for word in words)
    code = f"{script}\nCOMP_WORDS=({line}) COMP_CWORD={len(words) - 1}\n"
    code += '_shtab_fedjax_peft\nprintf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.fixture(scope="module")
def bash():
    """The completion script for bash."""
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    from fedjax_peft.cli.completion import script
    from fedjax_peft.cli.parser import build_parser

    return script(build_parser(), "bash")


def test_commands_options_and_keys(bash):
    assert {"run", "report", "list", "reproduce"} <= completed(bash, "fedjax-peft", "")
    assert completed(bash, "fedjax-peft", "reproduce", "--sm") == {"--small"}
    assert completed(bash, "fedjax-peft", "ini") == {"init"}
    assert completed(bash, "fedjax-peft", "run", "--dr") == {"--dry-run"}
    assert completed(bash, "fedjax-peft", "run", "c.toml", "peft.ran") == {
        "peft.rank=",
        "peft.rank_pattern=",
    }
    assert "placement.lanes=" in completed(bash, "fedjax-peft", "run", "c.toml", "placement.")
    assert completed(bash, "fedjax-peft", "completion", "z") == {"zsh"}
    assert completed(bash, "fedjax-peft", "explain", "peft.ran") == {
        "peft.rank",
        "peft.rank_pattern",
    }
    assert completed(bash, "fedjax-peft", "export", "--format", "ada") == {"adapterhub"}


def test_files(bash, tmp_path, monkeypatch):
    (tmp_path / "mine.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert completed(bash, "fedjax-peft", "run", "mi") == {"mine.toml"}


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    assert "fedjax-peft" in capsys.readouterr().out
