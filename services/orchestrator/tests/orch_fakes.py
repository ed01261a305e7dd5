"""Small fakes of the trainer and the environment host, served over loopback gRPC and shaped like the real
ones.

The fake trainer's "weights" are a hash over everything it applied, in order: two runs that end with the same
weights were trained on the same batches, once each. Its saved states survive `restart`, its memory does not.
The fake host "samples" what it is asked for from the version that the fake trainer published last; every
rollout carries its task, its member and its version in its tokens.
"""

from __future__ import annotations

import asyncio
import copy
import math
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import xxhash
from quartet.errors import QuartetError
from quartet.sampled_by import Told
from quartet.v1 import common_pb2 as cpb
from quartet.v1 import envhost_service_pb2 as epb
from quartet.v1 import inference_service_pb2 as ipb
from quartet.v1 import rollout_pb2 as rpb
from quartet.v1 import trainer_service_pb2 as tpb
from quartet.v1 import weights_pb2 as wpb
from quartet.v1.envhost_service_pb2_grpc import EnvHostServiceServicer
from quartet.v1.inference_service_pb2_grpc import InferenceServiceServicer
from quartet.v1.trainer_service_pb2_grpc import TrainerServiceServicer
from quartet.v1.weights_pb2_grpc import WeightServiceServicer

#: PolicyWeights.weights_id of what nobody here published.
OTHERS = 0x0BAD


@dataclass
class TrainerRun:
    spec: tpb.RunSpec
    applied: int = 0
    version: int = 0
    published: int | None = None
    weights: str = "base"
    gradients: str = ""
    broken: bool = False
    kept: dict[int, object] = field(default_factory=dict)
    trained: list[tuple[int, ...]] = field(default_factory=list)


