"""Cost of a page with advice: `python -m benchmarks.performance.advice_speed --before DIRECTORY`.

Makes the page of `vramcast classify` for a job that does not fit, in one process, with the code of this directory, and
with that of another checkout in turn if one is named. Times are of the CPU, without imports and the network's
construction: a busy machine changes them less than the time that passes.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

_JOB = ("hf:llama-3-8b", "--batch-size", "4", "--input", "4096", "--device", "rtx_4090")
_CODE = """
import json, sys, time
from vramcast.dataset_builder.families.libraries import tolerate_broken_torchvision
from vramcast.dataset_builder.jobs.building import build_job
from vramcast.simulation.simulator import Simulator
from vramcast.models.classify_command.command import _parser, values_of
from vramcast.models.classify_command.job_answers import page_of_request
from vramcast.models.classify_command.request import ClassifyRequest
from vramcast.models.predictor import Predictor
tolerate_broken_torchvision()
request = ClassifyRequest.of(values_of(_parser().parse_args(sys.argv[1:])))
simulator, predictor = Simulator(build_job(request.build_request())), Predictor.load("universal")
start = time.process_time()
page = page_of_request(request, simulator, predictor, 0.0)
seconds = time.process_time() - start
answers = [page.answer, *page.devices, *(item.answer for item in page.suggestions)]
print(json.dumps([seconds, [[item.device, item.estimate_mib, item.safe_mib] for item in answers]]))
"""


def page(python: str, directory: Path, job: list[str]) -> tuple[float, str]:
    """Return the seconds of CPU time that a page takes with the code of a directory, and its figures."""
    environment = {**os.environ, "PYTHONPATH": str(directory.resolve()), "OMP_NUM_THREADS": "1"}
    command = [python, "-W", "ignore", "-c", _CODE, *job]
    done = subprocess.run(command, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seconds, figures = json.loads(done.stdout.splitlines()[-1])
    return seconds, json.dumps(figures)


def main() -> int:
    """Print the seconds of each checkout and their ratio; fail if the pages differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with peft, for advice on LoRA")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("job", nargs="*", default=list(_JOB), help="the arguments of vramcast classify")
    arguments = parser.parse_args()
    directories = [Path.cwd(), *([arguments.before] if arguments.before else [])]
    runs = [
        [page(arguments.python, directory, arguments.job) for directory in directories] for _ in range(arguments.runs)
    ]
    seconds = [median(run[place][0] for run in runs) for place in range(len(directories))]
    print(f"{' '.join(arguments.job)}: {seconds[0]:.1f} s")
    if not arguments.before:
        return 0
    print(f"before: {seconds[1]:.1f} s, {seconds[1] / seconds[0]:.1f} times as long")
    same = len({text for run in runs for _, text in run}) == 1
    print("the pages are equal" if same else "the pages differ")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
