"""The inference replicas as the orchestrator reaches them: it asks what they serve, and never samples
itself."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from quartet.errors import QuartetError
from quartet.inference import concerning
from quartet.kit.call import unary
from quartet.kit.channel import ClientSecurity
from quartet.replicas.addresses import DNS, LOOKUP_SECONDS
from quartet.v1 import inference_service_pb2 as ipb
from quartet.v1.common_pb2 import ChatIdentity
from quartet.v1.inference_service_pb2_grpc import InferenceServiceStub

from quartet_orchestrator.adapter_loads import AdapterLoads
from quartet_orchestrator.outage import AWAY
from quartet_orchestrator.peers import Peer, Peers

ASK_S = 5.0

#: Its number, and the digest of its contents: those of another number may be equal.
Version = tuple[int, bytes]


@dataclass(frozen=True)
class Held:
    """A version that a replica serves, and what is to be said of it to a person."""

    version: int
    said: str
    # Of an earlier run of that name, which was deleted.
    is_anothers: bool = False
    is_adapter: bool = False


@dataclass(frozen=True)
class Standing:
    """Whether a replica serves a run, and what keeps it from its newest version; empty where nothing does."""

    serves: bool
    why: str


class Policies:
    """Connections to the inference replicas, of which there may be none."""

    def __init__(self, addresses: Sequence[str], security: ClientSecurity) -> None:
        """Raises ConfigError."""
        self._configured = frozenset(addresses)
        self._peers = Peers(addresses, security, InferenceServiceStub) if addresses else None
        self._loads = AdapterLoads()

    def __bool__(self) -> bool:
        """Whether any is known by name or address."""
        return self._peers is not None

    async def serving(
        self, run_id: str, version: int, *, adapter: bool = False, digest: bytes | None = None
    ) -> None:
        """Returns where a replica serves the run at the version or a later one (or none is known); else
        NOT_READY. A run whose versions are an adapter's is loaded by every replica that does not serve it.
        Where no replica will serve it as it is, each having failed or refused, that is raised: no waiting
        mends it.

        With the `digest` of the only version that the run has published so far (empty: it is not known):
        whoever serves something else by its name has it from an earlier run, and would answer this one's
        requests with it. That is waited for, too.
        """
        if self._peers is None:
            return
        peers = await self._peers.now()
        only = (version, digest) if digest is not None else None
        seen = await asyncio.gather(*(self._held(peer, run_id, adapter, only) for peer in peers))
        held_by = [held for held in seen if isinstance(held, Held)]
        confused = any(held.is_anothers for held in held_by)
        if not confused and any(held.version >= version for held in held_by):
            return
        found = _told(peers, [held.said if isinstance(held, Held) else held.message for held in seen])
        if all(isinstance(held, QuartetError) and held.reason not in AWAY for held in seen):
            reasons = {held.reason for held in seen if isinstance(held, QuartetError)}
            # A fault of one of them may pass, so that is what is told.
            reason = "INTERNAL" if "INTERNAL" in reasons else min(reasons)
            raise QuartetError(reason, f"no inference replica can serve run {run_id!r} ({found})")
        others = {one.metadata.get("other", "") for one in seen if isinstance(one, QuartetError)} - {""}
        remedy = f"; {_taken(run_id, sorted(others))}" if others and not held_by else ""
        raise QuartetError(
            "NOT_READY",
            f"no inference replica serves run {run_id!r} at version {version} yet ({found}){remedy}",
            # A replica that answers is not away: it says what keeps it.
            remedy="mend that" if any(map(_answered, seen)) else "",
        )

    async def unserve(self, run_id: str) -> None:
        """Has an adapter of that name unloaded wherever a replica answers; nothing where there is none. What
        is left on others is unloaded by `serving`, where it is met."""
        self._loads.forget(run_id)
        peers = []
        with suppress(QuartetError):
            peers = await self.here()
        request = ipb.UnloadAdapterRequest(run_id=run_id)

        async def unload(peer: Peer[InferenceServiceStub]) -> None:
            with suppress(QuartetError), peer.called():
                await unary(peer.stub.UnloadAdapter, request, timeout_s=ASK_S)

        await asyncio.gather(*map(unload, peers))

    async def answering(self, run_id: str = "") -> None:
        """Returns where a replica answers, is in service and found nothing wrong with the run's adapter (or
        none is known); else NOT_READY."""
        if self._peers is None:
            return
        peers = await self._peers.now()
        seen = await asyncio.gather(*(self._model(peer, run_id) for peer in peers))
        refusals = [model.message for model in seen if isinstance(model, QuartetError)]
        if len(refusals) == len(peers):
            raise QuartetError("NOT_READY", f"no inference replica is in service ({_told(peers, refusals)})")

    async def standing(self, run_id: str) -> dict[str, Standing]:
        """What each replica that answers says of the run, by address."""
        peers = []
        with suppress(QuartetError):
            peers = await self.here()
        seen = await asyncio.gather(*(self._told_by(peer) for peer in peers))
        return {
            peer.address: _standing(model, run_id)
            for peer, model in zip(peers, seen, strict=True)
            if model is not None
        }

    async def found_wrong(self, run_id: str, version: int) -> bool:
        """Whether a replica that has the version, or had the run's adapter, answers with neither, because of
        what its canary gave: other log-probabilities than were published, or no numbers."""
        peers = await self.here()
        seen = await asyncio.gather(*(self._told_by(peer) for peer in peers))
        return any(
            any(one.run_id == run_id for one in model.refused_adapters)
            or (model.out_of_service and (model.run_id, model.policy_version) == (run_id, version))
            for model in seen
            if model is not None
        )

    async def chats(self) -> dict[str, ChatIdentity]:
        """What the replicas that answer make prompts with, by address."""
        try:
            peers = await self.here()
        except QuartetError:
            return {}
        seen = await asyncio.gather(*(self._model(peer, "") for peer in peers))
        return {
            peer.address: one.chat
            for peer, one in zip(peers, seen, strict=True)
            if not isinstance(one, QuartetError)
        }

    async def has(self, address: str) -> bool:
        """Whether one of the replicas is configured, or was found, at an address, written so or by its
        numbers. Two names of one place are two: a gateway tells what is behind it apart by them."""
        known = set(self._configured)
        with suppress(QuartetError):
            known |= {peer.address for peer in await self.here()}
        if address in known:
            return True
        of_names = not _is_by_number(address)
        compared = [one for one in known if _is_by_number(one)] if of_names else known
        asked, *held = await asyncio.gather(*map(_places, (address, *compared)))
        return not asked.isdisjoint(set[str]().union(*held))

    async def here(self) -> list[Peer[InferenceServiceStub]]:
        """Every replica that there is. Raises NOT_READY while no name has any address."""
        return await self._peers.now() if self._peers is not None else []

    async def _told_by(self, peer: Peer[InferenceServiceStub]) -> ipb.GetModelResponse | None:
        with suppress(QuartetError), peer.called():
            model: ipb.GetModelResponse = await unary(
                peer.stub.GetModel, ipb.GetModelRequest(), timeout_s=ASK_S
            )
            return model
        return None

    async def _model(
        self, peer: Peer[InferenceServiceStub], run_id: str
    ) -> ipb.GetModelResponse | QuartetError:
        with peer.called():
            model = await _in_service(peer.stub)
        if isinstance(model, QuartetError):
            return model
        refused = [one.why for one in model.refused_adapters if one.run_id == run_id]
        return QuartetError("NOT_READY", refused[0]) if refused else model

    async def _held(
        self, peer: Peer[InferenceServiceStub], run_id: str, adapter: bool, only: Version | None
    ) -> Held | QuartetError:
        with peer.called():
            return await _served(peer, run_id, adapter, only, self._loads)

    async def close(self) -> None:
        """Closes every connection; calls under way are cancelled."""
        if self._peers is not None:
            await self._peers.close()


def _host_port(address: str) -> tuple[str, str]:
    host, _, port = address.removeprefix(DNS).removeprefix("dns:").rpartition(":")
    return host.strip("[]"), port


def _is_by_number(address: str) -> bool:
    """Whether it names a machine and no service behind a gateway."""
    host, _ = _host_port(address)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


async def _places(address: str) -> set[str]:
    """Where an address leads: the address itself, and the numbers that it stands for now."""
    host, port = _host_port(address)
    found: list[Any] = []
    with suppress(OSError, TimeoutError, UnicodeError):  # a name that is not found is no other address
        async with asyncio.timeout(LOOKUP_SECONDS):
            look_up = asyncio.get_running_loop().getaddrinfo
            found = await look_up(host, port, type=socket.SOCK_STREAM)
    return {address, *(f"{place[0]} {place[1]}" for *_, place in found)}


def _taken(run_id: str, others: Sequence[str]) -> str:
    """What to do where replicas go on serving a run that has no turn here."""
    names = ", ".join(map(repr, others))
    return (
        f"unless it has just ended here, {names} is of another orchestrator, or another client of the "
        f"trainer: stop it there; then 'quartet stop {run_id}' and 'quartet resume {run_id}' claim the "
        "replica again"
    )


def _answered(held: Held | QuartetError) -> bool:
    return isinstance(held, Held) or "grpc_code" not in held.metadata


def _told(peers: Sequence[Peer[InferenceServiceStub]], said: Sequence[str]) -> str:
    return "; ".join(f"{peer.address}: {one}" for peer, one in zip(peers, said, strict=True))


async def _in_service(stub: InferenceServiceStub) -> ipb.GetModelResponse | QuartetError:
    """What a replica has, or why it answers nobody."""
    try:
        model: ipb.GetModelResponse = await unary(stub.GetModel, ipb.GetModelRequest(), timeout_s=ASK_S)
    except QuartetError as error:
        return error
    if model.out_of_service:
        return QuartetError("NOT_READY", f"out of service: {model.out_of_service}")
    return model


def _standing(model: ipb.GetModelResponse, run_id: str) -> Standing:
    dead = [one.why for one in model.refused_adapters if one.run_id == run_id]
    why = model.out_of_service or "".join(dead) or concerning(model.update_refusals, run_id)
    serves = model.run_id == run_id or any(one.run_id == run_id for one in model.adapters)
    return Standing(serves and not model.out_of_service, why)


async def _served(
    peer: Peer[InferenceServiceStub], run_id: str, adapter: bool, only: Version | None, loads: AdapterLoads
) -> Held | QuartetError:
    """What a replica serves of the run, or why it serves nothing of it."""
    stub = peer.stub
    held = await _told_of(stub, run_id, adapter, only)
    if isinstance(held, QuartetError):
        return held
    if held is not None and not (held.is_anothers and (adapter or held.is_adapter)):
        return held
    try:
        if only is not None and (held is not None or (peer.address, run_id) not in loads):
            # What an earlier run left may answer, and count as loaded, without being told as served.
            await unary(stub.UnloadAdapter, ipb.UnloadAdapterRequest(run_id=run_id), timeout_s=ASK_S)
        if held is not None and not adapter:
            return held
        loaded = await loads.load(peer, run_id, after_unload=only is not None)
    except QuartetError as error:
        # What is not the run's own fault may pass: its trainer may be on its way back.
        return error if error.reason == "INVALID_REQUEST" else QuartetError("NOT_READY", error.message)
    if only is None:
        return Held(loaded.version, f"version {loaded.version}")
    waits = QuartetError("NOT_READY", f"has loaded version {loaded.version}, and does not tell it yet")
    return await _told_of(stub, run_id, adapter, only) or waits


async def _told_of(
    stub: InferenceServiceStub, run_id: str, adapter: bool, only: Version | None
) -> Held | QuartetError | None:
    """What a replica says that it serves of the run, or why it does not; None where it can be asked to."""
    model = await _in_service(stub)
    if isinstance(model, QuartetError):
        return model
    why = concerning(model.update_refusals, run_id)
    refused = f"; nothing newer comes to it: {why}" if why else ""
    if model.run_id == run_id and model.HasField("policy_version"):
        return _of((model.policy_version, model.weights_digest), only, refused)
    for one in model.adapters:
        if one.run_id == run_id:
            found = _of((one.policy_version, one.weights_digest), only, refused)
            return replace(found, is_adapter=True)
    if adapter:
        return None
    served = f"serves run {model.run_id!r}" if model.run_id else "serves its own model"
    # Where nothing newer comes to it, that keeps it, and nobody who took it.
    return QuartetError("NOT_READY", served + refused, other="" if why else model.run_id)


def _of(held: Version, only: Version | None, refused: str) -> Held:
    said = f"version {held[0]}{refused}"
    if only is not None and (held[0] != only[0] or (held[1] and only[1] and held[1] != only[1])):
        return Held(held[0], f"{said}, of an earlier run of that name", is_anothers=True)
    return Held(held[0], said)
