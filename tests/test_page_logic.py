"""The pages without a browser: their logic under node, their markup, and the headers with which they are served."""

import asyncio
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from served import serving

from vramcast.collocation.adapters.job_text import job_of_text
from vramcast.collocation.named_job import NamedJob
from vramcast.collocation.service import pages
from vramcast.collocation.service.pages import FILES

DIRECTORY = Path(pages.__file__).parent
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="no node here: apt-get install nodejs")
LORA = {"target": "hf:llama-3-8b", "batch_size": 2, "length": 2048, "precision": "bf16", "lora": True, "rank": 8,
        "quantize": "nf4", "checkpointing": True}  # fmt: skip


def evaluated(expression: str, *values: Any) -> Any:
    """Return the value of an expression with `logic` and `values`."""
    script = f"""
        import * as logic from {json.dumps((DIRECTORY / "logic.js").as_uri())};
        const values = {json.dumps(values)};
        console.log(JSON.stringify({expression}));
    """
    command = [str(NODE), "--input-type=module", "-e", script]
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=30, text=True).stdout)


@needs_node
def test_a_form_is_a_job_that_the_service_accepts_and_its_text_is_the_same_job() -> None:
    forms = [
        {},
        LORA,
        {"side": 160, "precision": "autocast_bf16", "optimizer": "sgd(momentum=0.9)"},
        {"target": "hf:gpt2", "parallel": "fsdp2", "world_size": 8},
        {"target": "hf:vit-base", "mode": "inference"},
    ]
    made = evaluated(
        "values[0].map((form) => { const job = logic.jobOf({...logic.START, ...form});"
        "return [job, logic.textOf(job), logic.isFast(job), logic.commandOf(job, 't4'), logic.yamlOf(job)]; })",
        forms,
    )
    for job, text, _, command, yaml in made:
        assert job_of_text(text) == job
        assert NamedJob.of(job).target == job["target"]
        assert command.startswith(f"vramcast classify {job['target']} --batch-size ")
        assert command.endswith("--device t4")
        assert f'vramcast/job: "{job["target"]} ' in yaml
    assert [fast for _, _, fast, _, _ in made] == [True, True, True, False, False]
    assert made[1][0]["lora"] == "r=8,targets=all-linear"
    assert "--optimizer 'sgd(momentum=0.9)'" in made[2][3]


@needs_node
def test_a_link_holds_the_form_and_refuses_what_is_no_field() -> None:
    form = {**evaluated("logic.START"), **LORA, "device": "h100_80gb"}
    query = evaluated("logic.queryOf(values[0])", form)
    assert evaluated("logic.formOf(values[0])", query) == form
    odd = "target=x&batch_size=NaN&rank=-3&__proto__=1&lora=yes&toString=1&device=" + "a" * 300
    read = evaluated("logic.formOf(values[0])", odd)
    assert read == {**evaluated("logic.START"), "target": "x"}


@needs_node
def test_names_are_found_by_words_and_amounts_are_readable() -> None:
    names = ["timm:resnet50", "timm:wide_resnet50_2", "hf:gpt2", "hf:gpt2-large", "timm:seresnet50"]
    assert evaluated("logic.matches(values[0], 'resnet50')", names)[0] == "timm:resnet50"
    assert evaluated("logic.matches(values[0], 'hf gpt')", names) == ["hf:gpt2", "hf:gpt2-large"]
    assert evaluated("logic.matches(values[0], '')", names) == ["timm:resnet50", "hf:gpt2"]
    assert evaluated("[0.5, 200, 2048, 204800].map(logic.gib)") == ["0.5 MiB", "200 MiB", "2.0 GiB", "200 GiB"]
    assert evaluated("[0, 0.1234, 1].map(logic.share)") == ["< 0.1 %", "12 %", "> 99.9 %"]
    assert evaluated("logic.placeOf(logic.BATCHES, 200)") == evaluated("logic.BATCHES.indexOf(192)")
    change = evaluated("logic.partsOfChange('a batch of 8 (--batch-size 8)')")
    assert change == {"words": "a batch of 8", "flags": "--batch-size 8"}


