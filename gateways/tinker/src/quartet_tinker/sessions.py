"""Sessions: one for each ServiceClient of a script, with its models and samplers."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any, Final

from quartet.kit.awake import awake_s

from quartet_tinker.refusal import Refused, unknown
from quartet_tinker.sampling import Sampler
from quartet_tinker.training import FROM_STATE, Run, Training

#: Of one session; a script makes one for each publication.
MAX_SAMPLERS: Final = 100_000
MAX_MODELS: Final = 64


@dataclass
class Session:
    """One ServiceClient."""

    session_id: str
    # By quartet.kit.awake.
    heard: float
    # What its script says of it.
    user_metadata: dict[str, str] = field(default_factory=dict)
    display_name: str | None = None
    models: dict[str, Training] = field(default_factory=dict)
    # With the path that it was made from.
    samplers: dict[str, tuple[Sampler, str | None]] = field(default_factory=dict)
    clones: int = 0

    def check_room(self) -> None:
        """Whether there is room for a model. Raises Refused."""
        if len(self.models) >= MAX_MODELS:
            raise Refused(f"session {self.session_id} has {MAX_MODELS} models; begin another")

    def add(self, name: str, sampler: Sampler, path: str | None) -> str:
        """A sampler; its id. Raises Refused."""
        if len(self.samplers) >= MAX_SAMPLERS:
            raise Refused(f"session {self.session_id} has {MAX_SAMPLERS} samplers; begin another")
        sampling_session_id = f"{self.session_id}:{name}"
        self.samplers[sampling_session_id] = (sampler, path)
        return sampling_session_id


class Sessions:
    """All of them. Ids of models and samplers begin with that of their session."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_id: dict[str, Session] = {}

    def make(self, user_metadata: dict[str, str] | None = None, display_name: str | None = None) -> Session:
        """A new one. Raises Refused."""
        if len(self._by_id) >= self._most:
            raise Refused(f"{self._most} sessions are open (max_sessions); finish one", status=429)
        session_id = f"tk-{secrets.token_hex(8)}"
        session = Session(session_id, awake_s(), user_metadata or {}, display_name)
        self._by_id[session.session_id] = session
        return session

    def find(self, any_id: str) -> Session:
        """The session of an id, which is heard of by it. Raises Refused."""
        session = self._known(any_id.partition(":")[0])
        session.heard = awake_s()
        return session

    def ids(self) -> list[str]:
        """Of those that are open, the newest first."""
        return list(reversed(self._by_id))

    def about(self, session_id: str) -> dict[str, Any]:
        """What a session is and has; who asks is not its script. Raises Refused."""
        session = self._known(session_id)
        return {
            "training_run_ids": list(session.models),
            "sampler_ids": list(session.samplers),
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }

    def runs(self) -> list[Run]:
        """The runs that models train, those of the newest sessions first."""
        sessions = reversed(self._by_id.values())
        return [one.run for session in sessions for one in reversed(session.models.values())]

    def model(self, model_id: str) -> tuple[Session, Training]:
        """A model and its session. Raises Refused."""
        session = self.find(model_id)
        training = session.models.get(model_id)
        if training is None:
            raise unknown("model", model_id, FROM_STATE, "it ends when another client goes on with its run")
        return session, training

    def run_of(self, model_id: str) -> Run | None:
        """The run that a model trains, if it is one of a session."""
        session = self._by_id.get(model_id.partition(":")[0])
        training = session.models.get(model_id) if session is not None else None
        return training.run if training is not None else None

    def sampler(self, sampling_session_id: str) -> tuple[Session, Sampler, str | None]:
        """A sampler, its session and the path that it was made from. Raises Refused."""
        session = self.find(sampling_session_id)
        if sampling_session_id not in session.samplers:
            raise unknown("sampler", sampling_session_id, "make another sampling client")
        return session, *session.samplers[sampling_session_id]

    def models_of(self, run_id: str) -> list[tuple[Session, str]]:
        """The models that train a run; one at most, but while it is taken over."""
        return [
            (session, model_id)
            for session in self._by_id.values()
            for model_id, training in session.models.items()
            if training.run.run_id == run_id
        ]

    def with_models(self, but: Session | None, run_id: str) -> list[Session]:
        """The other sessions with models, but for those that train this run."""
        return [
            one
            for one in self._by_id.values()
            if one is not but
            and one.models
            and all(training.run.run_id != run_id for training in one.models.values())
        ]

    def models_beside(self, but: Session | None, run_id: str) -> int:
        """How many models these have."""
        return sum(len(one.models) for one in self.with_models(but, run_id))

    def silent_since(self, when: float) -> list[str]:
        """Those that were not heard of since then; since for ever, all."""
        return [one.session_id for one in self._by_id.values() if one.heard < when]

    def take_out(self, session_id: str) -> Session | None:
        """Forget a session."""
        return self._by_id.pop(session_id, None)

    def _known(self, session_id: str) -> Session:
        session = self._by_id.get(session_id)
        if session is None:
            silent = "it ends when its script is silent for long"
            raise unknown("session", session_id, "make another ServiceClient", silent)
        return session
