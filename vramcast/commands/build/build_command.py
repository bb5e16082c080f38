"""The command `vramcast build`."""

import sys
from collections.abc import Sequence

from vramcast.commands.build.build_subcommands import COMMANDS, run_command
from vramcast.commands.exit_codes import INTERRUPTED, exit_code, interrupt_on_sigterm
from vramcast.errors import UserError, suggestion

_USAGE = f"""\
usage: vramcast build [KEY=VALUE ...]        build rows, or resume a build
       vramcast build --cfg [KEY=VALUE ...]  print the configuration only
       vramcast build COMMAND ...            one of: {", ".join(COMMANDS)}

  family=mlp|cnn|transformer|template   the default space of that family
  space=NAME        another space, such as gpumemnet_cnn_step1 (files in conf/space)
  sampler=combined|orthogonal|uniform|tbem
  backend=virtual|cuda|static   measure on a simulated GPU, on a real one, or from shapes alone
  backend=swept     simulate each network at many batch sizes and on several devices, as for space=universal
  n=100  seed=0  out=rows/NAME
  executor=local|serial|ray  executor.workers=2  executor.timeout_seconds=900

The same command resumes an interrupted build. Ctrl-C is safe at any time.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a build or one of its sub-commands and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    interrupt_on_sigterm()
    return exit_code("vramcast build", lambda: _dispatch(words))


def _dispatch(words: Sequence[str]) -> int:
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
    from vramcast.dataset_builder.configuration import (
        compose_build,
        make_build,
        make_executor,
        output_directory,
        settings_of,
    )
    from vramcast.dataset_builder.pipeline import COVERAGE_NAME, run_with_bar

    for word in overrides:
        if "=" not in word and not word.startswith("~"):
            hint = suggestion(word, COMMANDS, "see vramcast build --help")
            raise UserError(f"expected KEY=VALUE or one of {sorted(COMMANDS)}, found {word!r}: {hint}")
    config = compose_build(overrides)
    build = make_build(settings_of(config, overrides), output_directory(config))
    executor = make_executor(config, build.backend)
    source = build.sampler.describe(build.space)
    print(f"{build.space.name}: {build.n} configurations from {source}", file=sys.stderr)
    try:
        result = run_with_bar(build, executor)
    except KeyboardInterrupt:
        print(f"interrupted: all finished rows are in {build.out}; the same command resumes the build", file=sys.stderr)
        return INTERRUPTED
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr)
    counts = f"{result.rows} rows ({result.resumed} resumed, {result.rejected} configurations rejected)"
    pairs = f"{result.coverage.pairs_covered:.1%} of all pairs of levels"
    print(f"{counts} in {build.out}; they cover {pairs} ({COVERAGE_NAME})")
    return 0
