"""`vramcast device`, profiles of the user's own, and suggestions for wrong names."""

import json

import pytest
import yaml

from vramcast.cli import main as vramcast
from vramcast.commands.build.build_command import main as build
from vramcast.commands.device.device_command import main
from vramcast.dataset_builder.configuration import compose_build, settings_of
from vramcast.device.profiles import (
    CONF,
    device_file,
    device_names,
    device_of_gpu,
    load_device,
    load_profile,
    read_rules,
    user_conf,
)
from vramcast.errors import UserError, nearest_names, suggestion
from vramcast.virtual_gpu.profile import parse_profile

OWN = {
    "name": "my_t4", "title": "NVIDIA T4", "total_mib": 15000, "compute_capability": 7.5, "context_mib": 200,
    "rules": "no_tf32",
}  # fmt: skip


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A profile in a configuration directory of the user's own."""
    monkeypatch.setenv("VRAMCAST_CONFIG", str(tmp_path))
    path = tmp_path / "device" / "my_t4.yaml"
    path.parent.mkdir()

    def write(**changes):
        path.write_text(yaml.safe_dump({**OWN, **changes}))
        return path

    write()
    yield write
    load_profile.cache_clear()


def test_list_prints_a_line_for_each_device(capsys):
    assert main(["list"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "memory", "capability", "calibrated", "rules", "title"]
    assert [line.split()[0] for line in lines] == device_names()
    assert "t4  " in lines[device_names().index("t4")]
    assert lines[device_names().index("t4")].split()[1:] == ["15360", "MiB", "7.5", "no", "no_tf32", "NVIDIA", "T4"]


def test_list_as_json(own, capsys):
    assert main(["list", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert entries["a100_40gb"]["rules"] == "cudnn9_ampere_datacentre"
    assert entries["a100_40gb"]["calibrated_on"]
    assert entries["a100_40gb"]["shipped"] is True
    assert entries["my_t4"]["shipped"] is False
    assert entries["my_t4"]["file"] == str(own())


@pytest.mark.parametrize("name", ["t4", "h200", "a100_40gb_gpumemnet_2024"])
def test_show_prints_a_profile_that_reads_back(name, capsys):
    assert main(["show", name]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"# {device_file(name)}\n# rule set ")
    assert parse_profile(yaml.safe_load(text)) == load_profile(name)


def test_every_shipped_profile_names_a_rule_set():
    names = {yaml.safe_load(path.read_text())["rules"] for path in (CONF / "device").glob("*.yaml")}
    assert names == {path.stem for path in (CONF / "device" / "rules").glob("*.yaml")}
    assert all(load_profile(name).convolution for name in device_names())


def test_a_wrong_name_gets_the_nearest_ones(capsys):
    assert main(["show", "A100"]) == 2
    assert capsys.readouterr().err.endswith("found 'A100': did you mean a100_40gb or a100_80gb?\n")
    assert main(["lst"]) == 2
    assert "found 'lst': did you mean list?" in capsys.readouterr().err
    assert build(["device=A100"]) == 2
    assert "did you mean a100_40gb or a100_80gb?" in capsys.readouterr().err
    assert vramcast(["clasify"]) == 2
    assert capsys.readouterr().err.endswith("found 'clasify': did you mean classify?\n")


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("A100 80GB", ["a100_80gb"]),
        ("2080ti", ["rtx_2080ti"]),
        ("rtx4090", ["rtx_4090"]),
        ("v100", ["v100_16gb", "v100_32gb"]),
        ("h10_80gb", ["h100_80gb"]),
        ("abacus", []),
        ("", []),
    ],
)
def test_nearest_names(name, names):
    assert nearest_names(name, device_names())[: len(names) or 1] == names


def test_values_that_are_no_names_get_no_suggestion():
    assert suggestion(3, [1, 2]) == "choose one"
    assert suggestion("x", [None, 2], "remove it") == "remove it"


def test_a_profile_of_the_user_s_own_is_used_everywhere(own):
    assert "my_t4" in device_names()
    assert device_file("my_t4") == own()
    assert load_profile("my_t4").convolution == load_profile("t4").convolution
    assert device_of_gpu("Tesla T4") == "my_t4"
    assert settings_of(compose_build(["device=my_t4"]), [])["device"] == load_device("my_t4")


def test_a_shipped_profile_hides_one_of_the_same_name(own):
    own().with_name("t4.yaml").write_text(yaml.safe_dump({**OWN, "name": "t4"}))
    assert device_file("t4") == CONF / "device" / "t4.yaml"
    assert settings_of(compose_build(["device=t4"]), [])["device"] == load_device("t4")


def test_a_rule_set_can_be_chosen_for_a_build():
    settings = settings_of(compose_build(["device.rules=no_tf32"]), [])
    own = {name: value for name, value in load_device("a100_40gb").items() if name not in read_rules("no_tf32")}
    own.pop("padded_depthwise_channels")  # of its own rule set
    assert settings["device"] == {**own, "convolution": load_device("t4")["convolution"]}


def test_a_rule_set_with_unknown_keys_is_named(own):
    path = own(rules="odd")
    rules = path.parent / "rules" / "odd.yaml"
    rules.parent.mkdir()
    rules.write_text("evidence: none\nconvolution: []\n1: x\nfoo: y\n")
    with pytest.raises(UserError, match="found 1: remove it"):
        load_profile("my_t4")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"name": "other"}, "expected the name my_t4 in .*my_t4.yaml, found 'other'"),
        ({"rules": "tf_32"}, "expected rules to be one of .*, found 'tf_32': did you mean"),
        ({"convolution": []}, "expected rules or convolution in a profile, found both in my_t4"),
        (
            {"padded_depthwise_channels": 9},
            "expected rules or padded_depthwise_channels in a profile, found both in my_t4",
        ),
        ({"memory": 3}, "expected the device profile my_t4 to have only"),
    ],
)
def test_a_broken_profile_is_named(own, changes, sentence):
    own(**changes)
    with pytest.raises(UserError, match=sentence):
        load_profile("my_t4")


def test_a_rule_set_has_no_other_fields(own):
    rules = own(rules="mine").with_name("rules")
    rules.mkdir()
    rules.joinpath("mine.yaml").write_text("evidence: none\nconvolution: []\ncontext_mib: 3\n")
    with pytest.raises(UserError, match=r"expected evidence, convolution, .* in .*mine.yaml, found context_mib"):
        load_profile("my_t4")


def test_the_user_s_directory_follows_the_environment(monkeypatch, tmp_path):
    assert str(user_conf()).startswith("/")
    monkeypatch.delenv("VRAMCAST_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert user_conf() == tmp_path / "vramcast"
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_conf() == tmp_path / ".config" / "vramcast"
