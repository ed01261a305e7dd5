"""What a RestClient, and the SDK's command line with it, asks about runs, checkpoints and sessions."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from quartet.v1 import trainer_service_pb2 as pb
from quartet_tinker.rest import REMEDIES
from quartet_tinker.sessions import Sessions
from quartet_tinker.specs import Notes
from quartet_tinker.training import Run

from .tinker_calls import datum, lora, post
from .tinker_stack import Stack


def ask(address: str, method: str, path: str) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(f"http://{address}/api/v1/{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_runs_checkpoints_and_sessions_are_listed(tinker: Any, client: Any, services: Stack) -> None:
    training = [lora(client, user_metadata={"of": name}) for name in "ab"]
    paths = [one.save_state(name).result(60).path for one in training for name in ("x", "y")]
    ids, session = [one.model_id for one in training], training[0].model_id.partition(":")[0]
    rest = tinker.RestClient(base_url=f"http://{services.gateway}")

    newest = rest.list_training_runs(limit=2, access_scope="accessible").result(60)
    assert [one.training_run_id for one in newest.training_runs] == ids[::-1]
    assert [one.user_metadata for one in newest.training_runs] == [{"of": "b"}, {"of": "a"}]
    second = rest.list_training_runs(limit=1, offset=1).result(60)
    assert [one.training_run_id for one in second.training_runs] == ids[:1]
    assert second.cursor.total_count == newest.cursor.total_count >= 2

    listed = rest.list_user_checkpoints(limit=4).result(60)
    assert [one.tinker_path for one in listed.checkpoints] == paths[::-1]
    part = rest.list_user_checkpoints(limit=2, offset=1).result(60)
    assert [one.tinker_path for one in part.checkpoints] == paths[2:0:-1]

    assert session in rest.list_sessions(limit=1000).result(60).sessions
    assert rest.get_session(session).result(60).training_run_ids == ids
    with pytest.raises(tinker.NotFoundError, match="session 'tk-0' is not known"):
        rest.get_session("tk-0").result(60)
    with pytest.raises(tinker.BadRequestError, match="limit is refused"):
        rest.list_sessions(limit=1001).result(60)
    with pytest.raises(tinker.BadRequestError, match="project_id is not served here"):
        rest.list_training_runs(project_id="p").result(60)


def test_a_checkpoint_is_deleted_by_its_path(tinker: Any, client: Any, services: Stack) -> None:
    """As the cookbook does with its rolling ones, while a client trains the run and after it."""
    training = lora(client)
    rolling, kept = (training.save_state(name).result(60).path for name in ("rolling", "kept"))
    rest = tinker.RestClient(base_url=f"http://{services.gateway}")
    adam = tinker.AdamParams(learning_rate=0.01, beta2=0.9)
    for _ in range(2):  # what the first step says makes the run again: with the states that are there
        rest.delete_checkpoint_from_tinker_path(rolling).result(60)
        training.forward_backward([datum(tinker)], "cross_entropy").result(60)
        training.optim_step(adam).result(60)
        listed = rest.list_checkpoints(training.model_id).result(60).checkpoints
        assert [one.tinker_path for one in listed] == [kept]
        with pytest.raises(tinker.NotFoundError, match="has no state 'rolling'"):
            rest.delete_checkpoint_from_tinker_path(rolling).result(60)
        assert training.save_state("rolling").result(60).path == rolling, "its name is free"
    sampled = training.save_weights_for_sampler("s").result(60).path
    with pytest.raises(tinker.NotFoundError, match="are a version of an open run"):
        rest.delete_checkpoint_from_tinker_path(sampled).result(60)
    post(services.gateway, "unload_model", {"model_id": training.model_id, "type": "unload_model"})
    rest.delete_checkpoint_from_tinker_path(rolling).result(60)
    with pytest.raises(tinker.RequestFailedError, match="has no state 'rolling', it has kept"):
        client.create_training_client_from_state_with_optimizer(rolling).result(60)


def test_what_such_clients_ask_in_vain_is_refused_with_what_to_do(services: Stack) -> None:
    for (method, path), said in REMEDIES.items():
        names = {"model_id": "m", "kind": "weights", "name": "n", "session_id": "s"}
        assert ask(services.gateway, method, path.format(**names)) == (404, {"detail": said})


async def test_who_looks_at_a_session_is_not_its_script() -> None:
    sessions = Sessions(2)
    session = sessions.make({"a": "b"}, "mine")
    session.heard = before = session.heard - 1000
    about = sessions.about(session.session_id)
    assert (about["user_metadata"], about["display_name"]) == ({"a": "b"}, "mine")
    assert sessions.ids() == [session.session_id] and session.heard == before


@pytest.mark.parametrize("on_disk", [True, False])
async def test_runs_are_listed_a_page_at_a_time(tmp_path: Path, on_disk: bool) -> None:
    """Also those of a gateway before this one, and past a note that cannot be read."""
    import os

    notes = Notes(tmp_path if on_disk else None)
    for number, name in enumerate("cba"):
        notes.keep(Run(name, name, "model", pb.RunSpec()))
        if on_disk:
            os.utime(tmp_path / f"{name}.json", (number, number))
    assert [run.run_id for run in (await notes.page(0, 2))[0]] == ["a", "b"]
    assert [run.run_id for run in (await notes.page(2, 2))[0]] == ["c"]
    assert (await notes.page(3, 2)) == ([], 3)
    if on_disk:
        (tmp_path / "b.json").write_text("{")
        os.utime(tmp_path / "b.json", (1, 1))
        later = Notes(tmp_path)
        assert [run.run_id for run in (await later.page(0, 3))[0]] == ["a", "c"]
