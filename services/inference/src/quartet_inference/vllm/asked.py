"""What the engine asks of its workers: experts that take tokens (`experts`, `noting`), and how they load."""

#: In additional_config: note them at all.
WANTED = "quartet_routed_experts"
#: In SamplingParams.extra_args: the name of a submission that asks, and the first position that it asks for.
KEY = "quartet_experts"
#: In additional_config: false has every version loaded by vLLM's own reload (`loading`).
COPY_PLAN = "quartet_copy_plan"
