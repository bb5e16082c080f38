"""Sub-commands of `vramcast build` that work on existing builds: one function each."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from vramcast.commands.exit_codes import CommandParser
from vramcast.dataset_builder.rows import Row
from vramcast.dataset_builder.store import iter_records, locate, read_header, read_journal, repair
from vramcast.defaults import BUCKET_MIB
from vramcast.errors import UserError, check_count
from vramcast.jobs.spec import Spec


def status(arguments: argparse.Namespace) -> None:
    """Print counts by family, status and bucket, and why configurations were rejected."""
    from vramcast.dataset_builder.store.summary import summarise

    check_count("--bucket-mib", arguments.bucket_mib)
    summary = summarise(iter_records(arguments.directory, _note), arguments.bucket_mib)
    print(json.dumps(summary.to_json()) if arguments.json else summary.to_text())


def emit_script(arguments: argparse.Namespace) -> None:
    """Write a row as a training script that needs only torch, or Keras."""
    from vramcast.jobs.emit import emit
    from vramcast.jobs.emit_keras import emit_keras
    from vramcast.jobs.filters import Rejected, check

    spec = _find_spec(arguments.row, arguments.source)
    text = emit_keras(spec) if arguments.framework == "keras" else emit(spec)
    verdict = check(spec)
    if isinstance(verdict, Rejected):
        _note(f"this training fails when it runs: {verdict.reason}")
    if arguments.output:
        Path(arguments.output).write_text(text)
    else:
        print(text, end="")


def layers(arguments: argparse.Namespace) -> None:
    """Print the layer table of a row and its static estimate."""
    from vramcast.jobs.analysis.static import static_estimate
    from vramcast.jobs.filters import Rejected, check

    spec = _find_spec(arguments.row, arguments.source)
    table = check(spec)
    if isinstance(table, Rejected):
        raise UserError(f"expected a network that can be trained, found one that is refused: {table.reason}; change it")
    print(f"{'layer':32} {'kind':24} {'output':20} {'activations':>14} {'parameters':>14}")
    for record in table.layers:
        shape = "x".join(map(str, record.output_shape))
        print(f"{record.name:32} {record.kind:24} {shape:20} {record.activations:14,} {record.parameters:14,}")
    estimate = static_estimate(spec.training, table)
    print(f"{table.parameters:,} parameters, {table.activations:,} activations a sample")
    print(f"static estimate {estimate.total_bytes / 2**20:,.1f} MiB at batch size {spec.training.batch_size}")


def specification(arguments: argparse.Namespace) -> None:
    """Print the shape specification that the filter evaluates."""
    from vramcast.jobs.shape_rules import listing

    print(listing())


def coverage(arguments: argparse.Namespace) -> None:
    """Print how evenly the rows of a build cover its space, for each factor and each pair of factors."""
    from vramcast.dataset_builder.configuration import make_build
    from vramcast.dataset_builder.pipeline import find_assignments, report_coverage
    from vramcast.dataset_builder.samplers.coverage import coverage as cover

    check_count("--pairs", arguments.pairs, least=0)
    settings = read_header(arguments.directory).build
    if not settings or "space" not in settings:
        raise UserError(
            f"expected a build by a sampler in {arguments.directory}, found imported or repaired rows: name another"
        )
    build = make_build(settings, Path(arguments.directory))
    ids = {record.spec.id for record in iter_records(arguments.directory, _note) if isinstance(record, Row)}
    print(report_coverage(build, cover(build.space, find_assignments(build, ids)), arguments.pairs or None), end="")


def import_rows(arguments: argparse.Namespace) -> None:
    """Import a table of public measurements as rows."""
    from vramcast.dataset_builder.store.importers import import_file

    print(import_file(Path(arguments.file), Path(arguments.out), arguments.device))


def view(arguments: argparse.Namespace) -> None:
    """Write the rows as a flat table, CSV or Parquet by the file's suffix."""
    from vramcast.dataset_builder.store.views import to_frame, write_view

    rows = [record for record in iter_records(arguments.directory, _note) if isinstance(record, Row)]
    write_view(to_frame(rows), arguments.file)
    print(f"{len(rows)} rows written to {arguments.file}")


def split(arguments: argparse.Namespace) -> None:
    """Split the configurations of a build at random and write the split beside the rows."""
    from vramcast.dataset_builder.store.splits import make_split, make_wide_split

    directory = locate(arguments.directory).parent
    specs = {row.spec.group: row.spec for row in read_journal(arguments.directory).rows}
    path = Path(arguments.output or directory / "split.json")
    fractions = _fractions(arguments.fractions)
    if arguments.by == "architecture":
        from vramcast.jobs.families.architecture_names import architecture_of

        units = {group: architecture_of(spec) for group, spec in specs.items()}
        parts = make_wide_split(units, fractions, arguments.seed)
    else:
        parts = make_split(specs, fractions, arguments.seed)
    parts.save(path)
    print(f"{', '.join(f'{name} {len(part)}' for name, part in parts.parts.items())} configurations, written to {path}")


