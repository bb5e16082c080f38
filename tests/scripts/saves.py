"""Saves a trained network in every way over files that exist. Prints how each way ended.

saves.py DIRECTORY: each way has a directory of its own below it, which the test has filled (`files_of`).
"""

import ctypes
import io
import json
import logging
import mmap
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

NAMES = ("m.pt", "m.safetensors", "weights/part-1.bin", "weights/part-2.bin", "log.txt", "data.sqlite", "data.h5")
WAYS = {}
NEEDS = {}
"""The library that a way needs."""


def way(function=None, *, needs=None):
    """Add a way to save; its parameter is a state dict."""
    if function is None:
        return lambda given: way(given, needs=needs)
    WAYS[function.__name__] = function
    NEEDS[function.__name__] = needs
    return function


def fill(directory):
    """Write the files that a way finds."""
    for number, name in enumerate(NAMES):
        path = Path(directory, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == "data.sqlite":
            with sqlite3.connect(path) as base:
                base.execute("create table kept (value)")
                base.execute("insert into kept values (1)")
            base.close()
        else:
            path.write_bytes(bytes([number + 1]) * 5000)


# torch


@way
def torch_path(state):
    import torch

    torch.save(state, "m.pt")


@way
def torch_path_object(state):
    import torch

    torch.save(state, Path("weights", "part-1.bin").absolute())


@way
def torch_legacy(state):
    import torch

    torch.save(state, "m.pt", _use_new_zipfile_serialization=False)


@way
def torch_file(state):
    import torch

    with open("m.pt", "wb") as file:
        torch.save(state, file)


@way
def torch_path_open(state):
    import torch

    with Path("m.pt").open("wb") as file:
        torch.save(state, file)


@way
def torch_buffer(state):
    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    Path("m.pt").write_bytes(buffer.getvalue())


@way
def torch_after_remove(state):
    import torch

    os.remove("m.pt")
    torch.save(state, "m.pt")


@way
def torch_after_rename(state):
    import torch

    os.rename("m.pt", "m.pt.backup")
    torch.save(state, "m.pt")


@way
def torch_then_replace(state):
    import torch

    torch.save(state, "m.pt.tmp")
    os.replace("m.pt.tmp", "m.pt")


@way
def torch_then_link(state):
    import torch

    torch.save(state, "new.pt")
    os.unlink("m.pt")
    os.link("new.pt", "m.pt")


@way
def torch_through_a_link(state):
    import torch

    os.symlink("m.pt", "last.pt")
    torch.save(state, "last.pt")


@way
def jit(state):
    import torch

    torch.jit.save(torch.jit.script(torch.nn.Linear(4, 4)), "m.pt")


@way
def exported(state):
    import torch

    program = torch.export.export(torch.nn.Linear(4, 4), (torch.zeros(1, 4),))
    torch.export.save(program, "m.pt")


@way
def distributed_checkpoint(state):
    import torch.distributed.checkpoint as dcp

    Path("weights/.metadata").touch()
    dcp.save(state, checkpoint_id="weights")


@way
def pickled(state):
    with open("m.pt", "wb") as file:
        pickle.dump(state, file)


# other formats


@way(needs="safetensors")
def safetensors_file(state):
    from safetensors.torch import save_file

    save_file(state, "m.safetensors")


@way(needs="safetensors")
def safetensors_bytes(state):
    from safetensors.torch import save

    open("m.safetensors", "wb").write(save(state))


@way(needs="safetensors")
def safetensors_model(state):
    import torch
    from safetensors.torch import save_model

    save_model(torch.nn.Linear(4, 4).cuda(), "m.safetensors")


@way(needs="safetensors")
def safetensors_numpy(state):
    from safetensors.numpy import save_file

    save_file({name: value.cpu().numpy() for name, value in state.items()}, "m.safetensors")


@way
def numpy_save(state):
    import numpy as np

    with open("m.pt", "wb") as file:
        np.save(file, state["weight"].cpu().numpy())


@way
def numpy_archive(state):
    import numpy as np

    os.rename("m.pt", "m.npz")
    np.savez("m.npz", **{name: value.cpu().numpy() for name, value in state.items()})


@way
def numpy_tofile(state):
    state["weight"].cpu().numpy().tofile("m.pt")


@way
def numpy_text(state):
    import numpy as np

    np.savetxt("log.txt", state["weight"].cpu().numpy())


@way
def numpy_map(state):
    import numpy as np

    pages = np.memmap("m.pt", dtype="float32", mode="r+", shape=(64,))
    pages[:] = state["bias"].cpu().numpy()[:64]
    pages.flush()


@way
def json_values(state):
    Path("log.txt").write_text(json.dumps(state["weight"].tolist()))


@way(needs="h5py")
def h5py_file(state):
    import h5py

    with h5py.File("data.h5", "w") as file:
        file["weight"] = state["weight"].cpu().numpy()


@way
def pandas_csv(state):
    import pandas as pd

    pd.DataFrame(state["weight"].cpu().numpy()).to_csv("log.txt")


@way
def pandas_pickle(state):
    import pandas as pd

    pd.DataFrame(state["weight"].cpu().numpy()).to_pickle("m.pt")


@way
def pandas_parquet(state):
    import pandas as pd

    pd.DataFrame(state["weight"].cpu().numpy()).rename(columns=str).to_parquet("m.pt")


@way(needs="joblib")
def joblib_dump(state):
    import joblib

    joblib.dump({name: value.cpu().numpy() for name, value in state.items()}, "m.pt")


# libraries that save networks


@way(needs="timm")
def timm_saver(state):
    import timm
    import torch
    from timm.utils import CheckpointSaver

    model = timm.create_model("test_vit").cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name in ("last.pth.tar", "checkpoint-0.pth.tar"):
        shutil.move(NAMES[2] if name.startswith("l") else NAMES[3], name)
    CheckpointSaver(model, optimizer, checkpoint_dir=".", recovery_dir=".").save_checkpoint(0, metric=0.5)


@way(needs="transformers")
def transformers_shards(state):
    from transformers import GPT2Config, GPT2LMHeadModel

    for number in (1, 2):
        shutil.copy("m.pt", f"weights/model-0000{number}-of-00002.safetensors")
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64)).cuda()
    model.save_pretrained("weights", max_shard_size="20KB")
    assert len(list(Path("weights").glob("model-*.safetensors"))) != 2


