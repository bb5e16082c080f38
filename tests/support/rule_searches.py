"""Searches for workspace rules on the virtual GPU, which knows the rules that they should find."""

from dataclasses import replace

from vramcast.device.calibration.agreement import agreement
from vramcast.device.calibration.probing import RuleSearch
from vramcast.device.profiles import read_rules
from vramcast.virtual_gpu.profile import parse_profile


def profile_with(rules, align=4):
    settings = {"name": "truth", "title": "A GPU", "total_mib": 16000, "compute_capability": 8.0, "context_mib": 300}
    return parse_profile({**settings, "align_channels": align, "convolution": rules})


def searched(truth, disturb=lambda size: size):
    """Return a search on the virtual GPU, and the profile that it leads to."""
    search = RuleSearch(lambda probes: {probe: disturb(truth.workspace_bytes(probe.call)) for probe in probes})
    search.run()
    return search, replace(profile_with([]), convolution=search.rules, align_channels=search.align)


def check_recovery(name):
    """Assert that a search finds every rule of a shipped set again."""
    truth = profile_with(read_rules(name)["convolution"])
    search, profile = searched(truth)
    result = agreement(truth, profile, search.learned.keys() | search.checked.keys(), 4000, seed=1)
    assert result.equal == result.calls > 3900
    assert {rule.verdict for rule in result.rules} == {"recovered"}
    assert min(rule.calls for rule in result.rules) > 50
    assert search.shares[-1] == 1.0
    assert len(search.rules) <= len(truth.convolution) + 6
