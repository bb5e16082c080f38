"""Draws of the space of all networks, which needs the libraries of the networks and their lists: slow to import."""

from itertools import islice
from pathlib import Path

import pytest

from vramcast.dataset_builder.configuration import compose_build, make_build, settings_of
from vramcast.jobs.families.architecture_names import architecture_of
from vramcast.jobs.families.drawn_configs import drawn_config
from vramcast.jobs.spec import Spec


def test_the_universal_space_draws_every_part() -> None:
    pytest.importorskip("timm")
    pytest.importorskip("transformers")
    settings = settings_of(compose_build(["space=universal", "backend=swept", "sampler=uniform"]), [])
    build = make_build(settings, Path())
    drawn: dict[str, Spec] = {}
    for values in islice(build.sampler.candidates(build.space, 0), 200):
        drawn.setdefault(values["part"], build.space.spec(values))
    assert drawn.keys() == settings["space"]["parts"].keys()
    assert architecture_of(drawn["timm"]).startswith("timm/")
    assert architecture_of(drawn["hf_causal"]).startswith("hf/")
    config = drawn["hf_causal"].network["config"]
    assert {"vocab_size", "pad_token_id"} <= config.keys()
    assert drawn_config("M2M100ForConditionalGeneration", "layers", 2)["encoder_layerdrop"] == 0  # else random labels
