"""Speed of the computation of committed artifacts, from the records of their shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from flowmill.storage.artifacts.records import Manifest
from flowmill.storage.layout import ArtifactRef
from flowmill.tasks.runs.chain import Chain

#: Unit of the rows of stages whose row rate measures the model's speed.
ROWS = {"rollout": "samples", "optimize": "rows"}
#: Share of an epoch's time from which waiting for rewards is reported.
_WORTH_SAYING = 0.05


def speed_of(chain: Chain, manifest: Manifest) -> dict[str, float]:
    """Return the speed of computing an artifact of rollouts or training, as far as it is recorded.

    'samples_per_s' or 'rows_per_s'; 'outside_model', the share of the time in which no model computed; 'tflops_per_s'
    of the denoisers; 'mfu', that rate over the device's peak (PaLM, arXiv 2204.02311, appendix B).
    """
    records = [record.producer for record in chain.store.shards(ArtifactRef(manifest.kind, manifest.id))]
    names = ("seconds", "model_seconds", "model_flops")
    totals = {name: sum(float(each.get(name, 0.0)) for each in records) for name in names}
    if totals["seconds"] <= 0:
        return {}
    speed = {f"{ROWS[manifest.stage]}_per_s": manifest.rows / totals["seconds"]}
    # Shards written by another version may lack a counter, and a partial sum would give a wrong rate.
    if all("model_seconds" in each for each in records):
        speed["outside_model"] = 1 - totals["model_seconds"] / totals["seconds"]
    if all("model_flops" in each for each in records):
        rate = totals["model_flops"] / totals["seconds"]
        speed["tflops_per_s"] = rate / 1e12
        peaks = {float(each.get("peak_flops", 0.0)) for each in records}
        if len(peaks) == 1 and 0.0 not in peaks:
            speed["mfu"] = rate / peaks.pop()
    return speed


def seconds_of(chain: Chain, ref: ArtifactRef) -> float:
    """Return the seconds spent on a complete artifact, summed over all processes."""
    return sum(float(record.producer.get("seconds", 0.0)) for record in chain.store.shards(ref))


def committed_at(chain: Chain, refs: Iterable[ArtifactRef]) -> int:
    """Return the completion time of the last shard of complete artifacts, in milliseconds since 1970."""
    records = [record.producer for ref in refs for record in chain.store.shards(ref)]
    ends = [float(each.get("started", 0.0)) + float(each.get("seconds", 0.0)) for each in records]
    return int(max(ends, default=0.0) * 1000)


def epoch_speeds(chain: Chain, epoch: int) -> dict[str, dict[str, float]]:
    """Return the speeds of a trained epoch's stages, see ``speed_of``; empty before any."""
    if epoch == 0:
        return {}
    entries = {stage: chain.find(epoch, stage) for stage in ROWS}
    manifests = {stage: chain.store.manifest(entry.ref) for stage, entry in entries.items() if entry is not None}
    return {stage: speed_of(chain, manifest) for stage, manifest in manifests.items() if manifest is not None}


def in_words(speed: Mapping[str, float]) -> str:
    """Return a speed in words."""
    rows = {f"{name}_per_s": name for name in ROWS.values()}
    shown = [
        f"{value:.3g} {rows[name]}/s" if value < 1000 else f"{value:,.0f} {rows[name]}/s"
        for name, value in speed.items()
        if name in rows
    ]
    if "outside_model" in speed:
        shown.append(f"{speed['outside_model']:.1%} outside the model")
    if "tflops_per_s" in speed:
        shown.append(f"{speed['tflops_per_s']:.3g} TFLOP/s")
    if "mfu" in speed:
        shown.append(f"MFU {speed['mfu']:.1%}")
    return ", ".join(shown)


def waited_in_words(share: float) -> str:
    """Return a suffix with the share of an epoch's time spent waiting for rewards; '' if it is small."""
    return f", {share:.0%} of the time waited for rewards" if share >= _WORTH_SAYING else ""
