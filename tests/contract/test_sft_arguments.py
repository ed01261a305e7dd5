"""Every argument of TRL's SFTConfig and of SFTTrainer is known to quartet.sft, with its default."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from quartet.sft import SFTConfig, SFTTrainer
from quartet.sft.trainer import GIVEN

trl = pytest.importorskip("trl", reason="TRL is a development dependency")
# Importing it takes most of that.
pytestmark = pytest.mark.slow

#: Set here otherwise than there: where the output goes, and what is ours.
OUTPUT_DIR = "output_dir"


def test_every_argument_is_known_with_its_default() -> None:
    differing = {}
    for one in dataclasses.fields(trl.SFTConfig):
        there = one.default_factory() if callable(one.default_factory) else one.default
        here = getattr(SFTConfig(), one.name)
        if here != there and one.name != OUTPUT_DIR:
            differing[one.name] = (here, there)
    assert differing == {}


def test_what_is_known_is_an_argument_there() -> None:
    theirs = {one.name for one in dataclasses.fields(trl.SFTConfig)}
    assert set(SFTConfig().names()) - theirs == {"num_processes", "overrides", "warmup_ratio"}


def test_every_argument_of_the_trainer_is_taken_or_refused_by_name() -> None:
    theirs = set(inspect.signature(trl.SFTTrainer.__init__).parameters) - {"self"}
    assert theirs - set(GIVEN) <= SFTTrainer.ELSEWHERE.keys()
    ours = set(inspect.signature(SFTTrainer.__init__).parameters) - {"self", "unknown"}
    assert ours == set(GIVEN) <= theirs
