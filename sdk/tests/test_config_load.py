"""Reading configurations (quartet.config): merging, overrides, and what refusals say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest
from quartet.config import Config, ConfigError, load, validate
from quartet.config.load import Draft
from quartet.config.model import rule
from quartet.config.refusals import MAX_TOLD

Toml = Callable[[str, str], str]


class Inner(Config):
    drain_seconds: float = 5.0
    reflection: bool = True
    port_file: Path | None = None


class Env(Config):
    id: str
    weight: float = 1.0
    args: dict[str, Any] = pydantic.Field(default_factory=dict)


class Outer(Config):
    max_steps: int
    name: str = "run"
    mode: Literal["a", "b"] = "a"
    offline: bool | None = None
    stop: list[str] = pydantic.Field(default_factory=list)
    env: list[Env] = pydantic.Field(default_factory=list)
    server: Inner = Inner()
    trainer: dict[str, Any] = pydantic.Field(default_factory=dict)
    doors: dict[str, Inner] = pydantic.Field(default_factory=dict)


@pytest.fixture
def toml(tmp_path: Path) -> Toml:
    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def _read(*argv: str) -> Outer:
    return load(Outer, list(argv)).config


def _refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(Outer, list(argv))
    text = str(caught.value)
    assert "\n" not in text, "one sentence, one line"
    return text


def test_files_merge_left_to_right_and_lists_are_replaced(toml: Toml) -> None:
    one = toml("a.toml", 'max_steps = 1\nstop = ["x", "y"]\n[server]\ndrain_seconds = 1\nreflection = false')
    two = toml("b.toml", 'max_steps = 2\nstop = ["z"]\n[server]\ndrain_seconds = 2')
    config = _read("@", one, "@", two)
    assert (config.max_steps, config.stop) == (2, ["z"])
    assert (config.server.drain_seconds, config.server.reflection) == (2.0, False)


def test_a_table_is_typed_as_toml_or_as_json() -> None:
    for text in (
        "{ drain_seconds = 3.0, reflection = false }",
        '{"drain_seconds": 3.0, "reflection": false}',
    ):
        server = _read("--max-steps=1", "--server", text).server
        assert (server.drain_seconds, server.reflection) == (3.0, False)
    assert _read("--max-steps=1", "--trainer", '{"a": [null]}').trainer == {"a": [None]}
    assert "server = '{drain" in _refusal("--max-steps=1", "--server", "{drain")


def test_overrides_and_files_apply_in_the_order_written(toml: Toml) -> None:
    one = toml("a.toml", "max_steps = 1")
    assert _read("--max-steps", "9", "@", one).max_steps == 1
    assert _read(f"@{one}", "--max-steps", "9").max_steps == 9


@pytest.mark.parametrize(
    "argv",
    [
        ["--server.drain_seconds", "2.5"],
        ["--server.drain-seconds", "2.5"],
        ["--server.drain-seconds=2.5"],
        ["--server", "{drain-seconds = 2.5}"],
    ],
)
def test_spellings_of_one_override(argv: list[str]) -> None:
    assert _read("--max_steps=1", *argv).server.drain_seconds == 2.5


def test_kebab_and_snake_are_one_key_across_files(toml: Toml) -> None:
    one = toml("a.toml", "max-steps = 1\n[server]\ndrain-seconds = 1")
    two = toml("b.toml", "max_steps = 2\n[server]\ndrain_seconds = 2")
    config = _read("@", one, "@", two)
    assert (config.max_steps, config.server.drain_seconds) == (2, 2.0)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (
            '"server.drain-seconds" = 1',
            "server.drain_seconds without quotes, or drain_seconds in the table [server]",
        ),
        ('"trainer.ranks" = 1', "trainer.ranks without quotes, or ranks in the table [trainer]"),
        ('[[env]]\nid = "e"\n"args.n" = 1', "args.n without quotes"),
    ],
)
def test_dots_in_quotes_are_said_to_be_no_tables(toml: Toml, text: str, remedy: str) -> None:
    """Which key was meant says nothing to whoever wrote just that."""
    refusal = _refusal("@", toml("run.toml", f"max_steps = 1\n{text}"))
    assert f"; a key in quotes is one word, with its dots: write {remedy}" in refusal.replace("-", "_")
    assert "did you mean" not in refusal
    unknown = _refusal("@", toml("run.toml", 'max_steps = 1\n"server.drain" = 1'))
    assert "did you mean 'server.drain_seconds'?" in unknown


def test_a_file_after_the_name_of_a_table_is_what_stands_in_it(toml: Toml) -> None:
    """load.py 4: a file for each service, as others' launchers take them."""
    run = toml("run.toml", "max_steps = 1\n[trainer]\nranks = 2\nthreads = 1\n[server]\nreflection = false")
    trainer, server = toml("t.toml", "threads = 4"), toml("s.toml", "drain-seconds = 2.5")
    config = _read("@", run, "--trainer", "@", trainer, "--server", f"@{server}", "--trainer.ranks", "3")
    assert config.trainer == {"ranks": 3, "threads": 4}
    assert (config.server.drain_seconds, config.server.reflection) == (2.5, False)
    assert _read("--server.reflection", "@", run).server.reflection is False, "a flag takes no file"
    wrong = toml("w.toml", "drain = 1")
    assert f"unknown key 'server.drain' (in {wrong})" in _refusal("@", run, "--server", "@", wrong)
    assert "'@' is followed by nothing" in _refusal("@", run, "--server", "@")
    assert "'--max-steps' has no value" in _refusal("--max-steps", "@", run)
    assert "'--env' has no value" in _refusal("--env", "@", run), "a list is no table"


