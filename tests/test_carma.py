"""Job files of CARMA and of schedulers that read YAML."""

from pathlib import Path

import pytest

from vramcast.collocation.adapters.carma import write_rad, write_yaml
from vramcast.errors import UserError

RAD = "base\npython train.py\nsummary.txt\ncifar10\n128\ntrain\n1\n9000\n12000\n3000\n8000\n"


def test_the_estimate_is_written_to_its_line(tmp_path: Path) -> None:
    path = tmp_path / "job.rad"
    path.write_text(RAD, encoding="utf-8")
    write_rad(path, 5432.1)
    assert path.read_text(encoding="utf-8").splitlines() == [*RAD.splitlines()[:10], "5433"]
    write_rad(path, None, line=9)
    assert path.read_text(encoding="utf-8").splitlines()[8] == "40000", "it runs alone"


def test_a_short_file_is_extended(tmp_path: Path) -> None:
    path = tmp_path / "job.rad"
    path.write_text("\n".join(RAD.splitlines()[:7]), encoding="utf-8")
    write_rad(path, 100)
    assert path.read_text(encoding="utf-8").splitlines()[6:] == ["1", "", "", "", "100"]


@pytest.mark.parametrize(("text", "line"), [("a\nb\n", 11), (RAD, 2), (RAD, 99)])
def test_other_files_and_lines_are_refused(tmp_path: Path, text: str, line: int) -> None:
    path = tmp_path / "job.rad"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError):
        write_rad(path, 1, line)
    assert path.read_text(encoding="utf-8") == text


YAML = "# a job\nname: resnet  # not the name of a file\nmemory_mib: 1 # typed in\ncommand: |\n  memory_mib: 5\n"


def test_a_yaml_file_keeps_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(YAML, encoding="utf-8")
    write_yaml(path, 700.5, "memory_mib")
    assert path.read_text(encoding="utf-8") == YAML.replace("memory_mib: 1 #", "memory_mib: 701 #")
    write_yaml(path, 12, "other")
    assert path.read_text(encoding="utf-8").endswith("  memory_mib: 5\nother: 12\n")


@pytest.mark.parametrize("text", ["[1]", "a: [", "k:\n  x: 1\n", '{"k": 1}', "---\na: 1\n...\n"])
def test_yaml_that_cannot_be_changed_by_a_line_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError):
        write_yaml(path, 1, "k")
    assert path.read_text(encoding="utf-8") == text


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="job file"):
        write_rad(tmp_path / "none.rad", 1)
    with pytest.raises(UserError, match="plain word"):
        (tmp_path / "a.yaml").write_text("a: 1\n", encoding="utf-8")
        write_yaml(tmp_path / "a.yaml", 1, "a b")
