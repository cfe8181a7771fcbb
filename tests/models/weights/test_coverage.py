from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flowmill.configs.errors import CorruptError
from flowmill.models.weights.tensor_files import TensorFiles, check_covered
from tests.conftest import ROOT

Box = tuple[tuple[int, ...], tuple[int, ...]]


def tiles(size: tuple[int, ...], boxes: list[Box]) -> bool:
    """Count how often each cell is covered, in a margin around the whole as well."""
    cells = np.zeros([2 * extent + 4 for extent in size], int)
    for offsets, extents in boxes:
        cells[tuple(slice(at, at + extent) for at, extent in zip(offsets, extents, strict=True))] += 1
    inside = np.zeros_like(cells)
    inside[tuple(slice(0, extent) for extent in size)] = 1
    return bool((cells == inside).all())


def accepted(size: tuple[int, ...], boxes: list[Box]) -> bool:
    try:
        check_covered(size, boxes)
    except ValueError:
        return False
    return True


def grid(draw: random.Random, size: tuple[int, ...]) -> list[Box]:
    cuts = [sorted({0, extent, *(draw.randint(0, extent) for _ in range(2))}) for extent in size]
    edges = [list(itertools.pairwise(each)) for each in cuts]
    return [(tuple(a for a, _ in each), tuple(b - a for a, b in each)) for each in itertools.product(*edges)]


def test_boxes_are_accepted_where_each_cell_is_covered_once() -> None:
    draw = random.Random(0)
    counts = {True: 0, False: 0}
    for _ in range(2000):
        size = tuple(draw.randint(0, 4) for _ in range(draw.randint(1, 3)))
        boxes = grid(draw, size)
        for _ in range(draw.choice([0, 0, 1, 1, 2])):
            kind, at = draw.randrange(4), draw.randrange(len(boxes) or 1)
            if not boxes or kind == 0:
                boxes.append((tuple(0 for _ in size), size))
            elif kind == 1:
                boxes.pop(at)
            elif kind == 2:
                offsets, extents = boxes[at]
                boxes[at] = (offsets, tuple(max(0, extent + draw.choice([-1, 0, 1])) for extent in extents))
            else:
                offsets, extents = boxes[at]
                boxes[at] = (tuple(max(0, offset + draw.choice([-1, 0, 1])) for offset in offsets), extents)
        assert accepted(size, boxes) == tiles(size, boxes), (size, boxes)
        counts[tiles(size, boxes)] += 1
    assert min(counts.values()) > 400


def test_what_is_wrong_is_said() -> None:
    check_covered((), [((), ())])
    with pytest.raises(ValueError, match=r"of shape \(\) leave a gap at \(\)"):
        check_covered((), [])
    with pytest.raises(ValueError, match=r"of shape \(4,\) leave a gap at \(2,\)"):
        check_covered((4,), [((0,), (2,)), ((3,), (1,))])
    with pytest.raises(ValueError, match=r"overlap or lie outside of it at \(1,\)"):
        check_covered((4,), [((0,), (2,)), ((1,), (3,))])
    with pytest.raises(ValueError, match="has 9 dimensions, and 6 are read at most"):
        check_covered((1,) * 9, [])


PARTS = '{"w": {"saved_offsets": [%s]}}'


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        (["0, 0", "3, 0"], r"'w': the parts of a tensor of shape \(5, 3\) leave a gap at \(2, 0\)"),
        (["0, 0", "1, 0"], r"of shape \(3, 3\) overlap or lie outside of it at \(1, 0\)"),
        (["1, 0", "3, 0"], r"of shape \(5, 3\) leave a gap at \(0, 0\)"),
        (["0, 0", "0, 0"], r"overlap"),
        (["0, 0", "-2, 0"], r"cannot be read as safetensors files of whole tensors"),
        (["0, 0", '"x", 0'], r"cannot be read as safetensors files of whole tensors"),
        (["0, 0", "0"], r"cannot be read as safetensors files of whole tensors"),
        (["0, 0", "]]"], r"cannot be read as safetensors files of whole tensors"),
    ],
)
def test_files_of_parts_that_are_not_whole_are_refused(tmp_path, offsets: list[str], said: str) -> None:
    files = [tmp_path / "shard-0.safetensors", tmp_path / "shard-1.safetensors"]
    for file, at in zip(files, offsets, strict=True):
        save_file({"w": torch.ones(2, 3)}, file, metadata={"DCP_SHARDING_INFO": PARTS % at})
    with pytest.raises(CorruptError, match=said):
        TensorFiles(files)