@way(needs="transformers")
def transformers_one_file(state):
    from transformers import GPT2Config, GPT2LMHeadModel

    shutil.copy("m.safetensors", "weights/model.safetensors")
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64)).cuda().save_pretrained("weights")


@way(needs="accelerate")
def accelerate_state(state):
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator()
    model = torch.nn.Linear(4, 4)
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    os.rename("m.safetensors", "weights/model.safetensors")
    accelerator.save_state("weights")


@way(needs="lightning")
def lightning_checkpoint(state):
    import lightning
    import torch

    class Network(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch, _):
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_steps=1, default_root_dir=".", accelerator="gpu", **quiet)
    trainer.fit(Network(), torch.utils.data.DataLoader(torch.zeros(8, 4), batch_size=4))
    trainer.save_checkpoint("m.pt")


@way(needs="trl")
def trl_trainer(state):
    from datasets import Dataset
    from transformers import GPT2Config, GPT2LMHeadModel
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 8)
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64))
    shutil.copy("m.safetensors", "weights/model.safetensors")
    quiet = {"report_to": [], "disable_tqdm": True, "dataset_kwargs": {"skip_prepare_dataset": True}}
    config = SFTConfig(output_dir="weights", max_steps=1, per_device_train_batch_size=2, save_steps=1, **quiet)
    SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer()).train()
    model.save_pretrained("weights")


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<p>": 0, "<e>": 1}, unk_token="<e>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>", pad_token="<p>")


@way(needs="peft")
def peft_adapter(state):
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    shutil.copy("m.safetensors", "weights/adapter_model.safetensors")
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=64))
    get_peft_model(model, LoraConfig(target_modules=["c_attn"])).cuda().save_pretrained("weights")


@way(needs="diffusers")
def diffusers_unet(state):
    from diffusers import UNet2DModel

    shutil.copy("m.safetensors", "weights/diffusion_pytorch_model.safetensors")
    blocks = {"down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2}
    UNet2DModel(8, block_out_channels=(8, 8), norm_num_groups=4, **blocks).cuda().save_pretrained("weights")


@way(needs="keras")
def keras_file(state):
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    shutil.move("m.pt", "m.keras")
    keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)]).save("m.keras", overwrite=True)


