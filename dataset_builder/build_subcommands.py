"""What can be done with builds besides building: one function a sub-command, plain argparse."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from vramcast.dataset_builder.defaults import BUCKET_MIB
from vramcast.dataset_builder.schema import Row, Spec
from vramcast.dataset_builder.store import iter_records, locate, read_header, read_journal, repair
from vramcast.errors import UserError, check_count


def status(arguments: argparse.Namespace) -> None:
    """Counts by family, status and bucket, and why configurations were rejected."""
    from vramcast.dataset_builder.store.summary import summarise

    check_count("--bucket-mib", arguments.bucket_mib)
    found = summarise(iter_records(arguments.directory, _note), arguments.bucket_mib)
    print(json.dumps(found.to_json()) if arguments.json else found.to_text())


def emit_script(arguments: argparse.Namespace) -> None:
    """The row as a script that trains itself."""
    from vramcast.dataset_builder.emit import emit
    from vramcast.dataset_builder.filters import Rejected, check

    spec = _find_spec(arguments.row, arguments.source)
    text, verdict = emit(spec), check(spec)
    if isinstance(verdict, Rejected):
        _note(f"this training cannot run to its end: {verdict.reason}")
    if arguments.output:
        Path(arguments.output).write_text(text)
    else:
        print(text, end="")


def layers(arguments: argparse.Namespace) -> None:
    """The layer table of a row and its static estimate."""
    from vramcast.dataset_builder.analysis.static import static_estimate
    from vramcast.dataset_builder.filters import Rejected, check

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
    """The shape specification that the filter evaluates."""
    from vramcast.dataset_builder.specification import listing

    print(listing())


def coverage(arguments: argparse.Namespace) -> None:
    """How evenly the rows of a build cover its space: each factor and each pair of factors."""
    from vramcast.dataset_builder.configuration import make_build
    from vramcast.dataset_builder.pipeline import selected
    from vramcast.dataset_builder.samplers.coverage import coverage as cover
    from vramcast.dataset_builder.samplers.coverage import report

    check_count("--pairs", arguments.pairs, least=0)
    settings = read_header(arguments.directory).build
    if not settings or "space" not in settings:
        raise UserError(
            f"expected a build by a sampler in {arguments.directory}, found imported or repaired rows: name another"
        )
    build = make_build(settings, Path(arguments.directory))
    ids = {record.spec.id for record in iter_records(arguments.directory, _note) if isinstance(record, Row)}
    print(report(cover(build.space, selected(build, ids)), arguments.pairs or None), end="")


def import_rows(arguments: argparse.Namespace) -> None:
    """Public measurements as rows of a journal."""
    from vramcast.dataset_builder.store.importers import import_file

    print(import_file(Path(arguments.file), Path(arguments.out), arguments.device))


def view(arguments: argparse.Namespace) -> None:
    """The rows as a flat table, CSV or Parquet by the file's ending."""
    from vramcast.dataset_builder.store.views import to_frame, write_view

    rows = [record for record in iter_records(arguments.directory, _note) if isinstance(record, Row)]
    write_view(to_frame(rows), arguments.file)
    print(f"{len(rows)} rows written to {arguments.file}")


def split(arguments: argparse.Namespace) -> None:
    """A split by configuration, stored beside the rows."""
    from vramcast.dataset_builder.store.splits import make_split

    directory = locate(arguments.directory).parent
    groups = [row.spec.group for row in read_journal(arguments.directory).rows]
    path = Path(arguments.output or directory / "split.json")
    found = make_split(groups, _fractions(arguments.fractions), arguments.seed)
    found.save(path)
    print(f"{', '.join(f'{name} {len(part)}' for name, part in found.parts.items())} configurations, written to {path}")


def repair_journal(arguments: argparse.Namespace) -> None:
    """Lines that cannot be read are moved out of a journal."""
    print(repair(arguments.directory))


def verify_gpu(arguments: argparse.Namespace) -> int:
    """Twenty golden specs on a card and on the virtual GPU, with a verdict: exit code 0 if they agree, 1 if not."""
    from vramcast.dataset_builder.configuration import make_virtual
    from vramcast.dataset_builder.devices import device_for, load_device
    from vramcast.dataset_builder.verification import compare, measure_golden, read_recorded

    if arguments.recorded and (arguments.record or arguments.cap or arguments.gpu != "auto"):
        raise UserError("expected --recorded alone, found words for a card beside it: drop them, or --recorded")
    measured = read_recorded(Path(arguments.recorded)) if arguments.recorded else _measure_on_card(arguments)
    profile = arguments.device or device_for(measured[0].provenance.device, _note)
    virtual = measure_golden(make_virtual(load_device(profile)), lambda _: None)
    found = compare(virtual, measured, profile)
    print(json.dumps(found.to_json()) if arguments.json else found.to_text())
    return 0 if found.passed else 1


