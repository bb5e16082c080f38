"""The pages are held to the code: links lead somewhere, commands are understood, drawings name what there is."""

import argparse
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import pytest
from pages import DOCS, ROOT, blocks, prose

import vramcast.cli
from vramcast.dataset_builder import families, specification
from vramcast.dataset_builder.configuration import compose_build
from vramcast.dataset_builder.devices import device_names, load_profile
from vramcast.dataset_builder.schema import Provenance, Row, StaticEstimate
from vramcast.models.checkpoint import KINDS, RELEASED
from vramcast.models.storage import FORMAT, FORMAT_VERSION
from vramcast.train.configuration import configure
from vramcast.virtual_gpu.measurement import Measurement
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.training_setup import TrainingSetup

PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
STAND_INS = {"FAMILY": "cnn", "ESTIMATOR": "mlp", "N": "1000", "NAME": "t4", "$peak": "9000"}
"""For the words that a page leaves to its reader, where a command would refuse them."""


def text_of(name: str) -> str:
    return (DOCS / name).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    for link in links:
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_the_index_names_every_page():
    listed = set(re.findall(r"\]\((\w[^)/]*\.md)\)", text_of("README.md")))
    assert listed == {path.name for path in DOCS.glob("*.md")} - {"README.md"}


# --- commands --------------------------------------------------------------------------------------------------------


class Understood(BaseException):
    """Raised in the place of what a command would do."""


def _written(page: Path) -> Iterator[str]:
    """Every command of a page that says all that it needs: lines of blocks, and code within text."""
    lines = [line for block in blocks(page) for line in block.replace("\\\n", " ").splitlines()]
    inline = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]
    for line in [*lines, *inline]:
        found = re.search(r"(?:^|[|;] *|^\.venv/bin/)((?:vramcast |python -m (?:train|benchmarks)\b).*)", line.strip())
        if found and "..." not in found[1] and (line in lines or len(found[1].split()) > 3):
            yield re.sub(r" [&|].*", "", found[1])


COMMANDS = sorted({(page.name, command) for page in PAGES for command in _written(page)})


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_commands_are_understood(page, command, monkeypatch):
    words = [STAND_INS.get(word, word) for word in shlex.split(command, comments=True)]
    words = [re.sub(r"=([A-Z]+)$", lambda found: f"={STAND_INS.get(found[1], found[1])}", word) for word in words]
    if words[:2] == ["python", "-m"] and words[2] != "train":
        assert find_spec(words[2])
    elif words[:3] == ["python", "-m", "train"] or words[:2] == ["vramcast", "train"]:
        settings = [word for word in words if "=" in word]
        assert "run.resume" in command or configure(settings)
    elif words[:2] == ["vramcast", "build"] and (len(words) == 2 or re.search("=|^~", words[2])):
        assert compose_build(words[2:])
    else:
        _parse(words[1:], monkeypatch)


def _parse(words: list[str], monkeypatch) -> None:
    """Have a command read its words, and stop there."""
    read = argparse.ArgumentParser.parse_args

    def stop(self, *args, **kwargs):
        read(self, *args, **kwargs)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", ["vramcast", *words])
    if {"--help", "--version", "--cfg"} & set(words):
        return
    with pytest.raises(Understood):
        vramcast.cli.main()


def test_there_are_commands_to_understand():
    assert len(COMMANDS) > 50


# --- what pages draw and list ----------------------------------------------------------------------------------------


def test_the_drawn_layers_are_the_contracts():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    lines = []
    for contract in contracts:
        for container in contract.get("containers", ["(packages)"]) if contract["type"] == "layers" else ():
            lines += [container, *(f"    {layer}" for layer in contract["layers"])]
    (drawn,) = blocks(DOCS / "architecture.md", "layers")
    assert drawn.splitlines() == lines


def test_the_dataset_card_names_every_field():
    kinds = (Row, TrainingSetup, StaticEstimate, Measurement, Provenance)
    names = {item.name for kind in kinds for item in fields(kind)}
    assert names <= set(re.findall(r"`(?:spec\.)?(\w+)`", text_of("dataset-card.md")))


def test_the_page_of_devices_names_every_field_and_every_profile():
    words = set(re.findall(r"`(\w+)`", text_of("devices.md")))
    assert {item.name for item in fields(DeviceProfile)} <= words
    assert set(device_names()) <= words
    (line,) = [line for line in text_of("devices.md").splitlines() if "**nothing**" in line]
    unfitted = {name for name in device_names() if load_profile(name).calibrated_on is None}
    assert set(re.findall(r"`(\w+)`", line)) == unfitted


def test_the_page_of_checkpoints_tells_the_format():
    text = text_of("checkpoint-format.md")
    assert f"| `format` | `{FORMAT}` |" in text
    assert f"| `version` | {FORMAT_VERSION}." in text
    assert all(f"`{kind}`" in text for kind in KINDS)
    listed = {word for line in text.splitlines() if line.startswith("  ") for word in line.split()[:1]}
    assert {path.name for path in (RELEASED / "universal").iterdir()} <= listed


# --- examples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", ["extending.md", "checkpoint-format.md"])
def test_examples_run(page):
    added_to = (specification.SPECIFICATION, families.FAMILIES)
    before = [set(mapping) for mapping in added_to]
    names: dict[str, object] = {}
    try:
        for code in blocks(DOCS / page, "python"):
            exec(compile(code, page, "exec"), names)
    finally:
        for mapping, known in zip(added_to, before, strict=True):
            for name in mapping.keys() - known:
                del mapping[name]
    assert names.keys() & {"Generous", "figures"}
