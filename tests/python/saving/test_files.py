"""Saving deletes only what a save has written, also where one was interrupted; files that lie are
refused by name."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trireme
from safetensors.torch import load_file, save_file
from torch import nn

from harness.faults import raises
from harness.models import mlp
from harness.on_ranks import on_shm_ranks
from harness.tensors import assert_bits
from saving.file_limit import die_behind, failing_behind
from saving.ranks import on_disk

INDEX = "model.safetensors.index.json"
MAKING = INDEX + ".saving"
FILE = "model-00001-of-00001.safetensors"


def tree(folder: Path) -> dict[str, tuple[bytes | str, int]]:
    """Everything in it: bytes or where a link leads, and when that was written."""
    found: dict[str, tuple[bytes | str, int]] = {}
    for path in sorted(folder.rglob("*")):
        content: bytes | str = ""
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = path.read_bytes()
        found[str(path.relative_to(folder))] = (content, path.lstat().st_mtime_ns)
    return found


def save(path: Path, number: int) -> None:
    """With an optimizer, so that files of every kind are there; ``number`` is its extra."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    trireme.save_checkpoint(path, model, optimizer, extra={"number": number}, max_file_bytes=400)


def number_at(path: Path) -> Any:
    model = mlp()
    return trireme.load_checkpoint(path, model, torch.optim.AdamW(model.parameters()))["number"]


# What is not ours


def _foreign(path: Path) -> None:
    """A save to ``path`` is refused, and changes nothing around it."""
    before = tree(path.parent)
    with raises(ValueError, f"got '{path}", "to be replaced, expected nothing but", "and found"):
        save(path, 9)
    assert tree(path.parent) == before


