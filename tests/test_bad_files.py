"""Files of users that are damaged or hostile: each is refused in one short sentence."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_tables import small_table

from vramcast.collocation.adapters.carma import write_rad, write_yaml
from vramcast.collocation.adapters.gpu_text import parse_gpus
from vramcast.commands.classify.classify_command import main
from vramcast.commands.classify.lengths import read_lengths
from vramcast.commands.classify.simulators import described
from vramcast.commands.classify.training_configs import read_training_config
from vramcast.dataset_builder.configuration import compose_build
from vramcast.dataset_builder.store.importers import import_file
from vramcast.device.profiles import load_profile, read_device
from vramcast.errors import UserError
from vramcast.files.yaml_text import parse_yaml
from vramcast.jobs.spec import Spec
from vramcast.jobs.targets import read_document
from vramcast.models.baselines.fake_tensor import read_published
from vramcast.train.configuration import configure, read_configuration
from vramcast.virtual_gpu.profile import DeviceProfile, parse_profile
from vramcast.virtual_gpu.training.setup import TrainingSetup

BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{new}: &{new} {{<<: [{', '.join([f'*{old}'] * 10)}]}}\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def refused(work, *words):
    with pytest.raises(UserError) as caught:
        work()
    text = str(caught.value)
    assert text.startswith("expected ") and len(text) < 1000, text
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (BOMB, "aliases that stand for more than 1048576 values"),
        (MERGES, "aliases that stand for more than 1048576 values"),
        ("&a [*a]", "aliases that stand for more"),
        ("a: 0x" + "f" * 5000, "a number of 5002 characters"),
        ("a: 1" + ":59" * 2000, "a number of 6001 characters"),
        ("[" * 5000, "recursion"),
        ("!!bool x", "'x'"),
        ("!!int ''", "index"),
        ("!!timestamp x", "NoneType"),
        ("2024-13-45", "month"),
        ("? [a]\n: b", "unhashable"),
        ("a: \0", "special characters"),
        ("a: 1\n---\nb: 2", "single document"),
        ("a: b: " + "c" * 9000, "mapping values"),
    ],
)
def test_yaml_that_makes_no_value_is_refused_in_one_sentence(text, why):
    refused(lambda: parse_yaml(text, "x.yaml"), why)


def test_yaml_is_read_with_its_aliases():
    assert parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: [*a, 0x1f]}", "x") == {
        "a": {"x": 1}, "b": {"x": 1, "y": [{"x": 1}, 31]}
    }  # fmt: skip
    assert parse_yaml("# nothing", "x") is None


def test_an_alias_bomb_is_refused_wherever_yaml_is_read(tmp_path, monkeypatch, capsys):
    path = tmp_path / "device" / "bomb.yaml"
    path.parent.mkdir()
    path.write_text(BOMB)
    monkeypatch.setenv("VRAMCAST_CONFIG", str(tmp_path))
    for read in (read_document, read_training_config):
        refused(lambda read=read: read(str(path)), "aliases")
    refused(lambda: read_device("bomb"), "aliases")
    refused(lambda: write_yaml(path, 5.0, "need"), "expected a YAML mapping")
    for words in ([str(path)], ["--config", str(path)], ["hf:gpt2", "--device", "bomb", "--batch-size", "1"]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert "aliases" in error and len(error) < 600
    refused(lambda: compose_build(["family=mlp"]), "bomb.yaml", "aliases")
    refused(lambda: configure([]), "bomb.yaml", "aliases")
    refused(lambda: read_configuration(path), "bomb.yaml", "aliases")


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_target": True},
        {"lora_target": 3},
        {"lora_target": ["q_proj", 3]},
        {"additional_target": {"a": 1}},
        {"per_device_train_batch_size": "\N{SUPERSCRIPT TWO}"},
        {"per_device_train_batch_size": "9" * 500},
        {"lora_rank": 8.5},
        {"model_name_or_path": "m" * 300},
        {"model_name_or_path": "m\0"},
    ],
)
def test_a_configuration_with_a_wrong_value_is_refused(changes, tmp_path):
    path = tmp_path / "config.json"
    config = {"model_name_or_path": "gpt2", "stage": "sft", "finetuning_type": "lora", **changes}
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="expected"):
        read_training_config(str(path))


def test_a_spec_with_other_keys_is_refused():
    refused(lambda: Spec.from_json({"family": "mlp", "network": {}, "training": {}, 1: 2}), "add or remove keys")
    refused(lambda: Spec.from_json({"family": "mlp", "network": {}, "training": {1: 2, "x": 3}}), "remove or rename")


@pytest.mark.parametrize("depth", ["1e999", "NaN", "[" * 100_000])
def test_a_spec_of_odd_values_is_refused(depth, tmp_path):
    path = tmp_path / "spec.json"
    path.write_text('{"family": "mlp", "network": {"depth": ' + depth + '}, "training": {"batch_size": 4}}')
    refused(lambda: described(str(path)))
    path = tmp_path / "spec.yaml"
    path.write_text("{family: mlp, network: {depth: 2024-01-01}, training: {batch_size: 4}}")
    refused(lambda: described(str(path)), "date")


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.array(["2024-01-01"], "datetime64[D]"), "an array of datetime64[D]"),
        (np.array([(1, 2.0)], "i4,f4"), "an array of ["),
        (np.array([{}], object), "Python objects"),
        (np.array(["12"]), "an array of <U2"),
        (np.array([True]), "an array of bool"),
        (np.array([1 + 2j]), "an array of complex128"),
        (np.array([1.0, np.nan]), "not whole"),
        (np.array([1.5]), "not whole"),
        (np.array([np.inf]), "not whole"),
        (np.array([], "i8"), "found none"),
        (np.array([0]), "found 0"),
        (np.array([2**40]), f"found {2**40}"),
    ],
)  # fmt: skip
def test_an_array_that_holds_no_lengths_is_refused(array, why, tmp_path):
    np.save(tmp_path / "lengths.npy", array)
    with pytest.raises(UserError) as caught:
        read_lengths(str(tmp_path / "lengths.npy"))
    assert str(caught.value).startswith("expected ")
    assert why in str(caught.value) or "lengths from 1" in str(caught.value)


def test_a_file_that_is_no_array_is_refused(tmp_path):
    path = tmp_path / "lengths.npy"
    np.save(path, np.array([[3.0, 4.0], [5.0, 6.0]]))
    assert read_lengths(str(path)) == [3, 4, 5, 6]
    header = b"\x93NUMPY\x01\x00v\x00" + b"{'descr': '<i8', 'fortran_order': False, 'shape': (10000000000000000,), }"
    for content in (b"", b"\x93NUMPY", b"PK\x03\x04", b"text", header.ljust(127) + b"\n" + b"\0" * 8):
        path.write_bytes(content)
        refused(lambda: read_lengths(str(path)), "a whole number a line or a .npy")
    refused(lambda: read_lengths(str(tmp_path / ("n" * 300 + ".npy"))), "File name too long")
    refused(lambda: read_lengths("\0"), "null")


@pytest.mark.parametrize("figure", ["inf", "-inf", "nan", "1e400", "-5"])
def test_an_impossible_memory_in_a_table_is_refused(figure, tmp_path):
    path = small_table(tmp_path)
    text = path.read_text()
    path.write_text(text.replace("1451", figure, 1))
    with pytest.raises(UserError, match=r"expected a GPUMemNet line at .*set.csv:2, found: .* a number from 0"):
        import_file(path, tmp_path / "rows")
    columns, first, *_ = text.split("\n")
    path.write_text(f"{columns},faketensor_peak_mib\n{first},{figure}\n")
    with pytest.raises(UserError, match=r"expected figures in the column faketensor_peak_mib of .*, found: .* from 0"):
        read_published(path)


def test_gpus_as_text_end_at_newlines_alone():
    (gpu,) = parse_gpus("a\u2028b, 100, 200\n")
    assert (gpu.id, gpu.free_mib, gpu.total_mib) == ("a\u2028b", 100.0, 200.0)
    for text in ("[" * 100_000, '[{"id": 1, "free_mib": 1, "jobs": 1e999}]', "[1]", "0, 1", "x" * 200_000 + ", 1, 2"):
        with pytest.raises(UserError, match="expected GPUs"):
            parse_gpus(text)


def test_a_line_of_a_rad_file_ends_at_a_newline_alone(tmp_path):
    path = tmp_path / "job.rad"
    path.write_text("env\npython a\x0c\u2028b.py\n" + "x\n" * 8, encoding="utf-8")
    write_rad(path, 5000.0)
    lines = path.read_text(encoding="utf-8").split("\n")
    assert lines[1] == "python a\x0c\u2028b.py" and lines[10:] == ["5000", ""]


SETTINGS = {"name": "x", "title": "X", "total_mib": 8000, "compute_capability": 8.0, "context_mib": 300}


@pytest.mark.parametrize(
    "changes",
    [
        {"context_mib": -1},
        {"context_mib": float("inf")},
        {"context_mib": float("nan")},
        {"context_mib": 1.5},
        {"context_mib": 9000},
        {"total_mib": 0},
        {"total_mib": True},
        {"total_mib": "8000"},
        {"total_mib": 2**50},
        {"driver_mib": 8000},
        {"other_mib": -4},
        {"nccl_mib": -1},
        {"compute_capability": float("inf")},
        {"compute_capability": 0},
        {"multiprocessors": 0},
        {"align_channels": 0},
        {"cublas_workspace_bytes": -8},
        {"title": 5},
        {"name": None},
        {"calibrated_on": ["me"]},
        {"convolution": "all"},
        {"convolution": ["all"]},
        {"convolution": [{"copies": float("inf")}]},
        {"convolution": [{"copies": -1.0}]},
        {"convolution": [{"copies": 1.0, "direction": "backward"}]},
        {"convolution": [{"copies": 1.0, "places": 0}]},
        {"convolution": [{"copies": 1.0, "aligned": 1}]},
        {5: 6},
    ],
    ids=str,
)
def test_a_profile_of_no_gpu_is_refused(changes):
    assert parse_profile(SETTINGS).context_mib == 300
    refused(lambda: parse_profile({**SETTINGS, **changes}))


def test_a_profile_of_no_gpu_ends_a_command_with_one_sentence(tmp_path, monkeypatch, capsys):
    path = tmp_path / "device" / "odd.yaml"
    path.parent.mkdir()
    path.write_text("name: odd\ntitle: Odd\ntotal_mib: 8000\ncompute_capability: 8.0\ncontext_mib: -.inf\n")
    monkeypatch.setenv("VRAMCAST_CONFIG", str(tmp_path))
    load_profile.cache_clear()
    words = ["gpumemnet:input:784_output:10_depth:3_arch:pyramid_batch:64.out", "--device", "odd"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "expected context_mib of the device profile odd to be a whole number from 0, found -inf: change it" in error


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 2**45) | st.floats() | st.text(max_size=6),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(max_size=4), items, max_size=3),
    max_leaves=5,
)
RULES = st.lists(
    st.dictionaries(st.sampled_from(["copies", "direction", "kernel", "aligned", "extra_mib", "y"]), JSON), max_size=2
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from([*DeviceProfile.__dataclass_fields__, "z"]), JSON, max_size=3), st.none() | RULES
)
def test_any_values_are_a_profile_or_bad_input(values, rules):
    try:
        profile = parse_profile({**SETTINGS, **values, **({"convolution": rules} if rules is not None else {})})
    except UserError as error:
        assert str(error).startswith("expected ")
    else:
        assert 0 <= profile.capacity_bytes(convolutions=True, batch_norm=True) < 2**63


@pytest.mark.parametrize("name", ["batch_size", "last_batch_size", "dry_run_batch_size"])
def test_batches_that_no_kernel_counts_are_refused(name):
    with pytest.raises(UserError, match=f"training.{name} to be at most 2147483647"):
        TrainingSetup(**{"batch_size": 8, name: 10**30})
