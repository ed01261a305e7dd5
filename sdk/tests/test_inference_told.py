"""What a replica says of the versions that it could not take, and whom it says it to."""

from __future__ import annotations

from quartet.inference import about, concerning, told


def test_a_run_is_told_what_is_about_it_or_about_all_of_them() -> None:
    lines = [told("torn:\n  tensor w", "a.1"), told("no room", "b"), told("gone"), told("gone", "a.1")]
    assert lines[0] == "run a.1: torn: tensor w" and [about(line) for line in lines] == [
        "a.1",
        "b",
        "",
        "a.1",
    ]
    said = "\n".join(lines)
    assert concerning(said, "a.1") == "torn: tensor w; gone", "each of it once"
    assert concerning(said, "b") == "no room; gone"
    assert concerning(said, "a") == concerning(said, "1") == "gone"
    assert concerning(said, "") == "; ".join(lines), "who names no run is told everything"
    assert concerning("", "a.1") == ""


def test_what_an_earlier_release_says_is_told_to_all() -> None:
    assert (
        concerning("version 0 could not be taken: tensor w", "a") == "version 0 could not be taken: tensor w"
    )
