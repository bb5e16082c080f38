"""Applies the patch of an admission review, as an API server does (RFC 6902, as far as it is used)."""

import base64
import json
from typing import Any


def patched(review: Any, reply: Any) -> dict[str, Any]:
    """Return the object of a review after the patch of its reply."""
    thing = json.loads(json.dumps(review["request"]["object"]))
    for step in json.loads(base64.b64decode(reply["response"]["patch"])):
        assert step["op"] == "add"
        target: Any = thing
        *way, last = [part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]]
        for part in way:
            target = target[int(part) if isinstance(target, list) else part]
        if isinstance(target, list):
            assert last == "-"
            target.append(step["value"])
        else:
            target[last] = step["value"]
    return dict(thing)
