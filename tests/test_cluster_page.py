"""The files in deploy/ray can be read by their programs, and docs/building.md has the keys of the executor."""

import re
import shlex
import subprocess
from pathlib import Path

import yaml

from vramcast.dataset_builder.configuration import compose_build
from vramcast.device.profiles import CONF

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "building.md").read_text()
SCRIPT, MANIFEST = ((ROOT / "deploy" / "ray" / name).read_text() for name in ("build.sh", "raycluster.yaml"))


def test_the_script_is_a_script():
    result = subprocess.run(["bash", "-n"], input=SCRIPT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_manifest_is_a_ray_cluster():
    cluster = yaml.safe_load(MANIFEST)
    assert (cluster["kind"], cluster["apiVersion"]) == ("RayCluster", "ray.io/v1")
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    assert (
        {mount["name"] for mount in head["containers"][0]["volumeMounts"]}
        == {"rows"}
        == {volume["name"] for volume in head["volumes"]}
    )


def test_the_keys_are_those_of_the_executor():
    told = dict(re.findall(r"^\| `executor\.(\w+)` \| (\S+) \|", PAGE, re.MULTILINE))
    settings = yaml.safe_load((CONF / "executor" / "ray.yaml").read_text())
    assert settings.pop("name") == "ray"
    assert told == {key: "null" if value is None else str(value) for key, value in settings.items()}


def test_the_commands_compose():
    commands = re.findall(r"^ *vramcast build (.*executor\..*?)(?: &)?$", PAGE + SCRIPT, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        words = [word for word in shlex.split(command) if word != "..." and not word.startswith("backend=cuda")]
        assert compose_build([*words, "executor=ray"]).executor.address
