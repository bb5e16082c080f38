"""Golden results: every figure that was recorded for the golden specs and for a file of jobs is reproduced.

Run this file to record them anew.
"""

import json
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from vramcast.commands.classify.classify_command import main
from vramcast.dataset_builder.backends.static import static_of
from vramcast.dataset_builder.backends.virtual import VirtualBackend
from vramcast.dataset_builder.golden import golden_specs
from vramcast.device.profiles import load_profile
from vramcast.jobs.job import SpecJob
from vramcast.models import load
from vramcast.models.predictor import Question
from vramcast.simulation.simulator import Simulator

GOLDEN = Path(__file__).parent / "golden"
SPECS = json.loads((GOLDEN / "specs.json").read_text())
JOBS = [json.loads(line) for line in (GOLDEN / "jobs.jsonl").read_text().splitlines()]
ANSWERS = [json.loads(line) for line in (GOLDEN / "answers.jsonl").read_text().splitlines()]
DEVICES = ("a100_40gb", "rtx_3060", "h100_80gb", "a100_40gb_gpumemnet_2024")
PROSE = {"notes", "profile", "evidence"}
"""Keys whose text may be reworded; all other values are compared, integers exactly."""
ROUNDING = 1e-6
"""Relative. A float depends on the order in which a processor adds; bytes and buckets do not."""


def installed(library):
    try:
        return version(library).partition("+")[0]
    except PackageNotFoundError:
        return None


OTHER_VERSIONS = {
    library for library, recorded in json.loads((GOLDEN / "versions.json").read_text()).items()
    if installed(library) != recorded
}  # fmt: skip
pytestmark = pytest.mark.skipif("torch" in OTHER_VERSIONS, reason="recorded with another torch")


def check(recorded, current, place):
    """Compare all that was recorded; keys that were added later are not looked at."""
    if isinstance(recorded, dict):
        for key, value in recorded.items():
            assert key in current, f"{place} has no {key}"
            if key in PROSE:
                assert bool(value) == bool(current[key]), f"{place}.{key}"
            else:
                check(value, current[key], f"{place}.{key}")
    elif isinstance(recorded, list):
        assert len(recorded) == len(current), place
        for index, (one, other) in enumerate(zip(recorded, current, strict=True)):
            check(one, other, f"{place}[{index}]")
    elif isinstance(recorded, float):
        assert current == pytest.approx(recorded, rel=ROUNDING), place
    else:
        assert recorded == current, place


def as_json(value):
    return json.loads(json.dumps(value))


@pytest.fixture(scope="module")
def predictor():
    return load("universal")


def test_every_golden_spec_was_recorded():
    assert SPECS.keys() == golden_specs().keys()


def current(label, predictor):
    """The figures of a golden spec."""
    spec, profiles = golden_specs()[label], [load_profile(device) for device in DEVICES]
    simulation = Simulator(SpecJob(spec)).simulate({}, profiles)
    answers = predictor.answers([Question.of_simulation(label, simulation, profile) for profile in profiles])
    return as_json({
        "static": vars(static_of(spec)),
        "measurement": vars(VirtualBackend(profiles[0]).measure(spec).measurement),
        "simulation": simulation.to_json(),
        "answers": [answer.to_dict() for answer in answers],
    })  # fmt: skip


@pytest.mark.parametrize("label", SPECS)
def test_a_golden_spec_has_its_recorded_measurement_simulation_and_answers(label, predictor):
    check(SPECS[label], current(label, predictor), label)


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """The answer to every job of the file, by its place there."""
    places = [place for place, job in enumerate(JOBS) if needed(job) not in OTHER_VERSIONS]
    return dict(
        zip(places, answers_to([JOBS[place] for place in places], tmp_path_factory.mktemp("jobs")), strict=True)
    )


def answers_to(jobs, directory):
    path = directory / "jobs.jsonl"
    path.write_text("".join(json.dumps(job) + "\n" for job in jobs))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(GOLDEN)
        return [json.loads(line) for line in printed_by(["--jobs", str(path), "--json"])]


def printed_by(words):
    with redirect_stdout(StringIO()) as out:
        assert main(words) == 0
    return out.getvalue().splitlines()


def needed(job):
    """The library that a job's figures depend on beside torch."""
    if job["target"] == "spec.json":
        return "timm"
    return {"timm": "timm", "hf": "transformers"}.get(job["target"].partition(":")[0])


@pytest.mark.parametrize("place", range(len(JOBS)), ids=[job["target"] for job in JOBS])
def test_a_job_has_its_recorded_answer(place, answered):
    if place not in answered:
        pytest.skip(f"recorded with another {needed(JOBS[place])}")
    check(ANSWERS[place], answered[place], "answer")


def record():
    """Write all figures anew: `python tests/test_golden.py`. Look at the difference before you commit it."""
    predictor = load("universal")
    lines = [f"{json.dumps(label)}:{compact(stable(current(label, predictor)))}" for label in sorted(golden_specs())]
    (GOLDEN / "specs.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    with TemporaryDirectory() as directory:
        answers = answers_to(JOBS, Path(directory))
    (GOLDEN / "answers.jsonl").write_text("".join(compact(stable(answer)) + "\n" for answer in answers))
    versions = {library: installed(library) for library in ("torch", "timm", "transformers")}
    (GOLDEN / "versions.json").write_text(json.dumps(versions) + "\n")


def stable(value):
    """The value without what differs between machines, at any depth."""
    if isinstance(value, dict):
        return {key: stable(item) for key, item in value.items() if key not in ("seconds", "traced_with")}
    return [stable(item) for item in value] if isinstance(value, list) else value


def compact(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


if __name__ == "__main__":
    record()