def repair_journal(arguments: argparse.Namespace) -> None:
    """Move unreadable lines out of a journal."""
    print(repair(arguments.directory))


def _fractions(text: str) -> dict[str, float]:
    try:
        pairs = [(name.strip(), float(share)) for name, share in (item.split("=") for item in text.split(","))]
    except ValueError:
        pairs = []
    if not pairs or not all(name for name, _ in pairs) or len(dict(pairs)) < len(pairs):
        raise UserError(f"expected --fractions such as train=0.8,test=0.2, found {text!r}: write it like that")
    return dict(pairs)


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _find_spec(row: str, source: str | None) -> Spec:
    """Return a spec by GPUMemNet name, by file, or by the beginning of its id in a build directory."""
    from vramcast.jobs.families.gpumemnet import spec_of_filename
    from vramcast.jobs.targets import GPUMEMNET

    if row.startswith(GPUMEMNET):
        return spec_of_filename(row.removeprefix(GPUMEMNET))
    if row.endswith(".json"):
        return _read_spec(Path(row))
    if source is None:
        raise UserError(f"expected gpumemnet:NAME, FILE.json, or an id with --from DIR, found {row!r}: add --from DIR")
    specs = {record.spec.id: record.spec for record in iter_records(source, _note) if record.spec.id.startswith(row)}
    if len(specs) != 1:
        raise UserError(
            f"expected one row whose id begins with {row!r} in {source}, found {len(specs)}: give more of the id"
        )
    return next(iter(specs.values()))


def _read_spec(path: Path) -> Spec:
    from vramcast.jobs.families import make_spec

    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"expected a spec as JSON in {path}, found: {error}; name another file") from error
    spec = Spec.from_json(values)
    return make_spec(spec.family, spec.network, spec.training)  # drops defaults that a user spelled out


Command = Callable[[argparse.Namespace], int | None]
"""A sub-command; returns the exit code, None for 0."""
COMMANDS: dict[str, Command] = {
    "status": status,
    "emit": emit_script,
    "layers": layers,
    "coverage": coverage,
    "view": view,
    "split": split,
    "import": import_rows,
    "specification": specification,
    "repair": repair_journal,
}


def make_parser() -> CommandParser:
    """Return the parser of all sub-commands."""
    parser = CommandParser(prog="vramcast build")
    parsers = parser.add_subparsers(required=True)
    subs = {
        name: parsers.add_parser(name, help=command.__doc__, description=command.__doc__)
        for name, command in COMMANDS.items()
    }
    for name, command in COMMANDS.items():
        subs[name].set_defaults(command=command)
    for name in ("status", "coverage", "view", "split", "repair"):
        subs[name].add_argument("directory", help="the out=DIR of a build")
    subs["coverage"].add_argument("--pairs", type=int, default=10, help="number of worst pairs to show, 0 for all")
    subs["status"].add_argument("--bucket-mib", type=int, default=BUCKET_MIB)
    subs["status"].add_argument("--json", action="store_true")
    for name in ("emit", "layers"):
        subs[name].add_argument("row", help="the beginning of a row's id, gpumemnet:NAME, or a spec as FILE.json")
        subs[name].add_argument("--from", dest="source", metavar="DIR", help="the build directory that has the row")
    subs["emit"].add_argument("-o", "--output", metavar="FILE")
    subs["emit"].add_argument(
        "--framework", choices=("torch", "keras"), default="torch", help="keras: its torch backend"
    )
    subs["view"].add_argument("file", help="FILE.csv or FILE.parquet")
    subs["split"].add_argument("--fractions", default="train=0.8,validation=0.1,test=0.1")
    subs["split"].add_argument("--seed", type=int, default=0)
    subs["split"].add_argument(
        "--by", choices=("network", "architecture"), default="network", help="what stays in one part"
    )
    subs["split"].add_argument("-o", "--output", metavar="FILE", help="default: split.json in the build directory")
    subs["import"].add_argument("file", help="a CSV table of GPUMemNet, of timm networks or of real networks")
    subs["import"].add_argument("--out", required=True, metavar="DIR")
    subs["import"].add_argument("--device", help="the profile whose rows to import, if a table has several")
    return parser


def run_command(argv: Sequence[str]) -> int:
    """Run one sub-command and return its exit code."""
    arguments = make_parser().parse_args(argv)
    return arguments.command(arguments) or 0
