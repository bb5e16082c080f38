"""Factors, spaces, and the presets in conf/space."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramcast.dataset_builder.configuration import compose_build, settings_of
from vramcast.dataset_builder.samplers import make_sampler
from vramcast.dataset_builder.space import Choice, Range, Space, parse_factor, parse_space
from vramcast.device.profiles import CONF
from vramcast.errors import UserError
from vramcast.jobs.filters import Rejected, check

LIBRARIES = {"timm", "diffusion", "detector", "unet", "recurrent", "random", "universal"}
PRESETS = sorted(
    path.stem for path in (CONF / "space").glob("*.yaml") if path.stem not in LIBRARIES and path.stem[:3] != "hf_"
)
"""Spaces of networks with a filter."""
GPUMEMNET_SEED = 99
GPUMEMNET_DRAWS = 3000


def load(name: str) -> Space:
    return parse_space(settings_of(compose_build([f"space={name}"]), [])["space"])


@given(
    low=st.integers(1, 500),
    width=st.integers(1, 500),
    step=st.integers(1, 7),
    log=st.booleans(),
    seed=st.integers(0, 99),
)
def test_integers_are_in_their_range_and_multiples_of_their_step(low, width, step, log, seed):
    factor = Range(low * step, (low + width) * step, whole=True, step=step, log=log)
    drawn = [factor.draw(np.random.RandomState(seed + i), {}) for i in range(20)]
    levels = [factor.level(i, 4, {}) for i in range(4)]
    for value in drawn + levels:
        assert isinstance(value, int)
        assert low * step <= value < (low + width) * step
        assert value % step == 0
        assert 0 <= factor.bin(value, {}) < factor.level_count
    assert levels[0] == low * step
    assert levels == sorted(levels)
    if not log:
        assert levels[-1] == (low + width - 1) * step


def test_each_level_of_a_range_has_its_own_bin():
    factor = Range(0.1, 0.5, whole=False, level_count=4)
    assert [factor.bin(factor.level(i, 4, {}), {}) for i in range(4)] == [0, 1, 2, 3]


def test_fewer_levels_of_a_choice_are_spread_over_its_values():
    factor = Choice(tuple("abcdefgh"))
    assert [factor.level(i, 4, {}) for i in range(4)] == ["a", "c", "e", "g"]
    assert [factor.level(i, 8, {}) for i in range(8)] == list("abcdefgh")


def test_bounds_may_depend_on_earlier_factors():
    factor = parse_factor("outputs", {"int": [1, "max(2, inputs // 4)"]})
    assert factor.level(3, 4, {"inputs": 400}) == 99
    assert factor.level(3, 4, {"inputs": 4}) == 1


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"choice": []}, "list of choices"),
        ({"choice": [1], "int": [1, 2]}, "one of choice, int"),
        ({"int": [1, 2], "steps": 2}, "one of choice, int"),
        ({"int": [1]}, r"\[low, high\]"),
        ({"int": [1, 9], "levels": 0}, "whole number from 1"),
        ({"choice": [1, 2], "levels": 2}, "one of choice, int"),
        ({"float": [0.1, 0.5], "step": 2}, "float .with log, levels at most."),
        ({"int": [1, 9], "step": 0}, "step of factor width to be a whole number from 1"),
        ({"int": [3, 9], "step": 2}, "begin at a multiple of 2, found 3"),
        ({"int": [1, 9], "log": 1}, "log of factor width to be true or false"),
        ({"int": [1, None]}, "from low to high for factor width"),
        ({"int": [9, 1]}, "from low to high for factor width"),
        ({"int": [0, 10], "log": True}, "above 0 where it is logarithmic"),
        (7, "one of choice, int"),
    ],
)
def test_an_invalid_factor_is_rejected(settings, sentence):
    with pytest.raises(UserError, match=sentence):
        parse_factor("width", settings)


@pytest.mark.parametrize("bounds", [["height", 1], ["0 * height", 10], [1, "'wide'"]])
def test_an_empty_range_is_rejected_when_it_is_drawn(bounds):
    factor = parse_factor("width", {"int": bounds, "log": True})
    with pytest.raises(UserError, match="expected a range from low to high for factor width"):
        factor.draw(np.random.RandomState(0), {"height": 5})


def test_a_bound_with_an_unknown_factor_is_rejected():
    factor = parse_factor("width", {"int": [1, "hieght * 2"]})
    with pytest.raises(UserError, match="hieght"):
        factor.draw(np.random.RandomState(0), {"height": 3})


@pytest.mark.parametrize("name", PRESETS)
def test_most_specs_of_every_preset_can_run(name):
    space = load(name)
    specs = [space.spec(values) for values in islice(make_sampler("uniform").candidates(space, 1), 60)]
    assert {spec.family for spec in specs} == {space.family}
    assert len({spec.id for spec in specs}) == 60
    accepted = sum(not isinstance(check(spec), Rejected) for spec in specs)
    assert accepted > 25


def _mlp(values):
    keys = {"input": "inputs", "output": "outputs", "depth": "depth", "arch": "arch", "batch": "batch"}
    return "_".join(f"{title}:{values[name]}" for title, name in keys.items())


def _norms(values):
    keys = {"act": "act", "dropout": "dropout_rate", "dropout ": "dropout", "batchnorm": "batch_norm"}
    return "".join(f"_{title.strip()}:{values[name]}" for title, name in keys.items())


def _cnn(values):
    keys = {
        "input_channels": "channels", "num_classes": "classes", "depth": "depth", "arch": "arch",
        "base_filters": "filters", "batch": "batch", "input_size": "size",
    }  # fmt: skip
    return "_".join(f"{title}:{values[name]}" for title, name in keys.items()) + _norms(values)


def _transformer(values):
    keys = {
        "num_classes": "classes", "embedding_size": "embedding", "num_layers": "layers", "num_heads": "heads",
        "ff_hidden_size": "feed_forward", "dropout_rate": "dropout", "seq_length": "length", "input_size": "words",
        "num_samples": "samples", "batch_size": "batch",
    }  # fmt: skip
    shown = {**values, "dropout": f"{values['dropout']:.4f}"}
    return "_".join(f"{title}:{shown[name]}" for title, name in keys.items())


@pytest.mark.parametrize(
    ("spaces", "file", "name_of"),
    [
        (["gpumemnet_mlp_step1"], "mlp_data_step1.csv", _mlp),
        (["gpumemnet_mlp_step2"], "mlp_data_step2.csv", lambda values: _mlp(values) + _norms(values)),
        (["gpumemnet_cnn_step1"], "cnn_data_step1.csv", _cnn),
        (["gpumemnet_transformer_step1", "gpumemnet_transformer_step2"], "transformer_data_sample.csv", _transformer),
    ],
)
def test_a_gpumemnet_preset_draws_the_published_configurations(public_rows, spaces, file, name_of):
    published = {line["Filename"] for line in public_rows(f"gpumemnet/{file}")}
    sampler = make_sampler("uniform")
    drawn = {
        f"{name_of(values)}.out"
        for space in spaces
        for values in islice(sampler.candidates(load(space), GPUMEMNET_SEED), GPUMEMNET_DRAWS)
    }
    assert published - drawn == set()
