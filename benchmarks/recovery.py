"""Seconds that a killed service costs the main job.

Runs tests/faults/test_kill_each_service.py, which ends each of the four services, and the process that two
of them are forks of, once with SIGKILL at a seeded moment of the main job with batches of 64, checks that
nothing was lost or doubled, and reads the times that it records: from the kill to the second step after it
(the first may have been on its way when the kill came). Steps go on for a while where nothing can be sampled:
without inference it is the first step all of whose tokens are of versions published after the kill. Bar: 15 s
for each.

    python benchmarks/recovery.py [--seeds 1,2,3] [--json FILE]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from figures import Figure, arguments, report

REPOSITORY = Path(__file__).resolve().parent.parent
TEST = "tests/faults/test_kill_each_service.py"
#: What the test waits for after each kill.
SAMPLED_ANEW = "step sampled by a later version"
SEEN_BY = {"inference": SAMPLED_ANEW, "forkserver": SAMPLED_ANEW}


def recoveries(seed: int) -> dict[str, float]:
    """Seconds by service."""
    with tempfile.TemporaryDirectory(prefix="quartet-recovery-") as folder:
        told = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TEST, f"--junitxml={told}"]
        command += ["-o", "junit_family=xunit1"]  # the newer one has no properties
        environment = {**os.environ, "QUARTET_FAULT_SEED": str(seed)}
        subprocess.run(command, check=True, cwd=REPOSITORY, env=environment)
        properties = ElementTree.parse(told).getroot().iter("property")
        return {one.attrib["name"]: float(one.attrib["value"]) for one in properties}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seeds", default="1,2,3")
    options = parser.parse_args()
    figures = []
    for seed in map(int, options.seeds.split(",")):
        for service, seconds in recoveries(seed).items():
            seen = SEEN_BY.get(service, "second step")
            figures.append(Figure(f"seed {seed}: {service} killed, {seen} after", seconds, "s", "<= 15"))
    report(figures, options.json)


if __name__ == "__main__":
    main()
