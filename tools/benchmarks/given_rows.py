"""Given samples of more and more rows: memory and time of reading, of ``ingest`` and of ``stream``.

python -m tools.benchmarks.given_rows [ROWS ...]

Each figure is of a process of its own. A row is a short text; CPU seconds are compared with those of a loop that only
reads the same file, or of plain ``webdataset`` on the same tars. Memory is the highest resident one, less that before.
"""

from __future__ import annotations

import csv
import io
import json
import resource
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from flowmill.configs.data import DataSection
from flowmill.configs.load import load_config
from flowmill.tasks.runtime.process_memory import process_peak

ROOT = Path(__file__).parents[2]
ROWS = (1_000, 10_000, 100_000)
FORMS = ("jsonl", "csv", "parquet", "tar")


def write(form: str, folder: Path, rows: int) -> str:
    """Write rows of short texts; return ``data.train``."""
    made = ({"prompt": f"{number}+1=", "txt": str(number + 1)[-3:]} for number in range(rows))
    path = folder / f"{rows}.{form}"
    if form == "jsonl":
        with path.open("w") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in made)
    elif form == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "txt"])
            writer.writeheader()
            writer.writerows(made)
    elif form == "parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(list(made)), path)
    else:
        with tarfile.open(path, "w") as archive:
            for number, row in enumerate(made):
                for name, value in row.items():
                    member = tarfile.TarInfo(f"{number:08d}.{name}")
                    member.size = len(value)
                    archive.addfile(member, io.BytesIO(value.encode()))
    return str(path)


def _plain(form: str, path: str) -> Iterable[Any]:
    """Return the rows of a file, read in the usual way."""
    if form == "jsonl":
        return map(json.loads, Path(path).open())
    if form == "csv":
        return csv.DictReader(Path(path).open())
    if form == "parquet":
        from pyarrow import parquet

        return (row for batch in parquet.ParquetFile(path).iter_batches() for row in batch.to_pylist())
    import webdataset

    rows: Iterable[Any] = webdataset.WebDataset([path], shardshuffle=False)
    return rows


def reading(form: str, path: str) -> dict[str, float]:
    """Read and check the rows of a file, and read them in the usual way."""
    from flowmill.tasks.inputs.data_rows import read_data_rows

    section = DataSection(train=path, columns={"sample": "txt"})
    _count(_plain(form, path))
    # A reader's libraries are imported with the first row.
    next(iter(read_data_rows(section).rows))
    before, begun = _peak(), _cpu()
    count = _count(read_data_rows(section).rows)
    seconds, peak, begun = _cpu() - begun, _peak(), _cpu()
    assert _count(_plain(form, path)) == count
    return {"mib": peak - before, "rows": count, "seconds": seconds, "ratio": seconds / (_cpu() - begun)}


def prepared(folder: Path, source: str) -> str:
    """Write a config of a run on the rows of a file; return its path."""
    from tests.support.language_models import texts_data

    data = texts_data(folder)
    data["data"] = {"train": source, "sample": "txt", "rows_per_shard": 4096}
    data["prompts"] = {"heldout": data["prompts"]["heldout"]}
    data["optimize"] = {"algorithm": "sft"}
    path = folder / "texts.yaml"
    path.write_text(yaml.safe_dump(data))
    return str(path)


def preparing(config: str) -> dict[str, float]:
    """Carry out the stages before ``ingest``."""
    from flowmill.tasks.runs.opening import begin_run
    from flowmill.tasks.stages.stage_run import StageRun
    from tests.support.inside import make_stage

    context = begin_run(load_config(Path(config)))
    for name in ("base", "encode", "preprocess"):
        StageRun(make_stage(context, name, 0)).execute()
    return {}


def ingesting(config: str) -> dict[str, float]:
    """Carry out ``ingest`` alone, and read its file in the usual way; memory is of the process, from its imports on."""
    from flowmill.tasks.runs.opening import begin_run
    from flowmill.tasks.stages.stage_run import StageRun
    from tests.support.inside import make_stage

    loaded = load_config(Path(config))
    assert loaded.data is not None
    before, begun = _peak(), _cpu()
    StageRun(make_stage(begin_run(loaded), "ingest", 0)).execute()
    seconds, peak, begun = _cpu() - begun, _peak(), _cpu()
    _count(_plain("jsonl", loaded.data.train))
    return {"mib": peak - before, "seconds": seconds, "ratio": seconds / (_cpu() - begun)}


def streaming(config: str) -> dict[str, float]:
    """Read the committed samples as a stream, and with plain webdataset."""
    import webdataset

    import flowmill
    from flowmill.tasks.specs.graph import Node
    from tests.support.inside import prepare

    loaded = load_config(Path(config))
    context = prepare(loaded)
    run = flowmill.open(loaded.store.root).run(context.run.name)
    ref = context.chain.ref(Node(0, "ingest"))
    tars = [str(context.store.folder(ref, record) / "samples.tar") for record in context.store.shards(ref)]
    _count(webdataset.WebDataset(tars[:1], shardshuffle=False))
    before, begun = _peak(), _cpu()
    count = _count(run.stream(1))
    seconds, peak, begun = _cpu() - begun, _peak(), _cpu()
    assert _count(webdataset.WebDataset(tars, shardshuffle=False)) == count
    return {"mib": peak - before, "rows": count, "seconds": seconds, "ratio": seconds / (_cpu() - begun)}


def table(rows: Iterable[int] = ROWS) -> Iterator[str]:
    """Yield a table of the figures of all sizes and forms, line by line."""
    yield "| rows | of | MiB more | rows per CPU s | CPU of the plain way |"
    yield "|---|---|---|---|---|"
    with tempfile.TemporaryDirectory(prefix="flowmill-given-") as root:
        for count in rows:
            folder = Path(root) / str(count)
            folder.mkdir()
            for form in FORMS:
                yield _line(count, form, _in_process("reading", form, write(form, folder, count)))
            config = prepared(folder, write("jsonl", folder, count))
            _in_process("preparing", config)
            yield _line(count, "stage ingest", _in_process("ingesting", config))
            yield _line(count, "stream", _in_process("streaming", config))


def _line(count: int, name: str, found: Mapping[str, float]) -> str:
    return f"| {count:,} | {name} | {found['mib']:.0f} | {count / found['seconds']:,.0f} | {found['ratio']:.1f}x |"


def _in_process(name: str, *arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "tools.benchmarks.given_rows", "--one", name, *arguments]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, float] = json.loads(output.splitlines()[-1])
    return found


def _count(rows: Iterable[Any]) -> int:
    return sum(1 for _ in rows)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _peak() -> float:
    return process_peak() / 1024**2


_PARTS: dict[str, Callable[..., dict[str, float]]] = {
    "reading": reading,
    "preparing": preparing,
    "ingesting": ingesting,
    "streaming": streaming,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        sys.stdout.write(json.dumps(_PARTS[sys.argv[2]](*sys.argv[3:])) + "\n")
    else:
        for line in table(map(int, sys.argv[1:]) if sys.argv[1:] else ROWS):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
