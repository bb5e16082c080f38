"""The virtual GPU against Transformers that others measured: most figures are met to the MiB.

Small networks stand for all here; `vramcast evaluate` goes through the whole table. A few figures hold what another
process had on the card.
"""

from collections.abc import Callable, Iterator
from itertools import islice

from vramcast.dataset_builder.backends.virtual import trace_spec
from vramcast.device.profiles import load_device
from vramcast.jobs.families.gpumemnet import spec_of_filename
from vramcast.virtual_gpu.allocator.allocator import AllocatorOptions
from vramcast.virtual_gpu.allocator.sizes import MIB
from vramcast.virtual_gpu.profile import parse_profile
from vramcast.virtual_gpu.replay.simulate import simulate

_STEP_MIB = 2  # what small segments take
_LAYERS = (3, 6)
_ROWS = 18


def _errors(lines: list[dict[str, str]]) -> Iterator[int]:
    """Measured less simulated, in MiB, of runs that ended well and whose layers are neither many nor tiny."""
    profile = parse_profile(load_device("a100_40gb_gpumemnet_2024"))
    for line in lines:
        spec = spec_of_filename(line["Filename"])
        numbers = spec.training.batch_size * spec.network["sequence_length"] * spec.network["embedding_size"]
        if line["Status"] == "SUCCESSFUL" and spec.network["layers"] in _LAYERS and numbers >= MIB:
            found = simulate(trace_spec(spec), profile, AllocatorOptions())
            assert found.device_used_bytes is not None
            yield int(line["Max GPU Memory (MiB)"]) - found.device_used_bytes // MIB


def test_most_are_met_to_the_mib(public_rows: Callable[[str], list[dict[str, str]]]) -> None:
    errors = list(islice(_errors(public_rows("gpumemnet/transformer_data_sample.csv")), _ROWS))
    assert len(errors) == _ROWS
    assert sum(abs(error) <= _STEP_MIB for error in errors) >= 0.75 * _ROWS, errors
