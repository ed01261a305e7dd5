"""The environment of benchmarks/vs_trl.py: one turn, rewarded by the share of digits in the reply."""

import verifiers.v1 as vf

PROMPTS = 4096


def digit_share(text: str) -> float:
    """What part of a text is digits."""
    return sum(character in "0123456789" for character in text) / max(1, len(text))


class DigitsTask(vf.Task[vf.TaskData]):
    """Say digits."""

    @vf.reward
    async def digits(self, trace: vf.Trace) -> float:
        """The share of digits."""
        return digit_share(trace.last_reply)


class DigitsTaskset(vf.Taskset[DigitsTask, vf.TasksetConfig]):
    """Numbered prompts."""

    def load(self):
        """The tasks."""
        for index in range(PROMPTS):
            yield DigitsTask(vf.TaskData(prompt=f"number {index:08d}:"), self.config.task)


__all__ = ["DigitsTaskset"]
