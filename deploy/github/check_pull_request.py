"""Check the training jobs of a pull request with vramcast, and comment it with their memory. Standard library alone.

Reads the variables of action.yml and of GitHub Actions. Exits with the highest exit code of the checks.
"""

import json
import os
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MARK = "<!-- vramcast check -->"
"""The first line of the comment, by which the next run finds it."""
_PAGE = 100
_MOST_PAGES = 30
_TIMEOUT_SECONDS = 30
_MOST_ERROR = 500


def main() -> int:
    """Check all jobs, write the summary and the comment, and return the exit code."""
    jobs = [shlex.split(line) for line in os.environ["VRAMCAST_JOBS"].splitlines() if line.strip()]
    if not jobs:
        print("::error::expected the arguments of vramcast check in `jobs`, one job a line, found none: add them")
        return 2
    baseline = os.environ.get("VRAMCAST_BASELINE", "")
    event = json.loads(Path(os.environ["GITHUB_EVENT_PATH"]).read_text(encoding="utf-8"))
    pull_request = event.get("pull_request")
    base = base_figures(baseline, pull_request["base"]["sha"]) if baseline and pull_request else None
    results = [check(words, baseline) for words in jobs]
    text = comment(results, base)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(summary).open("a", encoding="utf-8") as file:
            file.write(f"{text}\n")
    if pull_request and os.environ.get("VRAMCAST_COMMENT", "true") == "true":
        publish(text, int(pull_request["number"]))
    return max(int(result["code"]) for result in results)


def check(words: Sequence[str], baseline: str) -> dict[str, Any]:
    """Run `vramcast check` for one job; return its JSON with the exit code, or the error."""
    command = ["vramcast", "check", "--json", *(["--baseline", baseline] if baseline else []), *words]
    print(f"$ {shlex.join(command)}", flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "VRAMCAST_TOKEN"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    print(done.stdout, done.stderr, sep="", flush=True)
    lines = done.stdout.splitlines()
    if not lines or not lines[-1].startswith("{"):
        last = done.stderr.strip().splitlines()[-1:] or ["no answer"]
        return {"job": shlex.join(words), "code": done.returncode or 1, "error": last[0][:_MOST_ERROR]}
    return {**json.loads(lines[-1]), "code": done.returncode}


def base_figures(baseline: str, commit: str) -> Mapping[str, Any] | None:
    """Return the jobs of the baseline file on the base branch; None where there is no such file."""
    shown = ["git", "show", f"{commit}:./{baseline}"]
    done = subprocess.run(shown, capture_output=True, check=False)
    if done.returncode:  # the checkout has the last commit alone
        subprocess.run(["git", "fetch", "--quiet", "--depth=1", "origin", commit], capture_output=True, check=False)
        done = subprocess.run(shown, capture_output=True, check=False)
    try:
        jobs: Mapping[str, Any] = json.loads(done.stdout)["jobs"]
    except (ValueError, KeyError, TypeError):
        return None
    return jobs


def comment(results: Sequence[Mapping[str, Any]], base: Mapping[str, Any] | None) -> str:
    """Return the comment as Markdown."""
    lines = [MARK, "**GPU memory of the training**, simulated by `vramcast check`", ""]
    lines += ["| job | device | safe to reserve | before | change | |", "| --- | --- | ---: | ---: | ---: | --- |"]
    lines += [row(result, before(result, base)) for result in results]
    return "\n".join(lines)


def before(result: Mapping[str, Any], base: Mapping[str, Any] | None) -> float | None:
    """Return the safe figure of a job on the base branch, or in the baseline of the pull request if that has none."""
    entry = (base or {}).get(result["job"])
    if isinstance(entry, dict) and isinstance(entry.get("safe_mib"), int | float):
        return float(entry["safe_mib"])
    return result.get("baseline_mib")


def row(result: Mapping[str, Any], earlier: float | None) -> str:
    """Return the row of a job."""
    if "error" in result:
        return f"| {code(result['job'])} | | | | | ❌ {plain(result['error'])} |"
    safe = result["safe_mib"]
    change = f"{safe - earlier:+,.0f} MiB ({safe / earlier - 1:+.1%})" if earlier else ""
    verdict = "✅ fits" if result["passed"] else f"❌ {plain('; '.join(result['failures']))}"
    if result["passed"] and result["code"]:
        verdict = "❌ the script failed"
    shown = f"{earlier:,.0f} MiB" if earlier else ""
    cells = (code(result["job"]), plain(result["answer"]["device"]), f"{safe:,.0f} MiB", shown, change, verdict)
    return f"| {' | '.join(cells)} |"


def code(text: str) -> str:
    """Return a text as code inside of a table: HTML, because backticks in it would end Markdown's."""
    return f"<code>{plain(text)}</code>"


def plain(text: str) -> str:
    """Return a text that Markdown, tables and mentions leave alone."""
    return "".join(item if item.isalnum() or item in " .,-/=" else f"&#{ord(item)};" for item in " ".join(text.split()))


def publish(text: str, number: int) -> None:
    """Write the comment, or change that of an earlier run; a token that may not do so fails no check."""
    issues = f"/repos/{os.environ['GITHUB_REPOSITORY']}/issues"
    try:
        own = existing(f"{issues}/{number}/comments")
        if own is None:
            request("POST", f"{issues}/{number}/comments", {"body": text})
        else:
            request("PATCH", f"{issues}/comments/{own}", {"body": text})
    except (urllib.error.URLError, OSError, ValueError) as error:  # as in a pull request from a fork
        print(f"::warning::the pull request was not commented: {error}")


def existing(path: str) -> int | None:
    """Return the number of the comment that an earlier run wrote."""
    for page in range(1, _MOST_PAGES + 1):
        comments = request("GET", f"{path}?per_page={_PAGE}&page={page}")
        for item in comments:
            if item["body"].startswith(MARK):
                return int(item["id"])
        if len(comments) < _PAGE:
            break
    return None


def request(method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Send a request to GitHub's API and return its JSON."""
    url = os.environ.get("GITHUB_API_URL", "https://api.github.com") + path
    data = json.dumps(body).encode() if body is not None else None
    headers = {
        "Authorization": f"Bearer {os.environ['VRAMCAST_TOKEN']}",
        "Accept": "application/vnd.github+json",
        "X-GitHub-Api-Version": "2022-11-28",
    }
    sent = urllib.request.Request(url, data=data, method=method, headers=headers)  # noqa: S310 - the runner's own URL
    with urllib.request.urlopen(sent, timeout=_TIMEOUT_SECONDS) as response:  # noqa: S310
        return json.load(response)


if __name__ == "__main__":
    sys.exit(main())
