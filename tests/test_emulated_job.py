"""Networks that meta tensors alone cannot run, classified on a virtual GPU that they see as CUDA."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from vramcast.device.profiles import load_profile
from vramcast.errors import UserError
from vramcast.jobs.building import build_job
from vramcast.jobs.job import ModuleJob
from vramcast.jobs.targets import BuildRequest, parse_target
from vramcast.simulation.simulator import Simulator

PROFILES = [load_profile("a100_40gb"), load_profile("rtx_3060")]


def simulate(module, make, step=None, **options):
    simulator = Simulator(ModuleJob(module, make, step))
    simulation = simulator.simulate({"batch_size": 32, "optimizer": "adam", **options}, PROFILES)
    curve = simulator.curve({"batch_size": 32, "optimizer": "adam", **options}, PROFILES[0])
    assert max(curve.reserved_bytes) == simulation.peaks["a100_40gb"].unbounded.reserved_bytes
    return simulation


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(256, 512), nn.Linear(512, 10)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


class OnCuda(Plain):
    def forward(self, x):
        mask = torch.ones(512).cuda()
        assert x.is_cuda and x.device.type == "cuda"
        return self.second(torch.relu(self.first(x)) * mask)


class Reading(Plain):
    def forward(self, x):
        if x.abs().max().item() > 100:
            raise ValueError("too large")
        return super().forward(x)


class Streaming(Plain):
    def forward(self, x):
        with torch.cuda.stream(torch.cuda.Stream()):
            x = x.to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(torch.cuda.current_stream())
        return super().forward(x)


def meta(make):
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("network", [OnCuda, Reading, Streaming])
def test_networks_that_ask_for_cuda_take_what_plain_ones_do(network):
    plain = simulate(meta(Plain), lambda size: torch.randn(size, 256))
    simulation = simulate(meta(network), lambda size: torch.randn(size, 256))
    for device in ("a100_40gb", "rtx_3060"):
        expected, bounded = plain.peaks[device].bounded, simulation.peaks[device].bounded
        assert bounded.allocated_bytes == pytest.approx(expected.allocated_bytes, rel=0.02)
        assert bounded.breakdown["parameters"] == expected.breakdown["parameters"]
    assert [layer.name for layer in simulation.table.layers] == ["first", "second"]
    assert simulation.training.batch_size == 32 and simulation.training.optimizer == "Adam"


def test_an_assumed_value_is_a_note_with_its_line():
    simulation = simulate(meta(Reading), lambda size: torch.randn(size, 256))
    assert any("taken as 1.0" in note and "test_emulated_job.py" in note for note in simulation.notes)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 5)

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.out(pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])


def test_packed_sequences_have_the_lengths_of_the_batch():
    def make(size):
        return torch.randn(size, 40, 64), torch.arange(size) + 1

    simulation = simulate(meta(Packed), make)
    kept = 6 * 128 * 4 * sum(range(1, 33))  # what cuDNN keeps of each place for the backward pass
    assert simulation.peaks["a100_40gb"].bounded.breakdown["activations"] > kept


def test_sparse_embeddings_train_with_an_optimizer_of_their_own():
    network = meta(lambda: nn.Embedding(1000, 64, sparse=True))

    def configure(module):
        return torch.optim.SparseAdam(list(module.parameters()))

    job = ModuleJob(network, lambda size: torch.randint(1000, (size, 8)), optimizer=configure)
    simulation = Simulator(job).simulate({"batch_size": 32}, PROFILES)
    breakdown = simulation.peaks["a100_40gb"].bounded.breakdown
    rows = 4 * 64 * 32 * 8  # the gradient of each token, of which the step has five copies at its peak
    assert breakdown["parameters"] == 4 * 64_000 and breakdown["optimizer_state"] == 2 * 4 * 64_000 + 5 * rows


def test_sparse_adam_is_an_optimizer_by_name():
    network = meta(lambda: nn.Embedding(1000, 64, sparse=True))
    job = ModuleJob(network, lambda size: torch.randint(1000, (size, 8)))
    options = {"batch_size": 32, "optimizer": "sparseadam(lr=0.1)"}
    simulation = Simulator(job).simulate(options, PROFILES)
    rows = 4 * 64 * 32 * 8
    assert simulation.peaks["a100_40gb"].bounded.breakdown["optimizer_state"] == 2 * 4 * 64_000 + 5 * rows
    dense = ModuleJob(meta(lambda: nn.Linear(8, 8)), lambda size: torch.randn(size, 8))
    with pytest.raises(UserError, match="found dense ones: make its embeddings sparse=True"):
        Simulator(dense).simulate(options, PROFILES)


def test_a_lightning_step_may_ask_its_trainer():
    lightning = pytest.importorskip("lightning")

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Plain()

        def training_step(self, batch, index):
            scale = 1.0 / (1 + self.trainer.current_epoch)
            loss = self.net(batch).pow(2).mean() * scale
            self.log("loss", loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    simulation = simulate(
        meta(Lit), lambda size: torch.randn(size, 256), step=lambda module, x: module.training_step(x, 0)
    )
    assert simulation.peaks["a100_40gb"].bounded.breakdown["optimizer_state"] == 8 * (256 * 512 + 512 + 5120 + 10)


def test_a_bug_of_the_network_stays_its_own():
    class Wrong(Plain):
        def forward(self, x):
            return self.second(x.cuda())

    with pytest.raises(Exception, match=r"cuda|mat1|shape|reduction dim"):
        simulate(meta(Wrong), lambda size: torch.randn(size, 256))


def tiny_language_model():
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 500}  # fmt: skip
    return build_job(BuildRequest(target=parse_target("hf:llama-7b"), arguments=sizes, inputs=("128",), directory="."))


# the Trainer keeps the 8-bit states of embeddings in fp32, which the virtual GPU must follow too
@pytest.mark.parametrize("optimizer", ["adamw_torch_fused", "adamw_8bit"])
def test_a_language_model_takes_the_same_on_the_virtual_gpu(optimizer):
    job = tiny_language_model()
    options = {"batch_size": 4, "dtype": "bf16", "optimizer": optimizer}
    profile = load_profile("a100_40gb")
    traced = Simulator(job).simulate(options, [profile]).peaks[profile.name].unbounded
    job.runs_emulated = True
    live = Simulator(job).simulate(options, [profile]).peaks[profile.name].unbounded
    assert (live.allocated_bytes, live.reserved_bytes) == (traced.allocated_bytes, traced.reserved_bytes)


def offloaded(**options):
    options = {"batch_size": 4, "dtype": "bf16", "checkpointing": "offload", **options}
    return Simulator(tiny_language_model()).simulate(options, PROFILES)


def test_managed_memory_is_noted_on_the_virtual_gpu_too():
    assert any("managed memory" in note for note in offloaded(optimizer="paged_adamw_8bit").notes)
    assert not any("managed memory" in note for note in offloaded(optimizer="adamw_8bit").notes)


def test_the_library_of_an_adapter_is_part_of_the_answer_of_the_virtual_gpu():
    pytest.importorskip("peft")
    versions = offloaded(adapter="lora(r=4, target_modules='q_proj')").traced_with
    assert {"torch", "transformers", "peft"} <= versions.keys()


def images():
    pytest.importorskip("timm")
    return build_job(BuildRequest(target=parse_target("timm:resnet18"), inputs=("3,64,64",), directory="."))


STEPS = [
    {"prefetched_batches": 2}, {"last_batch_size": 3}, {"cudnn_benchmark": True}, {"implementation": "in_backward"},
    {"channels_last": True}, {"accumulate": 3, "zero_grad": "after_step"}, {"autocast": "fp16"},
    {"dry_run_batch_size": 2, "dry_run_passes": 2},
]  # fmt: skip


@pytest.mark.parametrize("options", STEPS, ids=str)
@pytest.mark.parametrize("make", [tiny_language_model, images])
def test_both_modes_of_the_loop_take_the_same(make, options):
    options = {"batch_size": 8, "optimizer": "adamw", **options}
    profile = load_profile("a100_40gb")
    traced = Simulator(make()).simulate(options, [profile]).peaks[profile.name].unbounded
    job = make()
    job.runs_emulated = True
    emulated = Simulator(job).simulate(options, [profile]).peaks[profile.name].unbounded
    assert emulated.allocated_bytes == traced.allocated_bytes
    # the loss that an output suggests is computed in the network's own pass here, which keeps the last output longer
    has_sizes = "last_batch_size" in options or "dry_run_batch_size" in options
    cache_bytes = 2 * 2**20 if make is images and has_sizes else 0
    assert emulated.reserved_bytes == pytest.approx(traced.reserved_bytes, abs=cache_bytes)


@pytest.mark.parametrize("options", [{"prefetched_batches": 2}, {"last_batch_size": 2}, {"cudnn_benchmark": True}])
def test_offloaded_checkpoints_train_in_all_steps(options):
    plain, other = (offloaded(**changes).peaks["a100_40gb"].unbounded for changes in ({}, options))
    assert other.reserved_bytes >= plain.reserved_bytes


@pytest.mark.parametrize("error", [KeyError("weights"), ValueError("too large"), RecursionError("too deep")])
def test_an_error_of_the_network_is_not_run_again(error, monkeypatch):
    class Failing(Plain):
        def forward(self, x):
            raise error

    monkeypatch.setattr("vramcast.simulation.simulator.EmulatedJob", None)  # would raise a TypeError
    with pytest.raises(type(error), match=str(error).strip("'")) as raised:
        simulate(meta(Failing), lambda size: torch.randn(size, 256))
    assert raised.value is error
