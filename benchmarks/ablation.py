"""What an estimator owes to its features and to its rows: `python -m benchmarks.ablation --data DIR`.

For each family an MLP ensemble is cross-validated on the measured rows, split by configuration, with the published
features, with a layer table's, and with the virtual estimate among them; trained on measured rows, on rows that the
virtual GPU made of other configurations of the same space, and on both. Always judged on measured rows alone.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import torch
from tqdm import tqdm

from dataset_builder.configuration import compose_build, make_build, make_executor, settings_of
from dataset_builder.devices import load_profile
from dataset_builder.pipeline import run
from dataset_builder.schema import MIB, Status
from dataset_builder.store import read_journal
from dataset_builder.store.splits import Split, make_folds
from models.baselines.virtual import Virtual
from models.classifiers import NetworkSettings
from models.comparison import compare
from models.ensemble import Ensemble
from models.example import Example
from models.examples import example_of_row
from models.fitting import PlainFitter
from models.labels import Buckets
from train.configuration import configure
from train.experiment import examples_for

PROFILE = "a100_40gb_gpumemnet_2024"
SPACES = {"mlp": "gpumemnet_mlp_step2", "cnn": "gpumemnet_cnn_step1", "transformer": "gpumemnet_transformer_step2"}
WIDTHS_MIB = {"mlp": 1000, "cnn": 8000, "transformer": 8000}
PUBLISHED = {"mlp": ".976 / .984", "cnn": ".797 / .803", "transformer": ".848 / .858"}
"""GPUMemNet's MLP and Transformer estimator, by three folds; CNNs without residual and dense ones."""
VIRTUAL_SEED = 7
"""Not the one of the published sets: the virtual rows are of other configurations."""


@dataclass(frozen=True)
class Variant:
    """What is learned from."""

    features: str
    rows: str
    """'measured', 'virtual' or 'both'."""


VARIANTS = (
    Variant("gpumemnet", "measured"),
    Variant("gpumemnet", "virtual"),
    Variant("gpumemnet", "both"),
    Variant("layers", "measured"),
    Variant("layers", "virtual"),
    Variant("layers", "both"),
    Variant("full", "measured"),
    Variant("full", "both"),
)
"""With 'full' virtual rows alone teach nothing, since their truth is among the features: see the virtual GPU alone."""


def virtual_examples(family: str, count: int, out: Path) -> list[Example]:
    """Rows that the virtual GPU makes of the published space, built where they are absent."""
    words = [f"space={SPACES[family]}", "sampler=uniform", f"n={count}", f"seed={VIRTUAL_SEED}", f"device={PROFILE}"]
    words += [f"family={family}", "backend=virtual"]
    config = compose_build(words)
    build = make_build(settings_of(config, words), out / f"{family}-{count}")
    with tqdm(total=count, desc=f"virtual rows of {family}", unit="row", mininterval=10) as bar:
        run(build, make_executor(config, build.backend), lambda _: bar.update(), bar.update)
    profile = load_profile(PROFILE)
    rows = [row for row in read_journal(build.out).rows if row.measurement.status in (Status.OK, Status.OOM)]
    return [example_of_row(row, profile, row.measurement) for row in rows]


def folds_of(examples: Sequence[Example], count: int) -> Iterator[tuple[list[Example], list[Example]]]:
    """Training and test rows of each fold."""
    split: Split = make_folds([example.group for example in examples], count, seed=0)
    for name in split.parts:
        test = [example for example in examples if split.part_of(example.group) == name]
        yield [example for example in examples if split.part_of(example.group) != name], test


def rows_for(variant: Variant, train: list[Example], virtual: list[Example], test: list[Example]) -> list[Example]:
    tested = {example.group for example in test}
    made = [example for example in virtual if example.group not in tested]
    return {"measured": train, "virtual": made, "both": [*train, *made]}[variant.rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="the directory with the public tables")
    parser.add_argument("--families", nargs="+", default=list(SPACES), choices=list(SPACES))
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--virtual", type=int, default=400, help="virtual rows of each family")
    parser.add_argument("--out", type=Path, default=Path("runs/ablation"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = [line for family in arguments.families for line in study(family, arguments)]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "ablation.json").write_text(json.dumps(found, indent=1) + "\n")


def study(family: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Print a table of one family; its lines as values."""
    measured = examples_for(configure(["data=gpumemnet", f"data.path={arguments.data}", f"family={family}"]))
    virtual = virtual_examples(family, arguments.virtual, arguments.out)
    width = WIDTHS_MIB[family]
    print(
        f"\n{family}: {len(measured)} measured rows, {arguments.folds} folds, {width} MiB; {len(virtual)} virtual rows"
    )
    print(
        f"published: {PUBLISHED[family]}\n\n| features | rows | accuracy | too low | median error |\n"
        + "| --- " * 5
        + "|"
    )
    lines = []
    for variant in (*VARIANTS, None):
        figures = []
        for train, test in folds_of(measured, arguments.folds):
            buckets = Buckets(width * MIB, test[0].capacity_bytes)
            estimator = Virtual()
            if variant is not None:
                settings = NetworkSettings(features=variant.features, bucket_mib=width)
                rows = rows_for(variant, train, virtual, test)
                estimator = Ensemble.of(settings, arguments.members, PlainFitter(patience=20)).fit(rows, [])
            score = compare({"found": estimator}, test, buckets)["found"].overall
            figures.append((score.accuracy, score.too_low, score.median_relative_error))
        names = (variant.features, variant.rows) if variant else ("the virtual GPU alone", "none")
        accuracy, too_low, error = zip(*figures, strict=True)
        spread = stdev(accuracy) if len(accuracy) > 1 else 0.0
        cells = f"{fmean(accuracy):.3f} ± {spread:.3f} | {fmean(too_low):.1%} | {fmean(error):.2%}"
        print(f"| {names[0]} | {names[1]} | {cells} |", flush=True)
        lines.append(
            {"family": family, "features": names[0], "rows": names[1], "accuracy": accuracy, "too_low": too_low}
        )
    return lines


if __name__ == "__main__":
    main()
