"""The notebook runs from its first cell to its last."""

import json
from pathlib import Path

NOTEBOOK = Path(__file__).parent.parent / "docs" / "classify.ipynb"


def test_the_notebook_shows_a_table_and_a_picture(capsys):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []  # what is shown must come from running it
            exec("".join(cell["source"]), names)
    assert "fits" in capsys.readouterr().out
    assert list(names["table"]["verdict"]) == sorted(
        names["table"]["verdict"], key=["fits", "tight", "does not fit"].index
    )
    assert names["picture"].stat().st_size > 10_000