# files


@way
def moved(state):
    shutil.move("m.pt", "weights/part-1.bin")


@way
def copied_over(state):
    shutil.copyfile("m.pt", "weights/part-1.bin")


@way
def removed_tree(state):
    shutil.rmtree("weights")


@way
def tree_replaced(state):
    os.rename("weights", "weights.old")
    shutil.copytree("weights.old", "weights")
    shutil.rmtree("weights.old")
    Path("weights", "new.txt").touch()


@way
def truncated(state):
    os.truncate("m.pt", 10)


@way
def truncated_by_descriptor(state):
    descriptor = os.open("m.pt", os.O_RDWR)
    os.ftruncate(descriptor, 10)
    os.pwrite(descriptor, b"x", 3)
    os.close(descriptor)


@way
def mapped(state):
    with open("m.pt", "r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        pages[:4] = b"maps"


@way
def appended(state):
    with open("log.txt", "a") as file:
        file.write("one more line")


@way
def logged(state):
    handler = logging.FileHandler("log.txt", mode="w")
    handler.emit(logging.LogRecord("log", logging.INFO, "", 0, "a line", None, None))
    handler.close()


@way
def changed_mode(state):
    os.chmod("m.pt", 0o600)
    os.utime("m.safetensors", (1, 1))


@way
def zipped(state):
    with zipfile.ZipFile("m.pt", "w") as archive:
        archive.write("log.txt")


@way
def unpacked(state):
    with tarfile.open("new.tar", "w") as archive:
        archive.add("log.txt", "m.pt")
    with tarfile.open("new.tar") as archive:
        archive.extractall(".", filter="data")


@way
def forked(state):
    if os.fork() == 0:
        Path("m.pt").write_text("from a child")
        os._exit(0)
    os.wait()


@way
def sqlite_rows(state):
    with sqlite3.connect("data.sqlite") as base:
        base.execute("delete from kept")
    base.close()


# programs and native code


@way
def program_mv(state):
    subprocess.run(["mv", "m.pt", "weights/part-1.bin"], check=True)


@way
def program_rm(state):
    subprocess.run(["rm", "-rf", "weights"], check=True)


@way
def program_cp(state):
    subprocess.run(["cp", "m.pt", "weights/part-1.bin"], check=True)


@way
def program_shell(state):
    subprocess.run("echo text > m.pt", shell=True, check=True)


@way
def program_python(state):
    subprocess.run([sys.executable, "-S", "-c", "open('m.pt', 'w').write('text')"], check=True)


@way
def native_file(state):
    library = ctypes.CDLL(None, use_errno=True)
    library.fopen.restype = ctypes.c_void_p
    file = library.fopen(b"m.pt", b"w")
    if not file:
        raise OSError(ctypes.get_errno(), "fopen")
    library.fputs(b"text", ctypes.c_void_p(file))
    library.fclose(ctypes.c_void_p(file))


@way
def native_unlink(state):
    library = ctypes.CDLL(None, use_errno=True)
    if library.unlink(b"m.pt"):
        raise OSError(ctypes.get_errno(), "unlink")


def seen(directory):
    """Return what the script sees of its files."""
    found = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            with open(f"{folder}/{name}", "rb") as file:
                status = os.stat(f"{folder}/{name}")
                found[f"{folder}/{name}"] = (file.read(), status.st_mode, status.st_mtime_ns)
    return found


def main():
    import torch

    network = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    network(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    for name, save in WAYS.items():
        if NEEDS[name] and find_spec(NEEDS[name]) is None:
            print(json.dumps({"way": name, "ended": "absent"}), flush=True)
            continue
        directory = Path(sys.argv[1], name)
        os.chdir(directory)
        before = seen(directory)
        try:
            save(network.state_dict())
            ended = "unchanged" if seen(directory) == before else "changed"
        except (OSError, subprocess.CalledProcessError, sqlite3.OperationalError) as error:
            ended = f"refused: {type(error).__name__}: {error}"
        except Exception as error:
            ended = f"{type(error).__name__}: {error}"
        print(json.dumps({"way": name, "ended": ended}), flush=True)


if __name__ == "__main__":
    main()
