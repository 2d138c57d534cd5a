"""checkpoint.save refuses what checkpoint.load wouldn't read, names it, and leaves the last file as it is."""

import argparse
import collections
import datetime
import os
import random
from pathlib import Path

import numpy
import pytest
import torch

from mpkernels.checkpoint import load, save
from mpkernels.optim import AdamW


def with_note(tensor, note):
    tensor.note = note
    return tensor


def optimizer_of_numpys_lr():
    return AdamW([torch.nn.Parameter(torch.ones(2))], lr=numpy.float64(3e-4))


UNREADABLE = {
    "it": numpy.float64(0.5),
    "it[1]": numpy.random.get_state(),
    "it['file']": {"file": Path("a")},
    "it[0]": (datetime.datetime(2000, 1, 1),),
    "it['args'][1]": {"args": [1, argparse.Namespace(rate=1)]},
    "it['by_name']": {"a": torch.ones(2), "by_name": collections.defaultdict(list, a=[1])},
    "it['last']": {"last": collections.deque([1])},
    "it[2]": [1, {2}, range(3)],
    "it[3]": [None, 1.5, b"text", object()],
    "a key of it": {numpy.int64(3): 1},
    "it.note": with_note(torch.ones(2), argparse.Namespace()),
    "it['param_groups'][0]['lr']": optimizer_of_numpys_lr(),
}


@pytest.mark.parametrize("place", UNREADABLE)
def test_a_value_that_load_would_refuse_is_named(tmp_path, place):
    path = tmp_path / "last.pt"
    save(path, step=1)
    with pytest.raises(TypeError) as caught:
        save(path, step=2, model=torch.nn.Linear(2, 2), it=UNREADABLE[place])
    assert str(caught.value).startswith(f"checkpoint.save: {place} must be a tensor, number, ")
    assert load(path) == {"step": 1}
    assert os.listdir(tmp_path) == ["last.pt"]


def test_the_class_of_the_value_and_a_way_out_are_named(tmp_path):
    with pytest.raises(TypeError, match=r"got numpy\.float64; convert it \(NumPy's values by tolist\(\), a path"):
        save(tmp_path / "a.pt", best=numpy.float64(0.5))


def test_a_list_that_holds_itself_is_searched_once(tmp_path):
    circle = [numpy.float64(0.5)]
    circle.insert(0, circle)
    with pytest.raises(TypeError, match=r"checkpoint\.save: circle\[1\] must be"):
        save(tmp_path / "a.pt", circle=circle)


def test_a_lazy_layer_must_be_initialised(tmp_path):
    with pytest.raises(ValueError, match=r"model\['0\.weight'\] must be initialised, got a lazy parameter; run a forw"):
        save(tmp_path / "a.pt", model=torch.nn.Sequential(torch.nn.LazyLinear(3)))


def test_what_load_reads_is_saved(tmp_path):
    values = {"random": random.getstate(), "torchs": torch.get_rng_state(), "best": numpy.float64(0.5).tolist()}
    values |= {"some": {1, 2}, "data": b"abc", "z": 1j, "dtype": torch.int8, "counts": collections.Counter("aab")}
    save(tmp_path / "a.pt", **values)
    assert str(load(tmp_path / "a.pt")) == str(values)


def test_a_class_that_the_user_allows_is_saved(tmp_path):
    with torch.serialization.safe_globals([argparse.Namespace]):
        save(tmp_path / "a.pt", args=argparse.Namespace(rate=0.5))
        assert load(tmp_path / "a.pt")["args"].rate == 0.5
        with pytest.raises(TypeError, match=r"checkpoint\.save: here must be .* got pathlib\."):
            save(tmp_path / "a.pt", args=argparse.Namespace(rate=0.5), here=Path())