def test_values_are_toml_or_text() -> None:
    config = _read("--max-steps", "3", "--name", "12", "--stop", '["a", "b"]', "--trainer.a-b.c", "[1, 2.5]")
    assert (config.name, config.stop, config.trainer) == ("12", ["a", "b"], {"a_b": {"c": [1, 2.5]}})
    assert _read("--max-steps=1", '--name="quoted"').name == "quoted"
    assert _read("--max-steps=1", "--trainer.path", "a/b c").trainer == {"path": "a/b c"}
    assert _read("--max-steps=1", "--trainer.x=1\ny = 2").trainer == {"x": "1\ny = 2"}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--no-server.reflection"], False),
        (["--server.no-reflection"], False),
        (["--server.reflection"], True),
        (["--server.reflection", "false"], False),
        (["--server.reflection=true"], True),
        (["--server.reflection", "--name", "x"], True),
    ],
)
def test_flags(argv: list[str], expected: bool) -> None:
    assert _read("--max-steps=1", *argv).server.reflection is expected


def test_an_element_of_a_list_can_be_overridden(toml: Toml) -> None:
    one = toml("a.toml", 'max_steps = 1\n[[env]]\nid = "x"\n[[env]]\nid = "y"')
    config = _read("@", one, "--env.1.weight", "0.5", "--env.0.args.max-turns", "5")
    assert [env.weight for env in config.env] == [1.0, 0.5]
    assert config.env[0].args == {"max_turns": 5}


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--max-stps", "3"], ["unknown key 'max_stps'", "did you mean 'max_steps'"]),
        (["--doors.any.refection", "x"], ["'doors.any.refection'", "did you mean 'doors.any.reflection'"]),
        (["--doors.any.what", "x"], ["known keys here: drain_seconds, reflection, port_file"]),
        (["--max-steps=1", "--server.refection=true"], ["'server.refection'", "'server.reflection'"]),
        (["--max-steps=1", "--drain-seconds=3"], ["'drain_seconds'", "'server.drain_seconds'"]),
        (["--max-steps=1", "--zzz=3"], ["unknown key 'zzz'", "known keys here: max_steps"]),
        ([], ["'max_steps' is not set", "--max_steps VALUE"]),
        (["--max-steps", "many"], ["max_steps = 'many'", "a whole number"]),
        (["--max-steps=true"], ["max_steps = true", "a whole number"]),
        (["--max-steps=1.5"], ["max_steps = 1.5", "a whole number"]),
        (["--max-steps=1", "--mode", "c"], ["mode = 'c'", "'a' or 'b'"]),
        (["--max-steps=1", "--stop", "x"], ["stop = 'x'", 'a list, such as ["a", "b"]']),
        (["--max-steps=1", "--server", "3"], ["server = 3", "a table"]),
        (["--max-steps=1", "--server.drain-seconds", '"3"'], ["server.drain_seconds = '3'", "a number"]),
        (["--max-steps"], ["'--max-steps' has no value"]),
        (["--max-stpes"], ["'--max-stpes' has no value; did you mean 'max_steps'?"]),
        (["--max-steps=1", "--server"], ["'--server' is a table", "of drain_seconds, reflection, port_file"]),
        (["--max-steps=1", "--env"], ["'--env' has no value"]),
        (["--max-steps", "--name", "x"], ["'--max-steps' has no value"]),
        (["@"], ["'@' is followed by nothing"]),
        (["@", ""], ["'@' is followed by nothing"]),
        (["@", "/nowhere/x.toml"], ["'/nowhere/x.toml' does not exist"]),
        (["@", "/"], ["is a directory"]),
        (["max_steps=3"], ["argument 'max_steps=3' is not understood", "write '--max_steps=3'"]),
        (["stray"], ["argument 'stray' is not understood", "write '@ file.toml' or '--key value'"]),
        (["--a..b=3"], ["empty key"]),
        (["--max-steps=1", "--max-steps.x=3"], ["max_steps is 1, not a table"]),
        (
            ["--max-steps=1", "--env", '[{id = "x"}]', "--env.3.weight=1"],
            ["'3' is not an index"],
        ),
        (["--max-steps=1", "--env", '[{id = "x"}]', "--env.id=y"], ["for the first write --env.0.id"]),
        (
            ["--max-steps=1", "--env", '[{id = "x"}]', "--env.1.id=y"],
            ["for the first write --env.0.id, and for one more [[env]] in a file"],
        ),
        (["--max-steps=1", "--env", '[{id = "x"}]', "--env.a_b=y"], ["for the first write --env.0.a_b"]),
        (["--max-steps=1", "--env.0.id=y"], ["no file before it has a list env; write [[env]] in a file"]),
        (["--max-steps=1", "--env", '[{id = "x", wait = 1}]'], ["'env.0.wait'"]),
        (["--max-steps=1", "--max-steps.x=3"], ["write '--max_steps VALUE'"]),
        (
            ["--max-steps=1", "--server", "true"],
            ["write a table [server], or '--server.KEY VALUE', of drain"],
        ),
        (["--max-steps=1", "--server.reflection", "yes"], ["write '--server.reflection', or"]),
        (["--max-steps=1", "--server.reflection=yes"], ["server.reflection = 'yes'", "true or false"]),
        (["--max-steps=1", "--server.reflection=1"], ["server.reflection = 1", "true or false"]),
        (["--max-steps=1", '--offline="false"'], ["offline = 'false'", "true or false"]),
    ],
)
def test_refusals_name_key_value_and_remedy(argv: list[str], parts: list[str]) -> None:
    text = _refusal(*argv)
    for part in parts:
        assert part in text


