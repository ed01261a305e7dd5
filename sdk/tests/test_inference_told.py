"""What a replica says of the versions that it could not take, and whom it says it to."""

from __future__ import annotations

from quartet.inference import concerning, line, refusal
from quartet.v1 import inference_service_pb2 as pb


def test_a_run_is_told_what_is_about_it_or_about_all_of_them() -> None:
    found = [
        refusal("torn:\n  tensor w", "a.1"),
        refusal("no room", "b"),
        refusal("gone"),
        refusal("gone", "a.1"),
    ]
    assert [line(one) for one in found] == [
        "run a.1: torn: tensor w",
        "run b: no room",
        "gone",
        "run a.1: gone",
    ]
    for said in (found, [pb.UpdateRefusal(run_id=one.run_id, why=one.why) for one in found]):
        assert concerning(said, "a.1") == "torn: tensor w; gone", "each of it once"
        assert concerning(said, "b") == "no room; gone"
        assert concerning(said, "a") == concerning(said, "1") == "gone"
        assert concerning(said, "") == "; ".join(map(line, said)), "who names no run is told everything"
    assert concerning([], "a.1") == ""