class FakeTrainer(TrainerServiceServicer, WeightServiceServicer):
    def __init__(self) -> None:
        self.runs: dict[str, TrainerRun] = {}
        self.disk: dict[tuple[str, str], TrainerRun] = {}
        self.applied_calls: Counter[int] = Counter()
        self.latest: dict[str, int] = {}
        self.digests: dict[tuple[str, int], bytes] = {}
        # So often nobody hears that a version is published, who asked for it or who asks about it.
        self.unheard: Counter[int] = Counter()
        self.delay_s = 0.0
        # What new runs begin with.
        self.base = "base"
        # Of each batch in turn; then 0.5.
        self.losses: list[float] = []
        # Of all samples that were trained, in order.
        self.advantages: list[list[float]] = []
        self.closed: list[str] = []
        # While it is not set a run that is being closed is saved.
        self.saved = asyncio.Event()
        self.saved.set()
        self.lose_answer_of: set[int] = set()
        self.model_missing = False
        self.checked: list[tpb.CheckRunRequest] = []
        # Whether the model may have routers; None: that is not said.
        self.has_routers: bool | None = None
        # Of each CreateRun that was answered; and the names of states that were saved to be kept.
        self.keep_last: list[int] = []
        self.kept: list[str] = []
        self.refuses: QuartetError | None = None
        self.chat = cpb.ChatIdentity()
        # The runs whose adapters replicas were told to unload, with what was published of each by then.
        self.unloaded: list[tuple[str, int | None]] = []
        # So many are open at once, as of quartet_trainer.roster.
        self.max_runs = 64
        # Members whose log-probabilities are not the trainer's; empty: it does not tell of each sample.
        self.off_members: set[int] = set()
        # So many calls of CreateRun answer INTERNAL.
        self.faults = 0
        # What FetchModel was asked, and what it sends or raises.
        self.fetched: list[tpb.FetchModelRequest] = []
        self.frames: list[tpb.FetchModelResponse | QuartetError | asyncio.Event] = []
        # Of each DeleteStates whether it was a dry run; and what those that are none raise.
        self.deletions: list[tuple[str, bool]] = []
        self.keeps_states: QuartetError | None = None
        # As one of an earlier release.
        self.cannot_delete = False
        # Whoever asks CheckRun waits for it.
        self.checks_at: asyncio.Event | None = None
        self._newer = asyncio.Event()

    def forget(self) -> None:
        self.runs.clear()

    def push(self, run_id: str, version: int) -> None:
        """A version is served from now on, whoever made it."""
        self.latest[run_id] = max(self.latest.get(run_id, 0), version)
        self._newer.set()
        self._newer = asyncio.Event()

    async def wait_version(self, run_id: str, version: int) -> None:
        while self.latest.get(run_id, -1) < version:
            await self._newer.wait()

    async def CheckRun(self, request, context):
        self.checked.append(request)
        if self.checks_at is not None:
            await self.checks_at.wait()
        if self.refuses is not None:
            raise self.refuses
        return tpb.CheckRunResponse(chat=self.chat, has_routers=self.has_routers)

    async def CreateRun(self, request, context):
        if self.faults:
            self.faults -= 1
            raise QuartetError("INTERNAL", "no memory left")
        if self.model_missing:
            # As quartet_trainer.model has it.
            said = "base_model: there is no folder /m; create it, or name another"
            raise QuartetError("INVALID_CONFIG", said, key="base_model", value="m")
        run = self.runs.get(request.run_id)
        if run is None:
            if len(self.runs) >= self.max_runs:
                said, remedy = f"{self.max_runs} runs are open (max_runs)", "close one with CloseRun"
                raise QuartetError("OVERLOADED", f"{said}; {remedy}", max_runs=self.max_runs, remedy=remedy)
            saved = [state for (run_id, _), state in self.disk.items() if run_id == request.run_id]
            new = TrainerRun(request.spec, weights=self.base)
            run = copy.deepcopy(max(saved, key=lambda s: s.applied)) if saved else new
            run.kept.clear()
            self.runs[request.run_id] = run
        if not self._extends(run.spec, request.spec):
            raise QuartetError("RUN_CONFLICT", "another spec", run_id=request.run_id)
        run.spec = request.spec
        self.keep_last.append(request.keep_last)
        return tpb.CreateRunResponse(run=self._state(request.run_id))

    @staticmethod
    def _extends(held: tpb.RunSpec, wanted: tpb.RunSpec) -> bool:
        """Whether they are equal, or more steps follow those before."""
        totals = [*held.optimizer.earlier_total_steps, held.optimizer.total_steps]
        longer = tpb.RunSpec()
        longer.CopyFrom(held)
        longer.optimizer.total_steps = wanted.optimizer.total_steps
        longer.optimizer.earlier_total_steps[:] = wanted.optimizer.earlier_total_steps
        begins_alike = wanted.optimizer.earlier_total_steps[: len(totals)] == totals
        return held == wanted or (begins_alike and longer == wanted)

    async def GetRun(self, request, context):
        self._find(request.run_id)
        return tpb.GetRunResponse(run=self._state(request.run_id))

    async def CloseRun(self, request, context):
        self.closed.append(request.run_id)
        run = self.runs.pop(request.run_id, None)
        await self.saved.wait()
        if run is not None and 0 < request.save_at_seq_id == run.applied:
            self.disk[request.run_id, "closed"] = run
        return tpb.CloseRunResponse()

    async def ForwardBackward(self, request_iterator, context):
        start_frame, samples, commit = None, [], None
        async for frame in request_iterator:
            match frame.WhichOneof("frame"):
                case "start":
                    start_frame = frame.start
                case "batch":
                    samples.extend(frame.batch.samples)
                case "commit":
                    commit = frame.commit
        if commit is None or commit.sample_count != len(samples):
            raise QuartetError("STREAM_TORN", "no commit")
        tokens = sum(len(s.sample.token_ids) for s in samples)
        assert commit.token_count == tokens

        def apply(run: TrainerRun):
            contents = b"".join(s.SerializeToString(deterministic=True) for s in samples)
            run.gradients = xxhash.xxh3_64_hexdigest(contents)
            run.trained += [tuple(s.sample.token_ids) for s in samples]
            self.advantages += [list(s.advantages) for s in samples]
            loss = self.losses.pop(0) if self.losses else 0.5
            run.broken = not math.isfinite(loss)
            answer = tpb.ForwardBackwardResponse(loss=loss, loss_tokens=tokens, tokens=tokens)
            answer.diagnostics["entropy"] = 1.5
            answer.verification.max_difference = 1e-6
            answer.verification.tokens_compared = tokens
            if self.off_members:
                off = [s.sample.token_ids[1] in self.off_members for s in samples]
                answer.verification.sample_differences.extend(0.8 if one else 0.01 for one in off)
                answer.verification.sample_tokens.extend([100] * len(off))
            return answer

        return await self._apply(start_frame.run_id, start_frame.seq_id, apply)

    async def OptimStep(self, request, context):
        def apply(run: TrainerRun):
            assert run.gradients
            if not run.broken:
                run.weights = xxhash.xxh3_64_hexdigest((run.weights + run.gradients).encode())
            run.gradients = ""
            run.version += 1
            return tpb.OptimStepResponse(
                grad_norm=math.nan if run.broken else 1.0,
                learning_rate=1e-3,
                policy_version=run.version,
                skipped_nonfinite=run.broken,
            )

        return await self._apply(request.run_id, request.seq_id, apply)

    async def PublishWeights(self, request, context):
        def apply(run: TrainerRun):
            run.published = run.version
            digest = self.digests[request.run_id, run.version] = run.weights.encode()
            self.push(request.run_id, run.version)
            return tpb.PublishWeightsResponse(version=run.version, digest=digest)

        answer = await self._apply(request.run_id, request.seq_id, apply)
        self._on_the_way(answer.version)
        return answer

    def _on_the_way(self, version: int) -> None:
        if self.unheard[version] > 0:
            self.unheard[version] -= 1
            raise QuartetError("NOT_READY", "the way is cut")

    async def GetManifest(self, request, context):
        self._on_the_way(request.version)
        published, digest = self._find(request.run_id).published, None
        if published is not None and request.version <= published:
            digest = self.digests.get((request.run_id, request.version))
        if digest is None:
            raise QuartetError("VERSION_UNKNOWN", "not published here", version=request.version)
        canary = wpb.Canary(token_ids=[1, 2], logprobs=[-1.0])
        manifest = wpb.WeightManifest(
            run_id=request.run_id, version=request.version, digest=digest, canary=canary
        )
        return wpb.GetManifestResponse(manifest=manifest)

    async def SaveState(self, request, context):
        def apply(run: TrainerRun):
            saved = copy.deepcopy(run)
            saved.applied = request.seq_id
            self.disk[request.run_id, request.name] = saved
            self.kept += [request.name] if request.keep else []
            state = self._saved(request.name, saved)
            state.model_path = "/model" if request.export_model else ""
            return tpb.SaveStateResponse(state=state)

        return await self._apply(request.run_id, request.seq_id, apply)

    async def ListStates(self, request, context):
        states = [self._saved(name, s) for (run_id, name), s in self.disk.items() if run_id == request.run_id]
        return tpb.ListStatesResponse(states=sorted(states, key=lambda s: s.seq_id))

    async def DeleteStates(self, request, context):
        self.deletions.append((request.run_id, request.dry_run))
        if self.cannot_delete:
            raise QuartetError("NOT_IMPLEMENTED", "DeleteStates is not served here")
        names = [key for key in self.disk if key[0] == request.run_id]
        there = [self.disk[key] for key in names]
        there += [self.runs[request.run_id]] if request.run_id in self.runs else []
        if request.HasField("spec") and not all(self._extends(run.spec, request.spec) for run in there):
            raise QuartetError("RUN_CONFLICT", "of another run of that name", run_id=request.run_id)
        if not request.dry_run:
            if self.keeps_states is not None:
                raise self.keeps_states
            if request.run_id in self.runs:
                raise QuartetError("RUN_CONFLICT", "it is open", run_id=request.run_id)
            for key in names:
                del self.disk[key]
        return tpb.DeleteStatesResponse(states=len(names), size_bytes=1000 * len(names))

    async def FetchModel(self, request, context):
        self.fetched.append(request)
        for frame in self.frames:
            if isinstance(frame, QuartetError):
                raise frame
            if isinstance(frame, asyncio.Event):
                await frame.wait()
                continue
            yield frame

    async def _apply(self, run_id, seq_id, apply):
        run = self._find(run_id)
        if seq_id <= run.applied:
            if seq_id not in run.kept:
                raise QuartetError("SEQUENCE_CONFLICT", "no longer kept", have=run.applied, want=seq_id)
            return run.kept[seq_id]
        if seq_id != run.applied + 1:
            raise QuartetError("SEQUENCE_GAP", "gap", have=run.applied, want=seq_id)
        await asyncio.sleep(self.delay_s)
        if self.runs.get(run_id) is not run or seq_id <= run.applied:
            raise QuartetError("NOT_READY", "restarted meanwhile")
        answer = apply(run)
        run.applied = seq_id
        run.kept = {seq_id: answer}
        self.applied_calls[seq_id] += 1
        if seq_id in self.lose_answer_of:
            self.lose_answer_of.discard(seq_id)
            self.forget()
            raise QuartetError("NOT_READY", "died before it answered")
        return answer

    def _find(self, run_id) -> TrainerRun:
        if run_id not in self.runs:
            raise QuartetError("RUN_UNKNOWN", "no such run", run_id=run_id)
        return self.runs[run_id]

    def _state(self, run_id):
        run = self.runs[run_id]
        return tpb.RunState(
            run_id=run_id,
            applied_seq_id=run.applied,
            policy_version=run.version,
            published_version=run.published,
        )

    def _saved(self, name, run):
        return tpb.SavedState(
            name=name, seq_id=run.applied, policy_version=run.version, path=f"/states/{name}"
        )