def test_each_thing_that_is_wrong_has_a_line_up_to_a_bound() -> None:
    with pytest.raises(ConfigError) as caught:
        load(Outer, ["--max-steps=x", "--server=3", *(f"--zz{n}=1" for n in range(MAX_TOLD + 1))])
    first, *others = str(caught.value).split("\n")
    assert first.startswith("unknown key 'zz0'") and caught.value.key == "zz0"
    assert len(others) == MAX_TOLD and all(line.startswith("  also: unknown") for line in others[:-1])
    assert others[-1] == "  and 3 more" and len(caught.value.each) == MAX_TOLD + 3


def test_what_was_typed_is_told_first(toml: Toml) -> None:
    """explain.py 1"""
    file = toml(
        "a.toml", "max_steps = 1\nmode = 'c'\n[server]\nx = 1\ndrain_seconds = '3'\n[[env]]\nweight = 1"
    )
    told = _lines("@", file, "--server.port-file.y=3", "--offline=3")
    keys = ["offline", "server.port_file", "mode", "server.x", "server.drain_seconds"]
    assert [key for key, line in zip(keys, told, strict=True) if key not in line] == []


def _lines(*argv: str, flags: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(Outer, list(argv), Draft(flags=flags))
    return str(caught.value).split("\n  also: ")


def test_what_is_wrong_with_one_argument_does_not_hide_the_others(toml: Toml) -> None:
    """load.py 5: five mistakes are one refusal, without what only follows from them."""
    file = toml("a.toml", 'nmae = "x"\nmode = "c"\n[[env]]\nid = "e"\n[server]\ndrain_seconds = "3"')
    first, *others = _lines("@", file, "--max-steps", "--env.1.id=y", "stray", "--server.x.y=1")
    assert first.startswith("option '--max-steps' has no value")
    starts = ("--env.1.id cannot be set", "argument 'stray'", "unknown key 'server.x'", "unknown key 'nmae'")
    assert [line.startswith(start) for line, start in zip(others, starts, strict=False)] == [True] * 4
    assert others[4].startswith("mode = 'c'") and others[5].startswith("server.drain_seconds = '3'")
    assert len(others) == 6, "that max_steps is not set is no news"


def test_beside_a_file_that_cannot_be_read_only_what_is_wrong_anyway_is_told(toml: Toml) -> None:
    """explain.py 2."""
    lines = _lines("@", "/nowhere/x.toml", "--max-stps=3", "--server.reflection=3")
    assert [line.split(" ")[0] for line in lines] == ["config", "unknown", "server.reflection"]


def test_two_spellings_of_one_key_in_one_file_are_refused(toml: Toml) -> None:
    """They hide nothing that the file says besides."""
    file = toml("a.toml", "[server]\ndrain-seconds = 1\ndrain_seconds = 2\nreflection = 3\n[x]\n")
    lines = _lines("@", file, "--max-steps=1")
    assert lines[0] == f"'drain-seconds' and 'drain_seconds' are one key in {file}; remove one"
    assert [line.split(" ")[0] for line in lines[1:]] == ["unknown", "server.reflection"]


FLAGS = ("--resume", "--output-dir", "--overwrite", "--max-time", "--name")


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        (["--overwrit"], "did you mean '--overwrite'?"),
        (["--overwrit", "--name", "x"], "did you mean '--overwrite'?"),
        (["--output-dri", "x"], "unknown key 'output_dri'; did you mean '--output-dir'?"),
        (["--output_dri=x"], "unknown key 'output_dri'; did you mean '--output-dir'?"),
        (["--max-stps=3"], "unknown key 'max_stps'; did you mean 'max_steps'?"),
        (["--max-tme=3"], "unknown key 'max_tme'; did you mean '--max-time'?"),
        (["--nmae=x"], "unknown key 'nmae'; did you mean 'name'?"),
        (["--server.resum=1"], "known keys here: drain_seconds"),
    ],
)
def test_a_misspelt_flag_of_the_command_is_recognised(option: list[str], meant: str) -> None:
    (line,) = _lines("--max-steps=1", *option, flags=FLAGS)
    assert meant in line


