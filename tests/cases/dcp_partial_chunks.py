"""A DCP checkpoint whose metadata covers a part of a tensor only must be refused: the rest would be uninitialized memory."""

import pickle
import sys
import tempfile
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from configs.errors import ConfigError
from models.weights.dcp_checkpoints import DcpCheckpoint

with tempfile.TemporaryDirectory() as t:
    folder = Path(t) / "dcp"
    save({"model.layer.weight": torch.full((1000, 8), 3.0)}, checkpoint_id=str(folder), no_dist=True)
    path = folder / ".metadata"
    meta = pickle.loads(path.read_bytes())
    entry = meta.state_dict_metadata["model.layer.weight"]
    chunk = entry.chunks[0]
    chunk.sizes = torch.Size((4, 8))  # says: this part has 4 of 1000 rows
    path.write_bytes(pickle.dumps(meta))
    # dirty the heap, so that what is not read is seen
    junk = [torch.full((1000, 8), 777.0) for _ in range(50)]
    del junk
    try:
        found = DcpCheckpoint(folder).read({"layer.weight": torch.Size((1000, 8))})["layer.weight"]
    except ConfigError as error:
        print("refused:", str(error)[:150])
        sys.exit(0)
    ok = bool((found == 3).all())
    print(
        f"accepted; rows that are what was saved: {int((found == 3).all(1).sum())} of 1000; others hold {found[500, :3].tolist()}"
    )
    sys.exit(0 if ok else 1)
