"""`task=fit`: train, evaluate, and write a self-explanatory run directory."""

from collections.abc import Mapping, Sequence

from vramcast.dataset_builder.store.splits import Split
from vramcast.models.checkpoint import save_checkpoint
from vramcast.models.comparison import EstimatorReport, text_table
from vramcast.models.example import Example
from vramcast.train.card import card_of, figures_of
from vramcast.train.data import buckets_of
from vramcast.train.experiment import Parts, evaluate, fit_estimator, parts_of, split_of
from vramcast.train.fitting import LightningFitter
from vramcast.train.loggers import make_loggers
from vramcast.train.pictures import draw_all
from vramcast.train.run import METRICS, Run

CHECKPOINT, FIGURES, MEMBERS, SPLIT = "checkpoint", "figures", "members", "split.json"


def fit(run: Run, examples: Sequence[Example]) -> None:
    """Run, or resume, a fit and print its figures."""
    reports = fit_on(run, examples, stored_split(run, examples))
    print(text_table(reports))
    print(f"buckets of {run.configuration.network.bucket_mib} MiB; everything is in {run.directory}")


def stored_split(run: Run, examples: Sequence[Example]) -> Split:
    """Return the split of a run; make and store it the first time."""
    path = run.directory / SPLIT
    if not path.exists():
        split_of(examples, run.configuration).save(path)
    return Split.load(path)


def fit_on(run: Run, examples: Sequence[Example], split: Split, title: str | None = None) -> dict[str, EstimatorReport]:
    """Train, evaluate on the test part, and write checkpoint, pictures and figures."""
    configuration = run.configuration
    parts = parts_of(examples, split)
    buckets = buckets_of(examples, configuration.bucket_bytes)
    fitter = LightningFitter(configuration.trainer, run.directory / MEMBERS, make_loggers(configuration.logger))
    estimator = fit_estimator(configuration, fitter, parts)
    reports = evaluate(configuration, estimator, parts, buckets)
    card = card_of(configuration, parts, title)
    save_checkpoint(estimator, run.directory / CHECKPOINT, figures_of(configuration, reports), card)
    if configuration.task.get("figures"):
        draw_all(run.directory / FIGURES, estimator, parts, buckets, fitter.history)
    write_reports(run, reports, parts)
    return reports


def write_reports(run: Run, reports: Mapping[str, EstimatorReport], parts: Parts) -> None:
    """Write the figures of all estimators as text and as JSON."""
    (run.directory / "metrics.txt").write_text(text_table(reports, families_of=reports) + "\n")
    rows = {name: len(examples) for name, examples in vars(parts).items()}
    run.write_json(METRICS, {"rows": rows, "estimators": {name: report.to_json() for name, report in reports.items()}})
