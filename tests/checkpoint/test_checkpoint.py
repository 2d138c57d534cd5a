"""mpkernels.checkpoint writes a file whole or not at all. Its errors say what is wrong with a file."""

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import mpkernels
from mpkernels.amp import GradScaler
from mpkernels.checkpoint import load, save
from mpkernels.optim import AdamW
from tests import ROOT
from tests.faults import faults
from tests.networks import B16, backward, network, one_thread
from tests.optim.optimizers import OPTIMIZERS, all_same_bits, each_with_masters, weights

__all__ = ["one_thread"]  # a fixture that each test uses


def training(seed, line=OPTIMIZERS["AdamW"]):
    model = network(B16, seed=seed)
    return {"model": model, "optimizer": line.ours(model.parameters(), max_norm=1.0), "scaler": GradScaler("cpu")}


def run(objects, numbers):
    for number in numbers:
        backward(objects["model"], number, objects["scaler"].scale(torch.ones(())))
        objects["scaler"].step(objects["optimizer"])
        objects["scaler"].update()


@each_with_masters
def test_training_goes_on_bit_for_bit(tmp_path, line):
    first, second = training(1, line), training(2, line)
    run(first, range(3))
    save(tmp_path / "last.pt", **first, step=3)
    assert load(tmp_path / "last.pt", **second)["step"] == 3
    for objects in (first, second):
        run(objects, range(3, 6))
    assert all_same_bits(weights(first["model"]), weights(second["model"]))
    assert first["scaler"].state_dict() == second["scaler"].state_dict()


def test_torch_reads_the_file_and_nothing_else_lies_beside_it(tmp_path):
    save(tmp_path / "last.pt", weight=torch.ones(3), names=["a"], empty=torch.ones(0))
    assert os.listdir(tmp_path) == ["last.pt"]
    assert torch.load(tmp_path / "last.pt", weights_only=True)["names"] == ["a"]
    assert mpkernels.checkpoint.load(tmp_path / "last.pt")["weight"].tolist() == [1, 1, 1]


def damaged(data):
    places = [0, 100, len(data) // 2, len(data) - 1]
    yield from ((data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :], "damaged") for i in places)


