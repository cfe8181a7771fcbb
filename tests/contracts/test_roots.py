"""The contract of every root; on local disk, and on a real S3 server, reliable or not."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from flowmill.configs.errors import CorruptError, RunConflictError, StoreError
from flowmill.configs.schema import StoreSection
from flowmill.storage import layout
from flowmill.storage.artifacts.commit import ArtifactStore
from flowmill.storage.artifacts.lineage import RunFolder, at_rest
from flowmill.storage.backends import ROOTS, open_backend
from flowmill.storage.backends.base import BLOCK, PART, FileEntry, Root
from flowmill.storage.backends.checksums import describe_file
from flowmill.storage.backends.connection import connection
from flowmill.storage.backends.obstore_client import Quick
from flowmill.storage.layout import ArtifactRef
from tests.support.s3 import Faults, Server, make_bucket, rclone, unreliable, use

MakeRoot = Callable[..., Root]
REF = ArtifactRef("rewards", "f" * 32)


def _version_3(path: Path, name: str) -> FileEntry:
    data = path.read_bytes()
    blocks = tuple(xxhash.xxh3_64_hexdigest(data[start : start + PART]) for start in range(0, len(data), PART))
    return FileEntry(name=name, size=len(data), xxh3=xxhash.xxh3_128_hexdigest(data), blocks=blocks)


def _version_1(path: Path, name: str) -> FileEntry:
    return replace(_version_3(path, name), blocks=())


described = pytest.mark.parametrize("describe", [describe_file, _version_3, _version_1])
Describe = Callable[[Path, str], FileEntry]


#: Servers are tried in addition to folders: their tests start one.
SERVED = [pytest.param(name, marks=pytest.mark.slow) for name in [*sorted(set(ROOTS) - {"file"}), "s3 with faults"]]


@pytest.fixture(params=["file", *SERVED])
def make_root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRoot]:
    """Returns roots that see the same objects."""

    def at(uri: str) -> MakeRoot:
        def make(**options: object) -> Root:
            section = {"root": uri, "cache": str(tmp_path / "cache"), **options}
            return open_backend(StoreSection.model_validate(section))

        return make

    if request.param == "file":
        yield at(str(tmp_path / "store"))
        return
    server: Server = request.getfixturevalue("s3_server")
    use(monkeypatch, server.variables())
    uri = f"s3://{make_bucket()}/some/prefix"
    if request.param == "s3":
        yield at(uri)
        return
    with unreliable(server, Faults(0.1)) as endpoint:
        use(monkeypatch, server.variables(endpoint))
        yield at(uri)


@pytest.fixture
def root(make_root: MakeRoot) -> Root:
    return make_root()


def publish(root: Root, path: str, **contents: bytes) -> None:
    with root.staging() as folder:
        for name, data in contents.items():
            (folder / name).write_bytes(data)
        root.publish(folder, path)


def test_create_is_exclusive(root: Root) -> None:
    assert root.read("a/b.json") is None
    assert root.create("a/b.json", b"first")
    assert not root.create("a/b.json", b"second")
    assert root.read("a/b.json") == b"first"
    assert root.read_many(["a/b.json", "a/c.json"]) == [b"first", None]


def test_results_of_reads_are_in_the_order_of_their_items(root: Root) -> None:
    names = [f"a/{number}" for number in range(40)]
    for name in names:
        assert root.create(name, name.encode())
    assert root.map(root.read, names) == [name.encode() for name in names]
    with pytest.raises(CorruptError, match="a/7"):
        root.map(corrupt, names[7:])


def corrupt(path: str) -> None:
    raise CorruptError(path)


def test_names_are_no_patterns(make_root: MakeRoot) -> None:
    root = make_root()
    for name in ("a/x.json", "a/[x].json", "a/*.json"):
        assert root.create(name, name.encode())
    names = ["a/[x].json", "a/*.json", "a/x.json", "a/?.json"]
    assert make_root().read_many(names) == [b"a/[x].json", b"a/*.json", b"a/x.json", None]


def test_of_many_creators_one_wins(make_root: MakeRoot) -> None:
    roots, start, won = [make_root() for _ in range(4)], threading.Barrier(12), []

    def attempt(number: int) -> None:
        start.wait()
        if roots[number % 4].create("raced", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(number).encode() for number in won] == [make_root().read("raced")]


@described
def test_published_files_are_listed_and_read(root: Root, tmp_path: Path, describe: Describe) -> None:
    data = os.urandom(2 * PART + BLOCK + 1000)
    (tmp_path / "source").write_bytes(data)
    entry = describe(tmp_path / "source", "big")
    publish(root, "kind/id/0-abc", big=data, small=b"x")
    assert root.list("kind") == ["id"]
    assert root.list("kind/id") == ["0-abc"]
    assert dict(root.files("kind")) == {"id/0-abc/big": len(data), "id/0-abc/small": 1}
    assert root.fetch("kind/id/0-abc", entry).read_bytes() == data
    root.check("kind/id/0-abc", entry)
    blob = root.blob("kind/id/0-abc", entry)
    for offset, size in ((0, 10), (BLOCK - 5, 10), (PART - 5, 10), (5, 2 * PART), (len(data) - 1, 1), (7, 0)):
        assert blob.read(offset, size) == data[offset : offset + size]
    with pytest.raises(CorruptError, match="lie outside"):
        blob.read(len(data) - 1, 2)
    assert root.list("nothing") == []
    assert dict(root.files("nothing")) == {}


def test_publishing_again_changes_nothing(root: Root) -> None:
    publish(root, "kind/id/0-abc", file=b"content")
    publish(root, "kind/id/0-abc", file=b"content")
    assert dict(root.files("kind/id/0-abc")) == {"file": 7}


def test_publishing_again_keeps_the_parts_of_other_processes(root: Root) -> None:
    for _ in range(2):
        publish(root, "kind/id/0-abc", file=b"content")
        publish(root, "kind/id/0-abc/parts", other=b"more")
    publish(root, "kind/id/0-abc", file=b"content")
    assert dict(root.files("kind/id/0-abc")) == {"file": 7, "parts/other": 4}


@described
@pytest.mark.parametrize("whole", [BLOCK, PART + BLOCK])
def test_damage_is_noticed(make_root: MakeRoot, tmp_path: Path, describe: Describe, whole: int) -> None:
    data = bytearray(os.urandom(whole + 100))
    (tmp_path / "source").write_bytes(data)
    entry = describe(tmp_path / "source", "file")
    data[-3] ^= 1
    root = make_root()
    publish(root, "flipped", file=bytes(data))
    publish(root, "short", file=bytes(data[:-1]))
    # Another process: the one that published files reads its own.
    other = make_root(cache=str(tmp_path / "other"))
    for path, message in (("flipped", "checksum"), ("short", "bytes|short"), ("absent", "missing|checksum|short")):
        for read in (other.fetch, other.check, root.check, lambda p, e: other.blob(p, e).read(whole, 50)):
            with pytest.raises(CorruptError, match=message):
                read(path, entry)


def test_move_and_remove(root: Root) -> None:
    publish(root, "kind/id", one=b"1", two=b"2")
    root.create("record.json", b"{}")
    root.move("kind/id", "aside/id")
    root.move("record.json", "aside/record.json")
    assert root.list("kind") == []
    assert dict(root.files("aside")) == {"id/one": 1, "id/two": 1, "record.json": 2}
    publish(root, "aside2", three=b"3")
    root.create("aside.json", b"{}")
    root.remove("aside")
    root.remove("aside")
    assert dict(root.files("aside")) == {}
    # Names that begin alike are others.
    assert dict(root.files("aside2")) == {"three": 1}
    assert root.read("aside.json") == b"{}"


def test_who_looks_whether_a_lock_is_held_takes_none(make_root: MakeRoot) -> None:
    assert not make_root().locked("runs/r/.lock")
    with make_root().lock("runs/r/.lock", "Run 'r'"):
        assert make_root().locked("runs/r/.lock")
    assert not make_root().locked("runs/r/.lock")


def test_a_lock_is_held_once(make_root: MakeRoot) -> None:
    with (
        make_root().lock("runs/r/.lock", "Run 'r'"),
        pytest.raises(RunConflictError, match="Run 'r' is being executed"),
        make_root().lock("runs/r/.lock", "Run 'r'"),
    ):
        pass
    with make_root().lock("runs/r/.lock", "Run 'r'"):
        pass


def test_runs_begin_before_or_after_removals(make_root: MakeRoot) -> None:
    store = ArtifactStore(make_root())
    run = RunFolder(ArtifactStore(make_root()), "new")
    with at_rest(store):
        with pytest.raises(RunConflictError, match="as 'flowmill store gc' or 'repair' is removing"), run.at_work():
            pass
        with (
            pytest.raises(RunConflictError, match="A 'flowmill store gc' or 'repair'"),
            at_rest(ArtifactStore(make_root())),
        ):
            pass
    # It has no record yet.
    with run.at_work(), pytest.raises(RunConflictError, match="Run 'new' is being executed"), at_rest(store):
        pass
    with at_rest(store):
        pass


def test_shards_commit_once_whoever_writes(make_root: MakeRoot) -> None:
    stores, records = [ArtifactStore(make_root()) for _ in range(4)], []

    def write(store: ArtifactStore) -> None:
        for number in range(5):
            with store.root.staging() as folder:
                (folder / "data").write_bytes(bytes([number]) * 1000)
                records.append(store.commit(REF, f"{number:05d}", folder, rows=1))

    threads = [threading.Thread(target=write, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(records) == 20
    assert len({record.digest for record in records}) == 5
    store = ArtifactStore(make_root())
    assert [record.shard for record in store.records(REF)] == [f"{number:05d}" for number in range(5)]
    for record in store.records(REF):
        assert (store.folder(REF, record) / "data").read_bytes() == bytes([int(record.shard)]) * 1000


class TestS3:
    @pytest.fixture
    def bucket(self, s3_server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
        use(monkeypatch, s3_server.variables())
        return make_bucket()

    def test_reads_of_several_items_are_concurrent(self, bucket: str, tmp_path: Path) -> None:
        root = open_backend(StoreSection(root=f"s3://{bucket}", cache=str(tmp_path / "cache")))
        barrier = threading.Barrier(4, timeout=60)
        root.map(lambda item: barrier.wait(), range(4))

    @pytest.mark.parametrize("body", [b"4711", b"", b"[]", b"{}", b'{"holder": null}', b"\xff"])
    def test_a_lock_file_of_a_copied_store_is_no_lease(self, bucket: str, body: bytes) -> None:
        root, client = open_backend(StoreSection(root=f"s3://{bucket}")), connection(attempts=3, connect_s=3, read_s=3)
        client.call_s3("put_object", Bucket=bucket, Key="runs/r/.lock", Body=body)
        assert not root.locked("runs/r/.lock")
        with root.lock("runs/r/.lock", "Run 'r'"):
            assert root.locked("runs/r/.lock")

    def test_markers_of_folders_are_no_files(self, bucket: str) -> None:
        root, client = open_backend(StoreSection(root=f"s3://{bucket}")), connection(attempts=3, connect_s=3, read_s=3)
        publish(root, "kind/id/a", one=b"1")
        for folder in ("kind", "kind/id", "kind/id/a", "kind/id/b"):
            client.call_s3("put_object", Bucket=bucket, Key=f"{folder}/", Body=b"")
        assert dict(root.files("kind")) == {"id/a/one": 1}
        assert root.list("kind/id") == ["a", "b"]
        for name in ("a", "b"):
            root.move(f"kind/id/{name}", f"aside/{name}")
        assert root.list("kind/id") == []
        assert dict(root.files("aside")) == {"a/one": 1}

    def test_all_runs_of_a_store_are_at_rest_or_none(self, bucket: str) -> None:
        store = ArtifactStore(f"s3://{bucket}")
        locks = [RunFolder(store, f"r{number}").lock_path for number in range(6)]
        for number in range(6):
            assert store.root.create(layout.run_record(f"r{number}"), b"{}")
        with store.root.lock(locks[3], "Run 'r3'"):
            with pytest.raises(RunConflictError, match="Run 'r3' is being executed"), at_rest(store):
                pass
            assert [store.root.locked(path) for path in locks] == [number == 3 for number in range(6)]
        with at_rest(store):
            assert all(store.root.locked(path) for path in locks)
        assert not any(store.root.locked(path) for path in locks)

    def test_the_cache_stays_within_its_limit(self, bucket: str, tmp_path: Path) -> None:
        limit = 64_000_000
        root = open_backend(StoreSection(root=f"s3://{bucket}", cache=str(tmp_path / "cache"), cache_size=limit))
        data = os.urandom(3 * PART)
        for number in range(8):
            changed = bytes([number]) + data
            (tmp_path / "source").write_bytes(changed)
            entry = describe_file(tmp_path / "source", "file")
            publish(root, f"kind/{number}", file=changed)
            assert root.blob(f"kind/{number}", entry).read(0, len(changed)) == changed
        kept = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
        assert limit / 2 < kept <= limit
        assert root.blob("kind/7", entry).read(0, 1) == b"\7"

    def test_a_damaged_copy_is_fetched_again(self, bucket: str, tmp_path: Path) -> None:
        section = StoreSection(root=f"s3://{bucket}", cache=str(tmp_path / "cache"))
        (tmp_path / "source").write_bytes(b"content")
        entry = describe_file(tmp_path / "source", "file")
        publish(open_backend(section), "kind/id", file=b"content")
        for root in (open_backend(section), open_backend(section)):
            for copy in (tmp_path / "cache").rglob("*"):
                if copy.is_file() and copy.stat().st_size == 7:
                    copy.write_bytes(b"c0ntent")
            assert root.blob("kind/id", entry).read(0, 7) == b"content"
            assert root.fetch("kind/id", entry).read_bytes() == b"content"

    @pytest.mark.parametrize("damage", ["cut off", "longer", "flipped"])
    def test_a_damaged_part_is_fetched_again(self, bucket: str, tmp_path: Path, damage: str) -> None:
        data = os.urandom(2 * PART)
        (tmp_path / "source").write_bytes(data)
        entry = describe_file(tmp_path / "source", "file")
        publish(open_backend(StoreSection(root=f"s3://{bucket}", cache=str(tmp_path / "theirs"))), "kind/id", file=data)
        section = StoreSection(root=f"s3://{bucket}", cache=str(tmp_path / "cache"))
        assert open_backend(section).blob("kind/id", entry).read(PART, 9) == data[PART : PART + 9]
        (copy,) = (path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size == PART)
        content = {"cut off": data[PART:-9], "longer": data[PART:] + b"more", "flipped": data[PART:-1] + b"?"}
        copy.write_bytes(content[damage])
        assert open_backend(section).blob("kind/id", entry).read(2 * PART - 9, 9) == data[-9:]
        assert copy.read_bytes() == data[PART:]

    def test_large_files_go_up_in_parts(self, bucket: str, tmp_path: Path) -> None:
        root = open_backend(StoreSection(root=f"s3://{bucket}", cache=str(tmp_path / "cache")))
        data = os.urandom(1 << 20) * 110
        (tmp_path / "source").write_bytes(data)
        entry = describe_file(tmp_path / "source", "file")
        publish(root, "kind/id", file=data)
        root.check("kind/id", entry)

    @pytest.mark.parametrize("share", [0.0, 0.3], ids=["sound", "faulty"])
    def test_many_small_objects_come_whole(
        self, monkeypatch: pytest.MonkeyPatch, s3_server: Server, bucket: str, tmp_path: Path, share: float
    ) -> None:
        section = StoreSection(root=f"s3://{bucket}/many", cache=str(tmp_path / "cache"))
        names = [f"a/{n:02d}.json" for n in range(40)] + ["a/[x].json", "a/*.json", "a/x y+%41.json"]
        root = open_backend(section)
        for name in names:
            assert root.create(name, name.encode() * 9)
        root.create("a/A.json", b"what '%41' is not")
        asked = [*names, "a/none.json", "a/?.json"]
        came: list[int] = []
        get = Quick.get

        def noted(self: Quick, keys: list[str]) -> list[tuple[bool, bytes | None]]:
            found = get(self, keys)
            came.append(sum(data is not None for _, data in found))
            return found

        monkeypatch.setattr(Quick, "get", noted)
        with unreliable(s3_server, Faults(share, seed=5)) as endpoint:
            use(monkeypatch, s3_server.variables(endpoint))
            other = open_backend(section.model_copy(update={"cache": str(tmp_path / "other")}))
            found = other.read_many(asked)
        assert found == [*(name.encode() * 9 for name in names), None, None]
        assert came[0] >= (40 if share == 0 else 10), "most of them by the client for many"

    def test_what_is_put_is_known_as_ones_own_though_answers_are_lost(
        self, monkeypatch: pytest.MonkeyPatch, s3_server: Server, bucket: str, tmp_path: Path
    ) -> None:
        section = StoreSection(root=f"s3://{bucket}/x", cache=str(tmp_path / "cache"))
        with unreliable(s3_server, faults := Faults(0.0, seed=2, kinds=("lost",))) as endpoint:
            use(monkeypatch, s3_server.variables(endpoint))
            root = open_backend(section)
            assert root.create("first", b"1")
            faults.share = 0.4
            # Whichever client puts it: after an answer that was lost the quick one is left alone.
            for number in range(10):
                monkeypatch.setattr("flowmill.storage.backends.obstore_client._REST_S", 0.0 if number % 2 else 60.0)
                assert root.create(f"record/{number}", b"1")
                assert not open_backend(section).create(f"record/{number}", b"2")
            assert faults.counts["lost"] > 3

    @pytest.mark.parametrize("below", ["x", "x//y", "x y/%41"])
    def test_what_either_client_writes_both_read_and_list(
        self, monkeypatch: pytest.MonkeyPatch, bucket: str, tmp_path: Path, below: str
    ) -> None:
        import s3fs

        names = ["a/1.json", "a/[2].json", "a/b/3", "a/x y+%41.json"]
        first = open_backend(StoreSection(root=f"s3://{bucket}/{below}", cache=str(tmp_path / "first")))
        for name in names[::2]:
            assert first.create(name, name.encode())
        slow = open_backend(StoreSection(root=f"s3://{bucket}/{below}", cache=str(tmp_path / "slow")))
        with monkeypatch.context() as patched:
            patched.setattr(Quick, "_connection", lambda self: None)
            for name in names[1::2]:
                assert slow.create(name, name.encode())
            assert not slow.create(names[0], b"other")
        # Some clients make an object of a folder.
        s3fs.S3FileSystem(use_listings_cache=False).call_s3("put_object", Bucket=bucket, Key=f"{below}/a/", Body=b"")
        for root in (first, slow):
            assert root.list("a") == ["1.json", "[2].json", "b", "x y+%41.json"]
            assert root.list("none") == []
            found = root.read_many([*names, "a/none", "none"])
            assert found == [*(name.encode() for name in names), None, None]

    def test_where_the_quick_client_reaches_nothing_it_is_left_alone(
        self, monkeypatch: pytest.MonkeyPatch, s3_server: Server
    ) -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            use(monkeypatch, s3_server.variables(f"http://127.0.0.1:{other.getsockname()[1]}"))
            client = connection(attempts=1, connect_s=1, read_s=1)
            getting, putting = Quick(client, "some-bucket"), Quick(client, "some-bucket")
            assert getting.get([f"{n}" for n in range(100)]) == [(False, None)] * 100
            assert not putting.put("1", b"1")
            monkeypatch.setattr(
                "flowmill.storage.backends.obstore_client.quick_connection", lambda *_: pytest.fail("asked again")
            )
            for quick in (getting, putting):
                assert quick.rests
                assert quick.get(["1"]) == [(False, None)]
                assert not quick.put("1", b"1", writer="me")

    @pytest.mark.parametrize("prefix", ["x", "x/deep", ""])
    def test_a_store_aborts_its_own_uploads_alone(self, bucket: str, tmp_path: Path, prefix: str) -> None:
        """Those of stores next to it, below it and above it go on, whatever beginning their prefixes share."""
        import s3fs

        fs = s3fs.S3FileSystem(use_listings_cache=False)
        ref = ArtifactRef("trajectories", "0a1b2c3d")
        files = [
            f"{layout.shard_folder(ref, 'epoch-0001', 'c0ffee' * 11)}/a.tar",
            f"{layout.checkpoints(ref)}/00000001/state.safetensors",
            f"{layout.QUARANTINE}/{layout.shard_folder(ref, 's', 'c0ffee' * 11)}/a.tar",
        ]
        stores = ["", "x", "x/deep", "x/deep/er", "x2", "x/deep2", "policies", "x/policies"]
        keys = {store: {f"{store}/{file}".lstrip("/") for file in files} for store in stores}
        others = {"x/mine.bin", "x/deep/mine.bin", "mine.bin", "x/trajectories/mine.bin"}
        for key in others.union(*keys.values()):
            fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
        root = open_backend(StoreSection(root=f"s3://{bucket}/{prefix}", cache=str(tmp_path / "cache")))
        assert root._bucket.abort_uploads(-60) == len(files)  # type: ignore[attr-defined]
        left = {each["Key"] for each in fs.list_multipart_uploads(bucket)}
        assert left == others.union(*keys.values()) - keys[prefix]

    @pytest.mark.parametrize("refused", ["abort_multipart_upload", "list_multipart_uploads"])
    @pytest.mark.parametrize("error", [PermissionError, FileNotFoundError])
    def test_uploads_that_cannot_be_aborted_stop_nothing(
        self, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str, error: type[OSError]
    ) -> None:
        root = open_backend(StoreSection(root=f"s3://{bucket}/x", cache=str(tmp_path / "cache")))
        inner = root._bucket  # type: ignore[attr-defined]
        ref = ArtifactRef("trajectories", "0a1b2c3d")
        key = f"x/{layout.shard_folder(ref, 'epoch-0001', 'c0ffee' * 11)}/a.tar"
        inner._fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
        call, calls = inner._fs.call_s3, []

        def refusing(name: str, **arguments: Any) -> Any:
            calls.append(name)
            if name == refused:
                raise error("no")
            return call(name, **arguments)

        monkeypatch.setattr(inner._fs, "call_s3", refusing)
        inner.abort_uploads(-60)
        assert refused in calls

    @pytest.mark.parametrize("token", ["again", None, ""])
    @pytest.mark.parametrize("kind", ["objects", "uploads"])
    def test_a_listing_that_does_not_end_is_an_error(
        self, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, token: str | None
    ) -> None:
        root = open_backend(StoreSection(root=f"s3://{bucket}/x", cache=str(tmp_path / "cache")))
        inner = root._bucket  # type: ignore[attr-defined]
        names = ("NextContinuationToken", "NextKeyMarker", "NextUploadIdMarker")
        page = {"IsTruncated": True, **({} if token is None else dict.fromkeys(names, token))}
        monkeypatch.setattr(inner, "_steady", lambda *call, **arguments: page)
        objects = [inner.names, inner.sizes, inner.delete]
        for listing in objects if kind == "objects" else [lambda path: inner.abort_uploads(0)]:
            with pytest.raises(StoreError, match=r"the listing of 'x/.* does not end"):
                listing("a")

    def test_a_missing_bucket_is_named(self, bucket: str) -> None:
        with pytest.raises(StoreError, match="there is no bucket 'flowmill-absent'"):
            open_backend(StoreSection(root="s3://flowmill-absent/x"))

    @pytest.mark.campaign_cases("silence", "no listener")
    @pytest.mark.parametrize(
        ("scheme", "listening", "said"),
        [
            ("http://", False, "does not answer"),
            ("http://", True, "does not answer.*imeout"),
            ("https://", None, "does not answer.*Write http:// where it speaks no TLS"),
            ("", None, "is '127.0.0.1:.*', which is no address. Write it as http"),
        ],
        ids=["no listener", "silence", "no TLS", "no scheme"],
    )
    def test_no_answer_is_named_within_seconds(
        self, monkeypatch: pytest.MonkeyPatch, s3_server: Server, scheme: str, listening: bool | None, said: str
    ) -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            if listening:
                other.listen()
            host = s3_server.endpoint.removeprefix("http://")
            address = host if listening is None else f"127.0.0.1:{other.getsockname()[1]}"
            use(monkeypatch, s3_server.variables(scheme + address))
            begun = time.monotonic()
            with pytest.raises(StoreError, match=said):
                open_backend(StoreSection(root="s3://some-bucket/x"))
            assert time.monotonic() - begun < 15

    def test_keys_that_expire_are_named_and_new_ones_go_on(
        self, monkeypatch: pytest.MonkeyPatch, s3_server: Server, bucket: str, tmp_path: Path
    ) -> None:
        faults = Faults(share=0.0, kinds=("403",))
        with unreliable(s3_server, faults) as endpoint:
            use(monkeypatch, s3_server.variables(endpoint))
            section = StoreSection(root=f"s3://{bucket}/x", cache=str(tmp_path / "cache"))
            root = open_backend(section)
            assert root.create("first", b"1")
            faults.share = 1.0
            (tmp_path / "shard").mkdir()
            (tmp_path / "shard" / "file").write_bytes(b"2")
            for call in (
                lambda: root.create("second", b"2"),
                lambda: root.read("never read before"),
                lambda: root.list("kind"),
                lambda: root.publish(tmp_path / "shard", "kind/id"),
                lambda: open_backend(section),
            ):
                with pytest.raises(StoreError, match=r"is refused.*the same command goes on"):
                    call()
            faults.share = 0.0
            assert root.read("second") is None
            assert root.create("second", b"2")


def test_a_server_that_ignores_conditions_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with rclone() as server:
        use(monkeypatch, server.variables())
        section = StoreSection(root=f"s3://{make_bucket()}/x", cache=str(tmp_path / "cache"))
        with pytest.raises(StoreError, match=r"ignores 'If-None-Match'.*store.single_writer=true"):
            open_backend(section).create("record", b"1")
        single = open_backend(section.model_copy(update={"single_writer": True}))
        assert single.create("record", b"1")
        assert not single.create("record", b"2")
        assert single.read("record") == b"1"
        monkeypatch.setenv("FLOWMILL_SINGLE_WRITER", "1")
        assert open_backend(section).create("other", b"1"), "what has no config"
