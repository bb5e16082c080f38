"""`python -m dataset_builder`, which is `vramcast build`."""

import sys
import textwrap
from collections.abc import Sequence
from shutil import get_terminal_size

from vramcast.dataset_builder.build_subcommands import COMMANDS, run_command
from vramcast.dataset_builder.exit_codes import INTERRUPTED, exit_code, interrupt_on_sigterm
from vramcast.errors import UserError, suggestion

_USAGE = f"""\
usage: vramcast build [KEY=VALUE ...]        build rows, or go on with a build
       vramcast build --cfg [KEY=VALUE ...]  print the configuration instead
       vramcast build COMMAND ...            one of: {", ".join(COMMANDS)}

  family=mlp|cnn|transformer|template   the default space of that family
  space=NAME        another space, such as gpumemnet_cnn_step1 (files in conf/space)
  sampler=combined|orthogonal|uniform|tbem
  backend=virtual|cuda|static   what measures a row: a simulated GPU, a real one, shapes alone
  n=100  seed=0  out=rows/NAME
  executor=local|serial|ray  executor.workers=2  executor.timeout_seconds=900

The same command resumes a build that was stopped. Ctrl-C is safe at any time.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a build or one of its sub-commands; the return value is the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    interrupt_on_sigterm()
    return exit_code("vramcast build", lambda: _carry_out(words))


def _carry_out(words: Sequence[str]) -> int:
    if words and words[0] in COMMANDS:
        return run_command(words)
    if {"-h", "--help"} & set(words):
        print(_USAGE, end="")
    elif "--cfg" in words:
        _show([word for word in words if word != "--cfg"])
    else:
        return _build(words)
    return 0


def _show(overrides: Sequence[str]) -> None:
    from omegaconf import OmegaConf

    from vramcast.dataset_builder.configuration import compose_build

    print(OmegaConf.to_yaml(compose_build(overrides)), end="")


def _build(overrides: Sequence[str]) -> int:
    from vramcast.dataset_builder.configuration import compose_build, make_build, make_executor, out_of, settings_of
    from vramcast.dataset_builder.pipeline import COVERAGE_NAME, run_with_bar

    for word in overrides:
        if "=" not in word and not word.startswith("~"):
            hint = suggestion(word, COMMANDS, "see vramcast build --help")
            raise UserError(f"expected KEY=VALUE or one of {sorted(COMMANDS)}, found {word!r}: {hint}")
    config = compose_build(overrides)
    build = make_build(settings_of(config, overrides), out_of(config))
    executor = make_executor(config, build.backend)
    told = f"{build.space.name}: {build.sampler.describe(build.space)}"
    print(textwrap.fill(told, get_terminal_size().columns, subsequent_indent="  "), file=sys.stderr)
    try:
        result = run_with_bar(build, executor)
    except KeyboardInterrupt:
        print(f"stopped; the rows so far are safe in {build.out}, and the same command goes on", file=sys.stderr)
        return INTERRUPTED
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr)
    counts = f"{result.rows} rows ({result.resumed} from before), {result.rejected} rejected"
    pairs = f"{result.coverage.pairs_covered:.1%} of all pairs of levels occur"
    print(f"{counts}, in {build.out}; {pairs}: see {COVERAGE_NAME}")
    return 0
