"""Checkpoints of torch that others wrote: read regardless of the writer, and obeyed in nothing."""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata as about
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from configs.errors import ConfigError
from models.weights.dcp_checkpoints import METADATA, DcpCheckpoint
from tests.support.ranks import RANKS

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SHAPES = {"net.a": torch.Size((4, 3)), "net.b": torch.Size((4,))}


def weights() -> dict[str, Tensor]:
    return {"a": torch.arange(12.0).reshape(4, 3), "b": torch.arange(4.0)}


def _save_spread(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    net = nn.Module()
    net.a, net.b = nn.Parameter(weights()["a"]), nn.Parameter(weights()["b"])
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    dcp.save({"model": net.state_dict(), "optim": {"lr": 0.1}}, checkpoint_id=folder / "spread")
    dist.destroy_process_group()


@pytest.mark.slow
def test_the_parts_of_two_ranks_are_put_together(tmp_path: Path) -> None:
    ranks = [RANKS.Process(target=_save_spread, args=(n, tmp_path)) for n in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(60)
    assert [each.exitcode for each in ranks] == [0, 0]
    assert len(list((tmp_path / "spread").glob("*.distcp"))) == 2
    found = DcpCheckpoint(tmp_path / "spread").read(SHAPES)
    assert all(torch.equal(found[f"net.{name}"], value) for name, value in weights().items())


@pytest.mark.parametrize(
    "state",
    [
        {"model": {"net": weights()}},
        {"model": weights()},
        {"net": weights()},
        weights(),
        {name: value.bfloat16() for name, value in weights().items()},
    ],
    ids=["model and module", "model", "module", "neither", "half as precise"],
)
def test_weights_are_found_under_their_names(tmp_path: Path, state: dict[str, Any]) -> None:
    dcp.save(state, checkpoint_id=tmp_path)
    found = DcpCheckpoint(tmp_path).read(SHAPES)
    assert all(torch.equal(found[f"net.{name}"], value) for name, value in weights().items())
    assert {value.dtype for value in found.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (SHAPES | {"net.c": torch.Size((4,))}, "has no 'model.net.c', which is trained; its first names are"),
        (SHAPES | {"net.b": torch.Size((5,))}, r"'model.net.b' of .* has shape \(4,\), the model \(5,\)"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, shapes: dict[str, torch.Size], said: str) -> None:
    dcp.save({"model": {"net": weights()}}, checkpoint_id=tmp_path)
    with pytest.raises(ConfigError, match=said):
        DcpCheckpoint(tmp_path).read(shapes)


class Runs:
    """What a pickle calls when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._call


@pytest.mark.parametrize(
    "content",
    [
        Runs(exec, "open('was here', 'w').close()"),
        Runs(getattr, about.Metadata, "__init__"),
        {"state_dict_metadata": Runs(torch.load, "file")},
        about.Metadata({}, storage_data={"x": Runs(io.open, "was here", "w")}),
        about.Metadata({}, storage_data=None),
        [],
    ],
)
def test_a_pickle_of_anything_else_is_refused_and_calls_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / METADATA).write_bytes(pickle.dumps(content))
    with pytest.raises(ConfigError, match=r"is not as torch.distributed.checkpoint writes it"):
        DcpCheckpoint(tmp_path)
    assert not (tmp_path / "was here").exists()


def test_a_pickle_changes_no_class_of_torch(tmp_path: Path) -> None:
    # A class and a state of slots: BUILD sets attributes of the class itself.
    module, name = about.Metadata.__module__, about.Metadata.__name__
    code = f"c{module}\n{name}\n(N(S'version'\nS'changed'\ndtb.".encode()
    assert pickle.loads(code).version == "changed"  # noqa: S301 - what it does where nothing prevents it
    about.Metadata.version = None
    (tmp_path / METADATA).write_bytes(code)
    with pytest.raises(ConfigError):
        DcpCheckpoint(tmp_path)
    assert about.Metadata.version is None


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "link", "nowhere"])
def test_files_outside_the_folder_are_not_read(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoint"
    dcp.save({"model": {"net": weights()}}, checkpoint_id=folder)
    (tmp_path / "secret").write_bytes((folder / "__0_0.distcp").read_bytes())
    (folder / "link").symlink_to(tmp_path / "secret")
    read = pickle.loads((folder / METADATA).read_bytes())  # noqa: S301 - of this test's own
    for part in read.storage_data.values():
        part.relative_path = name
    (folder / METADATA).write_bytes(pickle.dumps(read))
    with pytest.raises(ConfigError, match="is no file in the folder"):
        DcpCheckpoint(folder)


def change(folder: Path, name: str, how: Callable[[about.TensorStorageMetadata], None]) -> None:
    read = pickle.loads((folder / METADATA).read_bytes())  # noqa: S301 - of this test's own
    how(read.state_dict_metadata[name])
    (folder / METADATA).write_bytes(pickle.dumps(read))


def chunks(*parts: tuple[int, int]) -> Callable[[about.TensorStorageMetadata], None]:
    def changed(entry: about.TensorStorageMetadata) -> None:
        entry.chunks = [about.ChunkStorageMetadata(torch.Size((at, 0)), torch.Size((rows, 3))) for at, rows in parts]

    return changed


def dtype(kind: torch.dtype) -> Callable[[about.TensorStorageMetadata], None]:
    def changed(entry: about.TensorStorageMetadata) -> None:
        entry.properties.dtype = kind

    return changed


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (chunks((0, 2)), r"leave a gap at \(2, 0\)"),
        (chunks(), r"leave a gap at \(0, 0\)"),
        (chunks((0, 5)), r"overlap or lie outside of it at \(4, 0\)"),
        (chunks((0, 4), (0, 4)), r"overlap or lie outside of it at \(0, 0\)"),
        (chunks((1, 3)), "no file has the part of 'model.net.a' at"),
        (dtype(torch.float16), r"a part of torch.float16 and shape \(4, 3\) is of torch.FloatStorage"),
        (dtype(torch.int64), "is of torch.int64, and weights are read from torch.float64, torch.float32"),
        (dtype(torch.complex64), "is of torch.complex64, and weights"),
    ],
)
def test_parts_that_are_not_all_of_a_tensor_are_refused(tmp_path: Path, how: Any, said: str) -> None:
    dcp.save({"model": {"net": weights()}}, checkpoint_id=tmp_path)
    change(tmp_path, "model.net.a", how)
    with pytest.raises(ConfigError, match=said):
        DcpCheckpoint(tmp_path).read(SHAPES)


class Part:
    """Makes a tensor of 12 numbers out of a storage of fewer, as the pickle of a part could ask for."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        storage = torch.storage.TypedStorage(
            wrap_storage=torch.zeros(1).untyped_storage(), dtype=torch.float32, _internal=True
        )
        return torch._utils._rebuild_tensor_v2, (storage, 0, (4, 3), (3, 1), False, collections.OrderedDict())


class Unfilled:
    """Makes a tensor of memory that was never written, as ``weights_only`` permits."""

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return torch.FloatTensor, (4, 3)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (Part(), "it has 4 bytes, which are not those of shape"),
        (Unfilled(), "it names 'torch"),
        (torch.zeros(4, 3, dtype=torch.float64), "is of torch.DoubleStorage"),
        (torch.zeros(5, 3), r"is of torch.FloatStorage and \(5, 3\)"),
        (torch.zeros(12), r"and \(12,\)"),
        (torch.full((4, 3), float("nan")), "holds numbers that are not finite"),
        ({"a": torch.zeros(4, 3)}, "model.checkpoint: the files of"),
        (b"no tensor", "model.checkpoint: the files of"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_parts_that_are_no_such_tensors_are_refused(tmp_path: Path, content: Any, said: str) -> None:
    dcp.save({"model": {"net": weights()}}, checkpoint_id=tmp_path)
    made = io.BytesIO()
    torch.save(content, made)
    (tmp_path / "part").write_bytes(made.getvalue())
    read = pickle.loads((tmp_path / METADATA).read_bytes())  # noqa: S301 - of this test's own
    for index, part in read.storage_data.items():
        if index.fqn == "model.net.a":
            part.relative_path, part.offset, part.length = "part", 0, len(made.getvalue())
    (tmp_path / METADATA).write_bytes(pickle.dumps(read))
    with pytest.raises(ConfigError, match=said):
        DcpCheckpoint(tmp_path).read(SHAPES)


def test_strides_empty_and_single_numbers_are_read(tmp_path: Path) -> None:
    made = {"t": torch.arange(12.0).reshape(4, 3).t(), "one": torch.tensor(2.5), "none": torch.zeros(0, 3)}
    dcp.save(made, checkpoint_id=tmp_path)
    found = DcpCheckpoint(tmp_path).read({f"net.{name}": value.shape for name, value in made.items()})
    assert all(torch.equal(found[f"net.{name}"], value) for name, value in made.items())


def test_a_damaged_file_is_said_to_be(tmp_path: Path) -> None:
    dcp.save({"model": {"net": weights()}}, checkpoint_id=tmp_path)
    file = tmp_path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(ConfigError, match=r"do not match its .metadata"):
        DcpCheckpoint(tmp_path).read(SHAPES)