def test_a_key_of_a_file_is_no_misspelt_flag(toml: Toml) -> None:
    (line,) = _lines("--max-steps=1", "@", toml("a.toml", "resum = true"), flags=FLAGS)
    assert "known keys here" in line


class Agreeing(Config):
    low: int = 0
    high: int = 1
    odd: int = 1

    @rule
    def _in_order(self) -> None:
        if self.low > self.high:
            raise ValueError("low is above high")

    @rule
    def _is_odd(self) -> None:
        if not self.odd % 2:
            raise ValueError(f"odd = {self.odd} is even")


def test_all_rules_that_are_broken_are_told() -> None:
    """model.py 4."""
    assert load(Agreeing, ["--low=1"]).config.low == 1
    with pytest.raises(ConfigError) as caught:
        load(Agreeing, ["--low=3", "--odd=2"])
    assert str(caught.value) == "low is above high\n  also: odd = 2 is even"


class Around(Config):
    count: int = 1
    agreeing: Agreeing = Agreeing()
    rows: tuple[Agreeing, ...] = ()
    named: dict[str, Agreeing] = {}  # noqa: RUF012

    @rule
    def _is_small(self) -> Iterator[str]:
        for bound in (10, 100):
            if self.count > bound:
                yield f"count = {self.count} is above {bound}"


def test_rules_of_a_table_and_of_those_in_it_are_told_together() -> None:
    """model.py 4: each rule has as many sentences as it likes, and says in which table."""
    odd = {"odd": 2}
    with pytest.raises(ConfigError) as caught:
        validate(Around, {"count": 101, "agreeing": odd, "rows": [{}, odd], "named": {"it": odd}})
    assert str(caught.value).split("\n  also: ") == [
        "count = 101 is above 10",
        "count = 101 is above 100",
        "agreeing is refused: odd = 2 is even",
        "rows.1 is refused: odd = 2 is even",
        "named.it is refused: odd = 2 is even",
    ]
    assert validate(Around, {"rows": [{}]}).rows == (Agreeing(),)


def test_a_wrong_key_does_not_hide_the_rules_of_another_table() -> None:
    """model.py 4."""
    with pytest.raises(ConfigError) as caught:
        validate(Around, {"count": "x", "agreeing": {"low": 3, "odd": 2}, "rows": [{"odd": "y"}]})
    assert str(caught.value).split("\n  also: ") == [
        "count = 'x' is refused: should be a whole number",
        "agreeing is refused: low is above high",
        "agreeing is refused: odd = 2 is even",
        "rows.0.odd = 'y' is refused: should be a whole number",
    ]