@pytest.mark.parametrize(("kind", "fits"), [(torch.bfloat16, True), (torch.float64, True), (torch.int64, False)])
def test_numbers_of_another_kind_are_not_read_as_weights(tmp_path, kind: torch.dtype, fits: bool) -> None:
    save_file({"w": torch.ones(2, 3, dtype=kind)}, tmp_path / "x.safetensors")
    files, target = TensorFiles([tmp_path / "x.safetensors"]), torch.zeros(2, 3)
    if fits:
        files.read_into({"w": target})
        assert (target == 1).all()
        return
    with pytest.raises(CorruptError, match=r"has 'w' of torch.int64 and shape \(2, 3\), where torch.float32"):
        files.read_into({"w": target})


def test_tensors_of_another_shape_are_refused(tmp_path) -> None:
    save_file({"w": torch.ones(2, 3)}, tmp_path / "x.safetensors")
    with pytest.raises(CorruptError, match=r"and shape \(2, 3\), where torch.float32 and \(4, 3\) are read"):
        TensorFiles([tmp_path / "x.safetensors"]).read_into({"w": torch.zeros(4, 3)})


#: Files that allocate memory before they fill it, or read bytes as numbers, and why all of it is filled.
ALLOCATORS = {
    "models/policies/compute_meter.py": "on the meta device",
    "models/policies/flux2.py": "only its shape is read",
    "models/policies/flux3.py": "only its shape is read",
    "models/policies/wan.py": "each row is early or late",
    "models/rewards/invocation.py": "every row is in one call",
    "models/rewards/service/wire.py": "frombuffer of a checked size",
    "models/rewards/answer_parsing.py": "WeightsFile.fill refuses what is missing",
    "models/memory/denoisers.py": "only its size counts",
    "models/memory/language_models.py": "on the meta device",
    "models/films.py": "frombuffer of a matrix that the container has",
    "models/policies/causal_lm.py": "StoredWeights.give reads all",
    "models/policies/trainable.py": "Trainable.fill, by TensorFiles.read_into",
    "models/policies/folder_policy.py": "StoredWeights.give reads all",
    "models/weights/sharding.py": "lerp writes all of this rank's part",
    "models/weights/converted.py": "on the meta device",
    "models/weights/stored_weights.py": "TensorFiles.read_into, whose parts are check_covered",
    "tasks/modalities/tokens/data_texts.py": "log-probs that nobody knows are NaN",
    "tasks/inputs/rows/arrow_bounds.py": "frombuffer of a buffer of Arrow",
    "tasks/advantages/groups.py": "the order is a permutation",
    "tasks/export/checkpoint.py": "TensorFiles.read_into",
    "tasks/runtime/host.py": "Trainable.fill, by TensorFiles.read_into",
    "tasks/modalities/rows.py": "both columns are set",
    "tasks/modalities/proximal.py": "frombuffer of a checked size",
    "tasks/modalities/tokens/text_sampling.py": "frombuffer of bytes just made",
    "tasks/training/optimizer_placement.py": "copied to before it is used",
    "tasks/stages/policy.py": "TensorFiles.read_into",
    "tasks/stages/render.py": "frombuffer of bytes just made",
    "storage/trajectories/embeddings.py": "frombuffer of a checked size and dtype",
    "storage/trajectories/gradients.py": "stored_dtype, and a buffer of its size",
    "storage/trajectories/base.py": "stored_dtype, and a buffer of its size",
}
_ALLOCATES = re.compile(
    r"\b(?:torch|np|numpy)\.(?:empty|empty_like|empty_strided|ndarray|frombuffer|fromfile)\(|\.new_empty\(|\.to_empty\("
    r"|\bempty_model\(|\binit_empty_weights\(|\.set_\("
)


def test_each_allocation_is_filled_for_a_reason_that_is_written_down() -> None:
    packages = ("configs", "flowmill", "flows", "models", "storage", "tasks")
    files = (file for package in packages for file in (ROOT / package).rglob("*.py"))
    found = {str(file.relative_to(ROOT)) for file in files if _ALLOCATES.search(file.read_text())}
    assert sorted(found ^ ALLOCATORS.keys()) == []
