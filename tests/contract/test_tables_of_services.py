"""What a run's file refuses in the table of a service is no key of that service."""

from __future__ import annotations

import pytest
from quartet.config.keys import annotation_at
from quartet.run.service_tables import IN_TABLES, MISPLACED
from quartet_envhost.config import EnvHostConfig
from quartet_inference.config import InferenceConfig
from quartet_orchestrator.config import OrchestratorConfig
from quartet_trainer.config import TrainerConfig

CONFIGS = {
    "trainer": TrainerConfig,
    "orchestrator": OrchestratorConfig,
    "inference": InferenceConfig,
    "envhost": EnvHostConfig,
}


@pytest.mark.parametrize("service", CONFIGS)
def test_no_refused_name_is_a_key_of_the_service(service: str) -> None:
    for name in (*MISPLACED[service], *IN_TABLES[service]):
        assert annotation_at(CONFIGS[service], tuple(name.split("."))) is None, name
    assert MISPLACED.keys() == IN_TABLES.keys() == CONFIGS.keys()
