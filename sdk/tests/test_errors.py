"""The closed list of errors, and its way over the wire (quartet.errors, invariants 1 to 4)."""

from __future__ import annotations

import pickle
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from quartet import errors
from quartet.errors import QuartetError, from_rpc, refused, to_status
from quartet.v1 import common_pb2


def _arrived(error: QuartetError) -> QuartetError:
    trailers = grpc.aio.Metadata((errors.STATUS_KEY, to_status(error).SerializeToString()))
    return from_rpc(grpc.aio.AioRpcError(error.code, grpc.aio.Metadata(), trailers, error.message))


def _bare(code: grpc.StatusCode, details: str = "") -> QuartetError:
    return from_rpc(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details))


def test_the_list_is_the_protos() -> None:
    names = common_pb2.ErrorReason.DESCRIPTOR.values_by_name
    assert {f"ERROR_REASON_{reason}" for reason in errors.CODES} | {"ERROR_REASON_UNSPECIFIED"} == set(names)


def test_codes_are_what_the_proto_comments_say() -> None:
    # The comments are the specification; descriptors do not carry them, so the proto is read as text.
    source = common_pb2.DESCRIPTOR.name
    path = next(
        parent / "protos" / source for parent in Path(__file__).parents if (parent / "protos").is_dir()
    )
    comment: list[str] = []
    said = {}
    for line in map(str.strip, path.read_text().splitlines()):
        if line.startswith("//"):
            comment.append(line.strip(" /"))
            continue
        if line.startswith("ERROR_REASON_"):
            said[line.split()[0].removeprefix("ERROR_REASON_")] = comment[0].split(".")[0] if comment else ""
        comment = []
    said.pop("UNSPECIFIED")
    assert said == {reason: code.name for reason, code in errors.CODES.items()}


@pytest.mark.parametrize("reason", sorted(errors.CODES))
def test_every_reason_arrives_equal(reason: str) -> None:
    sent = QuartetError(reason, "what happened", retry_after_ms=250, have=3, want=[1, 2], raw=b"\x01")
    got = _arrived(sent)
    assert (got.reason, got.message, got.code) == (reason, "what happened", sent.code)
    assert got.metadata == {"have": "3", "want": "1, 2", "raw": "01"}
    assert got.retry_after_ms == 250


def test_status_has_exactly_one_error_info_of_our_domain() -> None:
    status = to_status(QuartetError("RUN_UNKNOWN", "no", run_id="r"))
    infos = [one for one in status.details if one.Is(error_details_pb2.ErrorInfo.DESCRIPTOR)]
    assert len(infos) == 1 == len(status.details)
    info = error_details_pb2.ErrorInfo()
    infos[0].Unpack(info)
    assert (info.domain, info.reason, info.metadata["run_id"]) == ("quartet", "RUN_UNKNOWN", "r")


def test_overloaded_always_says_when_to_come_back() -> None:
    assert _arrived(QuartetError("OVERLOADED", "full")).retry_after_ms == errors.DEFAULT_RETRY_AFTER_MS


@pytest.mark.parametrize(("asked", "heard"), [(10**12, errors.MAX_RETRY_AFTER_MS), (-5, 0)])
def test_a_peer_cannot_make_anybody_wait_for_ever(asked: int, heard: int) -> None:
    """Invariant 7, though a peer says so."""
    assert _arrived(QuartetError("NOT_READY", "later", retry_after_ms=asked)).retry_after_ms == heard


@pytest.mark.parametrize(
    ("code", "details", "reason"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", "NOT_READY"),
        (grpc.StatusCode.CANCELLED, "", "NOT_READY"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", "DEADLINE"),
        (grpc.StatusCode.UNIMPLEMENTED, "", "NOT_IMPLEMENTED"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!", "OVERLOADED"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Sent message larger than max (5 vs. 4)", "INVALID_REQUEST"),
        (grpc.StatusCode.UNKNOWN, "x", "INTERNAL"),
    ],
)
def test_errors_without_error_info_join_the_list(code: grpc.StatusCode, details: str, reason: str) -> None:
    assert _bare(code, details).reason == reason


def test_that_another_service_is_away_is_not_said_of_the_one_that_tells_it() -> None:
    away = _bare(grpc.StatusCode.UNAVAILABLE, "connection refused")
    assert away.metadata == {"grpc_code": "UNAVAILABLE"}
    got = _arrived(away)
    assert (got.reason, got.message, got.metadata) == ("NOT_READY", "connection refused", {})


def test_a_foreign_or_broken_status_is_read_by_its_code() -> None:
    for raw in (b"\xff\xff\xff", b""):
        trailers = grpc.aio.Metadata((errors.STATUS_KEY, raw))
        error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), trailers, "d")
        assert from_rpc(error).reason == "NOT_READY"


def test_a_reason_of_a_newer_peer_is_kept_as_metadata() -> None:
    status = to_status(QuartetError("INTERNAL", "later"))
    info = error_details_pb2.ErrorInfo(reason="FROM_THE_FUTURE", domain="quartet")
    status.details[0].Pack(info)
    trailers = grpc.aio.Metadata((errors.STATUS_KEY, status.SerializeToString()))
    got = from_rpc(grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, grpc.aio.Metadata(), trailers, "later"))
    assert (got.reason, got.metadata["unknown_reason"]) == ("INTERNAL", "FROM_THE_FUTURE")


def test_the_largest_error_fits_the_trailers() -> None:
    metadata = {f"key_{index}": "\u2126" * 10_000 for index in range(errors.MAX_METADATA_KEYS)}
    error = QuartetError("INVALID_REQUEST", "\u2126" * 10_000, **metadata)
    # base64 grows by a third, percent-encoding of grpc-message threefold.
    assert len(to_status(error).SerializeToString()) * 4 / 3 + len(error.message.encode()) * 3 < 8192


def test_errors_survive_pickling() -> None:
    copy = pickle.loads(pickle.dumps(QuartetError("OVERLOADED", "full", retry_after_ms=7, limit=3)))
    assert (copy.reason, copy.message, copy.retry_after_ms, copy.metadata) == (
        "OVERLOADED",
        "full",
        7,
        {"limit": "3"},
    )


def test_a_field_that_was_left_out_is_said_to_be_empty() -> None:
    assert refused("frame", "", "send one").message == "frame = empty is refused; send one"