def calibrate_device(arguments: argparse.Namespace) -> None:
    """Fit a device profile to rows measured on the card: about thirty that are measured now, or those of a file."""
    from vramcast.dataset_builder import calibrate_command as calibrating
    from vramcast.dataset_builder.devices import CONF, DEFAULT_DEVICE, load_profile
    from vramcast.dataset_builder.store.splits import in_half
    from vramcast.virtual_gpu.calibration import calibrate

    key, _, name = arguments.device.partition("=")
    if key != "device" or not name.isidentifier():
        raise UserError(f"expected device=NAME, found {arguments.device!r}: name the profile like that")
    check_count("--rows", arguments.rows)
    check_count("--test", arguments.test, least=0)
    known = (CONF / "device" / f"{name}.yaml").exists()
    start = load_profile(arguments.start or (name if known else DEFAULT_DEVICE))
    path = Path(arguments.output or CONF / "device" / f"{name}.yaml")
    if path.exists() and not arguments.force:
        raise UserError(f"expected no profile at {path}, found one: choose another with -o, or replace it with --force")
    if arguments.from_rows:
        rows, source = calibrating.load_rows(Path(arguments.from_rows)), Path(arguments.from_rows).name
    else:
        rows, source = calibrating.measure_rows(Path("rows/calibrate") / name, [f"device={start.name}"]), "its own"
    rows = [row for row in rows if in_half(row.spec, arguments.half)]
    chosen, rest = calibrating.choose(rows, arguments.rows, arguments.seed)
    begin = calibrating.from_scratch(start) if arguments.from_scratch else start
    found = calibrate(begin, calibrating.samples_of(chosen, start.compute_capability))
    calibrating.write_profile(path, found, name, source)
    print(f"{path}: fitted to {found.rows} rows, median error {found.median_error_before:.2%} -> ", end="")
    print(f"{found.median_error_after:.2%}; {'; '.join(found.changed) or 'nothing changed'}")
    if arguments.test and rest:
        samples = calibrating.samples_of(rest[: arguments.test], start.compute_capability)
        for label, profile in (("before", begin), ("fitted", found.profile), (f"profile {start.name}", start)):
            print(f"on {len(samples)} other rows, {label}: median error {calibrating.error_on(profile, samples):.2%}")


def _measure_on_card(arguments: argparse.Namespace) -> list[Row]:
    """The golden specs on one GPU; with --record also what was measured before an interruption is kept."""
    from vramcast.dataset_builder.configuration import make_cuda, make_virtual
    from vramcast.dataset_builder.devices import device_for, load_device
    from vramcast.dataset_builder.verification import measure_golden, write_recorded

    settings = {"gpu": arguments.gpu, "on_busy": arguments.on_busy}
    first = make_cuda(settings).lanes()[0]
    estimator = None
    if arguments.cap:
        estimator = make_virtual(load_device(arguments.device or device_for(first.device, _ignore)))
    rows: list[Row] = []

    def note(row: Row) -> None:
        rows.append(row)
        _note(f"{len(rows)}: {row.measurement.status} after {row.measurement.seconds or 0:.1f} s")

    try:
        measure_golden(make_cuda({**settings, "gpu": first.settings.gpu}, estimator), note)
    finally:
        if arguments.record and rows:
            write_recorded(Path(arguments.record), rows)
    return rows


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


def _ignore(text: str) -> None:
    """For what is noted at another place."""


def _find_spec(row: str, source: str | None) -> Spec:
    """A spec by GPUMemNet name, by file, or by the beginning of its id in a build directory."""
    from vramcast.dataset_builder.families.gpumemnet import spec_of_filename
    from vramcast.dataset_builder.jobs.targets import GPUMEMNET

    if row.startswith(GPUMEMNET):
        return spec_of_filename(row.removeprefix(GPUMEMNET))
    if row.endswith(".json"):
        return _read_spec(Path(row))
    if source is None:
        raise UserError(f"expected gpumemnet:NAME, FILE.json, or an id with --from DIR, found {row!r}: add --from DIR")
    found = {r.spec.id: r.spec for r in iter_records(source, _note) if r.spec.id.startswith(row)}
    if len(found) != 1:
        raise UserError(
            f"expected one row whose id begins with {row!r} in {source}, found {len(found)}: give more of the id"
        )
    return next(iter(found.values()))


