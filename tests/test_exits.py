"""How commands end: one exit code for each kind of end, and never a traceback for what a user can mend."""

import subprocess
import sys

import pytest

from vramcast.dataset_builder.exit_codes import exit_code
from vramcast.errors import UserError, WorkerError


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("expected a, found b: fix it"), 2, "vramcast fly: expected a, found b: fix it\n"),
        (WorkerError("expected workers, found none"), 1, "vramcast fly: expected workers, found none\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
        (PermissionError(13, "Permission denied", "rows"), 2, "Permission denied: 'rows'; fix that\n"),
    ],
)
def test_each_kind_of_end_has_its_code_and_its_sentence(error, code, said, capsys):
    def work():
        raise error

    assert exit_code("vramcast fly", work) == code
    assert capsys.readouterr().err.endswith(said)


def test_the_code_of_the_work_itself_is_kept():
    assert exit_code("vramcast fly", lambda: None) == 0
    assert exit_code("vramcast fly", lambda: 3) == 3


def test_an_error_of_our_own_keeps_its_traceback():
    def work():
        raise TypeError("a slip")

    with pytest.raises(TypeError, match="a slip"):
        exit_code("vramcast fly", work)


def test_a_pipe_that_is_closed_is_no_error():
    code = (
        "from vramcast.dataset_builder.exit_codes import exit_code\n"
        "raise SystemExit(exit_code('x', lambda: print('row\\n' * 10**6)))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"row\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
