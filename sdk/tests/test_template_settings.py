"""Variables of a chat template on their way: as text, in a run's tables, to whoever answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from quartet.cli.eval.config import EvalFileConfig
from quartet.cli.eval.openai_policy import parameters
from quartet.cli.eval.rollouts import rollouts_request
from quartet.cli.gepa.policies import ReplicaPolicy
from quartet.cli.run_file import load_run
from quartet.config import ConfigError
from quartet.config.load import validate
from quartet.errors import QuartetError
from quartet.kit.channel import ClientSecurity
from quartet.kit.unknown import unknown_field
from quartet.replicas import Replicas
from quartet.run.config import parse_run
from quartet.run.sampling import MAX_TABLE_BYTES, measured_as
from quartet.template_settings import MAX_SETTINGS_BYTES, overlaid, read, written
from quartet.v1 import envhost_service_pb2 as pb
from quartet.v1 import inference_service_pb2 as ipb
from quartet.v1.rollout_pb2 import Task

RUN = 'model = "m"\n[[env]]\nid = "a"\n'
FULL = {"a": "x" * (MAX_SETTINGS_BYTES - len('{"a": ""}'))}


def test_equal_ones_travel_alike_and_arrive_as_they_were() -> None:
    """Promise 1"""
    given = {"b": [1, {"c": None}], "a": False, "é": 0.5}
    assert (
        written(given)
        == written(dict(reversed(given.items())))
        == '{"a": false, "b": [1, {"c": null}], "é": 0.5}'
    )
    assert read(written(given)) == given and written({}) == "" and read("") == {}
    assert read(written(FULL)) == FULL


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({**FULL, "b": 1}, "at most 8192 travel"),
        ({"a": float("nan")}, "cannot be written as JSON"),
        ({"a": object()}, "cannot be written as JSON"),
        ({"a": "\ud83d"}, "cannot be written as JSON"),
        ({"messages": []}, "messages is no variable that can be chosen"),
    ],
)
def test_what_cannot_travel_is_refused(given: dict[str, Any], why: str) -> None:
    """Promises 1 and 2"""
    with pytest.raises(ValueError, match=why):
        written(given)
    with pytest.raises(ValueError, match=why):
        overlaid('{"c": 1}', given)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (json.dumps({"a": "x" * MAX_SETTINGS_BYTES}), "bytes as JSON; at most"),
        ('{"a": 1' + " " * MAX_SETTINGS_BYTES + "}", f"it has {MAX_SETTINGS_BYTES + 8} bytes as JSON"),
        ('{"a": "' + "\u00e9" * (MAX_SETTINGS_BYTES // 2) + '"}', "bytes as JSON; at most"),
        ("{", r"send a JSON object, such as .* \(Expecting property name"),
        ("[" * 5000, "send a JSON object"),
        ("[1]", "send a JSON object"),
        ("null", "send a JSON object"),
        ('{"a": "\\ud800"}', "it cannot be written as JSON"),
        ('{"a": NaN}', "it cannot be written as JSON"),
        ('{"tools": [], "messages": []}', "^messages is no variable that can be chosen"),
    ],
    ids=range(10),
)
def test_what_arrives_and_could_not_have_been_sent_is_refused(text: str, why: str) -> None:
    """Promises 1 and 2: whoever else sends them is held to the same."""
    with pytest.raises(ValueError, match=why):
        read(text)
    with pytest.raises(ValueError, match=why):
        overlaid(text, {"b": 1})


def test_those_laid_over_win_key_by_key() -> None:
    """Promise 3"""
    assert overlaid('{"a": 1, "b": 2}', {"b": 3}) == '{"a": 1, "b": 3}'
    assert overlaid('{"b":2}', None) == '{"b":2}', "where there is nothing to do, nothing is done"
    with pytest.raises(ValueError, match="send a JSON object"):
        overlaid("", ["b"])


def test_the_nearest_table_of_a_run_wins_key_by_key() -> None:
    run = parse_run(
        RUN + "[env.sampling.template_settings]\nb = 2\n[sampling.template_settings]\na = 1\nb = 1\n"
        "[eval.sampling.template_settings]\nc = 3\n"
    )
    assert run.sampling_of(run.env[0]).template_settings == {"a": 1, "b": 2}
    assert [one.sampling.template_settings for one in run.trials] == [{"a": 1, "b": 2, "c": 3}]
    assert parse_run(RUN).sampling.template_settings is None


def test_tables_that_are_laid_over_each_other_travel_together() -> None:
    tables = ("sampling", "env.sampling", "eval.sampling")
    most = "x" * (MAX_TABLE_BYTES - len(written({"a0": ""})))
    said = {table: f'[{table}.template_settings]\na{at} = "{most}"\n' for at, table in enumerate(tables)}
    run = parse_run(RUN + said["env.sampling"] + said["sampling"] + said["eval.sampling"])
    (trial,) = run.trials
    assert measured_as(run.sampling_of(run.env[0])).template_settings == {"a0": most, "a1": most}
    assert len(written(trial.sampling.template_settings or {})) > 3 * (MAX_TABLE_BYTES - 5)
    with pytest.raises(ConfigError, match="a table has 2730 at most: shorten it"):
        parse_run(RUN + said["sampling"].replace(most, most + "x"))


@pytest.mark.parametrize("table", ["sampling", "env.sampling", "eval.sampling", "eval.env.sampling"])
def test_others_name_of_them_is_told_in_every_table(table: str) -> None:
    start = RUN + ('[[eval.env]]\nid = "a"\n' if table.startswith("eval.env") else "")
    with pytest.raises(ConfigError, match=r"it is called '[a-z0-9.]*sampling\.template_settings' here"):
        parse_run(f"{start}[{table}.chat_template_kwargs]\nenable_thinking = false\n")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("tools = []", "tools is no variable that can be chosen: rendering sets it itself; remove it"),
        ("a = nan", "sampling.template_settings.a = nan is refused: should be a finite number"),
        ("a = 2026-01-01", "should be text in quotes"),
        (f'a = "{"x" * 9000}"', "at most 8192 travel"),
    ],
)
def test_what_a_run_cannot_choose_is_refused(said: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(f"{RUN}[sampling.template_settings]\n{said}\n")
    assert why in str(caught.value)


def test_an_option_sets_one_of_them(tmp_path: Path) -> None:
    (file := tmp_path / "run.toml").write_text(RUN + "[sampling.template_settings]\na = 1\n")
    found = load_run(["@", str(file), "--sampling.template-settings.enable_thinking", "false"])
    assert found.config.sampling.template_settings == {"a": 1, "enable_thinking": False}
    assert parse_run(found.toml) == found.config


async def test_evaluations_ask_for_them_wherever_the_answers_come_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = {"template_settings": {"enable_thinking": False}}
    own = {"template_settings": {"style": "brief"}}
    config = validate(EvalFileConfig, {"sampling": chosen, "eval": [{"id": "e", "sampling": own}]})
    (trial,) = config.trials
    request = rollouts_request(trial, Task(), [0])
    assert json.loads(request.template_settings) == {"enable_thinking": False, "style": "brief"}

    question = pb.ModelQuestion(template_settings=request.template_settings)
    assert parameters(question)["extra_body"] == {
        "chat_template_kwargs": {"enable_thinking": False, "style": "brief"}
    }
    asked: list[ipb.GenerateRequest] = []

    async def refuse(self: Replicas, request: ipb.GenerateRequest, timeout_s: float) -> Any:
        asked.append(request)
        raise QuartetError("NOT_READY", "enough was seen")

    monkeypatch.setattr(Replicas, "complete", refuse)
    with pytest.raises(QuartetError, match="enough"):
        await ReplicaPolicy(["127.0.0.1:1"], ClientSecurity())(question)
    assert asked[0].template_settings == request.template_settings


@pytest.mark.parametrize("message", [ipb.GenerateRequest, pb.RunRolloutsRequest])
def test_a_service_of_a_release_before_them_refuses_them(message: Any) -> None:
    """unknown.py 1: it would render another prompt than was asked for."""
    pool = descriptor_pool.DescriptorPool()
    _add_without(message.DESCRIPTOR.file, pool)
    older = message_factory.GetMessageClass(pool.FindMessageTypeByName(message.DESCRIPTOR.full_name))
    encoded = message(template_settings=written({"enable_thinking": False})).SerializeToString()
    assert unknown_field(older.FromString(encoded), encoded) == f"{message.DESCRIPTOR.name}, field 14"


def _add_without(file: Any, pool: descriptor_pool.DescriptorPool) -> None:
    """The file, and what it imports, as they were before there were template settings."""
    for one in file.dependencies:
        _add_without(one, pool)
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    for message in proto.message_type:
        known = [field for field in message.field if field.name != "template_settings"]
        del message.field[:]
        message.field.extend(known)
    pool.Add(proto)
