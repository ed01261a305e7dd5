"""How the engine asks its workers for the experts that take tokens (`experts`, `noting`)."""

#: In additional_config: note them at all.
WANTED = "quartet_routed_experts"
#: In SamplingParams.extra_args: the name of a submission that asks, and the first position that it asks for.
KEY = "quartet_experts"