@needs_node
def test_the_picture_keeps_the_peak_and_stays_in_its_box() -> None:
    count, peak = 1000, 900
    uses = {"parameters": [100] * count, "activations": [peak if at == 517 else 50 for at in range(count)]}
    line = {"uses": uses, "reserved_bytes": [1200] * count, "context_bytes": 10, "capacity_bytes": 1500}
    stack = evaluated("logic.stackOf(values[0], 600, 200)", line)
    assert stack["peak"] == 1210
    assert [area["name"] for area in stack["areas"]] == ["context", "parameters", "activations"]
    assert stack["areas"][2]["most"] == peak
    numbers = [float(item) for area in stack["areas"] for item in re.findall(r"[\d.]+", area["path"])]
    assert min(numbers) >= 0
    assert max(numbers) <= 600
    assert 0 < stack["limit"] < 20
    runs = [
        {"safe_mib": 2000, "peak_mib": 2500},
        {"safe_mib": 2000, "peak_mib": 900},
        {"safe_mib": None, "peak_mib": 5},
    ]
    points = evaluated("logic.scatterOf(values[0], 300).points", runs)
    assert [point["low"] for point in points] == [True, False]
    assert points[0]["y"] < 300 - points[0]["x"] < points[1]["y"]


class Markup(HTMLParser):
    """Collects what a page's markup refers to and what labels it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.fields: list[dict[str, str | None]] = []
        self.labelled: set[str | None] = set()
        self.references: list[str] = []
        self.inline: list[str] = []
        self._in_label = False
        self.feed((DIRECTORY / page).read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        self.inline += [name for name in values if name == "style" or name.startswith("on")]
        self.inline += [tag] if tag == "style" or (tag == "script" and "src" not in values) else []
        self.references += [text for name in ("src", "href") if (text := values.get(name)) is not None]
        if tag == "label":
            self.labelled.add(values.get("for"))
            self._in_label = True
        if tag in ("input", "select", "textarea"):
            named = self._in_label or "aria-label" in values
            self.fields.append({**values, "named": "yes" if named else None})

    def handle_endtag(self, tag: str) -> None:
        if tag == "label":
            self._in_label = False


@pytest.mark.parametrize(("page", "script"), [("index.html", "estimate.js"), ("operations.html", "operations.js")])
def test_the_markup_has_labels_and_no_inline_code_and_what_its_script_uses(page: str, script: str) -> None:
    markup = Markup(page)
    assert markup.inline == []
    assert all(not text.startswith(("http:", "https:", "//")) for text in markup.references)
    for field in markup.fields:
        assert field["named"] or field["id"] in markup.labelled, field
    code = "".join((DIRECTORY / name).read_text(encoding="utf-8") for name in (script, "shared.js"))
    assert set(re.findall(r'by\("([\w-]+)"\)', code)) <= markup.ids
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert unsafe not in code


def test_the_pages_are_served_under_a_strict_policy_and_need_no_token() -> None:
    from vramcast.collocation.service.settings import Settings

    async def scenario() -> None:
        async with serving(Settings(token="secret")) as service:
            for path in ("/", "/operations", *(f"/pages/{name}" for name in FILES)):
                response = await service.get(path)
                assert response.status == 200
                policy = response.headers["content-security-policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert response.headers["x-content-type-options"] == "nosniff"
            for path in ("/pages/__init__.py", "/pages/index.html", "/pages/..%2Fapp.py"):
                assert (await service.get(path)).status == 404
            assert (await service.get("/v1/operations")).status == 401

    asyncio.run(scenario())


def test_operators_see_runs_against_their_forecasts() -> None:
    spec = {"family": "mlp", "network": {"arch": "pyramid", "input_features": 64, "output_features": 2, "depth": 2}}
    small, large = ({"spec": {**spec, "training": {"batch_size": size}}, "device": "t4"} for size in (8, 16))

    async def scenario() -> None:
        async with serving() as service:
            await service.post("/v1/observations", {"job": large, "peak_mib": 600})
            answer = (await service.post("/v1/classify", small)).json
            for factor, user in ((1.5, "ana"), (0.5, "ana"), (0.5, "ben")):
                peak_mib = answer["safe_mib"] * factor
                await service.post("/v1/observations", {"job": small, "peak_mib": peak_mib, "user": user})
            seen = (await service.get("/v1/operations")).json
            assert (seen["status"], seen["observed_jobs"], seen["forecast_runs"], seen["too_low"]) == ("ready", 2, 3, 1)
            assert [(item["name"], item["runs"], item["too_low"]) for item in seen["users"]] == [
                ("ana", 2, 1), ("ben", 1, 0), ("not stated", 1, 0),
            ]  # fmt: skip
            assert seen["runs"][0]["user"] == "ben", "the latest first"
            assert seen["runs"][-1]["safe_mib"] is None
            assert seen["networks"][0]["used_share"] == pytest.approx(0.5, rel=1e-3)
            assert seen["queue"] == {"traces": 0, "searches": 0, "bodies": 0, "requests": 1}

    asyncio.run(scenario())
