"""Random traces of measured networks: sufficient reservations never crash, and no design enters its own bound."""

from dataclasses import replace

import numpy as np
from made_examples import MIB, example_of, mlp_table, simulated

from benchmarks.collocation.measured_traces import JOBS, Measured, bounds_of, table, traces
from vramcast.collocation.cluster_simulation.rules import ClusterRules

GB = 1e9
PEAKS = np.array([2.0, 9.0, 14.0, 21.0, 30.0, 50.0]) * GB


def made_networks() -> Measured:
    return Measured(PEAKS, {"right": PEAKS, "twice": 2 * PEAKS, "a tenth": PEAKS / 10})


def test_traces_are_reproducible_and_their_jobs_fit() -> None:
    (submissions, drawn), (_, others) = traces(made_networks(), 100, 2, ClusterRules())
    assert len(submissions) == JOBS
    assert [item.job.peak_bytes for item in submissions] == PEAKS[drawn].astype(int).tolist()
    assert 5 not in drawn  # larger than the device
    assert drawn != others
    assert next(traces(made_networks(), 100, 1, ClusterRules()))[1] == drawn


def test_reserving_the_peak_equals_the_oracle_and_reserving_less_crashes() -> None:
    lines = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in table(made_networks(), 100, 3)}
    assert lines["right"][1:] == ["0.0%", "1.00", "1.000 ± 0.000", "1.000 ± 0.000", "0.0"]
    assert lines["twice"][1:3] == ["0.0%", "2.00"]
    assert float(lines["twice"][4].split()[0]) > 1.05
    assert lines["twice"][5] == "0.0"
    assert lines["a tenth"][1] == "100.0%"
    assert float(lines["a tenth"][5]) > 50


def test_a_margin_comes_from_other_designs() -> None:
    # 400 networks of one design take twice the simulated memory, 400 other designs exactly the simulated memory
    overhead = 500
    examples = [
        example_of(
            mlp_table(8, 8), simulated=simulated(4096 * MIB), name=f"{name}{index}", family="timm",
            used_bytes=(overhead + used) * MIB,
        )
        for name, used in (("twice", 8192), ("right", 4096))
        for index in range(400)
    ]  # fmt: skip
    examples = [replace(item, design="twice") if item.id.startswith("twice") else item for item in examples]
    bounds = dict(bounds_of(examples))[0.01] / MIB - overhead
    assert np.allclose(bounds[:400], 4096)  # no other design has a margin
    assert np.isclose(bounds[400:], 8192).sum() > 200  # their margin applies to the other folds
