"""Input that was made to harm: names that lead out of a root, configs and prompts that explode."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pydantic import TypeAdapter

from flowmill.configs.errors import ConfigError, CorruptError, PromptError, StoreError
from flowmill.configs.load import load_config
from flowmill.configs.schema import PromptsSection
from flowmill.models.rewards.errors import log_traceback
from flowmill.storage.artifacts.checksummed_json import seal
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder
from flowmill.storage.artifacts.records import Manifest, ShardRecord
from flowmill.storage.backends.base import FileEntry
from flowmill.storage.backends.local import LocalBackend
from flowmill.storage.backends.process_tags import tag
from flowmill.storage.layout import ArtifactRef
from flowmill.storage.maintenance.garbage_collection import Removal, Retention, plan_removals, remove
from flowmill.storage.maintenance.transfer import copy_run
from flowmill.storage.names import below, inside, part
from flowmill.storage.trajectories.arrays import stored_dtype
from flowmill.storage.trajectories.gradients import StoredGradients, _GradientRow
from flowmill.tasks.inputs.prompts import read_prompts
from tests.conftest import ConfigFactory
from tests.support.inside import prepare

ENTRY = TypeAdapter(FileEntry)
OUT = ["../x", "/x", "a/../../x", "a//x", ".", "..", "a/./x", "", "a\0x", "a\\..\\x"]


@pytest.mark.parametrize(
    ("size", "blocks", "message"),
    [
        (1, ["0" * 32, "0" * 32], "1 bytes has checksums of 2 blocks"),
        (3 << 20, ["0" * 32], "3145728 bytes has checksums of 1 blocks"),
        (3 << 20, ["0" * 16, "0" * 16], "3145728 bytes has checksums of 2 blocks"),
        (1, ["../x"], "is no digest"),
        (-1, [], "greater than or equal to 0"),
        (True, [], "valid integer"),
    ],
)
def test_checksums_fit_the_file(size: int, blocks: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ENTRY.validate_python({"name": "x", "size": size, "xxh3": "0" * 32, "blocks": blocks})


@pytest.mark.parametrize("name", OUT)
def test_names_stay_inside(name: str, tmp_path: Path) -> None:
    for check in (inside, part, lambda each: below(tmp_path, each)):
        if check is inside or check is part or name not in ("a//x", "a/./x"):
            with pytest.raises(ValueError, match="is no"):
                check(name)
    entry = {"name": name, "size": 1, "xxh3": "0" * 32}
    with pytest.raises(ValueError, match="is no path"):
        ENTRY.validate_python(entry)
    ref = ArtifactRef("rewards", "abc")
    record = {"shard": "s", "digest": "0" * 32, "rows": 1, "files": [entry], "artifact": str(ref)}
    with pytest.raises(CorruptError, match="is not a commit record"):
        ShardRecord.decode(seal(record), f"{ref}/_shards/s.json")
    root = LocalBackend(str(tmp_path / "root"))
    for use in (root.read, root.list, root.remove, lambda each: root.create(each, b"x")):
        with pytest.raises(StoreError, match="Nothing outside a store's root is read or written"):
            use(name)
    if name != "a\0x":
        assert not (tmp_path / "x").exists()
    with pytest.raises(StoreError, match="There is no run"):
        RunFolder(ArtifactStore(str(tmp_path / "root")), name)


@pytest.mark.parametrize("identifier", ["../x", "a/b", ".", "..", "", "a\0", ".hidden"])
def test_an_artifact_has_one_name(identifier: str) -> None:
    with pytest.raises(ValueError, match="is not an artifact"):
        ArtifactRef.parse(f"rewards/{identifier}")


@pytest.mark.parametrize(
    "changed",
    [{"shards": [["../x", "0" * 32, 1]]}, {"shards": [["x", "../x", 1]]}, {"inputs": ["../../etc"]}, {"shards": [1]}],
)
def test_a_manifest_names_what_is_inside(changed: dict[str, Any]) -> None:
    data = {"kind": "rewards", "id": "a", "stage": "score", "stage_version": 1, "options": {}, "inputs": []}
    data |= {"shards": [["x", "0" * 32, 1]], "rows": 1, "size": 1, "digest": "0" * 32, "summary": {}}
    path = "rewards/a/manifest.json"
    assert Manifest.decode(seal(data), path).rows == 1
    with pytest.raises(CorruptError, match="is not a manifest"):
        Manifest.decode(seal({**data, **changed}), path)


def test_links_out_of_the_root_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("s")
    root = LocalBackend(str(tmp_path / "root"))
    (tmp_path / "root" / "runs").symlink_to(outside)
    (tmp_path / "root" / "file").symlink_to(outside / "secret")
    for use in (
        lambda: root.read("runs/secret"),
        lambda: root.read("file"),
        lambda: root.create("runs/new", b"x"),
        lambda: root.list("runs"),
        lambda: root.files("runs"),
        lambda: root.remove("runs"),
    ):
        with pytest.raises(StoreError, match="a link that leads out of"):
            use()
    assert sorted(os.listdir(outside)) == ["secret"]
    # A root may itself be reached through a link.
    (tmp_path / "alias").symlink_to(tmp_path / "root")
    assert LocalBackend(str(tmp_path / "alias")).create("inside/x", b"x")


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    root = LocalBackend(str(tmp_path))
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / "x")
    for use in (root.read, root.locked, lambda path: root.lock(path, "Run 'r'").__enter__()):
        with pytest.raises(StoreError, match="/a/x' is a pipe or a device"):
            use("a/x")
    with pytest.raises(CorruptError, match="is missing"):
        root.fetch("a", FileEntry(name="x", size=0, xxh3="0" * 32))
    assert root.read("y") is root.read("a") is None


@pytest.mark.parametrize("name", ["started", "seconds", "model_seconds", "model_flops", "peak_flops"])
@pytest.mark.parametrize("value", ["x", None, [0], {}, 1e308, 10**400])
def test_times_of_records_are_numbers(name: str, value: object) -> None:
    record = {"shard": "s", "digest": "0" * 32, "rows": 1, "files": [], "artifact": "rewards/abc"}
    path = "rewards/abc/_shards/s.json"
    assert ShardRecord.decode(seal({**record, "producer": {name: 1, "host": "h"}}), path).producer[name] == 1
    with pytest.raises(CorruptError, match=f"is not a commit record.*'{name}' is no number"):
        ShardRecord.decode(seal({**record, "producer": {name: value}}), path)


def test_a_linked_staging_folder_is_refused_and_nothing_there_is_removed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "runs").mkdir(parents=True)
    (root / ".staging").symlink_to("..")
    host, machine, _, _, number = tag().split("~")
    kept = tmp_path / "~".join((host, machine, "1", "0", number))
    kept.write_text("x")
    os.utime(kept, (0, 0))
    store = ArtifactStore(str(root))
    removal = Removal(label=f".staging/{kept.name}", size=1, reason="", trace=False)
    for use in (
        lambda: store.root.create("runs/x", b"x"),
        lambda: plan_removals(store, Retention()),
        lambda: remove(store, removal),
        store.root.sweep,
    ):
        with pytest.raises(StoreError, match=r"is a link to '\.\.'"):
            use()
    assert kept.exists()


def test_a_copied_run_stays_inside_its_target(make_config: ConfigFactory, tmp_path: Path) -> None:
    context = prepare(make_config())
    run = tmp_path / "store" / "runs" / "small"
    (name,) = list((run / "lineage").glob("*.base.*.json"))
    entry = json.loads(name.read_text())
    name.write_text(json.dumps({**entry, "artifact": "bases/../../../escaped"}))
    target = ArtifactStore(str(tmp_path / "target"))
    with pytest.raises((CorruptError, ValueError), match="does not match its own checksum"):
        copy_run(ArtifactStore(context.store.root.uri), target, "small", progress=lambda *about: None)
    assert not (tmp_path / "escaped").exists()


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join(['*' + chr(97 + n)] * 9)}]\n" for n in range(9)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "values, those that aliases repeat included"),
        ("a: &a [*a]\n", "an alias stands for something that it is part of"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("run: {epochs: 1e12}\n", "run.epochs"),
        ("run: {epochs: " + "9" * 6000 + "}\n", "a value cannot be read"),
        ("run: {seed: 2026-11-23}\n", "run.seed"),
        ("optimize: {learning_rate: .nan}\n", "optimize.learning_rate"),
        ("optimize: {learning_rate: .inf}\n", "optimize.learning_rate"),
        ("rollout: {sampler: {name: flow_sde, options: {noise_level: .nan}}}\n", "not finite"),
        ("rollout: {group_size: 99999999999999999999}\n", "rollout.group_size"),
        ("!!python/object/apply:os.system ['true']\n", "is not valid YAML"),
        ("\0", "is not valid YAML"),
    ],
    ids=["bomb", "cycle", "deep", "epochs", "digits", "date", "nan", "inf", "option", "group", "object", "nul"],
)
def test_a_config_that_explodes_is_refused_at_once(config_file: Path, tmp_path: Path, text: str, said: str) -> None:
    path, before = tmp_path / "hostile.yaml", psutil.Process().memory_info().rss
    path.write_text(text + (f"extends: {config_file}\n" if text.endswith("}\n") else ""))
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=said):
        load_config(path)
    assert time.monotonic() - begun < 5
    assert psutil.Process().memory_info().rss - before < 200e6


def test_a_device_is_no_config() -> None:
    with pytest.raises(ConfigError, match="it is no config"):
        load_config("/dev/zero")


def read(path: Path, **settings: Any) -> list[Any]:
    return read_prompts(str(path), PromptsSection(train=str(path), **settings), where="prompts.train")


def test_lines_end_where_a_person_sees_it(tmp_path: Path) -> None:
    words = ["a\u0085b", "c\u2028d", "e\x0cf", "g\x0bh", "i\x1cj"]
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(words).encode() + b"\rlast\n")
    assert [prompt.text for prompt in read(tmp_path / "a.txt")] == [*words, "last"]
    lines = [json.dumps({"prompt": word}, ensure_ascii=False) for word in words]
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode())
    assert [prompt.text for prompt in read(tmp_path / "a.jsonl")] == words


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.txt", b"one\ntw\xffo\n", "line 2 is not UTF-8 text"),
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2 is not UTF-8 text"),
        ("a.jsonl", b'{"prompt": "a", "x": NaN}\n', "line 1 is not JSON: NaN"),
        ("a.jsonl", b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"\n", "line 1 is not JSON"),
        ("a.jsonl", b'{"prompt": "a", "x": ' + b"9" * 6000 + b"}\n", "line 1 is not JSON"),
        ("a.parquet", b"PAR1" + bytes(100) + b"PAR1", "is not a Parquet file"),
        ("a.parquet", b"", "is not a Parquet file"),
    ],
    ids=["text", "lines", "nan", "deep", "digits", "parquet", "empty"],
)
def test_broken_prompts_are_named(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(PromptError, match=said):
        read(tmp_path / name)


def test_a_broken_column_is_named(tmp_path: Path) -> None:
    bad = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.array([0, 2], pa.int32()).buffers()[1], pa.py_buffer(b"\xff\xff")]
    )
    pq.write_table(pa.table({"prompt": ["a"], "more": bad}), tmp_path / "a.parquet")
    with pytest.raises(PromptError, match="column 'more' cannot be read"):
        read(tmp_path / "a.parquet")


def make_pipe(folder: Path) -> str:
    os.mkfifo(folder / "pipe.png")
    return "pipe.png"


def make_bomb(folder: Path) -> str:
    Image.fromarray(np.zeros((9000, 9000), np.uint8)).save(folder / "bomb.png")
    return "bomb.png"


def make_link(folder: Path) -> str:
    Image.new("RGB", (8, 8)).save(folder.parent / "elsewhere.png")
    (folder / "link.png").symlink_to(folder.parent / "elsewhere.png")
    return "link.png"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (make_pipe, "is no regular file"),
        (make_bomb, "has 81,000,000 pixels"),
        (make_link, "a link that leads out of"),
        (lambda folder: "../up.png", "is no path below its folder"),
        (lambda folder: "/etc/hostname", "is no path below its folder"),
    ],
    ids=["pipe", "bomb", "link", "up", "absolute"],
)
def test_images_of_prompts_are_files_of_their_folder(tmp_path: Path, make: Callable[[Path], str], said: str) -> None:
    folder = tmp_path / "prompts"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps({"prompt": "a", "image": make(folder)}))
    with pytest.raises(PromptError, match=said):
        read(folder / "a.jsonl", image="image")


def test_a_pipe_is_no_prompt_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(PromptError, match="is no regular file"):
        read(tmp_path / "a.txt")


def test_tracebacks_are_for_their_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = log_traceback(ValueError("what somebody's data says"), "mine", "prompt 'a'")
    assert tmp_path in path.parents
    assert path.stat().st_mode & 0o777 == 0o600
    assert "what somebody's data says" in path.read_text()


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("object", (1,)),
        ("O", (1,)),
        ("V8", (1,)),
        ("<U4", (1,)),
        ("M8[s]", (1,)),
        ("no", (1,)),
        ("f4", (-1,)),
        ("f4", (2**40, 2**40)),
        ("f4", ("x",)),
    ],
)
def test_bytes_are_read_as_numbers_alone(dtype: str, shape: tuple[Any, ...]) -> None:
    # NumPy takes bytes as addresses where they are said to be objects, and the process ends at the first look.
    with pytest.raises(ValueError, match="there are no arrays of type"):
        stored_dtype(dtype, shape)


@pytest.mark.parametrize("dtype", ["object", "V4", "no"])
def test_a_gradient_that_is_no_numbers_is_refused(tmp_path: Path, dtype: str) -> None:
    store, ref = ArtifactStore(LocalBackend(tmp_path)), ArtifactRef("gradients", "f" * 32)
    stored = StoredGradients(store, [])
    stored._rows["s"] = _GradientRow(ref, None, 1.0, dtype, (1,), 0)  # type: ignore[arg-type]
    with pytest.raises(CorruptError, match="the gradient of sample s: there are no arrays of type"):
        stored.of("s")
