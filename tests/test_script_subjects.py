"""Scripts that train on a virtual GPU: DLRM with sparse gradients, Mask R-CNN with another shape in each step."""

from bisect import bisect_right
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice

import pytest
import torch

from benchmarks.collocation.assumptions import CASES, TERABYTE_ROWS
from benchmarks.collocation.varying_shapes import line
from vramcast.dataset_builder.backends.virtual import VirtualBackend
from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.families.dlrm import Dlrm
from vramcast.jobs.families.mask_rcnn import ASPECT_RATIOS, MOST_INSTANCES, coco_batches
from vramcast.jobs.families.padded_lines import line_lengths, padded_batches
from vramcast.jobs.families.script_jobs import LENGTHS_VARY, script_subject
from vramcast.jobs.job import SpecJob
from vramcast.jobs.recipes import recipes as all_recipes
from vramcast.jobs.recipes import spec_of_recipe
from vramcast.models.examples import example_of_table
from vramcast.simulation.simulator import Simulator
from vramcast.virtual_gpu.allocator.sizes import MIB

A100 = load_profile("a100_40gb")
ROWS = [300_000, 7, 20_000]


def small_dlrm(**network: object) -> SpecJob:
    return SpecJob(spec_of_recipe("dlrm", 64, {"rows": ROWS, "bottom": [13, 32, 16], "top": [32, 1], **network}))


def test_dlrm_multiplies_each_pair_of_features_once() -> None:
    network = Dlrm([5, 9], [3, 4], [8, 1])
    dense, indices = torch.rand(2, 3), torch.tensor([[1, 4], [8, 0]])
    taken = []
    network.top.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    result = network(dense, torch.arange(2).expand(2, 2), indices, torch.ones(2, 1))
    x = network.bottom(dense)
    one, two = (table.weight[indices[place]] for place, table in enumerate(network.tables))
    pairs = [(a * b).sum(1, keepdim=True) for a, b in ((one, x), (two, x), (two, one))]
    assert torch.allclose(taken[0], torch.cat([x, *pairs], dim=1), atol=1e-6)
    assert torch.allclose(result.loss, -result.probability.log().mean())


def test_dlrm_has_the_published_tables_and_layers() -> None:
    script = script_subject(spec_of_recipe("dlrm", 32))
    assert script is not None
    with torch.device("meta"):
        network = script.make()
    assert sum(table.num_embeddings for table in network.tables) == 33_762_577
    assert {table.embedding_dim for table in network.tables} == {16}
    assert 539e6 < sum(item.numel() for item in network.parameters()) < 542e6  # "approximately 540M", says the paper
    assert network.top[0].in_features == 16 + 27 * 26 // 2
    shapes = [tuple(item.shape) for item in next(script.batches(32))]
    assert shapes == [(32, 13), (26, 32), (26, 32), (32, 1)]  # one index to a table and sample


def test_other_sizes_of_dlrm_are_the_published_ones() -> None:
    assert sum(TERABYTE_ROWS) == 49_126_297
    recipes = {recipe for _, recipe, *_ in CASES}
    assert recipes <= set(all_recipes())
    for _, recipe, batch_size, network, training in CASES:
        spec = spec_of_recipe(recipe, batch_size, network)
        assert set(network) <= set(spec.network)
        assert replace(spec.training, **training).batch_size == batch_size


def test_gradients_of_tables_are_as_large_as_a_batch_and_not_as_the_tables() -> None:
    simulation = Simulator(small_dlrm()).simulate({}, [A100])
    breakdown = simulation.peaks["a100_40gb"].bounded.breakdown
    table_bytes = 4 * 16 * sum(ROWS)
    assert breakdown["parameters"] >= table_bytes
    assert breakdown["gradients"] + breakdown["activations"] < table_bytes / 20
    assert simulation.family == "script"


def test_a_backend_measures_a_live_script_with_its_layers() -> None:
    result = VirtualBackend(A100, tables=True).measure(small_dlrm().spec)
    kinds = result.table.counts
    assert (kinds["EmbeddingBag"], kinds["Linear"]) == (3, 4)
    assert result.table.input_elements == 13 + 3 + 3 + 1


def test_what_a_live_script_cannot_follow_is_refused() -> None:
    with pytest.raises(UserError, match=r"for dlrm, found parallel=ddp\(world_size=2\)"):
        Simulator(small_dlrm()).simulate({"parallel": "ddp(world_size=2)"}, [A100])


