"""Ports, generated configs and their check before anything starts."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import tomllib
from enum import Enum
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from quartet.config import ConfigError
from quartet.kit import accelerator
from quartet.kit.standard_streams import shown
from quartet.local import deployment, ports
from quartet.local.child import ChildSpec
from quartet.local.deployment import check, write
from quartet.local.ports import AddressRefused, resolve
from quartet.local.toml_text import dumps, inline
from quartet.local.wiring import SERVICES, wire

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALAR = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | TEXT
VALUE = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(TEXT, VALUE, max_size=4))
def test_toml_reads_back_as_written(table: dict[str, object]) -> None:
    assert tomllib.loads(dumps(table)) == table


@example("\x1b[2J \x7f \x9b2J")
@given(VALUE)
def test_a_value_on_one_line_reads_back_as_written(value: object) -> None:
    text = inline(value)
    # By what TOML calls a line: its strings hold other separators of Unicode as they are.
    assert "\n" not in text and "\r" not in text
    assert text == shown(text), "nothing is a command to a terminal"
    assert tomllib.loads(f"value = {text}") == {"value": value}


def test_toml_of_what_is_no_table() -> None:
    assert dumps({"a": None, "b": 1}) == "b = 1\n"
    assert math.isnan(tomllib.loads(dumps({"a": math.nan}))["a"])
    with pytest.raises(TypeError, match="no bytes"):
        dumps({"a": b"x"})


def test_toml_of_numbers_that_write_themselves_otherwise() -> None:
    class Share(float):
        """As those of NumPy."""

        def __repr__(self) -> str:
            return f"Share({float(self)})"

    class Size(int, Enum):
        SMALL = 3

    assert dumps({"a": Share(0.5), "b": [Share("inf")], "c": Size.SMALL}) == "a = 0.5\nb = [inf]\nc = 3\n"


def test_ports_are_distinct_and_a_taken_one_is_refused() -> None:
    chosen = resolve(["127.0.0.1:0"] * 8)
    assert len(set(chosen)) == 8
    numbers = [int(address.rpartition(":")[2]) for address in chosen]
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(0 < port < lowest for port in numbers), "none that the system gives away meanwhile"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressRefused, match=f"127.0.0.1:{port}: Address already in use; choose another"):
            resolve([f"127.0.0.1:{port}"])
    for address in ("127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", 3, "3"):
        with pytest.raises(AddressRefused, match="is no host:port"):
            resolve([address])
    with pytest.raises(AddressRefused, match=f"cannot listen on {'ä' * 64}:0: there can be no such host"):
        resolve([f"{'ä' * 64}:0"])


def test_a_port_is_of_one_launcher_until_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """ports.py 3: of several that are started at once each has some, and binds them a minute later."""
    code = "from quartet.local.ports import resolve; print(*resolve(['127.0.0.1:0']), flush=True); input()"
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with launcher:
        assert launcher.stdout is not None
        address = launcher.stdout.readline().strip()
        monkeypatch.setattr(ports, "OWN_PORTS", [int(address.rpartition(":")[2])])
        monkeypatch.setattr(ports, "MAX_TRIES", 1)
        with pytest.raises(AddressRefused, match=r"127\.0\.0\.1:0: Address already in use"):
            resolve(["127.0.0.1:0"])
        launcher.kill()
    assert resolve(["127.0.0.1:0"]) == [address]


def test_the_services_point_at_each_other(tmp_path: Path) -> None:
    tables: dict[str, dict[str, object]] = {name: {} for name in SERVICES}
    tables["inference"] = {"max_num_seqs": 7, "server": {"drain_seconds": 1.0}}
    wired = wire("models/x", tmp_path / "data", tables)
    address = {name: wired[name]["server"]["address"] for name in SERVICES}
    assert wired["inference"]["weights_address"] == address["trainer"]
    assert wired["inference"]["max_num_seqs"] == 7
    assert wired["inference"]["server"]["drain_seconds"] == 1.0
    assert wired["envhost"]["inference_addresses"] == [address["inference"]]
    assert wired["orchestrator"]["trainer_address"] == address["trainer"]
    assert wired["orchestrator"]["envhost_addresses"] == [address["envhost"]]
    for spec in write(wired, tmp_path):
        assert Path(spec.command[-1]).stat().st_mode & 0o077 == 0, "it may have keys of judges"
        written = tomllib.loads((tmp_path / "config" / f"{spec.name}.toml").read_text())
        assert written == wired[spec.name]
        assert spec.address == written["server"]["address"]
        assert written["server"]["port_file"] == str(spec.port_file)


def test_a_disk_without_room_for_a_config_is_told_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    file = tmp_path / "config/trainer.toml"
    file.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left") as caught:
        write(wire("models/x", tmp_path / "data", {"trainer": {}}), tmp_path)
    assert caught.value.filename == str(file)


def test_services_on_loopback_ask_for_the_token_of_the_launch_or_for_their_own(tmp_path: Path) -> None:
    """deployment.py 3."""
    tables: dict[str, dict[str, object]] = {name: {} for name in SERVICES}
    tables["trainer"] = {"server": {"token_file": "mine"}}
    tables["envhost"] = {"server": {"tls": {"cert_file": "c", "key_file": "k", "client_ca_file": "a"}}}
    token = tmp_path / "data" / "token"
    specs = {spec.name: spec for spec in write(wire("m", tmp_path / "data", tables), tmp_path)}
    asked = {
        name: tomllib.loads(Path(spec.command[-1]).read_text())["server"] for name, spec in specs.items()
    }
    assert {name: server.get("token_file") for name, server in asked.items()} == {
        "trainer": "mine", "inference": str(token), "envhost": None, "orchestrator": str(token)
    }  # fmt: skip
    announced = {name for name, spec in specs.items() if spec.token_file == token}
    assert announced == {"inference", "orchestrator"}
    first = token.read_text()
    write(wire("m", tmp_path / "data", {"trainer": {}}), tmp_path)
    assert token.read_text() != first and token.stat().st_mode & 0o777 == 0o600
    everywhere = {"address": "0.0.0.0:0", "insecure_ok_off_loopback": True}
    wired = wire("m", tmp_path / "data", {"inference": {"server": everywhere}})
    assert "token_file" not in wired["inference"]["server"], "others are let in on purpose"


@pytest.mark.parametrize(
    ("server", "key"),
    [
        ({"token_file": "mine"}, "token_file = 'mine'"),
        ({"tls": {"cert_file": "c", "key_file": "k"}}, "tls = {'cert_file'"),
        ({"address": "0.0.0.0:0", "insecure_ok_off_loopback": True}, "address = '0.0.0.0:0'"),
    ],
)
def test_an_orchestrator_that_its_launcher_could_not_call_is_refused(
    tmp_path: Path, server: dict[str, object], key: str
) -> None:
    """wiring.py 3."""
    tables: dict[str, dict[str, object]] = {name: {} for name in SERVICES}
    tables["orchestrator"] = {"server": {"address": "127.0.0.2:0"}}
    assert wire("m", tmp_path / "data", tables)["orchestrator"]["server"]["token_file"]
    tables["orchestrator"] = {"server": server}
    with pytest.raises(ConfigError, match=rf"^orchestrator\.server\.{key}.* is refused: .*by a tunnel"):
        wire("m", tmp_path / "data", tables)
    for service in ("envhost", "trainer"):  # as an evaluation calls the one, and a fine-tuning the other
        with pytest.raises(ConfigError, match=rf"^{service}\.server\.{key}.* is refused: .*by a tunnel"):
            wire("m", tmp_path / "data", {service: {"server": server}})


def test_replicas_of_inference_are_processes_of_one_config(tmp_path: Path) -> None:
    tables: dict[str, dict[str, object]] = {name: {} for name in SERVICES}
    tables["inference"] = {"replicas": 3, "max_num_seqs": 7}
    wired = wire("models/x", tmp_path / "data", tables)
    names = ["inference-1", "inference-2", "inference-3"]
    assert list(wired) == ["trainer", *names, "envhost", "orchestrator"]
    addresses = [wired[name]["server"]["address"] for name in names]
    assert len(set(addresses)) == 3
    assert wired["envhost"]["inference_addresses"] == addresses
    assert wired["orchestrator"]["inference_addresses"] == addresses
    for name in names:
        assert wired[name]["max_num_seqs"] == 7 and "replicas" not in wired[name]
        assert wired[name]["weights_address"] == wired["trainer"]["server"]["address"]
    specs = [spec for spec in write(wired, tmp_path) if spec.name in names]
    assert all(spec.command[1:3] == ["-m", "quartet_inference"] for spec in specs)
    assert len({(spec.log_file, spec.port_file, spec.command[-1]) for spec in specs}) == 3


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"replicas": 0}, "inference.replicas = 0 is refused"),
        ({"replicas": True}, "inference.replicas = True is refused"),
        ({"replicas": "2"}, "inference.replicas = '2' is refused"),
        ({"replicas": 2, "server": {"metrics_address": "127.0.0.1:9090"}}, "one port for 2 replicas"),
        (
            {"replicas": 2, "openai": {"address": "127.0.0.1:8000"}},
            "inference.openai.address = '127.0.0.1:8000' is one port for 2 replicas; write port 0",
        ),
        ({"replicas": 2, "server": {"address": "127.0.0.1:47813"}}, "cannot listen on 127.0.0.1:47813"),
    ],
)
def test_replicas_that_cannot_be_are_refused(tmp_path: Path, table: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        wire("m", tmp_path, {"inference": table})


def test_inference_runs_in_an_interpreter_of_its_own(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    tables: dict[str, dict[str, object]] = {name: {} for name in SERVICES}
    tables["inference"] = {"python": str(other), "engine": "vllm"}
    tables["envhost"] = {"python": sys.executable}
    specs = {spec.name: spec for spec in write(wire("models/x", tmp_path / "data", tables), tmp_path)}
    assert specs["inference"].command[0] == str(other)
    assert {specs[name].command[0] for name in SERVICES if name != "inference"} == {sys.executable}
    assert "python" not in Path(specs["inference"].command[-1]).read_text()
    assert f'python = "{sys.executable}"' in Path(specs["envhost"].command[-1]).read_text()


@pytest.mark.parametrize("python", ["/nowhere/python", 3])
def test_an_interpreter_that_is_not_there_is_refused(tmp_path: Path, python: object) -> None:
    with pytest.raises(ConfigError, match=r"inference\.python = .* there is no such interpreter"):
        write(wire("m", tmp_path, {"inference": {"python": python}}), tmp_path)


def test_a_port_in_use_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"^trainer.server.address: cannot listen on {address}"):
            wire("m", tmp_path, {"trainer": {"server": {"address": address}}})


def test_a_table_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^inference\.server = 3 is refused: should be a table"):
        wire("m", tmp_path, {"trainer": {}, "inference": {"server": 3}})


async def test_every_service_says_all_that_it_refuses(tmp_path: Path) -> None:
    def spec(name: str, code: str) -> ChildSpec:
        return ChildSpec(name, [sys.executable, "-c", code], "", tmp_path / "log", tmp_path / "port")

    many = (
        "import sys; assert sys.argv[1] == '--dry-run'; sys.exit('error: one\\n  also: two\\n  and 3 more')"
    )
    with pytest.raises(ConfigError) as caught:
        await check(
            [
                spec("trainer", many),
                spec("inference-1", "import sys; sys.exit('error: x')"),
                spec("inference-2", "import sys; sys.exit('error: x')"),
            ],
            of_machine=False,
        )
    told = ["[trainer] one", "[trainer] two\n  and 3 more", "[inference] x"]
    assert [str(one) for one in caught.value.each] == told


async def test_a_refusal_names_the_service_and_keeps_its_sentence(tmp_path: Path) -> None:
    def spec(name: str, code: str) -> ChildSpec:
        return ChildSpec(name, [sys.executable, "-c", code], "", tmp_path / "log", tmp_path / "port")

    fine = spec("trainer", "import sys; assert sys.argv[1] == '--preflight'")
    bad = spec("inference", "import sys; sys.exit('error: unknown key \"dtpye\"')")
    await check([fine])
    with pytest.raises(ConfigError, match=r'^\[inference\] unknown key "dtpye"$'):
        await check([fine, bad])
    missing = ChildSpec("x", [sys.executable, "-m", "quartet_x"], "", tmp_path / "log", tmp_path / "port")
    with pytest.raises(ConfigError, match="quartet_x is not installed"):
        await check([missing])


@pytest.mark.parametrize("variables", [{"WORLD_SIZE": "4", "RANK": "0"}, {"RANK": "1"}])
async def test_a_machine_of_several_that_were_each_told_to_start_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    """As whoever trained on several nodes started each; here every one would train for itself."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    specs = write(wire("m", tmp_path / "data", {name: {} for name in SERVICES}), tmp_path)
    with pytest.raises(ConfigError, match=r"this is rank \S of \S \(RANK.*trainer\.nodes, with --hosts"):
        await check(specs)