def test_a_backup_beside_the_checkpoint_stays(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    save(path, 1)
    shutil.copytree(path, tmp_path / "ck.previous")
    (tmp_path / "ck.previous" / "notes.txt").write_text("mine")
    (tmp_path / "k2.previous").write_text("mine")
    kept = {name: value for name, value in tree(tmp_path).items() if "previous" in name}
    for number in (2, 3):
        save(path, number)
        save(tmp_path / "k2", number)
        now = {name: value for name, value in tree(tmp_path).items() if "previous" in name}
        assert now == kept
    assert number_at(path) == 3 and number_at(tmp_path / "k2") == 3


def test_folders_that_our_index_does_not_name(tmp_path: Path) -> None:
    other = tmp_path / "weights"  # another program's files, without an index and with one
    other.mkdir()
    (other / "llama-lora.safetensors").write_bytes(b"x" * 100)
    _foreign(other)
    save_file({"w": torch.ones(2)}, other / FILE)
    index = {"metadata": {"total_size": 8}, "weight_map": {"w": FILE}}
    (other / INDEX).write_text(json.dumps(index))
    _foreign(other)
    (tmp_path / "file").write_text("mine")
    _foreign(tmp_path / "file")

    path = tmp_path / "ck"
    save(path, 1)
    for name in ("README.md", "model-00009-of-00009.safetensors", "extra.json.orig"):
        (path / name).write_text("mine")
        _foreign(path)
        (path / name).unlink()
    (path / "optimizer.json").rename(path / "there")  # what it names, but as a folder or a link
    (path / "optimizer.json").symlink_to("there")
    _foreign(path)
    (path / "optimizer.json").unlink()
    (path / "optimizer.json").mkdir()
    _foreign(path)
    (path / "optimizer.json").rmdir()
    (path / "there").rename(path / "optimizer.json")
    save(path, 2)
    (path / "optimizer.json").unlink()  # what is missing is not lost by a save
    save(path, 3)
    empty = tmp_path / "empty"
    empty.mkdir()
    save(empty, 4)
    assert (number_at(path), number_at(empty)) == (3, 4)
    assert sorted(os.listdir(tmp_path)) == ["ck", "empty", "file", "weights"]


@pytest.mark.parametrize("beside", ["ck.saving", "ck.replaced"])
def test_what_lies_where_a_save_writes(beside: str, tmp_path: Path) -> None:
    path, place = tmp_path / "ck", tmp_path / beside
    save(path, 1)
    save(path, 2)
    shutil.copytree(path, place)  # a backup by hand
    _foreign(path)
    shutil.move(path, tmp_path / "elsewhere")  # also without the one that it is of
    _foreign(path)
    with raises(ValueError, "got no folder"):
        number_at(path)
    shutil.move(tmp_path / "elsewhere", path)
    shutil.rmtree(place)
    place.mkdir()
    (place / "notes.txt").write_text("mine")
    _foreign(path)
    shutil.rmtree(place)
    place.write_text("mine")
    _foreign(path)
    place.unlink()
    place.symlink_to(tmp_path / "ck")
    _foreign(path)
    place.unlink()
    place.mkdir()  # what is empty holds nothing to lose
    save(path, 3)
    assert os.listdir(tmp_path) == ["ck"]


@on_shm_ranks(2)
def test_all_ranks_are_refused_alike(rank: int, tmp_path: Path) -> None:
    path = tmp_path / "ck"
    path.mkdir(exist_ok=True)
    (path / "notes.txt").write_text("mine")
    dist.barrier()
    before = tree(tmp_path)
    with raises(ValueError, "found 'notes.txt' in it", "(rank 0 of 2)"):
        trireme.save_checkpoint(path, mlp(), extra={"rank": rank})
    assert tree(tmp_path) == before
    with raises(ValueError, "got an empty path"):
        trireme.save_checkpoint("", mlp())
    dist.barrier()
    (path / "notes.txt").unlink(missing_ok=True)
    dist.barrier()
    # What only other ranks say is nobody's, and neither is what they say within what rank 0 says.
    extra: dict[str, Any] = {"best": {"a": 1}} if rank == 0 else {"best": {"b": 2}, "debug": "x"}
    trireme.save_checkpoint(path, mlp(), extra=extra)
    assert trireme.load_checkpoint(path, mlp()) == {"best": {"a": 1}}
    trireme.save_checkpoint(path, mlp(), extra=None if rank == 0 else extra)
    assert trireme.load_checkpoint(path, mlp()) == {}


def test_paths_that_are_no_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for call in (trireme.save_checkpoint, trireme.load_checkpoint):
        with raises(ValueError, "got an empty path"):
            call("", mlp())
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for path in (".", tmp_path / "here", "../here/"):
        with raises(ValueError, "the folder that this process works in"):
            trireme.save_checkpoint(path, mlp())
    save(Path("ck"), 1)
    monkeypatch.chdir("ck")
    assert number_at(Path(".")) == 1


def test_a_path_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("other/ck")
    (tmp_path / "round").symlink_to("round")
    for number in (1, 2):  # the first one makes what it leads to
        save(tmp_path / "link", number)
        assert os.readlink(tmp_path / "link") == "other/ck"
        assert number_at(tmp_path / "link") == number_at(tmp_path / "other" / "ck") == number
    assert os.listdir(tmp_path / "other") == ["ck"]
    with raises(RuntimeError, "cannot find", "round"):
        save(tmp_path / "round", 3)


# What an interrupted save has left


def _killed_while_saving(path: Path, most: int) -> None:
    """The system kills a forked child when a file of its becomes longer than ``most`` bytes."""
    child = os.fork()
    if child == 0:
        try:
            die_behind(most)
            save(path, 7)
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGXFSZ


@pytest.mark.parametrize("has_previous", [True, False])
def test_a_process_killed_while_it_saves(has_previous: bool, tmp_path: Path) -> None:
    """While it writes the index in the making, files of tensors, texts, or indexes."""
    path = tmp_path / "ck"
    save(path, 0)
    lengths = {file.stat().st_size for file in path.iterdir()}
    shutil.rmtree(path)
    for most in (0, 100, *(length - 1 for length in sorted(lengths))):
        if has_previous:
            save(path, most)
        _killed_while_saving(path, most)
        assert (tmp_path / "ck.saving").is_dir()
        if has_previous:
            assert number_at(path) == most
        else:
            with raises(ValueError, "got no folder"):
                number_at(path)
        with raises(ValueError, "got no file", INDEX):  # it is no checkpoint yet
            number_at(tmp_path / "ck.saving")
        save(path, 8)
        assert number_at(path) == 8
        assert os.listdir(tmp_path) == ["ck"]
        shutil.rmtree(path)


def _saved_twice(folder: Path) -> tuple[Path, Path]:
    """A checkpoint, and the one whose place it took, both as they are while that happens."""
    path, older = folder / "ck", folder / "older"
    save(path, 1)
    shutil.copytree(path, older)
    save(path, 2)
    shutil.copy(path / INDEX, path / MAKING)
    return path, older


def _before_the_exchange(path: Path, older: Path) -> None:
    path.rename(f"{path}.saving")
    older.rename(path)


def _after_the_exchange(path: Path, older: Path) -> None:
    older.rename(f"{path}.saving")


def _while_the_older_one_is_removed(path: Path, older: Path) -> None:
    _after_the_exchange(path, older)
    (path / MAKING).unlink()
    for file in Path(f"{path}.saving").iterdir():
        if file.name != INDEX:
            file.unlink()


def _between_two_renames(path: Path, older: Path) -> None:
    path.rename(f"{path}.saving")
    older.rename(f"{path}.replaced")


def _after_two_renames(path: Path, older: Path) -> None:
    older.rename(f"{path}.replaced")


@pytest.mark.parametrize(
    ("leave", "number"),
    [
        (_before_the_exchange, 1),
        (_after_the_exchange, 2),
        (_while_the_older_one_is_removed, 2),
        (_between_two_renames, 1),
        (_after_two_renames, 2),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_a_save_interrupted_while_it_takes_its_place(
    leave: Callable[[Path, Path], None], number: int, tmp_path: Path
) -> None:
    path, older = _saved_twice(tmp_path)
    leave(path, older)
    assert number_at(path) == number
    # A save that fails costs nothing either.
    with failing_behind(100), raises(RuntimeError, "cannot ", "File too large"):
        trireme.save_checkpoint(path, mlp())
    assert number_at(path) == number
    assert os.listdir(tmp_path) == ["ck"]
    save(path, 3)
    assert number_at(path) == 3
    assert os.listdir(tmp_path) == ["ck"]


# Files that lie


def _edit(path: Path, change: Callable[[Any], None]) -> None:
    """Keeps the length that it had before, if that becomes shorter; without checksums, which would
    tell that it was changed."""
    length = path.stat().st_size
    content = json.loads(path.read_text())
    for key in ("checksum", "chunk_bytes", "chunk_checksums", "other_file_checksums"):
        content["metadata"]["trireme"].pop(key, None)
    change(content)
    path.write_text(json.dumps(content).ljust(length))


def test_an_index_that_leads_out_of_the_folder(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    save_file({"0.bias": torch.zeros(13)}, secret)
    for name in ("../secret", str(secret), "sub/../../secret", "..", ".", "", "a\0b"):
        path = tmp_path / "ck"
        save(path, 1)
        _edit(path / INDEX, lambda index: index["weight_map"].update({"0.bias": name}))  # noqa: B023
        with raises(ValueError, f"got {json.dumps(name)} as", INDEX, "expected one in its"):
            number_at(path)
        _edit(
            path / INDEX,
            lambda index: index["metadata"]["trireme"]["other_file_bytes"].update({name: 1}),  # noqa: B023
        )
        before = tree(tmp_path)
        with raises(ValueError, "to be replaced"):
            save(path, 2)
        assert tree(tmp_path) == before
        shutil.rmtree(path)


def test_files_that_the_index_names(tmp_path: Path) -> None:
    """Texts and the optimizer's files, too, are missed when gone, cut or another save's."""
    path, other = tmp_path / "ck", tmp_path / "other"
    save(path, 1)
    save(other, 2)
    names = sorted(os.listdir(path))
    assert "extra.json" in names and "optimizer.json" in names and len(names) > 6
    for name in names:
        file = path / name
        kept = file.read_bytes()
        file.unlink()
        with raises(ValueError, "got no file", name):
            number_at(path)
        if name != INDEX:
            file.write_bytes(kept[:-1])
            with raises(ValueError, f"got {len(kept) - 1} bytes", name, f"expected {len(kept)}"):
                number_at(path)
        file.write_bytes(kept)
    shutil.copy(other / "optimizer.safetensors.index.json", path)
    with raises(ValueError, "'optimizer.safetensors.index.json' of another save"):
        number_at(path)


def _header(text: bytes, bytes_of_tensors: int = 0) -> bytes:
    return len(text).to_bytes(8, "little") + text + bytes(bytes_of_tensors)


DEEP = 400_000
BAD_JSON = {
    "nested": (b'{"a": ' + b"[" * DEEP + b"]" * DEEP + b"}", "nested deeper than 500"),
    "nested_in_an_entry": (
        b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8], "x": '
        + b"[" * DEEP
        + b"]" * DEEP
        + b"}}",
        "nested deeper than 500",
    ),
    "nested_objects": (b'{"a":' * DEEP + b"1" + b"}" * DEEP, "nested deeper than 500"),
    "metadata": (b'{"__metadata__": ' + b"[" * DEEP + b"]" * DEEP + b"}", "nested deeper than"),
    "utf8": (b'{"\xff\xfe": 1}', "ill-formed UTF-8 byte"),
    "duplicate": (b'{"weight_map": {"a": 1, "\\u0061": 2}}', 'has the key "a" twice'),
    "surrogate": (b'{"\\ud800": 1}', "surrogate U+D800"),
    "cut": (b'{"weight_map": {', "unexpected end of input"),
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_headers_and_indexes_that_are_refused(case: str, tmp_path: Path) -> None:
    text, told = BAD_JSON[case]
    path = tmp_path / "ck"
    path.mkdir()
    (path / "model.safetensors").write_bytes(_header(text))
    with raises(ValueError, "[saving]", told, "model.safetensors"):
        trireme.load_checkpoint(path, mlp())
    (path / INDEX).write_bytes(text)
    with raises(ValueError, "[saving]", told, INDEX):
        trireme.load_checkpoint(path, mlp())
    for name in ("extra.json", "optimizer.json", "optimizer.safetensors.index.json"):
        shutil.rmtree(path)
        save(path, 1)
        (path / name).write_bytes(text)
        lengths = {name: len(text)}
        _edit(
            path / INDEX,
            lambda index: index["metadata"]["trireme"]["other_file_bytes"].update(lengths),  # noqa: B023
        )
        with raises(ValueError, "[saving]", told, name):
            number_at(path)


def test_one_file_without_an_index(tmp_path: Path) -> None:
    """So the safetensors package and transformers write it; also through links, as in a cache."""
    state = {name: value + 1 for name, value in mlp().state_dict().items()}
    (tmp_path / "hf").mkdir()
    save_file(state, tmp_path / "blob", metadata={"format": "pt"})
    (tmp_path / "hf" / "model.safetensors").symlink_to("../blob")
    for path in (tmp_path / "hf", tmp_path / "blob"):
        model = mlp()
        assert trireme.load_checkpoint(path, model) == {}
        for name, value in model.state_dict().items():
            assert_bits(value, state[name], name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with raises(ValueError, "got a checkpoint without an optimizer"):
            trireme.load_checkpoint(path, model, optimizer)
    before = tree(tmp_path)
    with raises(ValueError, "found 'model.safetensors' in it"):
        trireme.save_checkpoint(tmp_path / "hf", mlp())
    assert tree(tmp_path) == before


# Names


NAMES = ("__metadata__", "___metadata__", "weight", "a\nb", 'q"\\', "\u00e9\U0001f600", "x" * 300)


def _named(offset: int) -> nn.Module:
    model = nn.Module()
    for number, name in enumerate(NAMES):
        model.register_parameter(name, nn.Parameter(torch.full((2,), float(number + offset))))
    model.add_module("__metadata__ ", nn.Linear(2, 2))
    return model


def test_a_parameter_may_be_called_anything(tmp_path: Path) -> None:
    path = tmp_path / "ck"
    model, fresh = _named(1), _named(50)
    optimizers = [torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9) for net in (model, fresh)]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizers[0].step()
    trireme.save_checkpoint(path, model, optimizers[0])
    files = on_disk(str(path))
    index = json.loads((path / INDEX).read_text())
    assert index["weight_map"].keys() == load_file(path / FILE).keys()
    trireme.load_checkpoint(path, fresh, optimizers[1])
    for (name, got), saved in zip(fresh.named_parameters(), model.parameters(), strict=True):
        assert_bits(got, saved, name)
        assert_bits(files[".__metadata__" if name == "__metadata__" else name], saved, name)
        momenta = [optimizer.state for optimizer in optimizers]
        assert_bits(momenta[1][got]["momentum_buffer"], momenta[0][saved]["momentum_buffer"], name)
    odd = nn.Module()
    odd.register_parameter("\ud800", nn.Parameter(torch.ones(1)))
    with raises(ValueError, "'\\ud800'", "half of a surrogate pair"):
        trireme.save_checkpoint(path, odd)
