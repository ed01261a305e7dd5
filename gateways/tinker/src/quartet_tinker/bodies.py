"""The JSON that the SDK sends.

1. A field that is not served is refused by its name, never ignored.
2. What the SDK sends in any case, or the cookbook by default, is taken although nothing here heeds it:
   `train_unembed` = True, `ttl_seconds` and, in protobuf, the provenance of tokens. Each session is told so
   when it begins (gateway.UNHEEDED).
3. Where a request has its place in a model's order, what a script may send and is not served is refused when
   its turn comes (the `check` methods). What cannot be read is refused at once, and has its place all the
   same (`Place`): the SDK sends the next number after it, never this one again.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import pydantic

from quartet_tinker import paths
from quartet_tinker.refusal import Refused

B = TypeVar("B", bound="Body")

#: Of what is noted of a run or logged of a session.
MAX_NOTES = 64
MAX_NOTE_CHARS = 1024

Note = Annotated[str, pydantic.StringConstraints(max_length=MAX_NOTE_CHARS)]
Metadata = Annotated[dict[Note, Note], pydantic.Field(max_length=MAX_NOTES)]


class Body(pydantic.BaseModel):
    """A request; fields that this gateway does not know are refused."""

    model_config = pydantic.ConfigDict(extra="forbid", protected_namespaces=())


class ClientConfig(Body):
    """An SDK asks how it is to behave; every version is answered alike."""

    sdk_version: Note


class CreateSession(Body):
    """A ServiceClient begins; all but `project_id`, which is refused, goes to the log."""

    type: Literal["create_session"] = "create_session"
    tags: Annotated[list[Note], pydantic.Field(max_length=MAX_NOTES)] = []
    user_metadata: Metadata | None = None
    sdk_version: Note = ""
    project_id: str | None = None
    display_name: Note | None = None

    def check(self) -> None:
        """Refuse what a gateway does not have. Raises Refused."""
        if self.project_id is not None:
            raise Refused(
                f"project_id = {self.project_id!r} is refused: there are no projects here; leave it out, and "
                "TINKER_PROJECT_ID unset"
            )


class Heartbeat(Body):
    """Which session is still there."""

    type: Literal["session_heartbeat"] = "session_heartbeat"
    session_id: str


class Reason(Body):
    """How a script ended."""

    type: Literal["success", "errored", "interrupted"]


class Finish(Body):
    """A ServiceClient ends; why, goes to the log."""

    reason: Reason
    detail: str | None = None

    def why(self) -> str:
        """In short."""
        return f"{self.reason.type}: {self.detail[:MAX_NOTE_CHARS]}" if self.detail else self.reason.type


class Lora(Body):
    """The adapters of a new model. Without `seed` one is drawn.

    False is what `train_unembed` is here; the SDK's default, True, is taken too, as said above.
    """

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(pydantic.BaseModel):
    """Adam, which has no field but its type; others say so by theirs, with fields of their own."""

    model_config = pydantic.ConfigDict(extra="allow")

    type: str = "adamw"

    def check(self) -> None:
        """Refuse all but Adam. Raises Refused."""
        if self.type != "adamw":
            raise Refused(f"optimizer = {self.type!r} is not served here; leave it out for AdamW")
        for field in self.model_extra or ():
            raise Refused(f"optimizer_config.{field} is not served here; AdamW has no such field")


class CreateModel(Body):
    """A model to train; refused without `lora_config`. `user_metadata` is noted with its run."""

    type: Literal["create_model"] = "create_model"
    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: Metadata | None = None
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()


class GetInfo(Body):
    """Which model is asked about."""

    type: Literal["get_info"] = "get_info"
    model_id: str


class Unload(Body):
    """Which model is done."""

    type: Literal["unload_model"] = "unload_model"
    model_id: str


class OptimStep(Body):
    """A step of Adam; `optimizer_params` are those of other optimizers."""

    type: Literal["optim_step"] = "optim_step"
    model_id: str
    seq_id: int
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None

    def params(self) -> dict[str, Any]:
        """Of Adam. Raises Refused."""
        if self.optimizer_params is not None:
            raise Refused("optimizer_params, of other optimizers than Adam, are not served; give AdamParams")
        if self.adam_params is None:
            raise Refused("adam_params is missing; give AdamParams")
        return self.adam_params


class SaveWeights(Body):
    """A state to save; without `path` it is named after `seq_id`."""

    type: Literal["save_weights"] = "save_weights"
    model_id: str
    seq_id: int
    path: str | None = None
    # Unheeded: states go by their number (the trainer's keep_last), not by their age.
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None

    def check(self) -> None:
        """Refuse what is not kept. Raises Refused."""
        _refuse_metadata(self.user_metadata)


class SaveForSampler(Body):
    """Weights to publish: with `path` for samplers to be made of it, without it for one at once."""

    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"
    model_id: str
    seq_id: int
    path: str | None = None
    # A repetition has another one: samplers are named by `seq_id`, and this only says that one is wanted.
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    # Unheeded: they are there until the next ones are.
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None

    def check(self) -> None:
        """Refuse what is not kept, and what contradicts itself. Raises Refused."""
        _refuse_metadata(self.user_metadata)
        if self.path is not None:
            paths.check_name(self.path)
        if self.path is not None and self.sampling_session_seq_id is not None:
            raise Refused("path and sampling_session_seq_id are for one each; give one of them")
        if self.path is not None and self.kind != "snapshot":
            raise Refused(f"kind = {self.kind!r} is not for weights with a path; leave one of them out")


class LoadWeights(Body):
    """A state to return to; without `model_id`, one to make a new model of the session from.

    `user_metadata` replaces that of the state's run, which the new model goes on with.
    """

    type: Literal["load_weights"] = "load_weights"
    path: str
    optimizer: bool
    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: Metadata | None = None
    optimizer_config: Optimizer | None = None
    weights_access_token: str | None = None

    def address(self) -> tuple[str, int]:
        """Model and number, or session and number of the model to make. Raises Refused."""
        of_model, of_session = ("model_id", "seq_id"), ("session_id", "model_seq_id")
        needed = of_session if self.model_id is None else of_model
        others = ("seq_id",) if self.model_id is None else (*of_session, "base_model", "user_metadata")
        for field in needed:
            if getattr(self, field) is None:
                raise Refused(f"{field} is missing; give {' and '.join(needed)}")
        for field in others:
            if getattr(self, field) is not None:
                raise Refused(f"{field} is not served beside {needed[0]}; leave it out")
        name, number = (getattr(self, field) for field in needed)
        return name, number

    def state(self) -> paths.WeightsPath:
        """Which state. Raises Refused."""
        path = paths.read(self.path)
        if path.version is not None:
            raise Refused(f"path = {self.path!r} is of a sampler; give what save_state returned")
        if not self.optimizer and self.model_id is not None:
            raise Refused(
                "load_state returns to a state with its optimizer here, never to its weights alone; use "
                "load_state_with_optimizer, or a new client: create_training_client_from_state"
            )
        if self.optimizer and self.optimizer_config is not None:
            raise Refused("optimizer_config is refused: a state has its own optimizer; leave it out")
        if self.optimizer_config is not None:
            self.optimizer_config.check()
        if self.weights_access_token is not None:
            raise Refused("weights_access_token is not served here; leave it out")
        return path


class RetrieveFuture(Body):
    """Which promise is waited for; `allow_metadata_only`: the size of a large answer is enough at first."""

    request_id: str
    allow_metadata_only: bool = False


class CancelFuture(Body):
    """Which promise nobody waits for any more."""

    request_id: str


class WeightsInfo(Body):
    """Which saved weights are asked about."""

    tinker_path: str


class Place(pydantic.BaseModel):
    """Where a request is in a model's order, whatever else it says."""

    model_config = pydantic.ConfigDict(protected_namespaces=(), strict=True)

    model_id: str
    seq_id: int


def place(raw: bytes) -> Place | None:
    """Of a body that may be refused; None where it has none."""
    try:
        return Place.model_validate_json(raw)
    except pydantic.ValidationError:
        return None


def parse(kind: type[B], raw: bytes) -> B:
    """A body. Raises Refused, naming the field."""
    try:
        return kind.model_validate_json(raw)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        if first["type"] == "extra_forbidden":
            raise Refused(f"{where} is not served here; leave it out") from None
        raise Refused(f"{where} is refused: {first['msg']}") from None


def _refuse_metadata(user_metadata: dict[str, str] | None) -> None:
    if user_metadata:
        raise Refused(
            "user_metadata of saved weights is not kept here; leave it out, or give it to "
            "create_lora_training_client, which notes it with the run"
        )