def test_a_key_with_a_dash_is_the_same_key(tmp_path: Path) -> None:
    tables: dict[str, dict[str, object]] = {name: {} for name in SERVICES}
    tables["trainer"] = {"state-dir": "mine", "server": {"port-file": "port"}}
    tables["orchestrator"] = {"data-dir": "also-mine"}
    wired = wire("m", tmp_path, tables)
    assert wired["trainer"]["state_dir"] == "mine" and wired["orchestrator"]["data_dir"] == "also-mine"
    every = [key for table in wired.values() for key in (*table, *table["server"])]
    assert not [key for key in every if "-" in key]


async def test_a_preflight_that_dies_in_this_process_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dying_service.py").write_text("raise ValueError('label too long')")
    monkeypatch.syspath_prepend(tmp_path)
    command = [sys.executable, "-m", "dying_service", "@", "x.toml"]
    dying = ChildSpec("trainer", command, "", tmp_path / "log", tmp_path / "port")
    with pytest.raises(ConfigError, match=r"^\[trainer\] ValueError: label too long$"):
        await check([dying])


async def test_a_preflight_apart_leaves_this_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quartet_looking.py").write_text("import os; raise SystemExit(f'error: by {os.getpid()}')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spec = ChildSpec("x", [sys.executable, "-m", "quartet_looking"], "", tmp_path / "log", tmp_path / "port")
    with pytest.raises(ConfigError) as refused:
        await check([spec], apart=True)
    assert str(os.getpid()) not in str(refused.value) and "by " in str(refused.value)
    with pytest.raises(ConfigError, match=str(os.getpid())):
        await check([spec])


def test_services_with_large_imports_are_forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "driver"
    monkeypatch.setattr(accelerator, "DRIVERS", (driver,))
    monkeypatch.setattr(deployment, "possible", lambda: True)

    def forked(*, ranks: int = 1, **inference: object) -> list[str]:
        tables: dict[str, dict[str, object]] = {name: {} for name in SERVICES}
        tables |= {"inference": inference, "trainer": {"ranks": ranks}}
        specs = write(wire("m", tmp_path / "data", tables), tmp_path)
        assert all(spec.preload in ("", f"quartet_{spec.name}.preload") for spec in specs)
        return [spec.name for spec in specs if spec.preload]

    assert forked() == ["trainer", "inference"]
    assert forked(engine="vllm") == ["trainer"]
    assert forked(python="/bin/sh") == ["trainer"]
    assert forked(ranks=2) == ["inference"]
    # What a driver holds does not outlive a fork.
    driver.touch()
    assert forked() == []
    driver.unlink()
    monkeypatch.setattr(deployment, "possible", lambda: False)
    assert forked() == []
