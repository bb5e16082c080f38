"""Exit codes of commands; no traceback for errors that a user can fix."""

import subprocess
import sys

import pytest

from vramcast.commands.exit_codes import exit_code
from vramcast.errors import UserError, WorkerError


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("expected a, found b: fix it"), 2, "vramcast fly: expected a, found b: fix it\n"),
        (WorkerError("expected workers, found none"), 1, "vramcast fly: expected workers, found none\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
        (PermissionError(13, "Permission denied", "rows"), 2, "Permission denied: 'rows'; fix that\n"),
    ],
)
def test_each_error_has_its_code_and_its_message(error, code, message, capsys):
    def work():
        raise error

    assert exit_code("vramcast fly", work) == code
    assert capsys.readouterr().err.endswith(message)


def test_the_code_of_the_work_is_returned():
    assert exit_code("vramcast fly", lambda: None) == 0
    assert exit_code("vramcast fly", lambda: 3) == 3


def test_a_bug_keeps_its_traceback():
    def work():
        raise TypeError("a slip")

    with pytest.raises(TypeError, match="a slip"):
        exit_code("vramcast fly", work)


def test_a_closed_pipe_is_not_an_error():
    code = (
        "from vramcast.commands.exit_codes import exit_code\n"
        "raise SystemExit(exit_code('x', lambda: print('row\\n' * 10**6)))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"row\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
