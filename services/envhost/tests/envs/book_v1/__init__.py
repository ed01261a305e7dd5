"""A v1 environment as the documentation of Verifiers writes it; nothing here knows of this project.

The reply is a program, which is run in the runtime of the rollout.
"""

import verifiers.v1 as vf

# A picture of one dot.
IMAGE = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAACAkQBADs="


class CodeData(vf.TaskData):
    expected: str


class CodeTask(vf.Task[CodeData]):
    async def finalize(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        program = trace.last_reply.removeprefix("run ")
        await runtime.write("program.py", program.encode())
        ran = await runtime.run(["python3", "program.py"], {})
        trace.info["printed"] = ran.stdout.strip() if ran.exit_code == 0 else ran.stderr[-200:]

    @vf.reward
    async def printed(self, trace: vf.Trace) -> float:
        return float(trace.info["printed"] == self.data.expected)


class CodeTaskset(vf.Taskset[CodeTask, vf.TasksetConfig]):
    def load(self):
        for number in (2, 3):
            prompt = f"Write a program that prints {number * number}."
            yield CodeTask(CodeData(prompt=prompt, expected=str(number * number)), self.config.task)
        image = {"type": "image_url", "image_url": {"url": IMAGE}}
        shown = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]
        yield CodeTask(CodeData(prompt=shown, expected="a dot"), self.config.task)


__all__ = ["CodeTaskset"]