class FakePolicy(InferenceServiceServicer):
    """A replica that serves one run, at the version that was pushed last."""

    def __init__(self, trainer: FakeTrainer) -> None:
        self.trainer = trainer

    async def UnloadAdapter(self, request, context):
        self.trainer.unloaded.append((request.run_id, self.trainer.latest.get(request.run_id)))
        return ipb.UnloadAdapterResponse()

    async def GetModel(self, request, context):
        for run_id, version in self.trainer.latest.items():
            return ipb.GetModelResponse(run_id=run_id, policy_version=version)
        return ipb.GetModelResponse()


class FakeHost(EnvHostServiceServicer):
    def __init__(self, trainer: FakeTrainer) -> None:
        self.trainer = trainer
        self.requests: list[epb.RunRolloutsRequest] = []
        self.max_delay_s = 0.004
        # Rollouts that were asked for and have not ended, now and at most.
        self.under_way = self.most_under_way = 0
        self.random = random.Random(0)
        # (task_index, member) -> failures still to come; kind of failure.
        self.failures: dict[tuple[int, int], int] = {}
        self.failing_tasks: set[int] = set()
        # These before any other has sampled.
        self.fails_at_once = False
        # Whose failing tasks fail; empty: every environment's.
        self.failing_environments: set[str] = set()
        # Tasks whose members all earn the same.
        self.flat_tasks: set[int] = set()
        # Tasks whose prompts have so many tokens instead of two.
        self.prompt_tokens: dict[int, int] = {}
        self.kind = rpb.FAILURE_KIND_ENVIRONMENT
        self.reason = cpb.ERROR_REASON_UNSPECIFIED
        self.lie_about_version: dict[int, int] = {}
        # Of tasks of evaluations: the version that samples them, instead of the one that was asked for.
        self.lie_in_evaluations: dict[int, int] = {}
        # Of (environment, task) of evaluations: those that never end.
        self.stuck: set[tuple[str, int]] = set()
        self.break_streams = 0
        # Environments whose description takes until the event.
        self.describing: dict[str, asyncio.Event] = {}
        self.described: list[str] = []
        # Of every task: those that a limit cuts.
        self.truncated_members: set[int] = set()
        # Answers with rollouts that sampled nothing.
        self.silent = False
        # Says that its rewards compare the members of a group; what they sample is their request's number.
        self.compares = False
        # What each rollout's attempts earn, in one episode: parts of it, with one sample each.
        self.attempts: list[float] = []
        # Whether it tells which weights answered; of tasks those that others did, this often, as a version.
        self.tells_weights = False
        self.others: dict[int, int] = {}
        self.others_version = 0
        # What it tells of every environment besides; one of an earlier release tells no digest.
        self.loaded = epb.EnvironmentInfo()

    async def DescribeEnvironment(self, request, context):
        if request.environment.id == "nowhere":
            raise QuartetError(
                "ENVIRONMENT_UNKNOWN", "'nowhere' is not hosted here", env_id="nowhere", hosted="toy"
            )
        self.described.append(request.environment.id)
        if request.environment.id in self.describing:
            await self.describing[request.environment.id].wait()
        info = epb.EnvironmentInfo(
            id=request.environment.id, train_size=50, eval_size=6, group_scoring=self.compares
        )
        info.MergeFrom(self.loaded)
        return epb.DescribeEnvironmentResponse(environment=info)

    async def RunRollouts(self, request, context) -> AsyncIterator[epb.RunRolloutsResponse]:
        self.requests.append(request)
        members = list(request.members)
        self.random.shuffle(members)
        left, sampled_by = len(members), Told()
        self._count(left)
        try:
            async for rollout in self._rollouts(request, members):
                left -= 1
                self._count(-1)
                told = self.loaded.digest if left == len(members) - 1 else ""
                rollout.replicas.append(f"replica-{rollout.member % 2}:1")
                frame = sampled_by.frame(rollout)
                frame.environment_digest = told
                yield frame
        finally:
            self._count(-left)

    def _count(self, more):
        self.under_way += more
        self.most_under_way = max(self.most_under_way, self.under_way)

    async def _rollouts(self, request, members):
        for number, member in enumerate(members):
            if not (self.fails_at_once and self._fails(request)):
                await asyncio.sleep(self.random.uniform(0, self.max_delay_s))
            await self.trainer.wait_version(request.run_id, request.min_policy_version)
            if request.split == epb.SPLIT_EVAL and (request.environment.id, request.task_index) in self.stuck:
                await asyncio.Event().wait()
            if self.break_streams and number:
                self.break_streams -= 1
                raise QuartetError("NOT_READY", "the host went away")
            rollout = self._rollout(request, member)
            if self.attempts and rollout.samples:
                self._attempts(rollout)
            if self.compares and rollout.samples:
                rollout.samples[0].token_ids[3] = 10 + self.requests.index(request)
            yield rollout

    def _attempts(self, rollout):
        for reward in self.attempts:
            rollout.parts.add(agent="agent", reward=reward, samples=1)
        for _ in self.attempts[1:]:
            rollout.samples.add().CopyFrom(rollout.samples[0])
        rollout.reward = sum(self.attempts) / len(self.attempts)

    def _fails(self, request):
        everywhere = not self.failing_environments or request.environment.id in self.failing_environments
        return everywhere and request.task_index in self.failing_tasks

    def _rollout(self, request, member):
        rollout = rpb.Rollout(member=member)
        key = (request.task_index, member)
        train = request.split == epb.SPLIT_TRAIN
        if train and (self.failures.get(key, 0) > 0 or self._fails(request)):
            self.failures[key] = self.failures.get(key, 0) - 1
            rollout.failure.kind, rollout.failure.reason = self.kind, self.reason
            rollout.failure.message = "broken"
            rollout.failure.retryable = True
            return rollout
        version = self.trainer.latest[request.run_id]
        if self.tells_weights and self.others.get(request.task_index, 0) > 0:
            self.others[request.task_index] -= 1
            version = self.others_version
            rollout.weights.add(policy_version=version, weights_id=OTHERS)
        elif self.tells_weights:
            digest = self.trainer.digests[request.run_id, version]
            rollout.weights.add(policy_version=version, weights_id=int.from_bytes(digest[:8], "big"))
        elif train:
            version = self.lie_about_version.pop(request.task_index, version)
        else:
            version = self.lie_in_evaluations.get(request.task_index, version)
        rollout.reward = ((request.task_index * 7 + member * 13 + version) % 10) / 10
        if request.task_index in self.flat_tasks:
            rollout.reward = 1.0
        rollout.rewards["match"] = rollout.reward
        if member < request.messages_of_members:
            rollout.messages.add(role="user", content=str(request.task_index))
            rollout.task_json = f'{{"answer":{request.task_index}}}'
        if self.silent:
            return rollout
        prompt = self.prompt_tokens.get(request.task_index, 2) if train else 2
        sample = rollout.samples.add(token_ids=[request.task_index, member, *[0] * (prompt - 2), version, 9])
        sample.spans.add(start=prompt, length=2, policy_version=version)
        sample.logprobs.extend([-0.5, -0.25])
        rollout.usage.completion_tokens = 2
        rollout.num_turns = 1
        rollout.truncated = member in self.truncated_members
        return rollout