def test_batches_of_coco_have_one_group_of_aspect_ratios_and_vary() -> None:
    batches = list(islice(coco_batches(4), 40))
    for images, targets in batches:
        assert len({bisect_right(ASPECT_RATIOS, item.shape[2] / item.shape[1]) for item in images}) == 1
        for image, target in zip(images, targets, strict=True):
            assert target["masks"].shape == (len(target["labels"]), *image.shape[1:])
            assert 1 <= len(target["labels"]) <= MOST_INSTANCES
    shapes = [[tuple(item.shape) for item in images] for images, _ in batches]
    assert len(set(map(tuple, shapes))) > 30
    assert shapes == [[tuple(item.shape) for item in images] for images, _ in islice(coco_batches(4), 40)]
    instances = [len(target["labels"]) for _, targets in batches for target in targets]
    assert 5 < sum(instances) / len(instances) < 10


def test_batches_of_lines_are_padded_to_their_longest_line() -> None:
    lines, batches = line_lengths(512, seed=3), padded_batches(8, inputs=3, longest=512, seed=3)
    for batch in islice(batches, 50):
        longest = max(islice(lines, 8))
        assert [tuple(item.shape) for item in batch] == [*[(8, longest)] * 3, (8,)]
    lengths = list(islice(line_lengths(512), 36_718))
    assert max(lengths) == 512
    assert 2.2e6 < sum(lengths) < 2.9e6  # tokens of the training text
    assert 0.3 < sum(item == 2 for item in lengths) / len(lengths) < 0.4


SMALL_XLNET = {"config": {"d_model": 64, "n_layer": 2, "n_head": 2, "d_inner": 128, "vocab_size": 1000}}


def lines_of_xlnet(**training: object) -> SpecJob:
    spec = spec_of_recipe("xlnet_base_on_lines", 8, {**SMALL_XLNET, "steps": 12})
    return SpecJob(replace(spec, training=replace(spec.training, **training)))


def test_lengths_that_vary_leave_more_in_the_cache_than_equal_ones() -> None:
    pytest.importorskip("transformers")
    backend = VirtualBackend(A100, tables=True)
    varying, equal = (
        backend.measure(spec) for spec in (lines_of_xlnet().spec, spec_of_recipe("xlnet_base", 8, SMALL_XLNET))
    )
    unused = [1 - item.measurement.allocated_bytes / item.measurement.reserved_bytes for item in (varying, equal)]
    assert unused[0] > unused[1] + 0.05
    assert LENGTHS_VARY in varying.measurement.notes
    example = example_of_table(varying.table, lines_of_xlnet().spec.training, A100, varying.measurement)
    assert not example.assumed


def test_a_dry_run_passes_a_batch_forward_before_the_first_step() -> None:
    pytest.importorskip("transformers")
    with_one, without = (
        Simulator(lines_of_xlnet(dry_run_batch_size=size)).simulate({}, [A100]).peaks["a100_40gb"].bounded
        for size in (8, None)
    )
    assert with_one.allocated_bytes != without.allocated_bytes  # the loop starts with the second batch
    assert with_one.reserved_bytes != without.reserved_bytes


def test_the_table_of_varying_shapes_shows_the_steps_that_were_made() -> None:
    assert line(3, [*[20_000] * 9, *[24_000] * 3], 18_000) == "| 3 | 24,000 | 18,000 |"


def test_mask_rcnn_trains_all_layers_on_its_largest_number_of_rois() -> None:
    if find_spec("torchvision") is None:
        pytest.skip("needs torchvision: pip install 'vramcast[timm]'")
    spec = spec_of_recipe("mask_rcnn", 128, {"steps": 2})
    assert spec.training.batch_size == 8  # the script's own
    spec = replace(spec, training=replace(spec.training, batch_size=1))
    result = VirtualBackend(A100, tables=True).measure(spec)
    # the published number with frozen norms, which have no parameters, and two for each of the 26,560 channels
    assert result.table.parameters == 44_401_393 + 2 * 26_560
    layers = {item.name: item for item in result.table.layers}
    assert layers["network.roi_heads.box_head.fc6"].activations == 512 * 1024
    assert 2_000 * MIB < result.measurement.allocated_bytes < result.measurement.reserved_bytes < 8_000 * MIB
    assert any("shapes of batches vary" in note for note in result.measurement.notes)