def cut(data):
    yield from ((data[:size], "got another one or a part") for size in (0, 1, 10, 60, len(data) // 2, len(data) - 1))
    yield data + b"more", "got another one or a part"


def of_another_version(data):
    yield data.replace(b"mpkernels checkpoint 0001", b"mpkernels checkpoint 0002"), "of version 1, got 0002"


@pytest.mark.parametrize("spoil", [damaged, cut, of_another_version], ids=lambda it: it.__name__)
def test_a_wrong_file_changes_nothing(tmp_path, spoil):
    path, objects = tmp_path / "last.pt", training(1)
    save(path, **objects)
    before = weights(objects["model"])
    for data, text in list(spoil(path.read_bytes())):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=rf"^checkpoint\.load: .*last\.pt must be .*{text}"):
            load(path, **objects)
    assert all_same_bits(weights(objects["model"]), before)


def test_a_large_file_is_checked_to_its_end(tmp_path):
    path, weight = tmp_path / "last.pt", torch.arange(700_000)
    save(path, weight=weight)
    assert torch.equal(load(path)["weight"], weight)
    data = path.read_bytes()
    for place in (1 << 20, len(data) // 2, len(data) - 4096):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(ValueError, match="it is damaged"):
            load(path)


def test_a_file_that_lacks_an_object_is_refused(tmp_path):
    objects = training(1)
    save(tmp_path / "last.pt", model=objects["model"], step=1)
    with pytest.raises(ValueError, match=r"must have \['optimizer', 'scaler'\], got \['model', 'step'\]"):
        load(tmp_path / "last.pt", **objects)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none.pt")


def test_a_value_in_an_objects_place_is_named_before_anything_changes(tmp_path):
    layer = torch.nn.Linear(2, 2)
    save(tmp_path / "a.pt", layer=layer, step=7)
    torch.nn.init.zeros_(layer.weight)
    with pytest.raises(TypeError, match=r"checkpoint.load: step must have a load_state_dict, got int; values are in"):
        load(tmp_path / "a.pt", layer=layer, step=0)
    assert not layer.weight.any()


def test_objects_must_be_given_by_name(tmp_path):
    """A model given by place would be taken for map_location, and a file without objects would hold nothing."""
    layer = torch.nn.Linear(2, 2)
    by_name = "objects must be given by name, as in model=model, "
    with pytest.raises(ValueError, match=f"{by_name}got none"):
        save(tmp_path / "a.pt")
    with pytest.raises(TypeError, match=f"checkpoint.save: {by_name}after the path; got Linear, int$"):
        save(tmp_path / "a.pt", layer, 3)
    assert not any(tmp_path.iterdir())
    save(tmp_path / "a.pt", layer=layer)
    with pytest.raises(TypeError, match=f"checkpoint.load: {by_name}after the path; got Linear$"):
        load(tmp_path / "a.pt", layer)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such folder: '.*nowhere'$"):
        save(tmp_path / "nowhere" / "a.pt", step=7)


class Counting(torch.nn.Module):
    """A module with parameters, buffers, and extra state."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layer, self.calls = torch.nn.Linear(2, 2, dtype=B16), [seed]
        self.register_buffer("mean", torch.full((2,), float(seed)))
        self.register_buffer("aside", torch.full((2,), float(seed)), persistent=False)

    def get_extra_state(self):
        return self.calls

    def set_extra_state(self, state):
        self.calls.clear()
        self.calls.extend(state)


def trained_objects(seed, steps, kind=AdamW, **options):
    model = Counting(seed)
    optimizer = kind(model.parameters(), lr=0.1 * seed, **options)
    objects = {"model": model, "optimizer": optimizer, "scaler": GradScaler("cpu", init_scale=2.0**seed)}
    objects["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(steps):
        objects["scaler"].scale(model.layer(torch.eye(2, dtype=B16)).float().square().sum()).backward()
        objects["scaler"].step(optimizer)
        objects["scaler"].update()
        objects["scheduler"].step()
    return objects


def state_of(objects):
    """Return as text all state that training would go on from."""
    model, optimizer = objects["model"], objects["optimizer"]
    states = [optimizer.state.get(param, {}) for param in model.parameters()]
    groups = [{**group, "params": len(group["params"])} for group in optimizer.param_groups]
    found = [model.state_dict(), model.aside, states, groups, objects["scaler"].state_dict()]
    text = str(torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.tolist, found))
    return text, objects["scheduler"].last_epoch


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # faults while a generator is closed
@pytest.mark.parametrize("options", [{"state_dtype": torch.int8}, {}, {"kind": torch.optim.AdamW}])
def test_a_fault_during_a_load_leaves_the_old_state_or_all_of_the_new(tmp_path, options):
    """Only a fault that comes late finds everything loaded. A second try loads."""
    save(tmp_path / "last.pt", **trained_objects(2, 3, **options))
    load(tmp_path / "last.pt", **(loaded := trained_objects(1, 1, **options)))
    old, new, found = state_of(trained_objects(1, 1, **options)), state_of(loaded), []
    for number, fault in zip(itertools.count(), faults(every=5)):
        objects = trained_objects(1, 1, **options)
        with fault:
            load(tmp_path / "last.pt", **objects)
        found.append(state_of(objects))
        assert found[-1] in (old, new), number
        load(tmp_path / "last.pt", **objects)
        assert state_of(objects) == new, number
    assert number > 200
    assert old in found
    assert new in found


class Refusing:
    def __init__(self):
        self.state = [1]

    def state_dict(self):
        return {"state": self.state}

    def load_state_dict(self, state):
        self.state.append(2)
        raise KeyError("not mine")


@pytest.mark.parametrize("options", [{}, {"kind": torch.optim.SGD, "momentum": 0.9}], ids=["ours", "torch's"])
@pytest.mark.parametrize("refuses", ["model", "optimizer", "last", "first"])
def test_if_one_object_refuses_none_is_changed(tmp_path, options, refuses):
    saved, old = trained_objects(2, 3, **options), trained_objects(1, 1, **options)
    before, states = state_of(old), list(old["optimizer"].state.values())
    if refuses == "model":
        saved["model"].mean = torch.ones(3)
    elif refuses == "optimizer":
        saved["optimizer"].add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    save(tmp_path / "last.pt", **saved, first={}, last=Refusing())
    objects = {name: old[name] for name in sorted(old, reverse=refuses == "model")} | {"last": Refusing()}
    if refuses == "first":  # this object refuses its old state, too
        objects = {"first": Refusing(), **objects}
    with pytest.raises((RuntimeError, ValueError, KeyError)):
        load(tmp_path / "last.pt", **objects)
    assert state_of(old) == before
    assert all(now is then for now, then in zip(old["optimizer"].state.values(), states, strict=True))


def test_the_last_good_file_survives_an_error(tmp_path):
    save(tmp_path / "last.pt", step=1)
    with pytest.raises(
        TypeError, match=r"^checkpoint.save: unsavable must be a tensor, .*, got builtins.function; conv"
    ):
        save(tmp_path / "last.pt", step=2, unsavable=lambda: None)
    assert load(tmp_path / "last.pt") == {"step": 1}
    assert os.listdir(tmp_path) == ["last.pt"]


@pytest.mark.skipif(os.name != "posix", reason="a folder can't be opened elsewhere")
def test_everything_has_reached_the_disk_before_the_name_does(tmp_path, monkeypatch):
    """A machine that loses its power between the two must not find an empty file under the name."""
    happened, path = [], tmp_path / "last.pt"

    def fsync(handle, fsync=os.fsync):
        what = "folder" if os.path.samestat(os.fstat(handle), os.stat(tmp_path)) else os.fstat(handle).st_size
        happened.append(("fsync", what))
        fsync(handle)

    def replace(old, new, replace=os.replace):
        happened.append(("replace", os.fspath(new)))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    save(path, weight=torch.ones(1000))
    assert happened == [("fsync", path.stat().st_size), ("replace", str(path)), ("fsync", "folder")]


@pytest.mark.skipif(os.name != "posix", reason="permissions as posix has them")
@pytest.mark.parametrize(
    ("before", "after"), [(None, 0o640), (0o600, 0o600), (0o664, 0o664)], ids=["new", "private", "shared"]
)
def test_the_file_has_the_permissions_of_the_one_before_or_of_any_new_file(tmp_path, before, after):
    path = tmp_path / "last.pt"
    umask = os.umask(0o027)
    try:
        if before is not None:
            path.touch()
            path.chmod(before)
        save(path, step=1)
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == after


ENDLESS = """
import sys, torch
from mpkernels.checkpoint import save
for step in range(10**9):
    save(sys.argv[1], step=step, filler=torch.full((100_000,), float(step)))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(os.name != "posix", reason="kills by a signal")
def test_the_last_good_file_survives_a_kill(tmp_path):
    path = tmp_path / "last.pt"
    for wait in (0.0, 0.013, 0.021):
        path.unlink(missing_ok=True)
        process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(path)], cwd=ROOT)
        while not path.exists() and process.poll() is None:
            time.sleep(0.01)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        process.wait()
        found = load(path)
        assert (found["filler"] == found["step"]).all()
