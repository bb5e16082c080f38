"""The public API: `import vramcast`, answers in Python and in notebooks, and optimizers as objects."""

import re
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import nn

import vramcast
from vramcast.errors import UserError
from vramcast.jobs.optimizers import OWN, describe_optimizer


def network():
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


INPUTS = torch.empty(8, 512)


def state_mib(optimizer, module=None):
    answer = vramcast.classify(module or network(), INPUTS, optimizer=optimizer)
    return answer.breakdown_mib["optimizer_state"]


def test_importing_the_package_imports_neither_torch_nor_numpy():
    code = (
        "import sys, vramcast; vramcast.devices(); print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_the_public_names_are_there():
    assert all(getattr(vramcast, name) for name in vramcast.__all__)
    assert vramcast.devices()["a100_40gb"] == "NVIDIA A100 40 GB"
    assert vramcast.load("universal") is vramcast.load()
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        vramcast.nothing  # noqa: B018


def test_an_answer_prints_as_a_few_lines_and_as_a_table():
    answer = vramcast.classify(network(), INPUTS, device="rtx_4090")
    first, *others = str(answer).splitlines()
    assert first == "Sequential, batch 8, on rtx_4090: fits"
    assert [line.split()[0] for line in others] == ["estimate", "safe", "input", "traced", "note"]
    assert f"torch {torch.__version__.partition('+')[0]}" in str(answer)
    assert "enough in 99 % of cases" in str(answer)
    html = answer._repr_html_()
    assert html.startswith("<table>")
    assert "<th>safe</th>" in html
    values = answer.to_dict()
    assert values["inputs"] == [{"shape": [512], "dtype": "float32"}]
    assert values["traced_with"].keys() == {"torch"}


def test_dtypes_go_by_the_names_of_torch_too():
    short, long = (vramcast.classify(network(), INPUTS, dtype=name) for name in ("bf16", "bfloat16"))
    assert short.estimate_mib == long.estimate_mib
    with pytest.raises(UserError, match=r"expected training\.dtype to be one of"):
        vramcast.classify(network(), INPUTS, dtype="int8")


def test_an_optimizer_object_counts_with_its_class_and_arguments():
    module = network()
    assert describe_optimizer(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), module) == (
        "SGD(lr=0.1, momentum=0.9)", None,
    )  # fmt: skip
    assert describe_optimizer(torch.optim.AdamW, module) == ("AdamW", None)
    assert describe_optimizer(partial(torch.optim.Adam, amsgrad=True), module) == ("Adam(amsgrad=True)", None)
    amsgrad = torch.optim.Adam(module.parameters(), amsgrad=True)
    assert state_mib(amsgrad, module) == state_mib("Adam(amsgrad=True)") > 1.2 * state_mib("adam")


def test_an_optimizer_of_some_parameters_keeps_state_for_those_only():
    module = network()
    head = torch.optim.Adam([{"params": module[2].parameters()}], lr=1e-3)
    text, factory = describe_optimizer(head, module)
    assert (text, callable(factory)) == (OWN, True)
    assert state_mib(head, module) < 0.1 * state_mib("adam")
    with pytest.raises(UserError, match="expected an optimizer of the module's own parameters, found 4"):
        vramcast.classify(network(), INPUTS, optimizer=head.__class__(network().parameters()))


def test_an_optimizer_of_a_users_own_class_is_traced():
    class Momentum(torch.optim.Optimizer):
        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for item in group["params"]:
                    if item.grad is not None:
                        state = self.state[item]
                        if "buffer" not in state:
                            state["buffer"] = torch.zeros_like(item)
                        state["buffer"].add_(item.grad)

    module = network()
    assert state_mib(Momentum(module.parameters()), module) == pytest.approx(state_mib("SGD(momentum=0.9)"))
    assert state_mib(Momentum) == pytest.approx(state_mib("SGD(momentum=0.9)"))


@pytest.mark.parametrize(
    "text",
    ["AdamW(fused=True)", "Adam(foreach=False)", "AdamW(capturable=True)", "SGD(maximize=True)", "Adam(amsgrad=True)",
     "RMSprop(capturable=True, centered=True)", "Adafactor(foreach=True)", "Adam(fused=False)"],
)  # fmt: skip
def test_all_real_arguments_of_an_optimizer_work(text):
    assert vramcast.classify(network(), INPUTS, optimizer=text).fits


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("Adam(betas=(2, 3))", "expected arguments that Adam accepts, found: Invalid beta parameter"),
        ("Adam(fused=True, foreach=True)", "expected one implementation of Adam"),
        ("Adam(differentiable=True)", "without differentiable=True"),
        ("Adadelta(fused=True)", "expected arguments of Adadelta among"),
        ({}, "expected an optimizer's name, object or class"),
    ],
)
def test_wrong_optimizers_are_refused_in_a_sentence(text, why):
    with pytest.raises(UserError, match=re.escape(why)):
        vramcast.classify(network(), INPUTS, optimizer=text)


def test_the_modes_of_the_caller_do_not_matter():
    expected = vramcast.classify(network(), INPUTS).safe_mib
    with torch.no_grad():
        assert vramcast.classify(network(), INPUTS).safe_mib == expected
    module = network()
    with torch.inference_mode(), torch.device("meta"):
        assert vramcast.classify(module, INPUTS).safe_mib == expected


def test_options_may_be_dtypes_of_torch_and_true():
    expected = vramcast.classify(network(), INPUTS, dtype="fp16").to_dict()
    actual = vramcast.classify(network(), INPUTS, dtype=torch.float16).to_dict()
    assert {**actual, "seconds": 0} == {**expected, "seconds": 0}
    mixed = vramcast.classify(network(), INPUTS, autocast=True)
    assert mixed.safe_mib == vramcast.classify(network(), INPUTS, autocast="bf16").safe_mib


def test_an_unknown_option_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match=r"found 'batchsize': did you mean batch_size\?"):
        vramcast.classify(network(), INPUTS, batchsize=3)
    with pytest.raises(UserError, match=r"found 'adamm': did you mean Adam"):
        vramcast.classify(network(), INPUTS, optimizer="adamm")


def test_a_network_without_trainable_parameters_is_refused():
    with pytest.raises(UserError, match="expected a network with trainable parameters"):
        vramcast.classify(network().requires_grad_(False), INPUTS)