@pytest.mark.parametrize(
    ("written", "ends"), [("Loud", "or 'quiet'; did you mean 'loud'?"), ("x", "or 'quiet'")]
)
def test_the_choice_that_was_meant_is_named(written: str, ends: str) -> None:
    class Voice(Config):
        kind: Literal["loud", "quiet"] = "quiet"

    with pytest.raises(ConfigError) as caught:
        validate(Voice, {"kind": written})
    assert str(caught.value) == f"kind = {written!r} is refused: should be 'loud' {ends}"


def test_a_long_table_is_named_and_not_quoted() -> None:
    row = {"low": 0, "high": 1, "odd": 1, "even": {"a": 1}}
    for key, given, quoted in (("count", [1], "count = [1] "), ("count", [row, row], "count ")):
        with pytest.raises(ConfigError) as caught:
            validate(Around, {key: given})
        assert str(caught.value) == f"{quoted}is refused: should be a whole number"


def test_bad_toml_names_file_and_line(toml: Toml) -> None:
    path = toml("a.toml", "max_steps = 1\nname = \n")
    text = _refusal("@", path)
    assert path in text and "line 2" in text


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("model = models/tiny", 'line 2, column 9); a text needs quotes: model = "models/tiny"'),
        ("model = ../tiny  # ours", 'a text needs quotes: model = "../tiny"'),
        ("server.name = my-name", 'a text needs quotes: server.name = "my-name"'),
        ("compiled = True", "line 2, column 12); write compiled = true"),
        ("model = None", "TOML has no such value, leave model out"),
        ("model =", ""),
        ("model = [a]", "line 2, column 10)"),
        ("model = 'a", ""),
        ("max_steps = 1 2", ""),
    ],
)  # fmt: skip
def test_a_word_that_is_no_value_is_told_with_what_to_write(toml: Toml, line: str, said: str) -> None:
    text = _refusal("@", toml("unquoted.toml", f"max_steps = 1\n{line}"))
    assert "is not valid TOML" in text and text.endswith(said)
    assert ("needs quotes" in text) == ("needs quotes" in said)


def test_the_mark_that_some_editors_put_first_is_no_part_of_a_file(toml: Toml) -> None:
    assert _read("@", toml("marked.toml", "\ufeffmax_steps = 3")).max_steps == 3


def test_absurd_files_are_refused_not_crashed_on(toml: Toml, tmp_path: Path) -> None:
    assert "nested too deeply" in _refusal("@", toml("deep.toml", "a = " + "[" * 100_000))
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"a = \xff")
    assert "not UTF-8" in _refusal("@", str(binary))
    assert "is not valid TOML" in _refusal("@", toml("long.toml", "max_steps = " + "9" * 5000))
    for absurd in ("9" * 5000, "[" * 5000):
        assert "should be a whole number" in _refusal("--max-steps", absurd)


def test_what_the_system_lets_nobody_look_at_is_a_sentence() -> None:
    class Looking(Config):
        model: Path = Path("m")
        steps: int = 1

        @pydantic.field_validator("model")
        @classmethod
        def _is_there(cls, folder: Path) -> Path:
            (folder / "config.json").is_file()
            return folder

    name = "m" * 300
    says = f"{name}/config.json cannot be looked at: File name too long; name one that this user can read"
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}$"):
        validate(Looking, {"model": name})
    with pytest.raises(ConfigError, match=rf"--x' has no value.*\n  also: {re.escape(says)}$"):
        load(Looking, ["--model", name, "--x"])


def test_refusals_say_which_file_a_value_came_from(toml: Toml) -> None:
    one, two = toml("a.toml", "max_steps = 1\nname = 3"), toml("b.toml", "max_steps = 2")
    text = _refusal("@", one, "@", two)
    assert f"(in {one})" in text and "name = 3" in text


def test_the_parts_of_a_refusal_are_there_for_invalid_config() -> None:
    with pytest.raises(ConfigError) as caught:
        load(Outer, ["--max-steps=x"])
    assert (caught.value.key, caught.value.value) == ("max_steps", "'x'")
    assert caught.value.remedy == "should be a whole number"


def test_configs_are_frozen() -> None:
    with pytest.raises(pydantic.ValidationError):
        _read("--max-steps=1").max_steps = 2  # type: ignore[misc]
