"""The small overlay in a cluster: the whole job runs, every pod is killed in it, every tier is updated in it.

`make test-kubernetes` runs it with the cluster that kubectl speaks to, which has the images and gives volumes
to claims (docs/deploy.md). It takes minutes, so nothing else does. The overlay's namespace must not be there
before, and is removed at the end.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parent.parent.parent
NAMESPACE, RUN, STEPS = "quartet", "job", 300
MODEL_SECONDS, STEP_SECONDS, END_SECONDS, UPDATE_SECONDS = 900, 300, 900, 600
WORKLOADS = ("deployment/envhost", "statefulset/trainer", "statefulset/orchestrator", "statefulset/inference")
PORT = 50051

pytestmark = [
    pytest.mark.skipif(
        "QUARTET_KUBERNETES" not in os.environ, reason="needs a cluster: make test-kubernetes"
    ),
    pytest.mark.timeout(3 * 3600),
]


def kubectl(*arguments: str, seconds: float = 120, given: str | None = None) -> str:
    """What the command prints on stdout; it has to end with 0."""
    done = attempt(*arguments, seconds=seconds, given=given)
    assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stdout}{done.stderr}"
    return done.stdout


def attempt(
    *arguments: str, seconds: float = 120, given: str | None = None
) -> subprocess.CompletedProcess[str]:
    """A command that may fail."""
    command = ["kubectl", "-n", NAMESPACE, *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, timeout=seconds, input=given
    )


def printed() -> str:
    """What the pod that follows the job has printed so far."""
    return attempt("logs", "follower").stdout


def steps() -> list[int]:
    """The steps that it has told, in its order."""
    return [int(step) for step in re.findall(rf" step (\d+)/{STEPS} ", printed())]


def until_step(step: int, seconds: float) -> None:
    """Wait for it."""
    end = time.monotonic() + seconds
    while step > max(steps(), default=0):
        assert time.monotonic() < end, (
            f"no step {step} within {seconds} s:\n{printed()}{kubectl('get', 'pods')}"
        )
        time.sleep(1)


def until_updated() -> None:
    """Wait for every workload."""
    for workload in WORKLOADS:
        kubectl("rollout", "status", workload, f"--timeout={UPDATE_SECONDS}s", seconds=UPDATE_SECONDS + 60)


def names(component: str) -> list[str]:
    """Of its pods."""
    label = f"app.kubernetes.io/component={component}"
    return kubectl("get", "pods", "-l", label, "-o", "name").split()


def follower() -> str:
    """A pod that follows the job from within: hardened, as the namespace wants it, and allowed to call the
    orchestrator."""
    hardened = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    container = {
        "name": "follower",
        "image": "quartet-command",
        "imagePullPolicy": "IfNotPresent",
        "args": ["watch", RUN, "--orchestrator", f"orchestrator:{PORT}", "--insecure-ok-off-loopback"],
        "securityContext": hardened,
    }
    user = {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "follower", "labels": {"app.kubernetes.io/component": "client"}},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": user,
            "containers": [container],
        },
    }
    return yaml.safe_dump(pod)


@contextmanager
def forwarded() -> Iterator[str]:
    """The orchestrator's address on this machine, as docs/deploy.md says."""
    command = ["kubectl", "-n", NAMESPACE, "port-forward", "statefulset/orchestrator", f":{PORT}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"127\.0\.0\.1:\d+", process.stdout.readline())
        assert found is not None
        yield found[0]
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def deployed() -> Iterator[None]:
    """The overlay, as it is applied by hand, with two hosts and two replicas; the model is made by it."""
    if attempt("get", "namespace", NAMESPACE).returncode == 0:
        pytest.fail(
            f"the namespace {NAMESPACE} is there before; another cluster, or kubectl delete ns {NAMESPACE}"
        )
    try:
        kubectl("apply", "-k", "k8s/overlays/cpu")
        kubectl("scale", "statefulset/inference", "deployment/envhost", "--replicas=2")
        kubectl(
            "rollout",
            "status",
            "statefulset/trainer",
            f"--timeout={MODEL_SECONDS}s",
            seconds=MODEL_SECONDS + 60,
        )
        until_updated()
        yield
    finally:
        attempt("delete", "namespace", NAMESPACE, seconds=600)


def test_the_job_outlives_every_pod_and_an_update_of_every_tier(deployed: None) -> None:
    with forwarded() as address:
        submit = ["submit", "@", "configs/reverse-text.toml", "--model", "/models/tiny", "--run-id", RUN]
        submit += ["--max-steps", str(STEPS), "--orchestrator", address]
        subprocess.run(
            [sys.executable, "-m", "quartet.cli", *submit], cwd=REPOSITORY, check=True, timeout=120
        )
    kubectl("apply", "-f", "-", given=follower())
    for component in ("trainer", "orchestrator", "inference", "envhost"):
        until_step(max(steps(), default=0) + 4, STEP_SECONDS)
        kubectl("delete", names(component)[0], "--grace-period=0", "--force", seconds=300)
    until_step(max(steps(), default=0) + 4, STEP_SECONDS)
    kubectl("rollout", "restart", *WORKLOADS)
    until_updated()
    assert steps()[-1] < STEPS, "the job ended before the update did"
    until_step(STEPS, END_SECONDS)
    end = time.monotonic() + STEP_SECONDS
    while (phase := kubectl("get", "pod", "follower", "-o", "jsonpath={.status.phase}")) == "Running":
        assert time.monotonic() < end, printed()
        time.sleep(1)
    assert phase == "Succeeded", printed()
    assert steps() == list(range(1, STEPS + 1)), "every step once, in order"
    untrained, trained = (
        float(reward) for reward in re.findall(r"after \d+ steps: reward ([\d.]+)", printed())
    )
    assert trained > untrained + 0.3, printed()


def test_it_is_updated_while_nothing_runs(deployed: None) -> None:
    """A replica without a run has no weights, and is not waited for."""
    kubectl("rollout", "restart", *WORKLOADS)
    until_updated()


def test_pods_reach_what_the_circle_has_and_nothing_else(deployed: None) -> None:
    """Where the cluster's network enforces the policies; a cluster that does not fails here."""
    ask = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"

    def reaches(source: str, host: str, port: int) -> bool:
        (pod, *_) = names(source)
        return attempt("exec", pod, "--", "python", "-c", ask, host, str(port)).returncode == 0

    assert reaches("orchestrator", "trainer", PORT) and reaches("envhost", "inference", PORT)
    for source, host in (("trainer", "inference"), ("envhost", "trainer"), ("inference", "envhost")):
        assert not reaches(source, host, PORT), f"{source} reaches {host}"
    for source in ("trainer", "orchestrator", "inference", "envhost"):
        assert not reaches(source, "kubernetes.default", 443), f"{source} reaches the cluster's own API"