def _read_spec(path: Path) -> Spec:
    from vramcast.dataset_builder.families import make_spec

    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"expected a spec as JSON in {path}, found: {error}; name another file") from error
    spec = Spec.from_json(values)
    return make_spec(spec.family, spec.network, spec.training)  # people write defaults down


Command = Callable[[argparse.Namespace], int | None]
"""Returns the exit code, None for 0."""
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
    "calibrate": calibrate_device,
    "verify-gpu": verify_gpu,
}


class _Parser(argparse.ArgumentParser):
    """Argparse, with bad words answered like any other bad input."""

    def error(self, message: str) -> NoReturn:
        """One sentence in place of the usage."""
        raise UserError(f"expected the words of '{self.prog}', found: {message}; see {self.prog} --help")


def run_command(argv: Sequence[str]) -> int:
    """Parse and carry out one sub-command; the return value is the exit code."""
    parser = _Parser(prog="vramcast build")
    parsers = parser.add_subparsers(required=True)
    subs = {
        name: parsers.add_parser(name, help=command.__doc__, description=command.__doc__)
        for name, command in COMMANDS.items()
    }
    for name, command in COMMANDS.items():
        subs[name].set_defaults(command=command)
    for name in ("status", "coverage", "view", "split", "repair"):
        subs[name].add_argument("directory", help="the out=DIR of a build")
    subs["coverage"].add_argument("--pairs", type=int, default=10, help="how many of the worst to show, 0 for all")
    subs["status"].add_argument("--bucket-mib", type=int, default=BUCKET_MIB)
    subs["status"].add_argument("--json", action="store_true")
    for name in ("emit", "layers"):
        subs[name].add_argument("row", help="the beginning of a row's id, gpumemnet:NAME, or a spec as FILE.json")
        subs[name].add_argument("--from", dest="source", metavar="DIR", help="the build directory that has the row")
    subs["emit"].add_argument("-o", "--output", metavar="FILE")
    subs["view"].add_argument("file", help="FILE.csv or FILE.parquet")
    subs["split"].add_argument("--fractions", default="train=0.8,validation=0.1,test=0.1")
    subs["split"].add_argument("--seed", type=int, default=0)
    subs["split"].add_argument("-o", "--output", metavar="FILE", help="default: split.json in the build directory")
    subs["import"].add_argument("file", help="a CSV of GPUMemNet's sets, of timm networks or of real ones")
    subs["import"].add_argument("--out", required=True, metavar="DIR")
    subs["import"].add_argument("--device", help="of a table of several stacks, the profile whose figures to take")
    _add_verify_gpu(subs["verify-gpu"])
    _add_calibrate(subs["calibrate"])
    arguments = parser.parse_args(argv)
    return arguments.command(arguments) or 0


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    from vramcast.dataset_builder.devices import DEFAULT_DEVICE

    parser.add_argument("device", metavar="device=NAME", help="the profile to write")
    parser.add_argument("--from-rows", metavar="PATH", help="measured rows: a build directory or a public table")
    parser.add_argument("--rows", type=int, default=40, help="how many of them to fit to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--half", choices=("even", "odd"), help="of the networks, to test on the other half")
    parser.add_argument("--start", metavar="PROFILE", help=f"where to start from; default: NAME, else {DEFAULT_DEVICE}")
    parser.add_argument("--from-scratch", action="store_true", help="forget the constants of the profile to start from")
    parser.add_argument("--test", type=int, default=0, metavar="N", help="also tell the error on so many other rows")
    parser.add_argument("-o", "--output", metavar="FILE", help="default: conf/device/NAME.yaml")
    parser.add_argument("--force", action="store_true", help="replace a profile of that name")


def _add_verify_gpu(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", default="auto", help="a UUID, its beginning, or an index of nvidia-smi")
    parser.add_argument("--on-busy", choices=("refuse", "record"), default="refuse", help="if someone else runs there")
    parser.add_argument("--device", metavar="NAME", help="the profile of the virtual GPU; default: by the card's name")
    parser.add_argument("--cap", action="store_true", help="run each again under its estimate as the allocator's limit")
    parser.add_argument("--record", metavar="FILE", help="keep what was measured, to send it or to compare it again")
    parser.add_argument("--recorded", metavar="FILE", help="take what --record kept in place of a card")
    parser.add_argument("--json", action="store_true")
