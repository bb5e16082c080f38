"""The documentation is consistent with the code: links, commands, listings and examples."""

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
from pages import DOCS, README, ROOT, blocks, prose

import vramcast.cli
from vramcast.dataset_builder.configuration import compose_build
from vramcast.dataset_builder.rows import Provenance, Row
from vramcast.device.profiles import device_names, load_profile
from vramcast.jobs import families, shape_rules
from vramcast.jobs.spec import StaticEstimate
from vramcast.models.checkpoint import KINDS
from vramcast.models.released import RELEASED
from vramcast.models.storage import FORMAT, FORMAT_VERSION
from vramcast.train.configuration import configure
from vramcast.virtual_gpu.measurement import Measurement
from vramcast.virtual_gpu.profile import DeviceProfile
from vramcast.virtual_gpu.training.setup import TrainingSetup

PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("benchmarks/*/README.md")])
WORDS = 1500
"""A page for readers has at most so many; tables of experiments are beside their code, in `benchmarks`."""
PLACEHOLDERS = {"FAMILY": "cnn", "ESTIMATOR": "mlp", "N": "1000", "NAME": "t4", "$peak": "9000"}
"""Values for placeholders on a page that a command would refuse."""


def text_of(name: str) -> str:
    return (DOCS / name).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_exist(page):
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    for link in links:
        assert link.startswith("https://") or (page.parent / link).exists(), link


def test_the_index_names_every_page():
    listed = set(re.findall(r"\]\((\w[^)/]*\.md)\)", text_of("README.md")))
    assert listed == {path.name for path in DOCS.glob("*.md")} - {"README.md"}


@pytest.mark.parametrize("page", [README, *sorted(DOCS.glob("*.md"))], ids=lambda page: page.name)
def test_a_page_is_short(page):
    assert len(page.read_text().split()) <= WORDS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.name}")
def test_marked_parts_are_made_by_modules_and_end(page):
    marks = re.findall(r"<!-- made by (benchmarks[\w.]*): (.*?) -->", page.read_text())
    assert all(find_spec(module) for module, _ in marks)
    assert marks[1::2] == [(module, f"end of {name}") for module, name in marks[::2]]


# --- commands --------------------------------------------------------------------------------------------------------


class Parsed(BaseException):
    """Raised instead of running a command."""


def _commands(page: Path) -> Iterator[str]:
    """Yield the complete commands of a page: lines of blocks, and code within text."""
    lines = [line for block in blocks(page) for line in block.replace("\\\n", " ").splitlines()]
    inline = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]
    for line in [*lines, *inline]:
        match = re.search(r"(?:^|[|;] *|^\.venv/bin/)((?:vramcast |python -m (?:train|benchmarks)\b).*)", line.strip())
        if match and "..." not in match[1] and (line in lines or len(match[1].split()) > 3):
            yield re.sub(r" [&|].*", "", match[1])


COMMANDS = sorted({(page.name, command) for page in PAGES for command in _commands(page)})


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_commands_parse(page, command, monkeypatch):
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command, comments=True)]
    words = [re.sub(r"=([A-Z]+)$", lambda match: f"={PLACEHOLDERS.get(match[1], match[1])}", word) for word in words]
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
    """Let a command parse its arguments, and stop before it runs."""
    parse_args = argparse.ArgumentParser.parse_args

    def stop(self, *args, **kwargs):
        parse_args(self, *args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", ["vramcast", *words])
    if {"--help", "--version", "--cfg"} & set(words):
        return
    with pytest.raises(Parsed):
        vramcast.cli.main()


def test_the_pages_have_commands():
    assert len(COMMANDS) > 50


# --- listings --------------------------------------------------------------------------------------------------------


def test_the_listed_layers_are_the_contracts():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    lines = []
    for contract in contracts:
        for container in contract.get("containers", ["(packages)"]) if contract["type"] == "layers" else ():
            lines += [container, *(f"    {layer}" for layer in contract["layers"])]
    (listed,) = blocks(DOCS / "architecture.md", "layers")
    assert listed.splitlines() == lines


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


def test_the_page_of_checkpoints_describes_the_format():
    text = text_of("training.md")
    assert f"| `format` | `{FORMAT}` |" in text
    assert f"| `version` | {FORMAT_VERSION}." in text
    assert all(f"`{kind}`" in text for kind in KINDS)
    listed = {word for line in text.splitlines() if line.startswith("  ") for word in line.split()[:1]}
    assert {path.name for path in (RELEASED / "universal").iterdir()} <= listed


def test_the_paths_of_the_glossary_exist():
    paths = re.findall(r"`([\w/.]+)`", " ".join(re.findall(r"\|([^|]*)\|$", text_of("concepts.md"), re.MULTILINE)))
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


# --- examples --------------------------------------------------------------------------------------------------------


def test_the_paths_of_the_architecture_exist():
    text = text_of("architecture.md")
    paths = re.findall(r"`([\w/.]+/[\w/.]*|test_\w+\.py)`", prose(DOCS / "architecture.md"))
    rooms = [ROOT, ROOT / "tests", ROOT / "virtual_gpu", ROOT / "vramcast", ROOT / "simulation"]
    assert len(paths) > 30
    assert [path for path in paths if not any((room / path).exists() for room in rooms)] == []
    benchmarks = re.search(r"`benchmarks/` \| (.*)\. Not installed", text)[1]
    assert {path.parent.name for path in ROOT.glob("benchmarks/*/README.md")} >= set(re.findall(r"`(\w+)`", benchmarks))


@pytest.mark.parametrize("page", ["extending.md", "training.md"])
def test_examples_run(page):
    added_to = (shape_rules.SPECIFICATION, families.FAMILIES)
    before = [set(mapping) for mapping in added_to]
    names: dict[str, object] = {}
    try:
        for code in blocks(DOCS / page, "python"):
            exec(compile(code, page, "exec"), names)
    finally:
        for mapping, names_before in zip(added_to, before, strict=True):
            for name in mapping.keys() - names_before:
                del mapping[name]
    assert names.keys() & {"Generous", "figures"}
