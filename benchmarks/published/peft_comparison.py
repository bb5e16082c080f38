"""PEFT's method comparison: Llama-3.2-3B with each kind of adapter on an L40S, reserved memory of a whole run."""

import json
import re

from benchmarks.published.job import PublishedJob, Record
from benchmarks.published.networks import network

_LENGTHS = "the longest batch of PEFT's runs has its cap of tokens in every row; the lengths are not published"
_LATER = {"GRALORA", "SHIRA"}
"""Adapters that peft 0.18 does not have yet, or makes from a mask of floats, whose values the virtual GPU forgets."""


def job_of(record: Record) -> PublishedJob | str:
    """Return the job of a record, or the reason why it is left out."""
    if "image-gen" in record["source"]:
        return "image generation"
    if record["metric"] != "reserved":
        return "a percentile over steps of unpublished lengths"
    kind, _, rest = record["peft"].partition(": ")
    optimizer, _, options = record["optimizer"].partition(" ")
    adapter = None
    if rest:
        config = json.loads(rest.rpartition("; trainable=")[0])
        adapter = {"kind": kind, "config": config, "autocast": "autocast_adapter_dtype=True" in record["dtype"]}
    is_new = "transformers 4" not in record["framework_versions"]
    cap = re.search(r"<= (\d+)", record["seq_len"])
    if cap is None:
        raise ValueError(f"no cap of tokens in {record['seq_len']!r}")
    return PublishedJob(
        group="PEFT adapters",
        title=f"Llama-3.2-3B {record['task']}",
        script="peft_comparison",
        parameters={
            "network": network("llama-3.2-3b"),
            "adapter": adapter,
            "optimizer": {"kind": optimizer, "options": json.loads(options)},
            "checkpointing": record["checkpointing"] == "yes",
            "evaluates_base": adapter is not None and is_new,  # on leaving, peft unfreezes what LoRA-FA has frozen
            "batch_size": int(record["micro_batch"]),
            "length": int(cap[1]),
        },
        stack="peft-0.20" if is_new or kind in _LATER or "use_bdlora" in rest else "peft-0.18",
        device="l40s",
        metric="reserved",
        published_bytes=float(record["value_published"]),
        assumptions=(_LENGTHS,),
    )
