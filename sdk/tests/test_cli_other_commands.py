"""Commands and flags as other systems' documents write them: each is told by what it is called here."""

from __future__ import annotations

from pathlib import Path

import pytest
from quartet.cli.__main__ import main
from quartet.cli.other_commands import tables_hidden, tables_shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["init", "ws", "--prime-rl"],
            "'--prime-rl' is not understood; leave it out: the files in configs/rl",
        ),
        (
            ["env", "install", "x", "--from-repo"],
            "'--from-repo' is not understood; a package of a repository",
        ),
        (["env", "list", "--from-repo"], "'--from-repo' is not understood; see 'quartet env list --help'"),
    ],
)
def test_flags_of_other_systems_are_told_by_what_is_here(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`prime lab setup --prime-rl`, `vf-install NAME --from-repo`."""
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: argument {said}")
    assert not list(tmp_path.iterdir()), "nothing is written of what was not understood"


@pytest.mark.parametrize(
    ("command", "here"),
    [
        ("lab", "quartet init'"),
        ("prime-rl", "quartet rl'"),
        ("vf-rl", "quartet rl'"),
        ("vf-install", "quartet env install'"),
        ("env-server", "python -m quartet_envhost', of a service that 'quartet rl' starts by itself"),
    ],
)
def test_commands_of_other_systems_are_told_by_their_names_here(
    command: str, here: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "setup"])
    said = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and said.endswith(f"; here it is '{here}")
    with pytest.raises(SystemExit):  # as the command of a command nobody has it
        main(["env", command])
    assert "here it is" not in capsys.readouterr().err


def test_a_table_that_has_the_name_of_an_address_is_left_for_the_files_of_a_run() -> None:
    given = ["submit", "--orchestrator", "@", "o.toml", "--orchestrator", "@p.toml", "--orchestrator", "h:1"]
    hidden = tables_hidden(given)
    assert hidden.count("--orchestrator") == 1 and hidden[-2:] == ["--orchestrator", "h:1"]
    assert tables_shown(hidden) == given
    assert tables_hidden(["submit", "--orchestrator"]) == ["submit", "--orchestrator"]
